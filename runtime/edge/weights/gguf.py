"""Reads the header of a GGUF file: metadata and the table of tensors, checked before anything is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every count
and length is compared with the bytes that are left in the file before anything of that size is built, so that
a corrupt or hostile file costs no more than its own size.

This module knows nothing about torch, architectures or tokenizers.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from edge.errors import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 17
"""Metadata entries or tensors; the largest public models have a few thousand."""
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


class GgmlType(IntEnum):
    """Storage types of tensors, with ggml's numbers. `weights.dequantize` lists those that can be run."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


BLOCKS: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.BF16: (1, 2),
    GgmlType.F64: (1, 8),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 40),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.MXFP4: (32, 17),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
}
"""Values per block, and bytes per block."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. `shape` is in torch's order, rows first; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself. Arrays in `metadata` are lists."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """`general.architecture`, for example `llama`; empty if the file does not say."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def num_parameters(self) -> int:
        """Values in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises:
        WeightsError: the file cannot be read, is no GGUF file, or is corrupt; the message names the file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise WeightsError(f"{path}: no GGUF file: only {size} bytes long")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error


# Numbers of the value types, as struct formats; 7 is bool, 8 string, 9 array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise self._corrupt("no GGUF file: it does not start with the letters GGUF")
        version = self._scalar("I")
        if version in (v << 24 for v in VERSIONS):
            raise self._corrupt("big-endian GGUF files are not supported; convert it to little-endian")
        if version not in VERSIONS:
            raise self._corrupt(f"GGUF version {version} is not supported (supported: 2, 3)")
        num_tensors = self._count("tensors", self._scalar("Q"), min_bytes=24)
        num_entries = self._count("metadata entries", self._scalar("Q"), min_bytes=13)
        metadata = self._metadata(num_entries)
        if metadata.get("split.count", 0) not in (0, 1):
            raise self._corrupt("is one part of a split model; join the parts with `llama-gguf-split --merge`")
        tensors = self._tensors(num_tensors, self._alignment(metadata))
        return GgufHeader(self._path, version, metadata, tensors)

    def _metadata(self, num_entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._name("metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(key, self._scalar("I"))
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._strings(1)[0]
        if kind not in _SCALARS:
            raise self._corrupt(f"metadata key {key!r} has the unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, key: str) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._require(length * 8, f"array {key!r} of {length} strings")
            return self._strings(length)
        if kind not in _SCALARS:
            raise self._corrupt(f"array {key!r} has elements of the unsupported value type {kind}")
        num_bytes = length * struct.calcsize("<" + _SCALARS[kind])
        self._require(num_bytes, f"array {key!r} of {length} values")
        values = list(struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self._at))
        self._at += num_bytes
        return values

    def _strings(self, count: int) -> list[str]:
        # One flat loop over local names: vocabularies have up to a few 100,000 entries.
        data, at, size, unpack = self._data, self._at, self._size, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > size:
                    raise self._corrupt(f"truncated: a string at byte {start} ends beyond the file")
                # Lone surrogates or half characters must not reach JSON and frames, which refuse them.
                strings.append(data[start:at].decode("utf-8", "replace"))
        except struct.error:
            raise self._corrupt("truncated: the file ends inside a string") from None
        self._at = at
        return strings

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two from 8 to 65536")
        return alignment

    def _tensors(self, num_tensors: int, alignment: int) -> tuple[GgufTensor, ...]:
        rows = [self._tensor_row() for _ in range(num_tensors)]
        data_start = -(-self._at // alignment) * alignment
        tensors = []
        for name, shape, kind, relative in rows:
            if relative % alignment:
                raise self._corrupt(f"tensor {name!r} starts at {relative}, not a multiple of {alignment}")
            values_per_block, bytes_per_block = BLOCKS[kind]
            if shape[-1] % values_per_block:
                raise self._corrupt(f"tensor {name!r}: rows of {shape[-1]} values cannot be stored as {kind.name}")
            size_bytes = math.prod(shape) // values_per_block * bytes_per_block
            tensors.append(GgufTensor(name, shape, kind, data_start + relative, size_bytes))
        self._check_layout(tensors)
        return tuple(tensors)

    def _tensor_row(self) -> tuple[str, tuple[int, ...], GgmlType, int]:
        name = self._name("tensor name")
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {num_dimensions} dimensions (allowed: 1 to {MAX_DIMENSIONS})")
        dimensions = [self._scalar("Q") for _ in range(num_dimensions)]
        if not all(0 < dimension < 1 << 40 for dimension in dimensions):
            raise self._corrupt(f"tensor {name!r} has the impossible shape {dimensions[::-1]}")
        number = self._scalar("I")
        try:
            kind = GgmlType(number)
        except ValueError:
            raise self._corrupt(f"tensor {name!r} has the unknown storage type {number}") from None
        return name, tuple(reversed(dimensions)), kind, self._scalar("Q")

    def _check_layout(self, tensors: list[GgufTensor]) -> None:
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names:
                raise self._corrupt(f"tensor {tensor.name!r} occurs twice")
            names.add(tensor.name)
        end, last = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._corrupt(f"tensors {last!r} and {tensor.name!r} overlap")
            end, last = tensor.offset + tensor.size_bytes, tensor.name
        if end > self._size:
            raise self._corrupt(f"truncated: tensor {last!r} ends at byte {end} of a file of {self._size} bytes")

    def _name(self, what: str) -> str:
        length = self._scalar("Q")
        if length > MAX_NAME_BYTES:
            raise self._corrupt(f"a {what} of {length} bytes is over the limit of {MAX_NAME_BYTES}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"a {what} is not UTF-8") from None

    def _count(self, what: str, count: int, min_bytes: int) -> int:
        if count > MAX_ENTRIES:
            raise self._corrupt(f"{count} {what} is over the limit of {MAX_ENTRIES}")
        self._require(count * min_bytes, f"{count} {what}")
        return count

    def _scalar(self, letter: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + letter, self._data, self._at)
        except struct.error:
            raise self._corrupt(f"truncated: the file ends inside its header, at byte {self._at}") from None
        self._at += struct.calcsize("<" + letter)
        return value

    def _take(self, num_bytes: int) -> bytes:
        self._require(num_bytes, f"{num_bytes} bytes")
        taken = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return taken

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._at:
            raise self._corrupt(f"truncated: no room for {what} at byte {self._at} of {self._size}")

    def _corrupt(self, reason: str) -> WeightsError:
        return WeightsError(f"{self._path}: {reason}")
