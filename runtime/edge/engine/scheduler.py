"""Decides what each step computes: plain Python over plain data, no torch.

A sequence is `num_computed_tokens` against `num_tokens`. Prefill chunks, decode and recomputing after a
preemption are one case: the step computes the next tokens that have no keys and values yet. A step has a token
budget. Sequences that decode go first, so that no prompt holds them up; what is left goes to prompts, oldest
first; then waiting sequences are admitted.

A sequence without credit, whose reader is slow, is not scheduled. It keeps its place and pages until somebody
else needs them: then it is the first to be preempted.

This module knows nothing about models, text or frames.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from edge.engine.pages import PageAllocator
from edge.errors import OutOfCapacity


@dataclass(eq=False)
class Sequence:
    """The tokens of one generation, prompt and answer, and the pages that hold their keys and values."""

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    credit: int
    """Steps that may produce a token before the reader has to ask for more."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the pages."""
    pages: list[int] = field(default_factory=list)
    arrival: int = -1

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
    """What a step computes of one sequence: the next `num_tokens` tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the sequence has all keys and values afterwards, so that its next token can be chosen."""
        return self.num_tokens == self.sequence.num_missing_tokens


class Scheduler:
    """Queues of one model's sequences over one KV cache."""

    def __init__(self, allocator: PageAllocator, *, step_tokens: int, max_running: int, max_waiting: int) -> None:
        """Plan steps of at most `step_tokens` tokens.

        `step_tokens` must be over `max_running`, so that prompts make progress while everybody decodes.
        """
        if step_tokens <= max_running:
            raise ValueError(f"step_tokens ({step_tokens}) must be greater than max_running ({max_running})")
        self._allocator = allocator
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._num_arrivals = 0
        self.waiting: list[Sequence] = []
        """By arrival."""
        self.running: list[Sequence] = []
        """By arrival."""

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that the pages can hold, alone."""
        return self._allocator.num_pages * self._allocator.page_size

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would find anything to compute."""
        return any(sequence.credit > 0 for queue in (self.running, self.waiting) for sequence in queue)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            OutOfCapacity: too many are waiting.
        """
        if len(self.waiting) >= self._max_waiting:
            raise OutOfCapacity(
                f"{len(self.waiting)} requests are waiting for this model, which is the limit "
                "(engine.max_waiting); try again later",
                retry_after_s=1,
            )
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished, cancelled or failed; its pages are free at once."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step: chunks of at most `step_tokens` tokens together. Their pages are allocated."""
        budget = self._step_tokens
        chunks: list[Chunk] = []
        ready = [sequence for sequence in self.running if sequence.credit > 0]
        decoding = [sequence for sequence in ready if sequence.num_missing_tokens == 1]
        prefilling = [sequence for sequence in ready if sequence.num_missing_tokens > 1]
        for sequence in decoding + prefilling:
            # An older one may have preempted it in this loop, never the other way round.
            if budget > 0 and sequence in self.running and self._grow(sequence):
                budget -= self._plan(sequence, budget, chunks)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget -= self._plan(admitted, budget, chunks)
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """Note that the step has computed `chunk`."""
        chunk.sequence.num_computed_tokens += chunk.num_tokens

    def _plan(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        num_tokens = min(budget, sequence.num_missing_tokens)
        chunks.append(Chunk(sequence, num_tokens))
        return num_tokens

    def _admit(self) -> Sequence | None:
        """Move the oldest waiting sequence that can run into `running`; None if there is none."""
        sequence = next((sequence for sequence in self.waiting if sequence.credit > 0), None)
        if sequence is None:
            return None
        if len(self.running) >= self._max_running and not self._preempt_stalled():
            return None
        # Pages for the whole prompt at once: half-admitted prompts would starve each other of pages.
        while not self._take_pages(sequence):
            if not self._preempt_stalled():
                return None
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda sequence: sequence.arrival)
        return sequence

    def _grow(self, sequence: Sequence) -> bool:
        """Give a running sequence the pages for its next tokens, preempting the youngest; False if that is itself."""
        while not self._take_pages(sequence):
            if self._preempt_stalled():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take_pages(self, sequence: Sequence) -> bool:
        num_missing = self._allocator.pages_for(sequence.num_tokens) - len(sequence.pages)
        if num_missing > self._allocator.num_free:
            return False
        sequence.pages += self._allocator.take(max(0, num_missing))
        return True

    def _preempt_stalled(self) -> bool:
        """Preempt the youngest running sequence that has no credit; False if there is none."""
        stalled = next((sequence for sequence in reversed(self.running) if sequence.credit <= 0), None)
        if stalled is not None:
            self._preempt(stalled)
        return stalled is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting; its keys and values will be computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed_tokens = 0
        bisect.insort(self.waiting, sequence, key=lambda sequence: sequence.arrival)

    def _release(self, sequence: Sequence) -> None:
        self._allocator.release(sequence.pages)
        sequence.pages = []
