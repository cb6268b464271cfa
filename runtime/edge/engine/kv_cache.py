"""The paged KV cache in four formats behind one interface.

Letters: T tokens, L layers, P pages, K key-value heads, D head dimension, S page size, Q side pages.

A page holds the keys of its tokens transposed, (K, D, S), so that the same dimension of all its tokens is one vector
for the processor, and the values as (K, S, D).

| format   | key                                    | value                                | scales |
|----------|----------------------------------------|--------------------------------------|--------|
| float32  | as it is                               | as it is                             |        |
| bfloat16 | rounded                                | rounded                              |        |
| int8     | codes times a scale per token and head | the same                             | bfloat16 |
| int4     | (code - 7.5) times a scale             | code times a scale plus a minimum    | bfloat16 |

Codes are of keys turned by a normalised Hadamard matrix over D, which spreads the few large channels that keys have
(QuaRot, arXiv:2404.00456); products with queries turned likewise are the same. Two int4 codes share a byte: dimension d
in the low half and d + D/2 in the high half. Of the pages that matter most - the first of a sequence, the query's own
and the one before it - the int4 format holds bfloat16 copies in a small pool of side pages. A page that has lost its
copy is read as int4: less exact, never wrong.

This module knows nothing about sequences and models; who owns which page is decided in `engine.pages`.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge.engine.step import Integers, Step

FORMATS = ("float32", "bfloat16", "int8", "int4")
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MASK_OF_BFLOAT16 = -0x10000
_SMALLEST_SCALE = 1e-37
"""Numbers with a smaller scale become 0; its inverse might be infinite."""


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What the formats of codes do to stay near the truth; each can be switched off to see what it is worth.

    All but `rotate_keys` is for int4 only.
    """

    rotate_keys: bool = True
    rotate_values: bool = False
    sink_pages: int = 1
    """Pages at the start of a sequence that are read in full precision."""
    window_pages: int = 2
    """Pages up to and with the query's own that are read in full precision."""


