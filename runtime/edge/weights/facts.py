"""What weights say about themselves, for the manifest: read from headers only, checking that the files are whole.

It knows nothing about torch nor about how an architecture computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from edge.errors import WeightsError
from edge.weights.encoder_facts import ENCODERS, encoder_task, max_text_tokens
from edge.weights.folder import (
    CODES,
    MAX_JSON_BYTES,
    MINIMUMS,
    SCALES,
    Quantization,
    find_shards,
    parse_json,
    read_json,
    read_quantization,
)
from edge.weights.gguf import read_header

MAX_CONTEXT = 1 << 27

_Size = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Facts:
    """`title` and `license` are empty where the weights do not say."""

    architecture: str
    context_length: int
    num_parameters: int
    task: str
    dimensions: int | None = None
    """Numbers in a vector of a model for embeddings, if it says so."""
    title: str = ""
    license: str = ""


def read_facts(path: Path) -> Facts:
    """The facts about a GGUF file, or about a folder with `config.json` and safetensors.

    Raises:
        WeightsError: a file is missing, truncated, corrupt, or of a kind that is not supported.
    """
    return _of_folder(path) if path.is_dir() else _of_gguf(path)


def _of_gguf(path: Path) -> Facts:
    header = read_header(path)
    about = header.metadata
    return Facts(
        architecture=header.architecture,
        context_length=_context(about.get(f"{header.architecture}.context_length"), path),
        num_parameters=header.num_parameters,
        task="text-embeddings" if "bert" in header.architecture else "text-generation",
        title=_text(about.get("general.name")),
        license=_text(about.get("general.license")),
    )


def _of_folder(folder: Path) -> Facts:
    file = folder / "config.json"
    config = read_json(file, dict[str, Any])
    quantization = read_quantization(folder)
    text_config = config.get("text_config")
    classes = config.get("architectures")
    first = _text(classes[0]) if isinstance(classes, list) and classes else ""
    generates = first.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
    architecture = _text(config.get("model_type"))
    task, context = "text-generation" if generates else "text-embeddings", config.get("max_position_embeddings")
    dimensions = None
    if architecture in ENCODERS:
        task, context = encoder_task(folder, config), max_text_tokens(folder, config)
        dimensions = config.get("hidden_size", config.get("dim")) if task == "text-embeddings" else None
    elif isinstance(text_config, dict):
        context = text_config.get("max_position_embeddings")
    return Facts(
        architecture=architecture,
        context_length=_context(context, file),
        num_parameters=sum(_count_parameters(shard, quantization) for shard in find_shards(folder)),
        task=task,
        dimensions=dimensions if type(dimensions) is int and dimensions > 0 else None,
        title=_text(config.get("_name_or_path")).rpartition("/")[2],
    )


class _Tensor(msgspec.Struct):
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def _count_parameters(file: Path, quantization: Quantization | None) -> int:
    """Values in all tensors of a safetensors file: 8 bytes of length, that many of JSON, and then the data."""
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size_bytes - 8, MAX_JSON_BYTES):
            raise WeightsError(f"{file}: no safetensors file: its header would have {length} bytes")
        header = parse_json(stream.read(length), dict[str, msgspec.Raw], file)
    header.pop("__metadata__", None)
    tensors = {name: parse_json(bytes(raw), _Tensor, file) for name, raw in header.items()}
    end = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if end != size_bytes:
        raise WeightsError(f"{file}: has {size_bytes} bytes instead of the {end} that its header tells of")
    counts = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    if quantization is None:
        return sum(counts.values())
    return sum(
        count * 8 // quantization.bits_of(name.removesuffix(CODES)) if name.endswith(CODES) else count
        for name, count in counts.items()
        if not name.endswith((SCALES, MINIMUMS))
    )


def _context(value: Any, file: Path) -> int:
    if type(value) is not int or not 0 < value <= MAX_CONTEXT:
        raise WeightsError(f"{file}: does not say how many tokens the context has, but {value!r}")
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
