"""Attention over a paged KV cache for a flat batch of tokens of several sequences.

Letters: T tokens in the step, B sequences in a group, N query tokens of each, S keys of each (padded to whole
pages), H query heads, K key-value heads, D head dimension, P pages.

This module knows nothing about models; who owns which page is decided in `engine.pages`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class KvCache:
    """Keys and values of all tokens in all pages, allocated once: per layer (P, page size, K, D) each.

    Memory that was never written is zero, not arbitrary: attention multiplies masked values by 0, and 0 times
    NaN is NaN. On the CPU, pages that were never used take no memory.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self.keys = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` (T, K, D) at `slots` (T,): page number times page size plus offset in the page."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` (B, M), in order: (B, M * page size, K, D) each."""
        B, M = pages.shape
        k, v = (cache[layer].index_select(0, pages.flatten()) for cache in (self.keys, self.values))
        return k.view(B, M * self.page_size, *k.shape[2:]), v.view(B, M * self.page_size, *v.shape[2:])

    def clear(self, pages: list[int]) -> None:
        """Zero `pages`: what a sequence that failed has written must not reach the next one as NaN."""
        for cache in (*self.keys, *self.values):
            cache[pages] = 0


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with N consecutive query tokens each, the rows `start` to `start + B * N` of the batch."""

    start: int
    num_sequences: int
    num_queries: int
    pages: Tensor
    """(B, M) page numbers; a short sequence repeats a page of its own, masked."""
    mask: Tensor
    """(B, 1, N, S), added to the scores: 0 up to the query's own position, -inf after it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, as the layers see them. Built once per step, used by every layer."""

    tokens: Tensor
    """(T,) token ids."""
    positions: Tensor
    """(T,) position of each in its sequence."""
    slots: Tensor
    """(T,) where its key and value go."""
    groups: list[Group]
    """Every row is in exactly one group."""


Attention = Callable[[Tensor, Tensor, Tensor, KvCache, int, Batch], Tensor]
"""(q (T, H, D), k (T, K, D), v (T, K, D), cache, layer, batch) to (T, H, D); stores k and v, then attends."""


def paged_attention(q: Tensor, k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> Tensor:
    """One fused attention per group over its gathered pages."""
    _, H, D = q.shape
    K = k.shape[1]
    cache.write(layer, batch.slots, k, v)
    outputs = []
    for group in batch.groups:
        B, N = group.num_sequences, group.num_queries
        keys, values = (x.transpose(1, 2) for x in cache.gather(layer, group.pages))  # (B, K, S, D)
        queries = q[group.start : group.start + B * N]
        if N == 1:
            # The query heads of one key head as its query rows: torch's own grouping is 7x slower here in bf16.
            out = F.scaled_dot_product_attention(queries.view(B, K, H // K, D), keys, values, attn_mask=group.mask)
            outputs.append(out.reshape(B, H, D))
        else:
            queries = queries.view(B, N, H, D).transpose(1, 2)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, enable_gqa=True)
            outputs.append(out.transpose(1, 2).reshape(B * N, H, D))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def paged_attention_reference(q: Tensor, k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> Tensor:
    """The same, one token and one head at a time, straight from the definition."""
    _, H, D = q.shape
    K = k.shape[1]
    cache.write(layer, batch.slots, k, v)
    out = torch.empty_like(q)
    for group in batch.groups:
        for b in range(group.num_sequences):
            keys, values = cache.gather(layer, group.pages[b : b + 1])  # (1, S, K, D)
            for n in range(group.num_queries):
                row = group.start + b * group.num_queries + n
                length = int(batch.positions[row]) + 1
                for h in range(H):
                    head = h // (H // K)
                    scores = keys[0, :length, head].float() @ q[row, h].float() / math.sqrt(D)
                    out[row, h] = scores.softmax(0) @ values[0, :length, head].float()
    return out


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # `torch.zeros` writes every byte, so that the whole cache would be resident from the start.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
