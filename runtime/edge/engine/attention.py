"""Attention over the paged KV cache for a step's tokens of several sequences, in plain torch.

Letters: T tokens in the step, B sequences in a group, N query tokens of each, S keys of each (padded to whole
pages), H query heads, K key-value heads, G = H / K, D head dimension, R dimensions that are rotated.

`paged_attention` runs on every device; `paged_attention_reference` says what it means. `engine.kernels.attention` has
the same for the CPU in native code. This module knows nothing about models; who owns which page is decided in
`engine.pages`, what a page looks like in `engine.kv_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edge.engine.kv_cache import KvCache, hadamard
from edge.engine.layers import RmsNorm
from edge.engine.step import Group, Step

_QUERIES_AT_ONCE = 256
"""Scores of so many queries with all heads and keys exist at a time, where they are computed step by step."""


@dataclass(frozen=True)
class AttentionShape:
    """What the attention of one layer is like."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are products times this."""
    window: int | None = None
    """A query at p sees the keys after p - window; None: all up to its own."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2)."""
    q_norm: RmsNorm | None = None
    """Applied to each query head before rotation (Qwen 3, Gemma 3)."""
    k_norm: RmsNorm | None = None


Attention = Callable[[Tensor, AttentionShape, Tensor, Tensor, KvCache, int, Step], Tensor]
"""(qkv (T, (H + 2K) * D), shape, cos (T, R/2), sin (T, R/2), cache, layer, step) to (T, H * D).

Norms and rotates queries and keys, stores keys and values, then attends.
"""


def paged_attention(
    qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, cache: KvCache, layer: int, step: Step
) -> Tensor:
    """One fused attention per group of alike sequences over its gathered pages."""
    q, k, v = _heads(qkv, shape, cos, sin)
    cache.begin(step)
    cache.write(layer, step.slots, k, v)
    q = hadamard(q.float()).to(q.dtype) if cache.rotates_keys else q
    out = torch.cat([_attend_group(q, shape, cache, layer, group) for group in step.groups])  # (T, H, D)
    if cache.rotates_values:
        out = hadamard(out.float()).to(out.dtype)
    return out.flatten(1)


def paged_attention_reference(
    qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, cache: KvCache, layer: int, step: Step
) -> Tensor:
    """The same, one token and one head at a time, straight from the definition."""
    q, k, v = _heads(qkv, shape, cos, sin)
    cache.begin(step)
    cache.write(layer, step.slots, k, v)
    out = torch.empty_like(q)
    for row in range(step.num_tokens):
        sequence = int(np.searchsorted(step.host_starts, row, side="right")) - 1
        position = int(step.positions[row])
        first = 0 if shape.window is None else max(0, position + 1 - shape.window)
        keys, values = cache.read(layer, step.page_table[sequence], position + 1)  # (S, K, D)
        for h in range(shape.num_heads):
            head = h // (shape.num_heads // shape.num_kv_heads)
            scores = keys[first:, head] @ q[row, h].float() * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            out[row, h] = scores.softmax(0) @ values[first:, head]
    return out.flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, N, D) with dimensions i and i + R/2 turned by the angles of `cos` and `sin` (T, R/2); float32 inside."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat(((low * cos - high * sin).to(x.dtype), (high * cos + low * sin).to(x.dtype), rest), dim=-1)


