from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge.weights.quantized import from_codes, quantize

RECIPES = [(4, 32, False), (4, 64, True), (8, 128, False), (8, 384, True), (8, 16, False)]


def weights(seed: int = 0, rows: int = 24, columns: int = 384) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(columns, generator=generator) * 0.1


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from([4, 8]), st.integers(0, 1 << 32))
def test_codes_come_back_as_they_were(rows: int, groups: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, groups * 16), dtype=torch.uint8, generator=generator)
    scales, minimums = torch.randn(2, rows, groups, generator=generator)
    matrix = from_codes(codes, scales, minimums, bits)
    assert (matrix.shape, matrix.group) == ((rows, groups * 16), 16)
    assert torch.equal(matrix.unpacked(), codes)
    expected = codes.view(rows, groups, 16) * scales.half().float()[..., None] + minimums.half().float()[..., None]
    assert torch.equal(matrix.dequantize(), expected.view(rows, -1))
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(matrix.rows(order).dequantize(), matrix.dequantize()[order])
    assert matrix.size_bytes == codes.numel() * bits // 8 + 2 * 2 * rows * groups


@pytest.mark.parametrize(("bits", "group", "symmetric"), RECIPES)
def test_the_error_is_half_a_step_at_most(bits: int, group: int, symmetric: bool) -> None:
    values = weights()
    matrix = quantize(values, bits=bits, group=group, symmetric=symmetric)
    steps = matrix.scales.float().repeat_interleave(group, dim=1)
    errors = (matrix.dequantize() - values).abs()
    # The range ends at what float16 makes of the extremes, which may be a little inside.
    assert (errors <= steps * 0.5 + values.abs().amax() * 2**-10).all()
    if symmetric:
        assert torch.equal(matrix.minimums.float(), matrix.scales.float() * -(1 << bits - 1))


@pytest.mark.parametrize(("bits", "group", "symmetric"), RECIPES)
def test_with_importance_the_weighted_error_is_smaller(bits: int, group: int, symmetric: bool) -> None:
    values, importance = weights(1), weights(2)[0].square() + 1e-6

    def error(counts: torch.Tensor | None) -> torch.Tensor:
        matrix = quantize(values, bits=bits, group=group, symmetric=symmetric, importance=counts)
        return ((matrix.dequantize() - values).square() * importance).view(len(values), -1, group).sum(-1)

    plain, searched = error(None), error(importance)
    assert (searched <= plain * (1 + 1e-5)).all()
    assert float(searched.sum()) < float(plain.sum()) * (0.95 if bits == 4 else 1)


@pytest.mark.parametrize("importance", [None, torch.ones(32)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_without_a_range(importance: torch.Tensor | None, symmetric: bool) -> None:
    values = torch.stack((torch.zeros(32), torch.full((32,), 0.5), torch.full((32,), -0.25)))
    matrix = quantize(values, bits=4, group=32, symmetric=symmetric, importance=importance)
    assert (matrix.dequantize() - values).abs().max() < 0.04
    assert torch.equal(matrix.dequantize()[0], torch.zeros(32))
