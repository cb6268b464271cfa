"""Chooses the next token of each sequence from its logits.

Order, as in the APIs that callers know: penalties, logit_bias, the grammar's mask, temperature, top-k, top-p, min-p,
one draw. Log-probabilities are those of the model's own distribution: of the logits before any of that.

A row's result never depends on what else is in the batch: every sum is over one row, in an order that only the size of
the vocabulary decides, and the random number of a token is a function of the sequence's seed and the token's place in
the answer. So neither the batch, nor a preemption, nor speculation changes what a seed writes.

This module knows nothing about sequences, text, grammars or frames other than `Sampling`. It computes in numpy: on
rows of a vocabulary that is several times faster than torch on the CPU, and it starts no threads.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from edge.errors import InvalidInput
from edge.frames import MAX_LOGIT_BIASES, MAX_LOGPROBS, Sampling

GREEDY_TEMPERATURE = 1e-6
"""At or under this, the most likely token is taken: division by it would overflow."""
MIN_LOGPROB = -9999.0
"""Reported for probability zero, which JSON has no logarithm of; the value that OpenAI's API uses."""

_BLOCK = 256
"""Weights are summed in blocks of so many, so that a draw looks at one block and not at the whole vocabulary."""

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.int32]
"""Tokens that are allowed, (ceil(V / 32),): token t is bit t % 32 of word t // 32."""


