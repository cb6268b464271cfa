import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edge.engine.kernels import Kernels
from edge.engine.kernels.linear import BLOCK, NativeLinear, rms_norm
from edge.engine.layers import QuantizedLinear, RmsNorm, prologue
from edge.weights.quantized import Quantized, quantize


def weights(N: int, K: int, *, bits: int = 4, group: int = 32, symmetric: bool = False, seed: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(N, K, generator=generator), bits=bits, group=group, symmetric=symmetric)


def rows(T: int, K: int, seed: int = 1) -> Tensor:
    """Rows with columns of different sizes, as the activations of a model have, and most with an outlier somewhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator) * torch.logspace(-1, 1, K).roll(7)
    x[torch.arange(T), torch.randint(0, K, (T,), generator=generator)] *= 50
    return x


def rounded(x: Tensor, outlier: float = 6) -> Tensor:
    """What the kernel multiplies with, as float64: x (T, K) rounded to 8 bits with a scale per block, or to 16 bits
    in blocks with a number more than `outlier` times the row's root mean square."""
    T, K = x.shape
    blocks = F.pad(x, (0, -K % BLOCK)).view(T, -1, BLOCK)
    most = blocks.abs().amax(-1, keepdim=True)
    scaled = blocks * torch.where(most > 0, torch.tensor(127.0) / most, 0)  # not 127 / most, which torch rounds twice
    codes = scaled.round()
    fine = ((scaled - codes) * 256).round().clamp(max=127) / 256
    is_fine = most > outlier * x.square().mean(-1).sqrt()[:, None, None]
    return ((codes + fine * is_fine).double() * (most / 127).double()).view(T, -1)[:, :K]


def exactly(parts: list[Quantized], x: Tensor, outlier: float = 6) -> Tensor:
    """W x with x rounded as the kernel does, in float64."""
    return rounded(x, outlier) @ torch.cat([part.dequantize() for part in parts]).double().T


def differences(got: Tensor, wanted: Tensor) -> Tensor:
    """Of each row, relative to its size."""
    return (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def difference(got: Tensor, wanted: Tensor) -> float:
    """Of the worst row."""
    return differences(got, wanted).max().item()


def nearly_exact(got: Tensor, wanted: Tensor) -> bool:
    """For inputs that differ from torch's in the last bits: where that rounds one to the next code, the row moves."""
    each = differences(got, wanted)
    return bool(each.median() < 1e-5 and each.max() < 0.01)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 384])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_product(kernels: Kernels, bits: int, group: int, symmetric: bool) -> None:
    part = weights(80, 384, bits=bits, group=group, symmetric=symmetric)
    linear = NativeLinear([part], None, kernels)
    for T in (1, 3, 16, 37):
        x = rows(T, 384)
        assert difference(linear(x), exactly([part], x)) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_float_product_within_the_rounding_of_the_inputs(kernels: Kernels, bits: int) -> None:
    part = weights(64, 576, bits=bits)
    x = torch.randn(20, 576, generator=torch.Generator().manual_seed(2))
    wanted = QuantizedLinear([part], None, torch.float32)(x)
    assert 1e-4 < difference(NativeLinear([part], None, kernels)(x), wanted) < 0.01


@pytest.mark.parametrize(("N", "K", "group"), [(3, 32, 32), (7, 48, 16), (17, 50, 50), (33, 100, 100), (15, 16, 16)])
def test_odd_shapes(kernels: Kernels, N: int, K: int, group: int) -> None:
    part = weights(N, K, group=group)
    linear = NativeLinear([part], None, kernels)
    for T in (0, 1, 5, 18):
        x = rows(T, K)
        out = linear(x)
        assert out.shape == (T, N)
        if T:
            assert difference(out, exactly([part], x)) < 1e-5


