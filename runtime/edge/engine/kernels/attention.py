"""Attention over the paged KV cache by the native kernel: one call per layer and step.

It does what `edge.engine.attention.paged_attention` does, on float32 activations on the CPU, with pages turned into
floats in the processor's caches. A row's result is the same bits whatever other sequences are in the step, however its
prompt was cut into steps and however many threads there are.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from edge.engine.attention import Attention, AttentionShape, paged_attention
from edge.engine.kernels import Kernels
from edge.engine.kv_cache import FORMATS, KvCache
from edge.engine.layers import RmsNorm
from edge.engine.step import Step

PAGE_SIZE = 16
MAX_HEAD_DIM = 256
_SHORT_KEYS = 2000
"""Steps that read fewer keys keep Python's lock: they are over before another thread would have run."""


def make_attention(num_heads: int, num_kv_heads: int, head_dim: int, kv: str, kernels: Kernels | None) -> Attention:
    """The fastest attention there is for a model of these heads over a cache in the format `kv`."""
    if kernels is None:
        return paged_attention
    if reason := why_not_native(num_heads, num_kv_heads, head_dim, kv):
        print(f"engine: attention runs on torch's operators: {reason}", file=sys.stderr, flush=True)
        return paged_attention
    return NativeAttention(kernels)


def why_not_native(num_heads: int, num_kv_heads: int, head_dim: int, kv: str) -> str | None:
    """Why the native kernel cannot be used; None if it can."""
    step = 32 if kv == "int4" else 16
    if head_dim % step or head_dim > MAX_HEAD_DIM:
        sizes = f"{step} to {MAX_HEAD_DIM} in steps of {step}"
        return f"the native attention needs a head dimension of {sizes}, not {head_dim}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly"
    return None


class NativeAttention:
    """An `edge.engine.attention.Attention` for float32 activations on the CPU; one per model and cache."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._short, self._long = (_declared(library) for library in (kernels.short, kernels.long))
        self._cache: KvCache | None = None
        self._layers: dict[int, tuple[AttentionShape, _Layer]] = {}
        self._step: Step | None = None
        self._described: _Step | None = None

    def __call__(
        self, qkv: Tensor, shape: AttentionShape, cos: Tensor, sin: Tensor, cache: KvCache, layer: int, step: Step
    ) -> Tensor:
        """As `paged_attention`.

        Raises:
            ValueError: a tensor, the shape or the cache is not what the kernel reads.
        """
        if self._step is not step:
            self._begin(step, cache)
        known = self._layers.get(layer)
        if known is None or known[0] is not shape:
            known = self._layers[layer] = (shape, _layer(shape, cache, layer))
        T, width = qkv.shape[0], (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        half = cos.shape[1]
        _check("qkv", qkv, (T, width))
        _check("cos", cos, (T, half))
        _check("sin", sin, (T, half))
        if step.num_tokens != T or 2 * half > shape.head_dim:
            raise ValueError(f"{T} rows and {2 * half} rotated dimensions do not fit the step and head dimension")
        out = torch.empty(T, shape.num_heads * shape.head_dim)
        self._attend(
            ctypes.addressof(known[1]),
            ctypes.addressof(self._described),  # type: ignore[arg-type]
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            half,
            out.data_ptr(),
            self._kernels.num_threads,
        )
        return out

    def _begin(self, step: Step, cache: KvCache) -> None:
        if cache is not self._cache:
            self._cache, self._layers = cache, {}
        cache.begin(step)
        self._step = step
        num_keys = int(step.host_lengths.sum())
        self._attend = self._short if num_keys < _SHORT_KEYS else self._long
        self._described = _Step(
            starts=step.starts.data_ptr(),
            lengths=step.lengths.data_ptr(),
            page_table=step.page_table.data_ptr(),
            side_of_page=cache.side.side_of_page.ctypes.data if cache.side is not None else None,
            num_sequences=step.num_sequences,
            max_pages=step.page_table.shape[1],
        )


class _Layer(ctypes.Structure):
    """`EdgeAttentionLayer` in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "value_minimums")),
        *((name, ctypes.c_void_p) for name in ("side_keys", "side_values", "q_norm", "k_norm")),
        *((name, ctypes.c_float) for name in ("q_eps", "k_eps", "scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("format", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("num_pages", "num_side_pages", "window")),
        *((name, ctypes.c_int32) for name in ("rotate_keys", "rotate_values", "sink_pages", "window_pages")),
    )


class _Step(ctypes.Structure):
    """`EdgeAttentionStep` in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "page_table", "side_of_page")),
        *((name, ctypes.c_int32) for name in ("num_sequences", "max_pages")),
    )


def _declared(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library["edge_attention"]  # by index: a function object of our own, not one that others declare too
    function.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
    function.restype = None
    return function


def _layer(shape: AttentionShape, cache: KvCache, layer: int) -> _Layer:
    reason = why_not_native(shape.num_heads, shape.num_kv_heads, shape.head_dim, cache.format)
    if reason is not None:
        raise ValueError(reason)
    if cache.page_size != PAGE_SIZE or cache.device.type != "cpu":
        raise ValueError(f"the native attention needs pages of {PAGE_SIZE} tokens on the CPU")
    if (cache.num_kv_heads, cache.head_dim) != (shape.num_kv_heads, shape.head_dim):
        raise ValueError("the cache was made for other heads than the attention has")
    planes = ("keys", "values", "key_scales", "value_scales", "value_minimums", "side_keys", "side_values")
    return _Layer(
        **{name: plane[layer].data_ptr() for name in planes if (plane := getattr(cache, name))},
        q_norm=_norm("q_norm", shape.q_norm, shape.head_dim),
        k_norm=_norm("k_norm", shape.k_norm, shape.head_dim),
        q_eps=shape.q_norm.eps if shape.q_norm else 0,
        k_eps=shape.k_norm.eps if shape.k_norm else 0,
        scale=shape.scale,
        softcap=shape.softcap or 0,
        format=FORMATS.index(cache.format),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_pages=cache.num_pages,
        num_side_pages=cache.side.num_side_pages if cache.side else 0,
        window=shape.window or 0,
        rotate_keys=cache.rotates_keys,
        rotate_values=cache.rotates_values,
        sink_pages=cache.options.sink_pages,
        window_pages=cache.options.window_pages,
    )


def _norm(name: str, norm: RmsNorm | None, head_dim: int) -> int | None:
    if norm is None:
        return None
    _check(name, norm.weight, (head_dim,))
    return norm.weight.data_ptr()


def _check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype is not torch.float32 or x.shape != shape or not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(
            f"{name} must be contiguous float32 {shape} on the CPU, not {x.dtype} {tuple(x.shape)} on {x.device}"
        )
