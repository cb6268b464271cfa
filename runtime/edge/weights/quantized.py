"""Weights as small integers with a scale and a minimum per group: the form that files, quantizer and kernels share.

`w[n, k] = codes[n, k] * scales[n, k // group] + minimums[n, k // group]`, with codes from 0 to 2^bits - 1. Symmetric
formats are those whose minimum is -2^(bits-1) times the scale. GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are exactly this;
Q4_K, Q5_K and Q6_K are once the products of their two scales are rounded to float16.

This module knows nothing about files or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = (16, 32, 64, 128)
"""Group sizes with kernels; besides, a group may be a whole row."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""How much of a group's range is tried: what is outside is cut off, and what is inside gets finer steps."""
CHUNK_VALUES = 1 << 18


@dataclass(frozen=True)
class Quantized:
    """A matrix (N, K): N outputs, K inputs."""

    codes: Tensor
    """uint8: (N, K) with 8 bits; (N, K / 2) with 4 bits, the even column in the low half."""
    scales: Tensor
    """float16 (N, K / group)."""
    minimums: Tensor
    """float16 (N, K / group)."""
    bits: int
    """4 or 8."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, stored = self.codes.shape
        return N, stored * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and minimums."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, self.scales, self.minimums))

    def rows(self, index: Tensor | slice) -> Quantized:
        """These rows only, or all in another order."""
        return Quantized(self.codes[index], self.scales[index], self.minimums[index], self.bits)

    def unpacked(self) -> Tensor:
        """The codes, one per byte: (N, K) uint8."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def dequantize(self) -> Tensor:
        """The values, (N, K) float32."""
        N, K = self.shape
        codes = self.unpacked().view(N, -1, self.group).float()
        values = codes * self.scales.float().unsqueeze(-1) + self.minimums.float().unsqueeze(-1)
        return values.view(N, K)


def from_codes(codes: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> Quantized:
    """Pack `codes` (N, K), one per byte."""
    if bits == 4:
        pairs = codes.view(codes.shape[0], -1, 2)
        codes = pairs[..., 0] | pairs[..., 1] << 4
    return Quantized(codes.contiguous(), scales.half().contiguous(), minimums.half().contiguous(), bits)


def quantize(
    weight: Tensor, *, bits: int, group: int, symmetric: bool = False, importance: Tensor | None = None
) -> Quantized:
    """`weight` (N, K) rounded to codes.

    Args:
        weight: any float type.
        bits: 4 or 8.
        group: columns that share a scale; K must be a multiple.
        symmetric: whether zero is code 2^(bits-1) in every group.
        importance: (K,), what the squared error of each column counts. With it, scales and minimums are searched for
            that make the sum of errors small; without, each group's range is divided evenly.
    """
    N, K = weight.shape
    top = (1 << bits) - 1
    codes = torch.empty(N, K, dtype=torch.uint8)
    scales, minimums = torch.empty(2, N, K // group)
    step = max(1, CHUNK_VALUES // K)  # what is worked on stays in the processor's cache
    counts = None if importance is None else importance.float().view(1, -1, group)
    for start in range(0, N, step):
        rows = slice(start, start + step)
        values = weight[rows].float().view(-1, K // group, group)
        grid = _range(values, top, symmetric)
        if counts is not None:
            grid = _search(values, counts, grid, top, symmetric)
        codes[rows] = _codes(values, grid, top).to(torch.uint8).flatten(1)
        scales[rows], minimums[rows] = (part.squeeze(-1) for part in grid)
    return from_codes(codes, scales, minimums, bits)


_Grid = tuple[Tensor, Tensor]
"""Scales and minimums of groups, (N, G, 1) each, at float16's precision."""


def _range(values: Tensor, top: int, symmetric: bool, shrink: float = 1.0) -> _Grid:
    """The grid over the range of each group of `values` (N, G, group), with zero in it."""
    if symmetric:
        return _symmetric(values.abs().amax(-1, keepdim=True) * (shrink / (top // 2)), top)
    low = values.amin(-1, keepdim=True).clamp(max=0) * shrink
    high = values.amax(-1, keepdim=True).clamp(min=0) * shrink
    return ((high - low) / top).half().float(), low.half().float()


def _symmetric(scales: Tensor, top: int) -> _Grid:
    scales = scales.half().float()
    return scales, scales * -(top // 2 + 1)


def _codes(values: Tensor, grid: _Grid, top: int) -> Tensor:
    # Divided by what is stored, not by what was computed: the rounding of the scale is made up for.
    scales, minimums = grid
    return ((values - minimums) / torch.where(scales == 0, 1.0, scales)).round_().clamp_(0, top)


def _search(values: Tensor, counts: Tensor, grid: _Grid, top: int, symmetric: bool) -> _Grid:
    """The best of several grids: the range shrunk more and more, each refitted to the codes that it gives."""
    best, least = grid, _error(values, counts, grid, top)
    for shrink in SHRINKS:
        start = _range(values, top, symmetric, shrink)
        tried = _fit(values, counts, _codes(values, start, top), top, symmetric, start)
        error = _error(values, counts, tried, top)
        better = error < least
        least = torch.where(better, error, least)
        best = (torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1]))
    return best


def _error(values: Tensor, counts: Tensor, grid: _Grid, top: int) -> Tensor:
    scales, minimums = grid
    rounded = _codes(values, grid, top).mul_(scales).add_(minimums)
    return rounded.sub_(values).square_().mul_(counts).sum(-1, keepdim=True)


def _fit(values: Tensor, counts: Tensor, codes: Tensor, top: int, symmetric: bool, start: _Grid) -> _Grid:
    """The grid with the least error for these `codes`: weighted linear regression of values on codes."""
    if symmetric:
        steps = codes - (top // 2 + 1)
        norm = (counts * steps * steps).sum(-1, keepdim=True)
        scales = (counts * steps * values).sum(-1, keepdim=True) / norm
        return _symmetric(torch.where(norm > 0, scales, start[0]), top)
    total = counts.sum(-1, keepdim=True)
    weighted = counts * codes
    mean_code, mean_value = weighted.sum(-1, keepdim=True) / total, (counts * values).sum(-1, keepdim=True) / total
    spread = (weighted * codes).sum(-1, keepdim=True) / total - mean_code.square()
    together = (weighted * values).sum(-1, keepdim=True) / total - mean_code * mean_value
    usable = spread > 1e-3
    scales = torch.where(usable, together / spread, start[0]).half().float()
    return scales, torch.where(usable, mean_value - scales * mean_code, start[1]).half().float()