def test_parts_of_different_bits_with_bias_in_rows_of_a_wider_matrix(kernels: Kernels) -> None:
    parts = [weights(40, 96), weights(24, 96, group=96, bits=8), weights(19, 96, bits=8, group=16, symmetric=True)]
    bias = torch.randn(83, generator=torch.Generator().manual_seed(3))
    wide = rows(21, 200)
    x = wide[:, 50:146]
    out = NativeLinear(parts, bias, kernels)(x)
    assert difference(out, exactly(parts, x.contiguous()) + bias) < 1e-5


@pytest.mark.parametrize("T", [1, 2, 9, 50])
def test_residual_is_added_in_place(kernels: Kernels, T: int) -> None:
    part, x = weights(48, 64), rows(T, 64)
    residual = torch.randn(T, 48, generator=torch.Generator().manual_seed(4))
    wanted = exactly([part], x) + residual
    out = NativeLinear([part], None, kernels)(x, residual=residual)
    assert out is residual
    assert difference(out, wanted) < 1e-5


@pytest.mark.parametrize("K", [64, 100])
def test_norm_before_the_product(kernels: Kernels, K: int) -> None:
    part, x = weights(32, K, group=K), rows(19, K)
    norm = RmsNorm(torch.rand(K, generator=torch.Generator().manual_seed(5)) + 0.5, 1e-5)
    got = NativeLinear([part], None, kernels)(x, norm=norm)
    assert nearly_exact(got, exactly([part], norm(x)))
    assert difference(got, norm(x) @ part.dequantize().T) < 0.03


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("K", [64, 100])
def test_gate_before_the_product(kernels: Kernels, K: int, gate: str) -> None:
    part = weights(32, K, group=K)
    x = torch.randn(19, 2 * K, generator=torch.Generator().manual_seed(6)) * 4
    got = NativeLinear([part], None, kernels)(x, gate=gate)
    assert nearly_exact(got, exactly([part], prologue(x, None, gate), outlier=10))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_at_both_ends(kernels: Kernels, gate: str) -> None:
    identity = Quantized(torch.eye(32).to(torch.uint8), torch.ones(32, 1).half(), torch.zeros(32, 1).half(), 8)
    linear = NativeLinear([identity], None, kernels)
    for value in (-1e4, -100.0, -3.0, 0.0, 3.0, 100.0, 1e4):
        x = torch.cat((torch.full((1, 32), value), torch.ones(1, 32)), dim=1)
        torch.testing.assert_close(linear(x, gate=gate), prologue(x, None, gate), rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_in_every_batch(kernels: Kernels) -> None:
    K = 96
    parts = [weights(50, K), weights(40, K, bits=8, group=16), weights(30, K, bits=8, group=96, symmetric=True)]
    linear = NativeLinear(parts, torch.ones(120), kernels)
    norm = RmsNorm(torch.ones(K), 1e-6)
    x = rows(70, K)
    alone = torch.cat([linear(row, norm=norm) for row in x.split(1)])
    for T in range(1, 71):
        assert torch.equal(linear(x[:T], norm=norm), alone[:T])
        assert torch.equal(linear(x[70 - T :], norm=norm), alone[70 - T :])


def test_a_row_has_the_same_bits_with_any_number_of_threads(kernels: Kernels) -> None:
    linear, x = NativeLinear([weights(1000, 256)], None, kernels), rows(100, 256)
    few = Kernels(kernels.path)
    wanted = NativeLinear([weights(1000, 256)], None, few)(x)
    for few.num_threads in (1, 2, 3, 8):
        assert torch.equal(linear(x), wanted)
        assert torch.equal(NativeLinear([weights(1000, 256)], None, few)(x), wanted)


def test_more_inputs_than_fit_the_cache(kernels: Kernels) -> None:
    part, x = weights(40, 4096), rows(150, 4096)
    assert difference(NativeLinear([part], None, kernels)(x), exactly([part], x)) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("call", ["plain", "norm", "silu", "gelu_tanh"])
def test_bad_numbers_stay_in_their_row(kernels: Kernels, bad: float, call: str) -> None:
    K = 64
    linear = NativeLinear([weights(32, K), weights(16, K, bits=8, group=16)], None, kernels)
    gate = call if call in ("silu", "gelu_tanh") else None
    norm = RmsNorm(torch.ones(K), 1e-6) if call == "norm" else None
    x = rows(20, K if gate is None else 2 * K)
    wanted = linear(x, norm=norm, gate=gate)
    x[7, K - 1] = bad
    out = linear(x, norm=norm, gate=gate)
    assert not out[7].isfinite().any()
    others = [i for i in range(20) if i != 7]
    assert torch.equal(out[others], wanted[others])


def test_zeros_and_the_smallest_numbers(kernels: Kernels) -> None:
    linear = NativeLinear([weights(32, 64)], None, kernels)
    assert torch.equal(linear(torch.zeros(3, 64)), torch.zeros(3, 32))
    assert linear(torch.full((3, 64), 1e-40)).abs().max() < 1e-30


def test_calls_from_several_threads(kernels: Kernels) -> None:
    linear, x = NativeLinear([weights(2000, 512)], None, kernels), rows(64, 512)
    wanted, results = linear(x), []

    def call() -> None:
        results.extend(linear(x) for _ in range(10))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 40
    assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("C", [48, 100])
def test_rms_norm(kernels: Kernels, T: int, C: int) -> None:
    norm = RmsNorm(torch.rand(C, generator=torch.Generator().manual_seed(7)), 1e-5)
    x = rows(T, C)
    torch.testing.assert_close(rms_norm(x, norm, kernels), norm(x), rtol=2e-6, atol=1e-7)


def test_refusals(kernels: Kernels) -> None:
    part = weights(32, 64)
    linear = NativeLinear([part], None, kernels)
    norm = RmsNorm(torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match="one width, not"):
        NativeLinear([part, weights(32, 128)], None, kernels)
    with pytest.raises(ValueError, match="groups of 48 columns"):
        NativeLinear([weights(32, 96, group=48)], None, kernels)
    with pytest.raises(ValueError, match="must be finite"):
        NativeLinear([Quantized(part.codes, part.scales * float("inf"), part.minimums, 4)], None, kernels)
    with pytest.raises(ValueError, match="bias"):
        NativeLinear([part], torch.ones(31), kernels)
    for x in (torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(3, 63), torch.ones(64, 3).T):
        with pytest.raises(ValueError, match="x must be float32"):
            linear(x)
    with pytest.raises(ValueError, match="x must be float32"):
        linear(torch.ones(3, 64), gate="silu")
    with pytest.raises(ValueError, match="residual must be"):
        linear(torch.ones(3, 64), residual=torch.ones(2, 32))
    with pytest.raises(ValueError, match="not both"):
        linear(torch.ones(3, 128), gate="silu", norm=norm)
    with pytest.raises(ValueError, match="norm must have"):
        linear(torch.ones(3, 64), norm=RmsNorm(torch.ones(63), 1e-6))
    with pytest.raises(ValueError, match="x must be contiguous"):
        rms_norm(torch.ones(3, 63), norm, kernels)


@pytest.mark.slow
def test_without_the_best_instructions(kernels: Kernels, lesser_kernels: Kernels) -> None:
    """On other machines: the same integers, so the same results up to the rounding of sums."""
    norm = RmsNorm(torch.ones(96), 1e-6)
    for bits, group, symmetric in itertools.product((4, 8), (16, 32, 96), (False, True)):
        part, x = weights(50, 96, bits=bits, group=group, symmetric=symmetric), rows(23, 96)
        linear = NativeLinear([part], None, lesser_kernels)
        assert difference(linear(x), exactly([part], x)) < 1e-5
        assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))
        gated = torch.cat((x, x), dim=1)
        best = NativeLinear([part], None, kernels)
        assert nearly_exact(linear(gated, gate="silu"), best(gated, gate="silu"))
        assert nearly_exact(linear(x, norm=norm), best(x, norm=norm))
    torch.testing.assert_close(rms_norm(rows(5, 96), norm, lesser_kernels), norm(rows(5, 96)), rtol=2e-6, atol=1e-7)