class Sampler:
    """One sequence's way of choosing tokens: its parameters, its seed, and what it has written so far."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Iterable[int] = ()) -> None:
        """Check the parameters, for a model of `vocab_size` logits.

        Raises:
            InvalidInput: one is out of range.
        """
        _check(sampling, vocab_size)
        self.sampling = sampling
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._num_accepted = 0
        self._bias = (
            np.fromiter(sampling.logit_bias.keys(), np.int64),
            np.fromiter(sampling.logit_bias.values(), np.float32),
        )
        self._counts = _Counts() if self.penalized else None
        if self._counts is not None and self._repetition != 1:
            self._counts.see(prompt)

    def accept(self, token: int) -> None:
        """Note that `token` was appended to the answer."""
        self._num_accepted += 1
        if self._counts is not None:
            self._counts.add(token)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.sampling.temperature <= GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self._repetition != 1 or bool(self.sampling.frequency_penalty) or bool(self.sampling.presence_penalty)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the choice."""
        return self.penalized or bool(self.sampling.logit_bias)

    @property
    def _repetition(self) -> float:
        value = self.sampling.repetition_penalty
        return 1.0 if value is None else value

    def adjust(self, logits: Floats, drafted: list[int]) -> None:
        """Apply penalties and biases to `logits` (V,) in place, as if `drafted` had been accepted.

        Repetition (arXiv:1909.05858) looks at prompt and answer; frequency and presence, as OpenAI defines them,
        at the answer alone.
        """
        if self._counts is not None:
            counts = self._counts.plus(drafted) if drafted else self._counts
            values = logits[counts.ids]
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
            values -= counts.numbers * np.float32(self.sampling.frequency_penalty or 0)
            values -= (counts.numbers > 0) * np.float32(self.sampling.presence_penalty or 0)
            logits[counts.ids] = values
        ids, biases = self._bias
        logits[ids] += biases

    def draw(self, num_ahead: int = 0) -> float:
        """The random number, in [0, 1), of the answer's next token, or of the one that comes `num_ahead` later."""
        name = f"{self._seed}:{self._num_accepted + num_ahead}".encode()
        return (int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class _Counts:
    """How often tokens occur in an answer, as arrays that grow: zero for those that are in the prompt alone."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._numbers = np.zeros(64, np.float32)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._places)]

    @property
    def numbers(self) -> Floats:
        return self._numbers[: len(self._places)]

    def see(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._place(token)

    def add(self, token: int) -> None:
        place = self._place(token)
        self._numbers[place] += 1

    def plus(self, tokens: list[int]) -> _Counts:
        """A copy to which `tokens` are added."""
        copy = _Counts()
        copy._places, copy._ids, copy._numbers = dict(self._places), self._ids.copy(), self._numbers.copy()
        for token in tokens:
            copy.add(token)
        return copy

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)])
        self._ids[place] = token
        return place


@dataclass(frozen=True, slots=True)
class Row:
    """What choosing one token needs to know."""

    sampler: Sampler
    drafted: list[int] = field(default_factory=list)
    """Guessed tokens between what the sampler has accepted and this row."""
    mask: Mask | None = None
    """The tokens that a grammar allows, at least one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token. `logprob` and `top`, the most likely tokens at its place, are there if they were asked for."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


def sample(logits: Tensor, rows: list[Row]) -> list[Choice | None]:
    """The choice of each row, or None where the logits (R, V) float32 are not numbers. Changes `logits`."""
    best, highest = _best(logits)
    finite = np.isfinite(highest).tolist()  # NaN and +inf rise to the maximum; all -inf stays
    chosen = best.tolist()
    special = [i for i, row in enumerate(rows) if finite[i] and _is_special(row)]
    if not special:
        return [Choice(token) if ok else None for token, ok in zip(chosen, finite, strict=True)]
    values = logits.cpu().numpy()  # shares memory on the CPU
    # What the model itself said, of the rows that report it: the choice changes the logits.
    raw = {i: values[i].copy() for i in special if rows[i].sampler.sampling.logprobs is not None}
    for i in special:
        if rows[i].sampler.adjusts or rows[i].mask is not None:
            chosen[i] = _adjust(values[i], rows[i])
    drawn = [i for i in special if not rows[i].sampler.greedy]
    for i, token in zip(drawn, _draw(values, drawn, [chosen[i] for i in drawn], rows), strict=True):
        chosen[i] = token
    choices: list[Choice | None] = [Choice(token) if ok else None for token, ok in zip(chosen, finite, strict=True)]
    for i, own in raw.items():
        choices[i] = _report(own, chosen[i], rows[i].sampler.sampling.logprobs or 0)
    return choices


def _is_special(row: Row) -> bool:
    """Whether more is to do than to take the most likely token."""
    sampler = row.sampler
    return not sampler.greedy or sampler.adjusts or row.mask is not None or sampler.sampling.logprobs is not None


def _best(logits: Tensor) -> tuple[Ids, Floats]:
    """Token and logit of the maximum of each row, NaN where there is one."""
    if logits.device.type != "cpu":  # on a device of its own the rows stay there unless there is more to do
        highest, best = logits.max(dim=-1)
        return best.cpu().numpy(), highest.cpu().numpy()
    values = logits.numpy()
    ids = values.argmax(axis=1)
    return ids, values[np.arange(len(ids)), ids]


def _adjust(values: Floats, row: Row) -> int:
    """Apply penalties, biases and mask to `values` (V,) in place.

    Returns:
        The token that is now the most likely one; the first that the mask allows if all of them are impossible.
    """
    row.sampler.adjust(values, row.drafted)
    if row.mask is not None:
        bytes_ = row.mask.view(np.uint8)
        values += _MASKS.take(bytes_, axis=0).reshape(-1)[: len(values)]
        best = int(values.argmax())
        if values[best] == -np.inf:
            best = int(np.unpackbits(bytes_, bitorder="little")[: len(values)].argmax())
            values[best] = 0
        return best
    return int(values.argmax())


def _mask_table() -> Floats:
    """(256, 8): what is added to the logits of eight tokens, by the byte of a mask that speaks for them."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, 0, -np.inf).astype(np.float32)


_MASKS = _mask_table()


def _draw(values: Floats, drawn: list[int], best: list[int], rows: list[Row]) -> list[int]:
    """One token at random from each of the rows `drawn` of `values` (R, V), whose maxima are at `best`."""
    if not drawn:
        return []
    samplers = [rows[i].sampler for i in drawn]
    weights = values if len(drawn) == len(values) else values[drawn]  # (N, V)
    weights -= weights[np.arange(len(drawn)), best][:, None]
    weights *= np.array([1 / sampler.sampling.temperature for sampler in samplers], np.float32)[:, None]
    np.exp(weights, out=weights)
    return [
        _pick(own, rows[i].sampler.sampling, rows[i].sampler.draw(len(rows[i].drafted)))
        for own, i in zip(weights, drawn, strict=True)
    ]


def _pick(weights: Floats, sampling: Sampling, number: float) -> int:
    """The token of `weights` (V,), the largest of which is 1, that `number` in [0, 1) falls on. Changes `weights`."""
    least = _least(weights, sampling)
    if least > 0:
        weights *= weights >= np.float32(least)
    return _place(weights, number)


def _least(weights: Floats, sampling: Sampling) -> float:
    """The smallest weight that top-k, top-p and min-p leave in; tokens of equal weight stay or go together."""
    least = sampling.min_p or 0.0
    if sampling.top_k is not None and sampling.top_k < len(weights):
        weights = np.partition(weights, -sampling.top_k)[-sampling.top_k :]
        least = max(least, float(weights[0]))
    if sampling.top_p is not None and sampling.top_p < 1:
        least = max(least, _least_of_top_p(weights, sampling.top_p))
    return least


def _least_of_top_p(weights: Floats, top_p: float) -> float:
    """The smallest weight in the smallest set of `weights` whose sum reaches the share `top_p` of theirs."""
    share = top_p * float(weights.sum())
    num_likely = 1 + len(weights) // 16
    ascending = np.partition(weights, -num_likely)[-num_likely:]
    if ascending.sum() < share:
        ascending = weights
    ascending = np.sort(ascending)
    return float(ascending[_place(ascending, max(0.0, 1 - share / float(ascending.sum())))])


def _place(weights: Floats, share: float) -> int:
    """The first place in `weights` (N,) at which their running sum is over `share` of their sum."""
    starts = np.arange(0, len(weights), _BLOCK)
    sums = np.add.reduceat(weights, starts).cumsum(dtype=np.float64)
    target = share * sums[-1]
    block = _over(sums, target)
    start = block * _BLOCK
    before = sums[block - 1] if block else 0.0
    return start + _over(weights[start : start + _BLOCK].cumsum(dtype=np.float64), target - before)


def _over(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """The first place where `cumulative` is over `target`, or, if rounding has it nowhere, where it gets to its end."""
    return int(min(np.searchsorted(cumulative, target, side="right"), np.searchsorted(cumulative, cumulative[-1])))


def _report(values: Floats, token: int, num_top: int) -> Choice:
    """The choice of `token` with the log-probabilities of `values` (V,), the model's own logits."""
    highest = values.max()
    normalizer = float(highest) + math.log(np.exp(values - highest).sum())
    ids: Ids = np.empty(0, np.int64)
    if num_top:
        num_top = min(num_top, len(values))
        ids = np.flatnonzero(values >= np.partition(values, -num_top)[-num_top])
        ids = ids[np.argsort(-values[ids], kind="stable")][:num_top]

    def logprob(token: int) -> float:
        return max(MIN_LOGPROB, float(values[token]) - normalizer)

    return Choice(token, logprob(token), [(id, logprob(id)) for id in ids.tolist()])


_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "frequency_penalty": (-100, 100),
    "presence_penalty": (-100, 100),
    "logprobs": (0, MAX_LOGPROBS),
}
_BIAS_LIMIT = 100.0


def _check(sampling: Sampling, vocab_size: int) -> None:
    for name, (low, high) in _LIMITS.items():
        value = getattr(sampling, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise InvalidInput(f"{name} is {value}, but must be from {low:g} to {high:g}", param=name)
    if sampling.top_k is not None and sampling.top_k < 1:
        raise InvalidInput(f"top_k is {sampling.top_k}, but must be at least 1", param="top_k")
    biases = sampling.logit_bias
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidInput(
            f"logit_bias has {len(biases)} tokens, more than the {MAX_LOGIT_BIASES} that are allowed",
            param="logit_bias",
        )
    for token, bias in biases.items():
        if not 0 <= token < vocab_size:
            raise InvalidInput(
                f"logit_bias has the token {token}, but the model's tokens are 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not (math.isfinite(bias) and abs(bias) <= _BIAS_LIMIT):
            raise InvalidInput(
                f"logit_bias is {bias} for token {token}, but must be from {-_BIAS_LIMIT:g} to {_BIAS_LIMIT:g}",
                param="logit_bias",
            )
