"""Decides what each step computes: plain Python over plain data, no torch.

A sequence is `num_computed_tokens` against `num_tokens`. Prefill chunks, decode, guessed tokens and recomputing
after a preemption are one case: the step computes the next tokens that have no keys and values yet. A step has a
token budget. Sequences that decode always go first, so that no prompt holds them up; what is left goes to prompts, at
most `prefill_tokens` of it while somebody waits for the next token of an answer; what is then left goes to guesses.

Rank: a sequence with d more priority is served as if it had come `arrivals_per_priority` * d arrivals earlier. So it
is overtaken by no more than so many that came later, however many come, and nobody starves. Among waiting sequences
of one priority, those go first that find most of their prompt in the KV cache; a sequence lets at most
`max_overtaken` others pass that way. A prompt whose next page a running one is about to compute waits for that page.

When pages or places run out, the lowest rank is preempted: for those that run, always; for one that waits, only
if its priority is higher. A sequence without credit, whose reader is slow, is not scheduled. It keeps its place and
pages until somebody else needs them: then it is the first to be preempted.

This module knows nothing about models, text or frames.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from edge.engine.pages import PageAllocator, extend_keys
from edge.errors import OutOfCapacity

LOOK_AHEAD = 32
"""How many waiting sequences are looked at for the longest cached prefix."""


@dataclass(eq=False)
class Sequence:
    """The tokens of one generation, prompt and answer, and the pages that hold their keys and values."""

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    credit: int
    """Steps that may produce a token before the reader has to ask for more."""
    priority: int = 0
    """Higher ones go first."""
    salt: str = ""
    """Sequences share pages only with those of the same salt: account, adapter and what else values depend on."""
    draft: list[int] = field(default_factory=list)
    """Guesses for the tokens after `tokens`; whoever guesses sets them before each step."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the pages."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the KV cache when the sequence first ran."""
    num_preemptions: int = 0
    shareable: bool = True
    """Whether its pages can be found, by others and by itself after a preemption."""
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages, as far as they were needed yet."""
    num_published_pages: int = 0
    """Pages at the front that others can find."""
    num_found_pages: int = 0
    """While it waits: how many pages were found when somebody last looked."""
    num_overtaken: int = 0
    """How many of its priority have passed it for their cached prefix."""
    arrival: int = -1
    rank: tuple[int, int] = (0, 0)
    """Lower goes first."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Answer so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that must be computed before the next one can be chosen; 1 while decoding."""
        return len(self.tokens) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of one sequence: the next `num_tokens` tokens, the last `num_draft` of them guessed."""

    sequence: Sequence
    num_tokens: int
    num_draft: int = 0

    @property
    def completes(self) -> bool:
        """Whether the sequence has all keys and values afterwards, so that its next token can be chosen."""
        return self.num_tokens - self.num_draft == self.sequence.num_missing_tokens


class Scheduler:
    """Queues of one model's sequences over one KV cache."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        step_tokens: int,
        max_running: int,
        max_waiting: int,
        max_overtaken: int = 16,
        arrivals_per_priority: int = 64,
    ) -> None:
        """Plan steps of at most `step_tokens` tokens.

        `step_tokens` must be over `max_running`, so that prompts make progress while everybody decodes.
        """
        if step_tokens <= max_running:
            raise ValueError(f"step_tokens ({step_tokens}) must be greater than max_running ({max_running})")
        self.prefill_tokens = step_tokens
        """Prompt tokens of a step while others wait for their next token; may be set between steps."""
        self.recomputes_in_place = False
        """Whether computing a token again stores the same bits as before, so that a page can be shared of which only
        the last token is wanted again; may be set between steps."""
        self._allocator = allocator
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_overtaken = max_overtaken
        self._arrivals_per_priority = arrivals_per_priority
        self._num_arrivals = 0
        self.waiting: list[Sequence] = []
        """By rank."""
        self.running: list[Sequence] = []
        """By rank."""
        self._has_left_some = False
        """Whether the last step had no place for somebody."""

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that the pages can hold, alone."""
        return self._allocator.num_pages * self._allocator.page_size

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would find anything to compute."""
        return any(sequence.credit > 0 for queue in (self.running, self.waiting) for sequence in queue)

    def add(self, sequence: Sequence, *, reject_if_busy: bool = False) -> None:
        """Queue a new sequence.

        Raises:
            OutOfCapacity: too many are waiting; with `reject_if_busy` also if it would have to wait for others to end.
        """
        num_sequences = len(self.running) + len(self.waiting)
        if reject_if_busy and (num_sequences >= self._max_running or (self.waiting and self._has_left_some)):
            raise OutOfCapacity(
                f"the model is busy with {num_sequences} requests, and rejectIfBusy was asked for; try again later",
                retry_after_s=1,
            )
        if len(self.waiting) >= self._max_waiting:
            raise OutOfCapacity(
                f"{len(self.waiting)} requests are waiting for this model, which is the limit "
                "(engine.max_waiting); try again later",
                retry_after_s=1,
            )
        sequence.arrival = self._num_arrivals
        sequence.rank = (sequence.arrival - self._arrivals_per_priority * sequence.priority, sequence.arrival)
        self._num_arrivals += 1
        bisect.insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished, cancelled or failed; its pages are free at once."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._release(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a sequence whose keys and values are broken; nobody finds them, or what came of them, again.

        Returns:
            The pages that nobody holds now and that must be cleared before the next step.
        """
        pages = sequence.pages
        dropped = self._allocator.forget(pages)
        for other in self.running:  # `sequence` among them
            if not set(pages).isdisjoint(other.pages):
                other.shareable = False
        self.remove(sequence)
        return dropped + self._allocator.free_among(pages)

    def schedule(self) -> list[Chunk]:
        """The next step: chunks of at most `step_tokens` tokens together. Their pages are allocated."""
        self._grow()
        while self._admit():
            pass
        self._has_left_some = bool(self.waiting)
        return self._plan()

    def computed(self, chunk: Chunk, num_accepted: int = 0) -> None:
        """Note that the step has computed `chunk`, and that its first `num_accepted` guesses were right."""
        sequence = chunk.sequence
        sequence.num_computed_tokens += chunk.num_tokens - chunk.num_draft + num_accepted
        self._publish(sequence)

    # -- planning ------------------------------------------------------------------------------------------

    def _plan(self) -> list[Chunk]:
        ready = [sequence for sequence in self.running if sequence.credit > 0]
        decoding = [sequence for sequence in ready if sequence.num_missing_tokens == 1]
        prefilling = [sequence for sequence in ready if sequence.num_missing_tokens > 1]
        budget = self._step_tokens - len(decoding)
        prefills = self._plan_prefills(prefilling, budget, decoding) if prefilling else []
        budget -= sum(chunk.num_tokens for chunk in prefills)
        chunks = []
        for sequence in decoding:
            num_draft = self._take_draft_pages(sequence, budget) if sequence.draft else 0
            chunks.append(Chunk(sequence, 1 + num_draft, num_draft))
            budget -= num_draft
        return chunks + prefills

    def _plan_prefills(self, prefilling: list[Sequence], budget: int, decoding: list[Sequence]) -> list[Chunk]:
        """Half of the budget for the first by rank; with the rest, a short prompt need not wait for a long one."""
        if any(sequence.num_output_tokens > 0 for sequence in decoding):
            budget = max(1, min(budget, self.prefill_tokens))
        first = prefilling[0]
        reserved = min(first.num_missing_tokens, -(-budget // 2))
        budget -= reserved
        chunks = []
        for sequence in sorted(prefilling, key=_shortest_first):
            num_reserved = reserved if sequence is first else 0
            num_more = min(budget, sequence.num_missing_tokens - num_reserved)
            budget -= num_more
            if num_reserved + num_more > 0:
                chunks.append(Chunk(sequence, num_reserved + num_more))
        return chunks

    def _take_draft_pages(self, sequence: Sequence, budget: int) -> int:
        """Take the pages for as much of the draft as fits, and return how much that is; nobody gives way for it."""
        num_slots = (len(sequence.pages) + self._allocator.num_free) * self._allocator.page_size
        num_draft = min(len(sequence.draft), budget, num_slots - sequence.num_tokens)
        num_pages = self._allocator.pages_for(sequence.num_tokens + num_draft) - len(sequence.pages)
        sequence.pages += self._allocator.take(max(0, num_pages))
        return num_draft

    def _grow(self) -> None:
        """Give the running sequences the pages for their next tokens, in order of rank."""
        page_size = self._allocator.page_size
        for sequence in self.running[:]:
            if sequence.credit <= 0 or len(sequence.pages) * page_size >= len(sequence.tokens):
                continue
            # It may have been preempted in this loop by one that ranks before it, never the other way round.
            while sequence in self.running and not self._take_pages(sequence):
                self._preempt(self._stalled() or self.running[-1])

    # -- admission -----------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Move a waiting sequence into `running`; False if there is none, or no place or pages for it."""
        first = next(self._ready_waiting(), None)
        if first is None or (len(self.running) >= self._max_running and self._victim(first) is None):
            return False
        sequence = self._choose()
        if sequence is None or not self._make_room(sequence):
            return False
        for other in self._ready_waiting():
            if other is sequence:
                break
            other.num_overtaken += 1
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)
        return True

    def _ready_waiting(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.waiting if sequence.credit > 0)

    def _choose(self) -> Sequence | None:
        """The first waiting sequence, or one of its priority behind it with more of its prompt in the cache."""
        best, most_found, priority = None, -1, None
        for sequence in islice(self._ready_waiting(), LOOK_AHEAD):
            if priority is not None and sequence.priority != priority:
                break
            priority = sequence.priority
            must_go = sequence.num_overtaken >= self._max_overtaken
            num_found = self._look_up(sequence)
            if num_found > most_found and (must_go or not self._is_being_computed(sequence)):
                best, most_found = sequence, num_found
            if must_go:
                break
        return best

    def _look_up(self, sequence: Sequence) -> int:
        """How many pages of a waiting sequence are in the cache, going on from what was found before."""
        self._extend_keys(sequence)
        keys, num_found = sequence.page_keys, sequence.num_found_pages
        if num_found > 0 and not self._allocator.is_published(keys[num_found - 1]):
            num_found = 0
        limit = self._max_shared_pages(sequence)
        while num_found < limit and self._allocator.is_published(keys[num_found]):
            num_found += 1
        sequence.num_found_pages = num_found
        return num_found

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether one that runs and ranks before it is going to compute the first page that is not in the cache."""
        index = sequence.num_found_pages
        return index < self._max_shared_pages(sequence) and any(
            owner.rank < sequence.rank
            and owner.credit > 0
            and owner.shareable
            and owner.num_published_pages <= index < len(owner.page_keys)
            and owner.page_keys[index] == sequence.page_keys[index]
            for owner in self.running
        )

    def _make_room(self, sequence: Sequence) -> bool:
        """Give `sequence` a place and its pages, preempting whom it may; False if that is not enough."""
        # All pages at once: half-admitted prompts would starve each other of pages.
        while len(self.running) >= self._max_running or not self._take_first_pages(sequence):
            victim = self._victim(sequence)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Who gives way to the waiting `sequence`: one without credit, or of lower priority and rank."""
        if (stalled := self._stalled()) is not None:
            return stalled
        lower = [other for other in self.running if other.priority < sequence.priority and other.rank > sequence.rank]
        num_pages = self._allocator.num_free + sum(len(other.pages) for other in lower)
        # Shared pages count more than once here, so this only spares those whose pages are too few for sure.
        return lower[-1] if lower and num_pages >= self._allocator.pages_for(sequence.num_tokens) else None

    def _stalled(self) -> Sequence | None:
        """The lowest-ranking running sequence that has no credit."""
        return next((sequence for sequence in reversed(self.running) if sequence.credit <= 0), None)

    # -- pages ---------------------------------------------------------------------------------------------

    def _take_pages(self, sequence: Sequence) -> bool:
        num_missing = self._allocator.pages_for(sequence.num_tokens) - len(sequence.pages)
        if num_missing > self._allocator.num_free:
            return False
        sequence.pages += self._allocator.take(num_missing)
        return True

    def _take_first_pages(self, sequence: Sequence) -> bool:
        """Give a sequence without pages those that hold its beginning already, and new ones for the rest."""
        found = self._allocator.find(sequence.page_keys[: self._max_shared_pages(sequence)])
        num_new = self._allocator.pages_for(sequence.num_tokens) - len(found)
        if num_new > self._allocator.num_free - len(self._allocator.free_among(found)):
            return False
        self._allocator.share(found)
        sequence.pages = found + self._allocator.take(num_new)
        sequence.num_published_pages = len(found)
        # The last token is always computed, for its logits.
        num_found_tokens = len(found) * self._allocator.page_size
        sequence.num_computed_tokens = min(num_found_tokens, sequence.num_tokens - 1)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _max_shared_pages(self, sequence: Sequence) -> int:
        """Not the page of the last token, which is stored again, unless it is stored as it was."""
        num_tokens = sequence.num_tokens if self.recomputes_in_place else sequence.num_tokens - 1
        return num_tokens // self._allocator.page_size

    def _extend_keys(self, sequence: Sequence) -> None:
        extend_keys(sequence.page_keys, sequence.salt, sequence.tokens, self._allocator.page_size)

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the pages that are full by now."""
        # Guesses that were right are computed before they are among the tokens.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self._allocator.page_size
        if num_full <= sequence.num_published_pages or not sequence.shareable:
            return
        self._extend_keys(sequence)
        keys = sequence.page_keys
        for index in range(sequence.num_published_pages, num_full):
            self._allocator.publish(sequence.pages[index], keys[index], keys[index - 1] if index > 0 else None)
        sequence.num_published_pages = num_full

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting; its keys and values will be found or computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_preemptions += 1
        sequence.draft = []
        bisect.insort(self.waiting, sequence, key=_rank)

    def _release(self, sequence: Sequence) -> None:
        self._publish(sequence)
        self._allocator.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed_tokens = 0
        sequence.num_published_pages = 0


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _shortest_first(sequence: Sequence) -> tuple[int, int, tuple[int, int]]:
    return -sequence.priority, sequence.num_missing_tokens, sequence.rank
