"""Turns stored blocks of GGUF tensors into float32 values, bit-equal to ggml's own arithmetic, or into our codes.

Each type has one function from `(N, bytes per block)` uint8 to `(N, values per block)` float32, written to be
read, and each quantized one a function to codes, scales and minimums, written to be fast: models are loaded by it.
Layouts: ggml's `block_*` structs in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

This module knows nothing about files, names or models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.gguf import BLOCKS, GgmlType
from edge.weights.quantized import Quantized

CHUNK_VALUES = 1 << 20
"""Values that are decoded at a time: intermediates stay in the cache and memory use is bounded."""


def dequantize(raw: Tensor, kind: GgmlType, shape: tuple[int, ...]) -> Tensor:
    """The values of one tensor.

    Args:
        raw: its bytes as stored, (size_bytes,) uint8; left unchanged.
        kind: its storage type.
        shape: its shape, rows first.

    Returns:
        A new float32 tensor of `shape`.

    Raises:
        WeightsError: the type is not supported.
    """
    decode = DECODERS.get(kind)
    if decode is None:
        raise WeightsError(f"tensors stored as {kind.name} are not supported (supported: {', '.join(SUPPORTED)})")
    values_per_block, bytes_per_block = BLOCKS[kind]
    blocks = raw.view(-1, bytes_per_block)
    values = torch.empty(blocks.shape[0], values_per_block)
    step = max(1, CHUNK_VALUES // values_per_block)
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = decode(blocks[start : start + step])
    return values.view(shape)


def unpack(raw: Tensor, kind: GgmlType, shape: tuple[int, ...]) -> Quantized | None:
    """One matrix in our form of codes and scales, without a detour through its values.

    Args:
        raw: its bytes as stored, (size_bytes,) uint8; left unchanged.
        kind: its storage type.
        shape: its shape, (N, K).

    Returns:
        What dequantizes to `dequantize(raw, kind, shape)`, for K types but for the rounding of scales and minimums
        to float16 (which may make one of them infinite); None if this is no matrix, or one of floats.
    """
    layout = _LAYOUTS.get(kind)
    if layout is None or len(shape) != 2:
        return None
    values_per_block, bytes_per_block = BLOCKS[kind]
    blocks = raw.view(-1, bytes_per_block)
    num_blocks, num_groups = blocks.shape[0], values_per_block // layout.group
    codes = torch.empty(num_blocks, values_per_block * layout.bits // 8, dtype=torch.uint8)
    scales, minimums = torch.empty(2, num_blocks, num_groups, dtype=torch.float16)
    step = max(1, CHUNK_VALUES // values_per_block)
    for start in range(0, num_blocks, step):
        part = slice(start, start + step)
        codes[part], scales[part], minimums[part] = layout.split(blocks[part])
    N = shape[0]
    return Quantized(codes.view(N, -1), scales.view(N, -1), minimums.view(N, -1), layout.bits)


def _f32(blocks: Tensor) -> Tensor:
    return _as(blocks, torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _as(blocks, torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return _as(blocks, torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = _half(blocks, 0), _nibbles(blocks[:, 2:])
    return scale * (codes.float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, minimum, codes = _half(blocks, 0), _half(blocks, 2), _nibbles(blocks[:, 4:])
    return scale * codes.float() + minimum


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, low = _half(blocks, 0), _bits(blocks[:, 2:6]), _nibbles(blocks[:, 6:])
    return scale * ((low | high << 4).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    high, low = _bits(blocks[:, 4:8]), _nibbles(blocks[:, 8:])
    return scale * (low | high << 4).float() + minimum


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _as(blocks[:, 2:], torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    codes = _k_nibbles(blocks[:, 16:])  # (N, 8, 32)
    return (scales * codes.float() - minimums).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    return (scales * _q5_k_codes(blocks).float() - minimums).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _q6_k_codes(blocks).float().sub_(32).view(-1, 16, 16)
    return (_q6_k_scales(blocks).unsqueeze(-1) * codes).view(-1, 256)


# -- to codes: (N, bytes) to codes (N, values * bits / 8) uint8, scales (N, groups) and minimums (N, groups) ----


def _split_q4_0(blocks: Tensor) -> _Parts:
    scale = _as(blocks[:, :2], torch.float16)
    return _pairs(blocks[:, 2:]), scale, scale * -8


def _split_q4_1(blocks: Tensor) -> _Parts:
    return _pairs(blocks[:, 4:]), _as(blocks[:, :2], torch.float16), _as(blocks[:, 2:4], torch.float16)


def _split_q5_0(blocks: Tensor) -> _Parts:
    scale, high, low = _as(blocks[:, :2], torch.float16), _bits(blocks[:, 2:6]), _nibbles(blocks[:, 6:])
    return low | high << 4, scale, scale * -16


def _split_q5_1(blocks: Tensor) -> _Parts:
    high, low = _bits(blocks[:, 4:8]), _nibbles(blocks[:, 8:])
    return low | high << 4, _as(blocks[:, :2], torch.float16), _as(blocks[:, 2:4], torch.float16)


def _split_q8_0(blocks: Tensor) -> _Parts:
    scale = _as(blocks[:, :2], torch.float16)
    return blocks[:, 2:] ^ 128, scale, scale * -128  # the sign bit turned over: plus 128


def _split_q4_k(blocks: Tensor) -> _Parts:
    scales, minimums = _k_scales(blocks)
    return _pairs(blocks[:, 16:].view(-1, 4, 32)).flatten(1), scales.flatten(1), -minimums.flatten(1)


def _split_q5_k(blocks: Tensor) -> _Parts:
    scales, minimums = _k_scales(blocks)
    return _q5_k_codes(blocks).flatten(1), scales.flatten(1), -minimums.flatten(1)


def _split_q6_k(blocks: Tensor) -> _Parts:
    scales = _q6_k_scales(blocks).half()
    return _q6_k_codes(blocks).flatten(1), scales, scales * -32


def _pairs(packed: Tensor) -> Tensor:
    """Bytes (..., B) that hold B codes in their low halves and the next B in their high ones, to our order."""
    words = packed.contiguous().view(torch.int16)  # two codes of the first half, and two of the second
    low = (words & 0x000F) | (words >> 4 & 0x00F0)
    high = (words >> 4 & 0x000F) | (words >> 8 & 0x00F0)
    return torch.cat((low, high), dim=-1).to(torch.uint8)


# -- parts of blocks ---------------------------------------------------------------------------------------


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the 8 groups of a K block, (N, 8, 1) each; 6-bit codes packed in bytes 4 to 16."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), dim=1).float()
    minimums = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), dim=1).float()
    return (_half(blocks, 0) * scales).unsqueeze(-1), (_half(blocks, 2) * minimums).unsqueeze(-1)


def _q5_k_codes(blocks: Tensor) -> Tensor:
    """(N, 8, 32)."""
    planes = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> planes) & 1  # bit i of each byte belongs to group i
    return _k_nibbles(blocks[:, 48:]) | high << 4


def _q6_k_codes(blocks: Tensor) -> Tensor:
    """(N, 8, 32)."""
    low, high = blocks[:, :128].view(-1, 2, 1, 64), blocks[:, 128:192].view(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return low | ((high >> shifts) & 3).view(-1, 8, 32) << 4


def _q6_k_scales(blocks: Tensor) -> Tensor:
    """(N, 16) float32."""
    return _half(blocks, 208) * _as(blocks[:, 192:208], torch.int8).float()


def _k_nibbles(packed: Tensor) -> Tensor:
    """(N, 128) bytes to (N, 8, 32) codes: each run of 32 bytes holds one group low and the next one high."""
    runs = packed.reshape(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=2).view(-1, 8, 32)


def _nibbles(packed: Tensor) -> Tensor:
    """(N, 16) bytes to (N, 32) codes: the low halves, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: Tensor) -> Tensor:
    """(N, 4) bytes to (N, 32) bits, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(-1, 32)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block as (N, 1) float32."""
    return _as(blocks[:, at : at + 2], torch.float16).float()


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.contiguous().view(dtype)


DECODERS: dict[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _f16,
    GgmlType.BF16: _bf16,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
SUPPORTED = [kind.name for kind in DECODERS]


_Parts = tuple[Tensor, Tensor, Tensor]


class _Layout(NamedTuple):
    bits: int
    group: int
    split: Callable[[Tensor], _Parts]


_LAYOUTS: dict[GgmlType, _Layout] = {
    GgmlType.Q4_0: _Layout(4, 32, _split_q4_0),
    GgmlType.Q4_1: _Layout(4, 32, _split_q4_1),
    GgmlType.Q5_0: _Layout(8, 32, _split_q5_0),
    GgmlType.Q5_1: _Layout(8, 32, _split_q5_1),
    GgmlType.Q8_0: _Layout(8, 32, _split_q8_0),
    GgmlType.Q4_K: _Layout(4, 32, _split_q4_k),
    GgmlType.Q5_K: _Layout(8, 32, _split_q5_k),
    GgmlType.Q6_K: _Layout(8, 16, _split_q6_k),
}
