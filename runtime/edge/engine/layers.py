"""The pieces that decoder models are made of.

Letters: T tokens, C hidden size, I width of the MLP, R rotated dimensions of a head.

All of them are plain callables over tensors that are final when they are made. They are no `nn.Module`s: looking up
a module's parts costs more than some of the steps here. What a linear is made of differs (floats, packed floats, codes
with scales, a native kernel), its call does not: see `Projection`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.engine.kernels import Kernels
from edge.weights.quantized import Quantized


class RmsNorm:
    """x (..., C) divided by its root mean square, times a weight (C,); in float32, whatever the type of x."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float().contiguous()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it; the result has the type of `x`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Gate:
    """x (T, 2I) to act(its first half) * its second half, (T, I)."""

    def __init__(self, name: str) -> None:
        """`name`: `silu` or `gelu_tanh`."""
        self.name = name
        self._act = _ACTIVATIONS[name]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it."""
        gate, up = x.chunk(2, dim=-1)
        return self._act(gate).mul_(up)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}
GATES = {name: Gate(name) for name in _ACTIVATIONS}


class Projection(Protocol):
    """A linear with what surrounds it in a layer, so that a kernel can do all of it at once."""

    def __call__(
        self, x: Tensor, *, norm: RmsNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[residual +] W p(x) [+ bias], where p is `norm`, or the gate of the name `gate`, or nothing.

        Args:
            x: (T, in), or (T, 2 in) with `gate`; left unchanged.
            norm: applied to x first.
            gate: a key of `GATES`; not together with `norm`.
            residual: (T, out), added; may be overwritten, so that callers go on with the result only.

        Returns:
            (T, out) in the type of `x`.
        """
        ...


def prologue(x: Tensor, norm: RmsNorm | None, gate: str | None) -> Tensor:
    """The p(x) of `Projection`."""
    if norm is not None:
        return norm(x)
    return x if gate is None else GATES[gate](x)


class Linear:
    """`Projection` by torch's own product: for every device, and what the others are compared with."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` (out, in), and `bias` (out,) in the same type."""
        self.weight = weight
        self.bias = bias

    def __call__(
        self, x: Tensor, *, norm: RmsNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As `Projection`."""
        inputs = prologue(x, norm, gate).to(self.weight.dtype)
        return _plus(residual, F.linear(inputs, self.weight, self.bias).to(x.dtype))


class PackedLinear:
    """`Linear` on the CPU with its weight in oneDNN's blocked layout: the same values, 2 to 4 times faster.

    Plain matrix products re-arrange the weight on every call, which costs more than a product of few rows. Where oneDNN
    has no product of bfloat16 for the processor, such a weight is held as float32: as exact, and twice as large.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, block_rows: int | None = None) -> None:
        """`weight` (out, in), and `bias` (out,) in the same type.

        With `block_rows` every product is of that many rows, filled up with zeros, so that a row's result cannot
        depend on the number of rows: oneDNN chooses its kernel, and with it the order of its sums, by that.
        """
        if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            weight, bias = weight.float(), None if bias is None else bias.float()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias
        self.block_rows = block_rows
        self._dtype = weight.dtype

    def __call__(
        self, x: Tensor, *, norm: RmsNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As `Projection`."""
        inputs = prologue(x, norm, gate).to(self._dtype)
        out = self._multiply(inputs) if self.block_rows is None else self._multiply_blocks(inputs, self.block_rows)
        return _plus(residual, out.to(x.dtype))

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def _multiply_blocks(self, x: Tensor, block_rows: int) -> Tensor:
        T = x.shape[0]
        x = F.pad(x, (0, 0, 0, -T % block_rows))
        blocks = [self._multiply(block) for block in x.split(block_rows)]  # type: ignore[no-untyped-call]
        return torch.cat(blocks)[:T]


class QuantizedLinear:
    """`Projection` over codes and scales, made into floats on every call: for CUDA, and the native kernel's oracle."""

    def __init__(self, parts: list[Quantized], bias: Tensor | None, dtype: torch.dtype) -> None:
        """`parts` are rows of one matrix, in order; `dtype` is what is computed in."""
        self.parts = parts
        self.bias = None if bias is None else bias.to(dtype)
        self._dtype = dtype

    def __call__(
        self, x: Tensor, *, norm: RmsNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As `Projection`."""
        weight = torch.cat([part.dequantize().to(self._dtype) for part in self.parts])
        inputs = prologue(x, norm, gate).to(self._dtype)
        return _plus(residual, F.linear(inputs, weight, self.bias).to(x.dtype))


def _plus(residual: Tensor | None, out: Tensor) -> Tensor:
    return out if residual is None else residual.add_(out)


def make_linear(
    parts: list[Tensor | Quantized],
    biases: list[Tensor] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None,
    block_rows: int | None = None,
) -> Projection:
    """The fastest linear for `parts`, which are rows of one matrix, in order.

    Parts that are codes stay so where something computes with them (native kernels on the CPU, any other device),
    and if all of them are codes; else all become floats of `dtype`. `block_rows` is that of `PackedLinear`.
    """
    bias = None if biases is None else torch.cat(biases).to(device)
    codes = [_moved(part, device) for part in parts if isinstance(part, Quantized)]
    if len(codes) == len(parts):
        if device.type != "cpu":
            return QuantizedLinear(codes, bias, dtype)
        if kernels is not None:
            from edge.engine.kernels.linear import NativeLinear  # it needs this module's norm and gates

            return NativeLinear(codes, None if bias is None else bias.float(), kernels)
    floats = [(part.dequantize() if isinstance(part, Quantized) else part).to(device, dtype) for part in parts]
    weight = floats[0] if len(floats) == 1 else torch.cat(floats)
    bias = None if bias is None else bias.to(dtype)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PackedLinear(weight, bias, block_rows=block_rows)
    return Linear(weight, bias)


def _moved(part: Quantized, device: torch.device) -> Quantized:
    return Quantized(part.codes.to(device), part.scales.to(device), part.minimums.to(device), part.bits)


class Embedding:
    """Token ids (T,) to rows of a matrix (V, C), times a scale; of codes, only the rows looked up are decoded."""

    def __init__(self, weight: Tensor | Quantized, *, scale: float, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is that of the result."""
        self.weight = _moved(weight, device) if isinstance(weight, Quantized) else weight.to(device)
        self._dtype = dtype
        # Models that scale were trained with the scale rounded to their own type.
        self._scale = None if scale == 1 else torch.tensor(scale, dtype=dtype).item()

    def __call__(self, tokens: Tensor) -> Tensor:
        """(T, C), a new tensor."""
        weight = self.weight
        rows = weight.rows(tokens).dequantize() if isinstance(weight, Quantized) else F.embedding(tokens, weight)
        rows = rows.to(self._dtype)
        return rows if self._scale is None else rows.mul_(self._scale)


class Rotary:
    """Rotary position embedding in half-split order: dimensions i and i + R/2 turn together."""

    def __init__(
        self, num_dims: int, theta: float, *, divisors: tuple[float, ...] | None = None, device: torch.device
    ) -> None:
        """Over `num_dims` R; `divisors` (R/2,) are what the frequencies are divided by."""
        frequencies = 1 / theta ** (torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims)  # (R/2,)
        if divisors is not None:
            frequencies = frequencies / torch.tensor(divisors)
        self._frequencies = frequencies.to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` (T,), (T, R/2) float32 each; once per step for all layers."""
        angles = positions.unsqueeze(1) * self._frequencies  # (T, R/2)
        return angles.cos(), angles.sin()
