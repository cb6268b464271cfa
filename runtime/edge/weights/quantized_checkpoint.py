"""Our own format of quantized models: a folder that `edge models quantize` writes and `open_checkpoint` opens.

`config.json` holds the model's shape and how its matrices are quantized, `tokenizer_files.json` the tokenizer's raw
material, and the safetensors every tensor by our name, a quantized matrix as `NAME.codes`, `NAME.scales` and
`NAME.minimums`. What depends on where the model came from (names, orders of rows, offsets of norms) was settled when
it was written, so that reading is the same for all architectures.

This module knows nothing about how the codes are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint, ModelConfig, TokenizerFiles, check_config
from edge.weights.folder import CODES, MINIMUMS, SCALES, Quantization, find_shards, read_json
from edge.weights.quantized import Quantized
from edge.weights.shards import Shards

TOKENIZER_FILE = "tokenizer_files.json"
MAX_SHARD_BYTES = 512 << 20


class _Config(msgspec.Struct, kw_only=True):
    """`config.json`, with what programs look for that know nothing about us."""

    architectures: tuple[str] = ("EdgeForCausalLM",)
    model_type: str
    max_position_embeddings: int
    quantization_config: Quantization
    edge_model: ModelConfig


class QuantizedCheckpoint:
    """`edge.weights.checkpoint.Checkpoint` over such a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._about = read_json(folder / "config.json", _Config)
        self._shards = Shards(find_shards(folder))
        self.architecture = self._about.model_type
        self.size_bytes = self._shards.size_bytes

    def config(self) -> ModelConfig:
        """The config, as it was where the model came from."""
        return check_config(self._about.edge_model, self._folder / "config.json")

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer's raw material, as it was where the model came from."""
        return read_json(self._folder / TOKENIZER_FILE, TokenizerFiles)

    def names(self) -> list[str]:
        """Our names of all tensors, shard by shard."""
        return list(self._names)

    def tensor(self, name: str) -> Tensor:
        """The values of `name`: float32 of a quantized matrix, else in their stored type."""
        matrix = self.quantized(name)
        values = self._shards.read(name) if matrix is None else matrix.dequantize()
        if not values.dtype.is_floating_point:
            raise WeightsError(f"{self._folder}: tensor {name!r} is stored as {values.dtype}, not as floats")
        return values

    def quantized(self, name: str) -> Quantized | None:
        """The matrix `name` as codes and scales, if it is stored so."""
        if name + CODES not in self._shards.places:
            return None
        codes, scales, minimums = (self._shards.read(name + suffix) for suffix in (CODES, SCALES, MINIMUMS))
        bits = self._about.quantization_config.bits_of(name)
        if not _fit(codes, scales, minimums, bits):
            raise WeightsError(
                f"{self._folder}: codes, scales and minimums of {name!r} do not fit each other, or are no finite "
                "numbers; quantize the model again (edge models quantize)"
            )
        return Quantized(codes, scales, minimums, bits)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors."""
        for name in self._names:
            yield name, self.tensor(name)

    @cached_property
    def _names(self) -> list[str]:
        stored = self._shards.places
        names = [name.removesuffix(CODES) for name in stored if not name.endswith((SCALES, MINIMUMS))]
        if len(set(names)) < len(names):
            raise WeightsError(f"{self._folder}: a matrix is stored both as floats and as codes")
        return names


def _fit(codes: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> bool:
    if not (codes.dim() == scales.dim() == 2 and codes.dtype == torch.uint8):
        return False
    if not (scales.dtype == minimums.dtype == torch.float16 and scales.shape == minimums.shape):
        return False
    if codes.numel() == 0 or scales.numel() == 0 or len(codes) != len(scales):
        return False
    num_columns = codes.shape[1] * 8 // bits
    return num_columns % scales.shape[1] == 0 and bool(scales.isfinite().all() and minimums.isfinite().all())


def save_quantized(
    folder: Path, source: Checkpoint, quantization: Quantization, tensors: Iterable[tuple[str, Tensor | Quantized]]
) -> None:
    """Write `tensors`, by our names, and what `source` says of its model and tokenizer into the empty `folder`.

    Args:
        folder: exists.
        source: the checkpoint that the tensors were made from.
        quantization: how; `bits` and `bits_by_name` have to fit the tensors.
        tensors: all tensors of the model; at most a shard of them is held in memory.
    """
    _write_shards(folder, tensors)
    config = source.config()
    about = _Config(
        model_type=source.architecture,
        max_position_embeddings=config.context_length,
        quantization_config=quantization,
        edge_model=config,
    )
    _write_json(folder / TOKENIZER_FILE, source.tokenizer_files())
    _write_json(folder / "config.json", about)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor | Quantized]]) -> None:
    number, size_bytes = 1, 0
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        for key, part in _stored(name, tensor):
            shard[key] = part.contiguous()
            size_bytes += part.numel() * part.element_size()
        if size_bytes >= MAX_SHARD_BYTES:
            _save(shard, folder / f"model-{number:05}.safetensors")
            number, size_bytes, shard = number + 1, 0, {}
    if shard:
        _save(shard, folder / f"model-{number:05}.safetensors")


def _save(shard: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(shard, path)
    except SafetensorError as error:  # the library's name for every failure, a full disk included
        raise WeightsError(f"{path.name} cannot be written: {error}; is there room on the disk?") from error


def _stored(name: str, tensor: Tensor | Quantized) -> list[tuple[str, Tensor]]:
    if isinstance(tensor, Tensor):
        return [(name, tensor)]
    return [(name + CODES, tensor.codes), (name + SCALES, tensor.scales), (name + MINIMUMS, tensor.minimums)]


def _write_json(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
