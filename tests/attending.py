"""Sequences of random activations that go through an attention in steps, for the tests of attention and its cache."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from edge.engine.attention import Attention, AttentionShape
from edge.engine.kv_cache import KvCache, KvOptions
from edge.engine.layers import RmsNorm
from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import Step, build_step

PAGE_SIZE = 16
CPU = torch.device("cpu")


def shape(
    H: int = 6,
    K: int = 2,
    D: int = 32,
    *,
    window: int | None = None,
    softcap: float | None = None,
    normed: bool = False,
) -> AttentionShape:
    """An attention of small heads, with norms of their own if `normed`."""
    generator = torch.Generator().manual_seed(7)
    q_norm, k_norm = (RmsNorm(torch.rand(D, generator=generator) + 0.5, 1e-6) for _ in range(2))
    return AttentionShape(H, K, D, D**-0.5, window, softcap, q_norm if normed else None, k_norm if normed else None)


def make_cache(
    format: str,
    shape: AttentionShape,
    *,
    num_pages: int = 200,
    num_layers: int = 1,
    num_side_pages: int = 200,
    options: KvOptions | None = None,
) -> KvCache:
    """A cache on the CPU for `shape`."""
    return KvCache(
        format,
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        device=CPU,
        num_side_pages=num_side_pages,
        options=options,
    )


class Attending:
    """Sequences over one cache, each with inputs of its own: the same ones however it is cut into steps."""

    def __init__(
        self,
        attention: Attention,
        shape: AttentionShape,
        cache: KvCache,
        lengths: list[int],
        *,
        num_rotary: int | None = None,
        first_seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.attention, self.shape, self.cache = attention, shape, cache
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        pages = list(range(cache.num_pages))
        random.Random(3).shuffle(pages)
        self.inputs, self.sequences = [], []
        for i, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(first_seed + i)
            self.inputs.append(torch.randn(length, width, generator=generator).to(dtype))
            own = [pages.pop() for _ in range(-(-length // PAGE_SIZE))]
            self.sequences.append(Sequence(i, list(range(length)), length, 1, pages=own))
        self.outputs = [torch.empty(0, shape.num_heads * shape.head_dim, dtype=dtype) for _ in lengths]
        self.frequencies = 100.0 ** -torch.linspace(0, 1, (num_rotary or shape.head_dim) // 2)

    def step(self, *plan: tuple[int, int]) -> None:
        """Compute, for each (sequence, number of tokens), its next tokens; all in one step."""
        chunks = [Chunk(self.sequences[i], num_tokens) for i, num_tokens in plan]
        step = build_step(chunks, PAGE_SIZE, CPU)
        rows = [self._rows(chunk) for chunk in chunks]
        out = self._attend(torch.cat(rows), step)
        for chunk, part in zip(chunks, out.split([len(x) for x in rows]), strict=True):
            i = chunk.sequence.id
            self.outputs[i] = torch.cat((self.outputs[i], part))
            chunk.sequence.num_computed_tokens += chunk.num_tokens

    def finish(self, num_tokens: int = 1 << 30) -> list[Tensor]:
        """Compute what is left, `num_tokens` of each sequence per step; the outputs of each sequence."""
        while left := [(s.id, s.num_missing_tokens) for s in self.sequences if s.num_missing_tokens > 0]:
            self.step(*((i, min(count, num_tokens)) for i, count in left))
        return self.outputs

    def _rows(self, chunk: Chunk) -> Tensor:
        start = chunk.sequence.num_computed_tokens
        return self.inputs[chunk.sequence.id][start : start + chunk.num_tokens]

    def _attend(self, qkv: Tensor, step: Step) -> Tensor:
        angles = step.positions[:, None].float() * self.frequencies
        return self.attention(qkv, self.shape, angles.cos(), angles.sin(), self.cache, 0, step)
