"""One step's tokens as the layers see them: built once from the scheduler's chunks, used by every layer.

Letters: T tokens of all sequences in the step, B sequences, M pages of the longest of them.

This module knows nothing about models or about what is stored in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge.engine.scheduler import Chunk

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with N consecutive query tokens each, the rows `start` to `start + B * N` of the step."""

    start: int
    num_queries: int
    pages: Tensor
    """(B, M) int64 page numbers; a short sequence repeats its first page, to be masked."""
    positions: Tensor
    """(B, N) int64 of the queries."""


class Adapters(Protocol):
    """What a step's LoRA adapters add to the output of a linear."""

    def add(self, linear: str, layer: int, x: Tensor, out: Tensor, prepare: Callable[[Tensor], Tensor]) -> None:
        """Add to `out` (T, outputs) of `linear` (qkv, o, gate_up or down), whose input was `prepare(x)`."""
        ...


@dataclass(eq=False)
class Step:
    """Tokens to compute, in rows: the chunk of the first sequence, then that of the second, and so on.

    The `host` arrays are the tensors of the same name where Python can read them without waiting for a device.
    """

    tokens: Tensor
    """(T,) int64 token ids."""
    positions: Tensor
    """(T,) int64 place of each token in its sequence."""
    slots: Tensor
    """(T,) int64 where its key and value go: page number times page size plus offset in the page."""
    starts: Tensor
    """(B + 1,) int32 first row of each sequence, and T."""
    lengths: Tensor
    """(B,) int32 tokens of each sequence that have keys and values after the step."""
    page_table: Tensor
    """(B, M) int32 pages of each sequence in order; rows of shorter ones end in zeros."""
    host_starts: Integers
    host_lengths: Integers
    host_page_table: Integers
    page_size: int
    adapters: Adapters | None = None
    """The LoRA adapters of the rows that have one (see `engine.lora`); None where no row has."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.host_lengths)

    @cached_property
    def groups(self) -> list[Group]:
        """All sequences, in groups that one operation can serve: for kernels that want rectangles.

        Neighbours of one token and similar length are together, so that one long sequence does not pad them all.
        """
        counts, num_pages = np.diff(self.host_starts), -(-self.host_lengths // self.page_size)
        return [
            self._group(first, end, int(counts[first]), num_pages[first:end])
            for first, end in _neighbours(counts.tolist(), num_pages.tolist())
        ]

    def _group(self, first: int, end: int, N: int, num_pages: Integers) -> Group:
        M = int(num_pages.max())
        pages = self.host_page_table[first:end, :M]
        pages = np.where(np.arange(M) < num_pages[:, None], pages, pages[:, :1])
        positions = self.host_lengths[first:end, None] - N + np.arange(N)
        pages_there, positions_there = (
            torch.from_numpy(array.astype(np.int64)).to(self.tokens.device) for array in (pages, positions)
        )
        return Group(int(self.host_starts[first]), N, pages_there, positions_there)


def build_step(chunks: Items[Chunk], page_size: int, device: torch.device) -> Step:
    """The step that computes `chunks`, at least one, in their order.

    A chunk's tokens are those after the computed ones of its sequence: its own, then the guessed ones of its draft.
    """
    tokens: list[int] = []
    counts, ends = [], []
    for chunk in chunks:
        sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
        end = start + chunk.num_tokens
        tokens += sequence.tokens[start:end]
        if end > len(sequence.tokens):
            tokens += sequence.draft[: end - len(sequence.tokens)]
        counts.append(chunk.num_tokens)
        ends.append(end)
    lengths = np.array(ends, np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    assert starts[-1] == len(tokens), "a chunk is longer than its sequence and draft"
    page_table = _page_table(chunks, -(-lengths // page_size))

    sequences = np.repeat(np.arange(len(counts)), counts)  # (T,) row of the page table
    positions = np.arange(len(tokens)) + (lengths - starts[1:])[sequences]
    slots = page_table[sequences, positions // page_size].astype(np.int64) * page_size + positions % page_size

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Step(
        tokens=tensor(np.array(tokens, np.int64)),
        positions=tensor(positions),
        slots=tensor(slots),
        starts=tensor(starts),
        lengths=tensor(lengths),
        page_table=tensor(page_table),
        host_starts=starts,
        host_lengths=lengths,
        host_page_table=page_table,
        page_size=page_size,
    )


def _page_table(chunks: Items[Chunk], num_pages: Integers) -> Integers:
    """(B, M) of the first `num_pages` (B,) pages of each sequence."""
    table = np.zeros((len(num_pages), int(num_pages.max())), np.int32)
    rows = [chunk.sequence.pages[:count] for chunk, count in zip(chunks, num_pages.tolist(), strict=True)]
    assert all(len(row) == count for row, count in zip(rows, num_pages.tolist(), strict=True)), "pages are missing"
    used = np.arange(table.shape[1]) < num_pages[:, None]
    table[used] = np.fromiter(chain.from_iterable(rows), np.int32)
    return table


def _neighbours(counts: list[int], num_pages: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of sequences that go together."""
    first = 0
    for at in range(1, len(counts) + 1):
        members = slice(first, at + 1)
        lengths = num_pages[members]
        if at == len(counts) or max(counts[members]) > 1 or max(lengths) > 2 * min(lengths) + 4:
            yield first, at
            first = at
