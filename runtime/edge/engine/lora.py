"""LoRA adapters at run time: loaded on demand, and many of them mixed in one batch.

The model computes a step for all rows; after each linear, the rows that have an adapter get its update added. On the
CPU one native call does that for all of them; elsewhere, and as its oracle, there is one pair of products for each.

Letters: T rows of the step, R rank.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from edge.engine.kernels import Kernels
from edge.errors import InvalidInput, WeightsError
from edge.weights.adapter import WEIGHTS_NAME, LowRank, adaptable, read_adapter
from edge.weights.checkpoint import ModelConfig

MAX_LOADED = 64
"""Adapters of a model that are kept in memory; the one not used for the longest time goes first."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LINEARS = {
    "qkv": ("attention.q", "attention.k", "attention.v"),
    "o": ("attention.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""The model's linears, and what checkpoints call the parts of their outputs, in order."""


@dataclass(frozen=True)
class _Part:
    """An adapter's update of the outputs `column` to `column + num_out` of a linear."""

    down: Tensor
    """(R, in)."""
    up: Tensor
    """(R, out)."""


class Adapter:
    """An adapter that fits a model."""

    def __init__(self, name: str, matrices: dict[str, LowRank], device: torch.device, version: int = 0) -> None:
        """Hold `matrices`, as `read_adapter` found them for the model; adapters of one name differ in `version`."""
        self.name = name
        self.key = f"{name}\n{version}"
        """Stands for the adapter's values: what was computed with one of another key was computed with another."""
        self._parts = {
            key: _Part(pair.down.to(device).contiguous(), pair.up.t().to(device).contiguous())
            for key, pair in matrices.items()
        }

    def part(self, layer: int, part: str) -> _Part | None:
        """What is added to `part`, such as `attention.q`, of `layer`; None: nothing."""
        return self._parts.get(f"layers.{layer}.{part}")


class AdapterStore:
    """The adapters of one model: a folder each, read when first asked for. For several threads."""

    def __init__(self, folder: Path, config: ModelConfig, device: torch.device) -> None:
        self._folder = folder
        self._config = config
        self._device = device
        self._loaded: OrderedDict[str, tuple[int, Adapter]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, folder: Path | None = None) -> Adapter:
        """The adapter `name` as it is in its folder now; that is `folder`, or of the model's own adapters.

        Raises:
            InvalidInput: there is none, or it cannot be used; the message says why.
        """
        if folder is None:
            version, folder, key = self._version(name), self._folder / name, name
        else:
            version, key = _version_in(folder), str(folder)
        with self._lock:
            loaded = self._loaded.get(key)
            if loaded is not None and loaded[0] == version:
                self._loaded.move_to_end(key)
                return loaded[1]
        adapter = self._load(folder.name, folder, version)
        with self._lock:
            self._loaded[key] = (version, adapter)
            self._loaded.move_to_end(key)
            if len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)  # calls that use it still hold it
        return adapter

    def _version(self, name: str) -> int:
        """A number that is another one once another adapter has that name."""
        try:
            if _NAME.fullmatch(name):
                return _version_in(self._folder / name)
        except InvalidInput:
            pass
        known = sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []
        raise InvalidInput(
            f"this model has no adapter {name[:80]!r}, and the account no finetune of that name or id"
            + (
                f"; the model's adapters: {', '.join(known[:20])}"
                if known
                else "; `edge models adapt MODEL FOLDER` adds one"
            ),
            param="lora",
        )

    def _load(self, name: str, folder: Path, version: int) -> Adapter:
        try:
            return Adapter(name, read_adapter(folder, self._config), self._device, version)
        except WeightsError as error:
            message = error.message.replace(f"{folder.parent}{os.sep}", "")  # the caller need not know where it lies
            raise InvalidInput(message, param="lora") from error


def _version_in(folder: Path) -> int:
    try:
        return (folder / WEIGHTS_NAME).stat().st_ctime_ns
    except OSError as error:
        raise InvalidInput("the adapter was removed", param="lora") from error


class StepAdapters:
    """Which rows of a step use which adapter."""

    def __init__(self, table: AdapterTable, rows: Tensor, which: Tensor) -> None:
        """Rows `rows` (n,) int32 of the step use the adapters with the numbers `which` (n,) int32 in `table`."""
        self._table = table
        self._rows = rows
        self._which = which

    def add(self, linear: str, layer: int, x: Tensor, out: Tensor, prepare: Callable[[Tensor], Tensor]) -> None:
        """Add to `out` (T, outputs) of `linear`, whose input was `prepare(x)`."""
        if self._table.touches(layer, linear):
            inputs = prepare(x[self._rows]).float().contiguous()
            self._table.apply(linear, layer, inputs, out, self._rows, self._which)


class AdapterTable:
    """The adapters of a step by number; the same object serves all steps with the same ones."""

    def __init__(self, adapters: tuple[Adapter, ...], config: ModelConfig, kernels: Kernels | None) -> None:
        self.adapters = adapters
        self._widths = {part: shape[1] for part, shape in adaptable(config).items()}
        self._kernels = kernels
        self._pointers: dict[tuple[int, str], _Pointers] = {}
        self._touched: dict[tuple[int, str], bool] = {}

    def touches(self, layer: int, linear: str) -> bool:
        """Whether any of the adapters changes `linear` of `layer`."""
        key = (layer, linear)
        if key not in self._touched:
            self._touched[key] = any(a.part(layer, part) for a in self.adapters for part in _LINEARS[linear])
        return self._touched[key]

    def apply(self, linear: str, layer: int, x: Tensor, out: Tensor, rows: Tensor, which: Tensor) -> None:
        """Add the updates of x (n, inputs) float32 to the rows `rows` of `out`."""
        column = 0
        for part in _LINEARS[linear]:
            if self._kernels is not None and out.dtype == torch.float32 and out.device.type == "cpu":
                self._apply_native(self._kernels, layer, part, x, out, rows, which, column)
            else:
                self._apply_torch(layer, part, x, out, rows, which, column)
            column += self._widths[part]

    def _apply_torch(
        self, layer: int, part: str, x: Tensor, out: Tensor, rows: Tensor, which: Tensor, column: int
    ) -> None:
        for number, adapter in enumerate(self.adapters):
            if matrices := adapter.part(layer, part):
                mine = (which == number).nonzero().squeeze(1)
                update = x[mine] @ matrices.down.t() @ matrices.up  # (n, out)
                out[rows[mine].long(), column : column + self._widths[part]] += update.to(out.dtype)

    def _apply_native(
        self,
        kernels: Kernels,
        layer: int,
        part: str,
        x: Tensor,
        out: Tensor,
        rows: Tensor,
        which: Tensor,
        column: int,
    ) -> None:
        pointers = self._pointers.get((layer, part))
        if pointers is None:
            pointers = self._pointers[layer, part] = _Pointers([a.part(layer, part) for a in self.adapters])
        kernels.long.edge_lora(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(which.data_ptr()),
            x.shape[0],
            x.shape[1],
            pointers.down,
            pointers.up,
            pointers.ranks,
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
            column,
            self._widths[part],
            kernels.num_threads,
        )


class _Pointers:
    """The adapters' matrices for one part as the kernel takes them."""

    def __init__(self, parts: list[_Part | None]) -> None:
        count = len(parts)
        self.down = (ctypes.c_void_p * count)(*(part.down.data_ptr() if part else None for part in parts))
        self.up = (ctypes.c_void_p * count)(*(part.up.data_ptr() if part else None for part in parts))
        self.ranks = (ctypes.c_int32 * count)(*(part.down.shape[0] if part else 0 for part in parts))
