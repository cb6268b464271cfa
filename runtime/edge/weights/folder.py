"""A model folder in the layout of Hugging Face: which files hold the weights, and its texts and JSON, within limits.

Of what the files say, it knows only the `quantization_config` that `edge models quantize` writes. It knows nothing
about torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edge.errors import WeightsError

MAX_JSON_BYTES = 64 << 20

HEAD_FILE = "classification_head.safetensors"
"""A classifier over the vectors of the encoder beside it: `weight` (L, C) and `bias` (L,)."""
CODES, SCALES, MINIMUMS = ".codes", ".scales", ".minimums"
"""What follows a matrix's name in the names of the three tensors that a quantized one is stored as."""

T = TypeVar("T")


class Quantization(msgspec.Struct, frozen=True, kw_only=True, tag_field="quant_method", tag="edge"):
    """`quantization_config` of `config.json`: matrices are stored as `edge.weights.quantized.Quantized`."""

    bits: Literal[4, 8]
    group_size: int
    """Columns that share a scale, but for matrices whose width is no multiple of it; 0: a whole row."""
    symmetric: bool = False
    bits_by_name: dict[str, Literal[4, 8]] = {}
    """Bits of the matrices that differ, by their name in the file."""

    def bits_of(self, name: str) -> int:
        """Bits of a code of the matrix `name`."""
        return self.bits_by_name.get(name, self.bits)


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: tensor name to file name."""

    weight_map: dict[str, str]


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of the model: those that its index names, else `model.safetensors`, else all there are,
    but for a classifier's head.

    Raises:
        WeightsError: there are none, or the index is broken or names a file that is not in the folder.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        shards = [single] if single.is_file() else sorted(set(folder.glob("*.safetensors")) - {folder / HEAD_FILE})
        if not shards:
            raise WeightsError(f"{folder}: has no weights; a model folder needs config.json and *.safetensors")
        return shards
    names = set(read_json(index, _Index).weight_map.values())
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(f"{index}: names the file {name!r}, which is not in the folder")
    return [folder / name for name in sorted(names)]


def read_json(path: Path, kind: type[T]) -> T:
    """The JSON value in `path`, of at most `MAX_JSON_BYTES`.

    Raises:
        WeightsError: it is missing, too long, no JSON, or not of type `kind`.
    """
    return parse_json(read_text(path, MAX_JSON_BYTES), kind, path)


def read_quantization(folder: Path) -> Quantization | None:
    """How the weights in `folder` are quantized; None: they are not.

    Raises:
        WeightsError: `config.json` cannot be read, or they are quantized by another tool.
    """
    path = folder / "config.json"
    found = read_json(path, dict[str, Any]).get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method != "edge":
        raise WeightsError(
            f"{path}: quantized safetensors are not supported, but for those that `edge models quantize` makes "
            f"(quant_method is {method!r}); use the unquantized model or a GGUF file"
        )
    try:
        return msgspec.convert(found, Quantization)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{path}: quantization_config cannot be used: {error}") from error


def parse_json(text: str | bytes, kind: type[T], source: Path) -> T:
    """The JSON value in `text`, which comes from the file `source`.

    Raises:
        WeightsError: it is no JSON, or not of type `kind`.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{source}: cannot be used: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise WeightsError(f"{source}: is not valid JSON: {error}") from error


def read_text(path: Path, max_bytes: int) -> str:
    """The text in `path`.

    Raises:
        WeightsError: it is missing, longer than `max_bytes`, or not UTF-8.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: is missing; a model folder needs config.json, tokenizer.json and *.safetensors")
    size_bytes = path.stat().st_size
    if size_bytes > max_bytes:
        raise WeightsError(f"{path}: {size_bytes} bytes is over the limit of {max_bytes}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path}: is not UTF-8: {error}") from error
