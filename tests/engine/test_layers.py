from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from edge.engine.layers import (
    Embedding,
    Gate,
    Linear,
    PackedLinear,
    Projection,
    QuantizedLinear,
    RmsNorm,
    Rotary,
    make_linear,
)
from edge.weights.quantized import Quantized, quantize

CPU = torch.device("cpu")
NUM_IN, NUM_OUT = 48, 80


def make(kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
    """A linear of `kind`, and for `quantized` one of three parts of different bits."""
    match kind:
        case "plain":
            return Linear(weight, bias)
        case "packed":
            return PackedLinear(weight, bias)
        case "blocks":
            return PackedLinear(weight, bias, block_rows=16)
    return QuantizedLinear(parts(weight), bias, weight.dtype)


def parts(weight: torch.Tensor) -> list[Quantized]:
    return [quantize(rows, bits=bits, group=16) for rows, bits in zip(weight.split(30), (4, 8, 4), strict=True)]


def values(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """What `make(kind, weight, ...)` multiplies by."""
    return torch.cat([part.dequantize() for part in parts(weight)]) if kind == "quantized" else weight


@pytest.mark.parametrize("kind", ["plain", "packed", "blocks", "quantized"])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 50])
def test_a_linear_computes_what_its_protocol_says(kind: str, num_rows: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(NUM_OUT, NUM_IN), torch.randn(NUM_OUT)
    linear, w = make(kind, weight, bias), values(kind, weight)
    x, wide = torch.randn(num_rows, NUM_IN), torch.randn(num_rows, 2 * NUM_IN)
    residual = torch.randn(num_rows, NUM_OUT)
    norm = RmsNorm(torch.randn(NUM_IN), 1e-5)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    gate, up = wide[:, :NUM_IN], wide[:, NUM_IN:]
    before = x.clone(), wide.clone()
    for got, expected in (
        (linear(x), x @ w.T + bias),
        (linear(x, norm=norm), normed @ w.T + bias),
        (linear(wide, gate="silu"), (gate * gate.sigmoid() * up) @ w.T + bias),
        (linear(wide, gate="gelu_tanh"), (F.gelu(gate, approximate="tanh") * up) @ w.T + bias),
        (linear(x, residual=residual.clone()), residual + x @ w.T + bias),
        (make(kind, weight, None)(x, norm=norm, residual=residual.clone()), residual + normed @ w.T),
    ):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(wide, before[1])


@pytest.mark.parametrize("kind", ["plain", "packed", "blocks", "quantized"])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_weights_in_bfloat16_take_and_give_the_type_of_the_activations(kind: str, activations: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(NUM_OUT, NUM_IN).bfloat16(), torch.randn(5, NUM_IN).to(activations)
    got = make(kind, weight, None)(x, residual=torch.ones(5, NUM_OUT, dtype=activations))
    assert got.dtype == activations
    expected = x.float() @ values(kind, weight.float()).float().T + 1
    torch.testing.assert_close(got.float(), expected, atol=0.2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_blocks_of_rows_a_row_is_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(96, 1536).to(dtype), block_rows=16)
    x = torch.randn(100, 1536)
    rows = linear(x)
    for start, end in ((0, 1), (17, 18), (3, 20), (0, 99)):
        assert torch.equal(linear(x[start:end]), rows[start:end])


def test_norms_are_computed_in_float32() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square is no float16
    assert RmsNorm(torch.tensor([1.0, 2, 3, 4]), 1e-5)(x).tolist() == [[1, 2, 3, 4]]


def test_a_gate_leaves_its_input_alone() -> None:
    x = torch.tensor([[1.0, -1.0, 2.0, 3.0]])
    assert Gate("silu")(x)[0].tolist() == pytest.approx([2 / (1 + math.exp(-1)), -3 / (1 + math.exp(1))])
    assert x.tolist() == [[1, -1, 2, 3]]


def test_make_linear_on_the_cpu_without_kernels_makes_floats_of_everything() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(90, NUM_IN), torch.randn(90)
    codes = parts(weight)
    mixed = [codes[0].dequantize(), codes[1], codes[2]]
    linear = make_linear(mixed, list(bias.split(30)), dtype=torch.float32, device=CPU, kernels=None)
    assert isinstance(linear, PackedLinear)
    x = torch.randn(3, NUM_IN)
    expected = x @ torch.cat([part.dequantize() for part in codes]).T + bias
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_embedding_gives_rows_times_the_scale_in_its_type(bits: int | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 32)
    stored = weight if bits is None else quantize(weight, bits=bits, group=16)
    tokens = torch.tensor([3, 3, 19, 0])
    expected = (stored if isinstance(stored, torch.Tensor) else stored.dequantize())[tokens]
    plain = Embedding(stored, scale=1, dtype=torch.float32, device=CPU)(tokens)
    assert torch.equal(plain, expected)
    scaled = Embedding(stored, scale=5.65685, dtype=torch.bfloat16, device=CPU)(tokens)
    assert torch.equal(scaled, expected.bfloat16() * 5.65625)  # the scale, too, is a bfloat16
    plain.zero_()
    assert torch.equal(Embedding(stored, scale=1, dtype=torch.float32, device=CPU)(tokens), expected)


def test_rotary_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    cos, sin = Rotary(6, 1000.0, divisors=(1.0, 2.0, 4.0), device=CPU).tables(torch.tensor([0, 7]))
    angles = [7 * 1000 ** (-i / 3) / divisor for i, divisor in enumerate((1, 2, 4))]
    assert torch.stack((cos, sin))[:, 0].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert cos[1].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-6)
    assert sin[1].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-6)
    assert cos.dtype == sin.dtype == torch.float32
