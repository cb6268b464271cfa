"""Runs one model: owns its weights and its KV cache, and turns the scheduler's chunks into one forward pass.

This module knows nothing about why these chunks, about text or about frames.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge.engine.attention import Batch, Group, KvCache
from edge.engine.models import load_model
from edge.engine.models.llama import Llama
from edge.engine.pages import PageAllocator
from edge.engine.scheduler import Chunk
from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint

PAGE_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """A model on a device, with KV cache for `allocator`'s pages."""

    def __init__(self, model: Llama, allocator: PageAllocator, *, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.allocator = allocator
        self._device = device
        self._dtype = dtype
        config = model.config
        self.cache = KvCache(
            num_layers=config.num_layers,
            num_pages=allocator.num_pages,
            page_size=allocator.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> Tensor:
        """Compute `chunks`; their keys and values are in the cache afterwards.

        Returns:
            The logits (R, V), float32, after the last token of each chunk that completes its sequence, in the
            order of `chunks`.
        """
        ordered = sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)  # decode rows together, and first
        batch = self.prepare(ordered)
        hidden = self.model(batch, self.cache)  # (T, C)
        last_rows, row = {}, 0
        for chunk in ordered:
            row += chunk.num_tokens
            last_rows[id(chunk)] = row - 1
        rows = [last_rows[id(chunk)] for chunk in chunks if chunk.completes]
        # The head is as large as several layers: only rows that need it go through it.
        return self.model.logits(hidden[torch.tensor(rows, dtype=torch.int64, device=self._device)])

    def prepare(self, chunks: list[Chunk]) -> Batch:
        """The tensors of one step; chunks of one token come first."""
        page_size = self.allocator.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            end = start + chunk.num_tokens
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.pages[at // page_size] * page_size + at % page_size for at in range(start, end)]
        groups = self._groups(chunks)
        return Batch(self._tensor(tokens), self._tensor(positions), self._tensor(slots), groups)

    def _groups(self, chunks: list[Chunk]) -> list[Group]:
        """Decode rows in groups of similar length, so that one long sequence does not pad them all; else alone."""
        groups, start = [], 0
        members: list[Chunk] = []
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            members.append(chunk)
            if following is None or not self._together([*members, following]):
                groups.append(self._group(start, members))
                start += sum(member.num_tokens for member in members)
                members = []
        return groups

    def _together(self, chunks: list[Chunk]) -> bool:
        if any(chunk.num_tokens > 1 for chunk in chunks):
            return False
        lengths = [len(chunk.sequence.pages) for chunk in chunks]
        return max(lengths) <= 2 * min(lengths) + 4

    def _group(self, start: int, chunks: list[Chunk]) -> Group:
        page_size = self.allocator.page_size
        N = chunks[0].num_tokens
        ends = [chunk.sequence.num_computed_tokens + N for chunk in chunks]
        M = max(self.allocator.pages_for(end) for end in ends)
        pages = self._tensor([_padded(chunk.sequence.pages, M) for chunk in chunks])  # (B, M)
        queries = self._tensor([[*range(end - N, end)] for end in ends])  # (B, N)
        hidden = torch.arange(M * page_size, device=self._device) > queries[:, None, :, None]  # (B, 1, N, S)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        return Group(start, len(chunks), N, pages, mask)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def load_runner(checkpoint: Checkpoint, *, dtype: str, device: str, kv_tokens: int, max_running: int) -> ModelRunner:
    """Load the model of `checkpoint` and give it a KV cache for `kv_tokens` tokens, or as many as can be used.

    Raises:
        WeightsError: the model cannot be loaded.
    """
    if dtype not in DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)}); set engine.dtype")
    where, kind = torch.device(device), DTYPES[dtype]
    model = load_model(checkpoint, dtype=kind, device=where)
    most = max_running * model.config.context_length
    allocator = PageAllocator(-(-min(kv_tokens, most) // PAGE_SIZE), PAGE_SIZE)
    return ModelRunner(model, allocator, dtype=kind, device=where)


def _padded(pages: list[int], length: int) -> list[int]:
    return pages[:length] + pages[:1] * (length - len(pages))