def _heads(qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (T, H, D) and keys (T, K, D), normed and rotated, and values (T, K, D)."""
    H, K, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    heads = qkv.view(qkv.shape[0], H + 2 * K, D)
    if shape.q_norm is None or shape.k_norm is None:
        qk = rotate(heads[:, : H + K], cos, sin)
        return qk[:, :H], qk[:, H:], heads[:, H + K :]
    q, k = shape.q_norm(heads[:, :H]), shape.k_norm(heads[:, H : H + K])
    return rotate(q, cos, sin), rotate(k, cos, sin), heads[:, H + K :]


def _attend_group(q: Tensor, shape: AttentionShape, cache: KvCache, layer: int, group: Group) -> Tensor:
    """The rows of `group` (B * N, H, D)."""
    (B, M), N, (_, H, D) = group.pages.shape, group.num_queries, q.shape
    queries = q[group.start : group.start + B * N].view(B, N, H, D).transpose(1, 2)  # (B, H, N, D)
    keys, values = cache.gather(layer, group.pages, q.dtype)  # (B, K, S, D)
    mask = _mask(group, shape, M * cache.page_size, q.dtype)
    if cache.side_keys:
        out = _attend_both(queries, keys, values, mask, shape, cache, layer, group)
    elif shape.softcap is not None:
        out = _attend_softcap(queries, keys, values, mask, shape)
    else:
        out = _attend(queries, keys, values, mask, shape)
    return out.transpose(1, 2).reshape(B * N, H, D)


def _mask(group: Group, shape: AttentionShape, num_keys: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, N, S), added to the scores: 0 for keys that the query sees, else -inf."""
    keys = torch.arange(num_keys, device=group.positions.device)
    queries = group.positions[:, None, :, None]
    hidden = keys > queries
    if shape.window is not None:
        hidden |= keys <= queries - shape.window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, shape: AttentionShape) -> Tensor:
    B, H, N, D = q.shape
    K = keys.shape[1]
    if N > 1:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=shape.scale, enable_gqa=H != K)
    # The query heads of one key head as its query rows: torch's own grouping is 7x slower in bfloat16 on a CPU.
    out = F.scaled_dot_product_attention(q.reshape(B, K, H // K, D), keys, values, attn_mask=mask, scale=shape.scale)
    return out.view(B, H, 1, D)


def _attend_softcap(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, shape: AttentionShape) -> Tensor:
    outputs = []
    for part, part_mask in zip(
        torch.split(q, _QUERIES_AT_ONCE, 2), torch.split(mask, _QUERIES_AT_ONCE, 2), strict=True
    ):
        scores = _scores(part, keys, shape) + part_mask[:, :, None]
        outputs.append(_weighted(scores.softmax(-1), values).to(q.dtype))
    return torch.cat(outputs, dim=2)


def _attend_both(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    shape: AttentionShape,
    cache: KvCache,
    layer: int,
    group: Group,
) -> Tensor:
    """Each query with the full-precision pages where it may have them, and the quantized ones elsewhere."""
    S = cache.page_size
    side_keys, side_values, has_side = cache.gather_side(layer, group.pages, q.dtype)
    page = torch.arange(group.pages.shape[1], device=q.device)
    full = cache.full_precision(page, group.positions[:, :, None] // S) & has_side[:, None]  # (B, N, M)
    full = full.repeat_interleave(S, dim=2)[:, None, None]  # (B, 1, 1, N, S)
    outputs = []
    for at in range(0, q.shape[2], _QUERIES_AT_ONCE):
        rows = slice(at, at + _QUERIES_AT_ONCE)
        part, part_full = q[:, :, rows], full[:, :, :, rows]
        scores = torch.where(part_full, _scores(part, side_keys, shape), _scores(part, keys, shape))
        weights = (scores + mask[:, :, None, rows]).softmax(-1)  # (B, K, G, N, S)
        out = _weighted(weights * part_full, side_values) + _weighted(weights * ~part_full, values)
        outputs.append(out.to(q.dtype))
    return torch.cat(outputs, dim=2)


def _scores(q: Tensor, keys: Tensor, shape: AttentionShape) -> Tensor:
    """q (B, H, N, D) with keys (B, K, S, D): (B, K, G, N, S), float32."""
    grouped = q.reshape(q.shape[0], shape.num_kv_heads, -1, *q.shape[2:])  # (B, K, G, N, D)
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).float() * shape.scale
    return scores if shape.softcap is None else torch.tanh(scores / shape.softcap) * shape.softcap


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """weights (B, K, G, N, S) with values (B, K, S, D): (B, H, N, D), float32."""
    return (weights.to(values.dtype) @ values[:, :, None]).float().flatten(1, 2)
