"""Quantized linears by the native kernel: weights of 4 and 8 bits, inputs of float32.

The inputs are rounded to 8 bits with a scale for every 32 columns of a row, so that the products are of integers; a
row's result is the same bits whatever other rows are in the call and however many threads there are. What is fused into
a call: the norm or gate before it, bias and residual after it.

`edge.engine.layers.QuantizedLinear` is the same function in torch, without the rounding of the inputs.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from torch import Tensor

from edge.engine.kernels import Kernels
from edge.engine.layers import RmsNorm
from edge.weights.quantized import Quantized

PANEL = 16
"""Outputs whose weights lie side by side."""
BLOCK = 32
"""Inputs of a row that share a scale."""
_LINE_BYTES = 64
_SHORT_PRODUCTS = 20_000_000
"""Calls of fewer multiplications keep Python's lock: they are over before another thread would have run."""
_PROLOGUES = {None: 0, "silu": 2, "gelu_tanh": 3}
_NORM = 1


class NativeLinear:
    """`edge.engine.layers.Projection` over codes and scales, on the CPU."""

    def __init__(self, parts: list[Quantized], bias: Tensor | None, kernels: Kernels) -> None:
        """`parts` are rows of one matrix, in order, and may differ in bits and group; `bias` (out,).

        Raises:
            ValueError: the parts differ in width, a scale is not finite, `bias` has another shape, or there is no
                kernel for a group size.
        """
        widths = {part.shape[1] for part in parts}
        if len(widths) != 1:
            raise ValueError(f"the parts of a linear must have one width, not {sorted(widths)}")
        self.num_inputs = widths.pop()
        self.num_outputs = sum(part.shape[0] for part in parts)
        if bias is not None and bias.shape != (self.num_outputs,):
            raise ValueError(
                f"a linear with {self.num_outputs} outputs needs a bias of as many, not {tuple(bias.shape)}"
            )
        self._kernels = kernels
        self._short, self._long = (_declared(library) for library in (kernels.short, kernels.long))
        # What the structures point to must live as long as they do.
        self._bias = None if bias is None else bias.float().contiguous()
        self._packed = [_Packed(part, kernels) for part in parts]
        self._parts = (_Part * len(parts))(*(packed.described for packed in self._packed))
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._matrix = _Matrix(ctypes.addressof(self._parts), len(parts), self.num_inputs, bias_address)
        self._address = ctypes.addressof(self._matrix)

    @property
    def size_bytes(self) -> int:
        """Bytes that a call of few rows reads."""
        return sum(packed.panels.numel() for packed in self._packed)

    def __call__(
        self, x: Tensor, *, norm: RmsNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As `Projection`; `residual`, if given, is what is returned, with the product added.

        Raises:
            ValueError: a tensor has another type, shape or layout than the kernel reads.
        """
        T = x.shape[0]
        self._check(x, norm, gate, residual)
        out = x.new_empty(T, self.num_outputs) if residual is None else residual
        short = T * self.num_inputs * self.num_outputs < _SHORT_PRODUCTS
        (self._short if short else self._long)(
            self._address,
            x.data_ptr(),
            x.stride(0),
            T,
            _PROLOGUES[gate] if norm is None else _NORM,
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            out.data_ptr(),
            out.stride(0),
            residual is not None,
            self._kernels.num_threads,
        )
        return out

    def _check(self, x: Tensor, norm: RmsNorm | None, gate: str | None, residual: Tensor | None) -> None:
        K, out_shape = self.num_inputs, (x.shape[0], self.num_outputs)
        width = K if gate is None else 2 * K
        if x.dtype is not torch.float32 or x.shape[1] != width or x.stride(1) != 1:
            raise ValueError(f"x must be float32 rows of {width}, not {_described(x)}")
        if norm is not None and gate is not None:
            raise ValueError("a linear takes a norm or a gate, not both")
        if norm is not None and norm.weight.shape != (K,):
            raise ValueError(f"norm must have {K} weights, not {_described(norm.weight)}")
        if residual is not None and (
            residual.dtype is not torch.float32 or residual.shape != out_shape or residual.stride(1) != 1
        ):
            raise ValueError(f"residual must be float32 {out_shape}, not {_described(residual)}")


def rms_norm(x: Tensor, norm: RmsNorm, kernels: Kernels) -> Tensor:
    """`norm` of x (T, C) float32, contiguous.

    Raises:
        ValueError: x is something else.
    """
    T, C = x.shape
    if x.dtype is not torch.float32 or not x.is_contiguous() or norm.weight.shape != (C,):
        raise ValueError(f"x must be contiguous float32 {(T, *norm.weight.shape)}, not {_described(x)}")
    out = torch.empty_like(x)
    call = kernels.short.edge_rms_norm
    call.argtypes = _RMS_NORM_TYPES
    call(x.data_ptr(), T, C, norm.weight.data_ptr(), norm.eps, out.data_ptr(), kernels.num_threads)
    return out


def _described(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"


class _Part(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("panel_bytes", ctypes.c_int64),
        ("scales_at", ctypes.c_int64),
        ("minimums_at", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
    )


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )


_LINEAR_TYPES = (
    ctypes.c_void_p,  # matrix
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # x_stride
    ctypes.c_int64,  # num_rows
    ctypes.c_int32,  # prologue
    ctypes.c_void_p,  # norm
    ctypes.c_float,  # eps
    ctypes.c_void_p,  # out
    ctypes.c_int64,  # out_stride
    ctypes.c_int32,  # add
    ctypes.c_int32,  # num_threads
)
_RMS_NORM_TYPES = (
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # num_rows
    ctypes.c_int64,  # n
    ctypes.c_void_p,  # weight
    ctypes.c_float,  # eps
    ctypes.c_void_p,  # out
    ctypes.c_int32,  # num_threads
)


def _declared(library: ctypes.CDLL) -> Any:
    function = library.edge_linear
    function.argtypes, function.restype = _LINEAR_TYPES, None
    return function


class _Packed:
    """A part in the kernel's layout: panel by panel of 16 outputs, its codes, then its scales, then its minimums."""

    def __init__(self, part: Quantized, kernels: Kernels) -> None:
        N, K = part.shape
        whole_row = part.group == K
        if not whole_row and part.group != 16 and part.group % BLOCK != 0:
            raise ValueError(
                f"no kernel for groups of {part.group} columns; use 16, a multiple of {BLOCK}, or whole rows"
            )
        if not (part.scales.isfinite().all() and part.minimums.isfinite().all()):
            raise ValueError("the scales of a quantized matrix must be finite")
        num_blocks = -(-K // BLOCK)
        group = num_blocks * BLOCK if whole_row else part.group
        num_groups = num_blocks * 2 if group == 16 else num_blocks * BLOCK // group
        symmetric = bool((part.minimums.float() == part.scales.float() * -(1 << part.bits - 1)).all())
        pieces = [_code_panels(part, num_blocks), _scale_panels(part.scales, num_groups)]
        if not symmetric:
            pieces.append(_scale_panels(part.minimums, num_groups))
        *starts, panel_bytes = itertools.accumulate((piece.shape[1] for piece in pieces), initial=0)
        P, stride = pieces[0].shape[0], -(-panel_bytes // _LINE_BYTES) * _LINE_BYTES
        self.panels = torch.frombuffer(kernels.arena.take(P * stride), dtype=torch.uint8).view(P, stride)
        torch.cat(pieces, dim=1, out=self.panels[:, :panel_bytes])
        self.described = _Part(
            panels=self.panels.data_ptr(),
            num_outputs=N,
            panel_bytes=stride,
            scales_at=starts[1],
            minimums_at=starts[-1],
            bits=part.bits,
            group=group,
            symmetric=symmetric,
        )


def _code_panels(part: Quantized, num_blocks: int) -> Tensor:
    """(P, bytes): per block of 32 columns, eight vectors of 16 outputs by 4 columns; with 4 bits, of two in one byte
    the first four vectors are the low halves."""
    N, K = part.shape
    P = -(-N // PANEL)
    codes = torch.zeros(P * PANEL, num_blocks * BLOCK, dtype=torch.uint8)
    codes[:N, :K] = part.unpacked()
    codes = codes.view(P, PANEL, num_blocks, 8, 4).permute(0, 2, 3, 1, 4)  # (P, blocks, 8, 16, 4)
    if part.bits == 4:
        codes = codes[:, :, :4] | codes[:, :, 4:] << 4
    return codes.reshape(P, -1)


def _scale_panels(scales: Tensor, num_groups: int) -> Tensor:
    """(P, bytes) of (N, groups) halves, group by group."""
    N = scales.shape[0]
    P = -(-N // PANEL)
    padded = torch.zeros(P * PANEL, num_groups, dtype=torch.float16)
    padded[:N, : scales.shape[1]] = scales
    return padded.view(P, PANEL, num_groups).transpose(1, 2).contiguous().view(torch.uint8).view(P, -1)
