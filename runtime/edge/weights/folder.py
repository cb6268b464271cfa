"""A model folder in the layout of Hugging Face: which files hold the weights, and its texts and JSON, within limits.

This module knows nothing about torch, nor about what the files say.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from edge.errors import WeightsError

MAX_JSON_BYTES = 64 << 20

T = TypeVar("T")


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: tensor name to file name."""

    weight_map: dict[str, str]


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of the model: those that its index names, else `model.safetensors`, else all there are.

    Raises:
        WeightsError: there are none, or the index is broken or names a file that is not in the folder.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        shards = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
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
