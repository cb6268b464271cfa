"""What encoders are asked for: texts that wait, the batches that are made of them, and the rows that come out.

While one batch is computed, the texts of later requests gather, and the next batch is made of what is there by then:
nobody waits for a batch to become full. A batch takes one text of each request in turn, so that one with a hundred
texts does not hold up one with a single one. It is computed layer by layer, and between two layers others may have the
device: decoding goes on beside it.

Texts of a higher priority go first: a batch has texts of one priority, and is set aside, once, between two layers, for
one of a higher. Nobody starves: `MAX_PASSES` batches are the most that overtake those of lower priority.

This module knows nothing about sockets, nor how a model computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from edge.engine.encoder_tokenizer import EncoderTokenizer
from edge.engine.generation import shares
from edge.engine.models.encoder import Encoder
from edge.errors import EdgeError, OutOfCapacity, TextTooLong
from edge.frames import Delta, Done, Encode, Encoded, Failed, Pooling, Started, Usage
from workers._wire import Frame

MAX_BATCH_TOKENS = 16384
MAX_BATCH_TEXTS = 1024
MAX_WAITING_TOKENS = 1 << 21
MAX_PASSES = 32
_FIRST_BATCH_TOKENS = 512
_WEIGHT = 0.3  # of the newest batch in what a token costs


class Encoding:
    """A request that was accepted: its texts as tokens, and the rows that are there already."""

    def __init__(self, request: Encode, tokenizer: EncoderTokenizer, pooling: Pooling) -> None:
        """Read the texts of `request`; `pooling` is the model's own.

        Raises:
            TextTooLong: a text does not fit and must not be cut, or all of them together are too long.
        """
        self.id = request.id
        self.rejects_if_busy = request.reject_if_busy
        self.priority = request.priority
        self.pooling = request.pooling or pooling
        self.texts: list[list[int]] = []
        self.num_tokens = 0
        for place, text in enumerate(request.texts):
            tokens, is_cut = tokenizer.encode(text)
            if is_cut and not request.truncate:
                raise TextTooLong(
                    f"text {place} has more than the {tokenizer.max_tokens} tokens that the model reads of a text; "
                    "shorten it, or set truncate_inputs to true",
                    param="text",
                )
            self.num_tokens += len(tokens)
            if request.max_total_tokens is not None and self.num_tokens > request.max_total_tokens:
                raise TextTooLong(
                    f"the texts have more than {request.max_total_tokens} tokens together; send them in several calls",
                    param="text",
                )
            self.texts.append(tokens)
        self.next_text = 0
        """The first text that is in no batch yet."""
        self.rows: list[Tensor | None] = [None] * len(self.texts)
        self.num_rows = 0
        self.num_read_tokens = 0
        """Of the texts that are or were in a batch."""
        self.compute_us = 0

    @property
    def usage(self) -> Usage:
        """What it has used so far."""
        return Usage(input_tokens=self.num_read_tokens, compute_us=self.compute_us)


@dataclass(frozen=True, slots=True)
class _Member:
    """One text in a batch."""

    encoding: Encoding
    place: int

    @property
    def tokens(self) -> list[int]:
        return self.encoding.texts[self.place]


@dataclass(slots=True)
class _Batch:
    members: list[_Member]
    priority: int
    work: Generator[None, None, Tensor]
    compute_us: int = 0
    was_set_aside: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(member.tokens) for member in self.members)


class LoadedEncoder:
    """An encoder that can run, and its requests. The step loop alone touches them."""

    def __init__(self, name: str, encoder: Encoder, tokenizer: EncoderTokenizer, max_waiting: int) -> None:
        self.name = name
        self.encoder = encoder
        self.tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._encodings: dict[int, Encoding] = {}
        self._waiting: dict[int, deque[Encoding]] = {}
        """By priority, requests with texts that are in no batch yet, the next one to give a text first."""
        self._batch: _Batch | None = None
        self._set_aside: _Batch | None = None
        self._num_passes = 0
        """Batches that were formed since others of a lower priority have been waiting."""
        self._layer_token_us = 0.0
        """What a token costs in a layer, lately; 0: not known yet."""

    @property
    def has_work(self) -> bool:
        """Whether there is a text to be computed."""
        return bool(self._waiting) or self._batch is not None or self._set_aside is not None

    @property
    def priority(self) -> int:
        """The highest of the texts that are to be computed, if there are any."""
        under_way = [batch.priority for batch in (self._batch, self._set_aside) if batch is not None]
        return max([*self._waiting, *under_way], default=0)

    @property
    def num_waiting(self) -> int:
        """Requests with texts that are in no batch yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Requests of which all texts that are missing are being computed."""
        return len(self._encodings) - self.num_waiting

    def add(self, encoding: Encoding) -> list[Frame]:
        """Have `encoding` computed.

        Raises:
            OutOfCapacity: too many requests or tokens wait already; one that is to be rejected if the model is busy is
                also refused if it would have to wait for others beside those in the batch under way.
        """
        if encoding.rejects_if_busy and any(priority >= encoding.priority for priority in self._waiting):
            raise OutOfCapacity(
                f"the model is busy with {len(self._encodings)} requests, and rejectIfBusy was asked for; "
                "try again later",
                retry_after_s=1,
            )
        num_tokens = sum(each.num_tokens for waiting in self._waiting.values() for each in waiting)
        if self.num_waiting >= self._max_waiting or num_tokens > MAX_WAITING_TOKENS:
            raise OutOfCapacity(
                f"{self.num_waiting} requests with {num_tokens} tokens are waiting for the model; try again later"
            )
        self._encodings[encoding.id] = encoding
        self._waiting.setdefault(encoding.priority, deque()).append(encoding)
        return [Started(encoding.id, encoding.num_tokens)]

    def cancel(self, id: int) -> list[Frame]:
        """Forget the request `id`, if it is here; a batch that it is in goes on for the others."""
        if id not in self._encodings:
            return []
        return [Done(id, "cancelled", self._forget(self._encodings[id]).usage)]

    def fail_all(self, error: EdgeError) -> list[Frame]:
        """End all requests with `error`."""
        self._batch = self._set_aside = None
        return [self._failed(encoding, error) for encoding in list(self._encodings.values())]

    def advance(self, slice_us: float) -> list[Frame]:
        """Compute for `slice_us` or a little longer, a layer at least; the frames that come of it."""
        started_ns = time.perf_counter_ns()
        if not self.has_work:
            return []
        batch, rows = self._next_batch(slice_us), None
        if all(member.encoding.id not in self._encodings for member in batch.members):  # everybody has gone
            self._batch = None
            return []
        try:
            while rows is None:
                try:
                    next(batch.work)
                except StopIteration as end:
                    rows = end.value
                if (time.perf_counter_ns() - started_ns) / 1000 >= slice_us:
                    break
        finally:
            self._charge(batch, (time.perf_counter_ns() - started_ns) // 1000)
        if rows is None:
            return []
        self._batch = None
        self._learn(batch)
        return self._deliver(batch, rows)

    def _next_batch(self, slice_us: float) -> _Batch:
        """The batch to go on with: the one under way, the one that was set aside, or a new one."""
        highest = max(self._waiting, default=None)
        batch = self._batch
        may_wait = batch is not None and not batch.was_set_aside and self._set_aside is None
        if batch is not None and may_wait and _outranks(highest, batch):
            batch.was_set_aside = True
            self._set_aside, self._batch = batch, None
        if self._batch is None:
            aside = self._set_aside
            if aside is not None and (not _outranks(highest, aside) or self._num_passes >= MAX_PASSES):
                self._batch, self._set_aside, self._num_passes = aside, None, 0
            else:
                self._batch = self._form(slice_us)
        return self._batch

    def _next_priority(self) -> int:
        """That of the texts of the next batch: the highest, or the lowest when it was passed over often enough."""
        lowest, highest = min(self._waiting), max(self._waiting)
        is_alone = lowest == highest and self._set_aside is None
        self._num_passes = 0 if is_alone else self._num_passes + 1
        if self._num_passes <= MAX_PASSES:
            return highest
        self._num_passes = 0
        return lowest

    def _form(self, slice_us: float) -> _Batch:
        """A batch of waiting texts of which a layer takes no longer than `slice_us`, as far as that is known."""
        priority = self._next_priority()
        waiting = self._waiting[priority]
        budget = _FIRST_BATCH_TOKENS if not self._layer_token_us else int(slice_us / self._layer_token_us)
        budget = min(budget, MAX_BATCH_TOKENS)
        members: list[_Member] = []
        while waiting and len(members) < MAX_BATCH_TEXTS:
            encoding = waiting[0]
            member = _Member(encoding, encoding.next_text)
            budget -= len(member.tokens)
            if budget < 0 and members:
                break
            members.append(member)
            encoding.next_text += 1
            waiting.popleft()
            if encoding.next_text < len(encoding.texts):
                waiting.append(encoding)
        if not waiting:
            del self._waiting[priority]
        members.sort(key=lambda member: -len(member.tokens))
        for member in members:
            member.encoding.num_read_tokens += len(member.tokens)
        work = self.encoder.encode(
            [member.tokens for member in members], [member.encoding.pooling for member in members]
        )
        return _Batch(members, priority, work)

    def _charge(self, batch: _Batch, us: int) -> None:
        batch.compute_us += us
        parts = shares(us, [len(member.tokens) for member in batch.members])
        for member, share in zip(batch.members, parts, strict=True):
            member.encoding.compute_us += share

    def _learn(self, batch: _Batch) -> None:
        token_us = batch.compute_us / batch.num_tokens / self.encoder.config.num_layers
        old = self._layer_token_us
        self._layer_token_us = token_us if not old else old + _WEIGHT * (token_us - old)

    def _deliver(self, batch: _Batch, rows: Tensor) -> list[Frame]:
        touched: dict[int, Encoding] = {}
        for member, row in zip(batch.members, rows, strict=True):
            if member.encoding.id in self._encodings:
                member.encoding.rows[member.place] = row
                member.encoding.num_rows += 1
                touched[member.encoding.id] = member.encoding
        return [self._news(encoding) for encoding in touched.values()]

    def _news(self, encoding: Encoding) -> Frame:
        """The rows, if they are complete; else the usage so far."""
        if encoding.num_rows < len(encoding.rows):
            return Delta(encoding.id, "", encoding.usage)
        rows = torch.stack([row for row in encoding.rows if row is not None])  # (N, width)
        if not rows.isfinite().all():
            return self._failed(
                encoding,
                EdgeError(
                    "the model computed values that are no numbers (NaN or infinite) for this request. If that happens "
                    f"again, its file is damaged: remove it (edge models rm {self.name}) and add it again"
                ),
            )
        self._forget(encoding)
        config = self.encoder.config
        return Encoded(
            encoding.id,
            rows.numpy().astype("<f4").tobytes(),
            rows.shape[1],
            encoding.usage,
            None if config.labels else encoding.pooling,
            list(config.labels),
        )

    def _failed(self, encoding: Encoding, error: EdgeError) -> Frame:
        self._forget(encoding)
        return Failed(encoding.id, error.code, error.message, encoding.usage, error.param)

    def _forget(self, encoding: Encoding) -> Encoding:
        del self._encodings[encoding.id]
        waiting = self._waiting.get(encoding.priority)
        if waiting is not None and encoding in waiting:
            waiting.remove(encoding)
            if not waiting:
                del self._waiting[encoding.priority]
        return encoding


def _outranks(priority: int | None, batch: _Batch) -> bool:
    return priority is not None and priority > batch.priority
