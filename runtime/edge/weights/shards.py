"""The tensors of several safetensors files as one mapping: opened on first use, read one by one.

This module knows nothing about what the names mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from edge.errors import WeightsError


class Shards:
    """Tensors by their stored names; `paths` are the files."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths)

    @cached_property
    def places(self) -> dict[str, Path]:
        """Every name, and the file that it is in.

        Raises:
            WeightsError: a file cannot be read as safetensors, or two have the same name.
        """
        places: dict[str, Path] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118 - safe_open cannot be iterated
                if name in places:
                    raise WeightsError(f"{path}: tensor {name!r} is in {places[name].name} too")
                places[name] = path
        return places

    def read(self, name: str) -> Tensor:
        """The tensor `name`, in its stored type.

        Raises:
            WeightsError: there is none, or it cannot be read.
        """
        path = self.places.get(name)
        if path is None:
            raise WeightsError(f"{self.paths[0].parent}: tensor {name!r} is missing")
        with _readable(path):
            tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    @cached_property
    def _files(self) -> dict[Path, Any]:
        files = {}
        for path in self.paths:
            with _readable(path):
                files[path] = safe_open(path, framework="pt")
        return files


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from error