class KvCache:
    """Keys and values of all tokens in all pages of all layers, allocated once.

    Memory that was never written is zero, not arbitrary: attention multiplies masked values by 0, and 0 times
    NaN is NaN. On the CPU, pages that were never used take no memory.
    """

    def __init__(
        self,
        format: str,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_side_pages: int = 256,
        options: KvOptions | None = None,
    ) -> None:
        """Allocate a cache in one of `FORMATS`.

        `num_side_pages` is for the format int4 only; a step can use the side pages of each of its
        sequences (`sink_pages` + `window_pages`) and one for every page that it fills.

        Raises:
            ValueError: the format is unknown, or int4 is asked for with an odd head dimension.
        """
        if format not in FORMATS:
            raise ValueError(f"the KV format {format!r} is unknown (known: {', '.join(FORMATS)})")
        if format == "int4" and head_dim % 2:
            raise ValueError(f"int4 needs an even head dimension, not {head_dim}; choose kv = int8")
        self.format = format
        self.num_pages, self.page_size = num_pages, page_size
        self.num_kv_heads, self.head_dim, self.device = num_kv_heads, head_dim, device
        self.options = options or KvOptions()
        P, K, D, S = num_pages, num_kv_heads, head_dim, page_size

        def planes(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            # By head first: neighbouring pages of one head are one stream, which the processor fetches ahead.
            P, K, *rest = shape
            return [_zeros((K, P, *rest), dtype, device).transpose(0, 1) for _ in range(num_layers)]

        width = D // 2 if format == "int4" else D
        dtype = _FLOATS.get(format) or (torch.uint8 if format == "int4" else torch.int8)
        self.keys = planes((P, K, width, S), dtype)
        self.values = planes((P, K, S, width), dtype)
        quantized = format in ("int8", "int4")
        self.key_scales = planes((P, K, S), torch.bfloat16) if quantized else []
        self.value_scales = planes((P, K, S), torch.bfloat16) if quantized else []
        self.value_minimums = planes((P, K, S), torch.bfloat16) if format == "int4" else []
        self.side = SidePages(num_pages, min(num_pages, num_side_pages), self.options) if format == "int4" else None
        Q = self.side.num_side_pages if self.side else 0
        self.side_keys = planes((Q, K, D, S), torch.bfloat16) if Q else []
        self.side_values = planes((Q, K, S, D), torch.bfloat16) if Q else []
        self._step: Step | None = None
        self._side_of_page: Tensor | None = None

    @property
    def rotates_keys(self) -> bool:
        """Whether keys are held turned, so that queries have to be turned too."""
        return self.options.rotate_keys and self.format in ("int8", "int4")

    @property
    def rotates_values(self) -> bool:
        """Whether values are held turned, so that what attention makes of them has to be turned back."""
        return self.options.rotate_values and self.format == "int4"

    def bytes_per_token(self) -> float:
        """Memory of one token in all layers, with its scales and without side pages."""
        planes = (self.keys, self.values, self.key_scales, self.value_scales, self.value_minimums)
        return sum(tensor.nbytes for plane in planes for tensor in plane) / (self.num_pages * self.page_size)

    def size_bytes(self, num_tokens: int) -> float:
        """Memory of a sequence of `num_tokens` tokens in all layers, with its side pages."""
        num_side_pages = min(self.options.sink_pages + self.options.window_pages, -(-num_tokens // self.page_size))
        side = sum(plane.nbytes for plane in (*self.side_keys, *self.side_values))
        per_side_page = side / self.side.num_side_pages if self.side_keys and self.side else 0
        return self.bytes_per_token() * num_tokens + per_side_page * num_side_pages

    def begin(self, step: Step) -> None:
        """Prepare for the writes and reads of `step`; does nothing when called again with the same one."""
        if self._step is step:
            return
        self._step = step
        if self.side is not None:
            self.side.begin(step)
            self._side_of_page = torch.from_numpy(self.side.side_of_page).to(self.device)

    def keep(self, pages: list[int], num_computed_tokens: int) -> None:
        """Count the full-precision pages of a sequence as used, though no step computes it now."""
        if self.side is not None:
            self.side.keep(pages, num_computed_tokens // self.page_size)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` (T, K, D) at `slots` (T,): page number times page size plus offset in the page."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        if self.format in _FLOATS:
            self.keys[layer][pages, :, :, offsets] = k.to(self.keys[layer].dtype)
            self.values[layer][pages, :, offsets] = v.to(self.values[layer].dtype)
            return
        k, v = k.float(), v.float()
        k = hadamard(k) if self.rotates_keys else k
        if self.format == "int8":
            key_codes, key_scales = quantize_int8(k)
            value_codes, value_scales = quantize_int8(v)
        else:
            v = hadamard(v) if self.rotates_values else v
            self._write_side(layer, pages, offsets, k, v)
            key_codes, key_scales = quantize_key_int4(k)
            value_codes, value_scales, minimums = quantize_value_int4(v)
            self.value_minimums[layer][pages, :, offsets] = minimums
        self.keys[layer][pages, :, :, offsets] = key_codes
        self.values[layer][pages, :, offsets] = value_codes
        self.key_scales[layer][pages, :, offsets] = key_scales
        self.value_scales[layer][pages, :, offsets] = value_scales

    def gather(self, layer: int, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` (B, M), in order, in `dtype`: (B, K, M * S, D) each, turned as they are held."""
        keys, values = self._dequantize(layer, pages.flatten())
        return self._sequences(keys, pages, dtype, transposed=True), self._sequences(values, pages, dtype)

    def gather_side(self, layer: int, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same in full precision, and which of the pages have that: (B, M) bool. Others are arbitrary numbers."""
        side = self.side_of(pages)
        places = side.clamp(min=0).flatten()
        keys = self._sequences(self.side_keys[layer][places], pages, dtype, transposed=True)
        return keys, self._sequences(self.side_values[layer][places], pages, dtype), side >= 0

    def side_of(self, pages: Tensor) -> Tensor:
        """The side page of each of `pages`; -1 for those that have none."""
        assert self._side_of_page is not None, "the cache has no side pages, or `begin` was not called"
        return self._side_of_page[pages]

    def read(self, layer: int, pages: Tensor, length: int, position: int | None = None) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values (length, K, D) of the sequence in `pages` (M,), float32, turned back.

        As a query at `position` sees them, by default the last one: int4 has some pages in full precision for it.
        """
        S = self.page_size
        keys, values = (x[0].transpose(0, 1)[:length] for x in self.gather(layer, pages[None], torch.float32))
        if self.side_keys:
            page = torch.arange(length, device=pages.device) // S
            query_page = (length - 1 if position is None else position) // S
            full = self.full_precision(page, query_page) & (self.side_of(pages)[page] >= 0)
            side_keys, side_values, _ = self.gather_side(layer, pages[None], torch.float32)
            keys = torch.where(full[:, None, None], side_keys[0].transpose(0, 1)[:length], keys)
            values = torch.where(full[:, None, None], side_values[0].transpose(0, 1)[:length], values)
        return hadamard(keys) if self.rotates_keys else keys, hadamard(values) if self.rotates_values else values

    def full_precision(self, page: Tensor, query_page: Tensor | int) -> Tensor:
        """Whether a query in the `query_page`th page of its sequence reads the `page`th from its side page."""
        return (page < self.options.sink_pages) | (page > query_page - self.options.window_pages)

    @torch.inference_mode()
    def clear(self, pages: list[int]) -> None:
        """Zero `pages`: what a sequence that failed has written must not reach the next one as NaN."""
        planes = (self.keys, self.values, self.key_scales, self.value_scales, self.value_minimums)
        for plane in planes:
            for tensor in plane:
                tensor[pages] = 0
        if self.side is not None:
            places = self.side.drop(pages)
            for tensor in (*self.side_keys, *self.side_values):
                tensor[places] = 0

    def _write_side(self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        if not self.side_keys:
            return
        side = self.side_of(pages)
        rows = (side >= 0).nonzero()[:, 0]
        places, offsets = side[rows], offsets[rows]
        self.side_keys[layer][places, :, :, offsets] = k[rows].bfloat16()
        self.side_values[layer][places, :, offsets] = v[rows].bfloat16()

    def _dequantize(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (N, K, D, S) and values (N, K, S, D) of `pages` (N,)."""
        keys, values = self.keys[layer][pages], self.values[layer][pages]
        if self.format in _FLOATS:
            return keys, values
        key_scales = self.key_scales[layer][pages].float()[:, :, None]  # (N, K, 1, S)
        value_scales = self.value_scales[layer][pages].float()[..., None]  # (N, K, S, 1)
        if self.format == "int8":
            return keys * key_scales, values * value_scales
        minimums = self.value_minimums[layer][pages].float()[..., None]
        return (_unpack(keys, dim=2) - 7.5) * key_scales, _unpack(values, dim=3) * value_scales + minimums

    def _sequences(self, x: Tensor, pages: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
        """Pages (B * M, K, S, D), or (B * M, K, D, S), as the sequences that they make up: (B, K, M * S, D)."""
        (B, M), K, S, D = pages.shape, self.num_kv_heads, self.page_size, self.head_dim
        x = x.to(dtype)
        x = x.view(B, M, K, D, S).permute(0, 2, 1, 4, 3) if transposed else x.view(B, M, K, S, D).transpose(1, 2)
        return x.reshape(B, K, M * S, D)


class SidePages:
    """Which page has its full-precision copy in which side page; the copy used least recently makes room.

    A copy starts when a step writes a page from its first token on, and lives until it has to make room. Sequences
    that pause would lose theirs to the pages of others that nobody reads in full any more: `keep` is for them.
    """

    def __init__(self, num_pages: int, num_side_pages: int, options: KvOptions) -> None:
        wanted = options.sink_pages + options.window_pages
        self.num_side_pages = num_side_pages if wanted else 0
        self.side_of_page: Integers = np.full(num_pages, -1, np.int32)
        """(P,): the side page of each page, or -1."""
        self._options = options
        self._page_of_side = np.full(self.num_side_pages, -1, np.int32)
        self._used = np.zeros(self.num_side_pages, np.int64)
        """The step that used each last."""
        self._num_steps = 0

    def begin(self, step: Step) -> None:
        """Note which copies `step` uses, and make room for the pages that it begins, as far as that goes."""
        if self.num_side_pages == 0:
            return
        self._num_steps += 1
        num_computed = step.host_lengths - np.diff(step.host_starts)
        page = np.arange(step.host_page_table.shape[1])
        last = (step.host_lengths - 1)[:, None] // step.page_size
        first = num_computed[:, None] // step.page_size
        used = self._reads_in_full(page, first)
        begun = page * step.page_size >= num_computed[:, None]
        self._touch(step.host_page_table[used & (page <= last)])
        self._start(step.host_page_table[begun & (page <= last)])

    def keep(self, pages: list[int], first: int) -> None:
        """Note that a sequence in `pages` goes on in the `first`th of them in some later step."""
        page = np.arange(min(len(pages), first + 1))
        self._touch(np.array(pages, np.int32)[page[self._reads_in_full(page, first)]])

    def drop(self, pages: list[int]) -> list[int]:
        """Forget the copies of `pages`; returns the side pages where they were."""
        places = self.side_of_page[pages]
        places = places[places >= 0]
        self.side_of_page[pages] = -1
        self._page_of_side[places] = -1
        self._used[places] = 0
        return places.tolist()  # type: ignore[no-any-return]

    def _reads_in_full(self, page: npt.NDArray[Any], first: npt.NDArray[Any] | int) -> npt.NDArray[np.bool_]:
        """Whether queries from the `first`th page of a sequence on read its `page`th, if it is no later one."""
        return (page < self._options.sink_pages) | (page > first - self._options.window_pages)

    def _touch(self, pages: Integers) -> None:
        places = self.side_of_page[pages]
        self._used[places[places >= 0]] = self._num_steps

    def _start(self, pages: Integers) -> None:
        pages = pages[self.side_of_page[pages] < 0]
        if len(pages) == 0:
            return
        oldest = np.argsort(self._used, kind="stable")[: len(pages)]
        oldest = oldest[self._used[oldest] < self._num_steps]  # what this step uses stays
        evicted = self._page_of_side[oldest]
        self.side_of_page[evicted[evicted >= 0]] = -1
        self._page_of_side[oldest] = pages[: len(oldest)]
        self.side_of_page[pages[: len(oldest)]] = oldest
        self._used[oldest] = self._num_steps


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) as int8 codes and a bfloat16 scale (...) each."""
    scale = _round_up(x.abs().amax(dim=-1) / 127)
    codes = (x * _inverse(scale)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scale.bfloat16()


def quantize_key_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) as packed codes (..., D/2) and a bfloat16 scale (...): x is about (code - 7.5) * scale."""
    scale = _round_up(x.abs().amax(dim=-1) / 7.5)
    codes = (x * _inverse(scale)[..., None] + 7.5).round().clamp(0, 15)
    return _pack(codes), scale.bfloat16()


def quantize_value_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., D) as packed codes (..., D/2), bfloat16 scale and minimum (...): x is about code * scale + minimum."""
    minimum = -_round_up(-x.amin(dim=-1))
    scale = _round_up((x.amax(dim=-1) - minimum) / 15)
    codes = ((x - minimum[..., None]) * _inverse(scale)[..., None]).round().clamp(0, 15)
    return _pack(codes), scale.bfloat16(), minimum.bfloat16()


def hadamard(x: Tensor) -> Tensor:
    """x (..., D) times the normalised Hadamard matrix of the largest power of two that divides D, block by block.

    It is its own inverse.
    """
    D = x.shape[-1]
    block = D & -D
    width = 1
    while width < block:
        pairs = x.reshape(*x.shape[:-1], D // (2 * width), 2, width)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(*x.shape[:-1], D)
        width *= 2
    return x / math.sqrt(block)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale < _SMALLEST_SCALE, 0, 1 / scale)


def _round_up(x: Tensor) -> Tensor:
    """float32 x at bfloat16's precision, away from 0 if it is positive and towards 0 if it is negative.

    A scale rounded to the nearest would be too small half of the time, and the largest value would be cut off.
    """
    bits = x.contiguous().view(torch.int32)
    return torch.where(x > 0, bits + 0xFFFF, bits).bitwise_and(_MASK_OF_BFLOAT16).view(torch.float32)


def _pack(codes: Tensor) -> Tensor:
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def _unpack(packed: Tensor, dim: int) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=dim).float()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # `torch.zeros` writes every byte, so that the whole cache would be resident from the start.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
