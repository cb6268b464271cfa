"""What the engine needs of a model's files, whatever their format: one Protocol and the plain data it hands out.

Tensor names are ours, the same for all formats: `embed.weight`, `norm.weight`, `head.weight` and, for layer i,
`layers.i.attention_norm.weight`, `layers.i.attention.{q,k,v,o}.{weight,bias}`, `layers.i.mlp_norm.weight`,
`layers.i.mlp.{gate,up,down}.{weight,bias}`. Rotary embeddings are in the half-split order.

This module knows nothing about how an architecture computes; `open_checkpoint` is the only door to the formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from edge.errors import WeightsError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that shape a decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    """Positions that the model was trained for."""
    norm_eps: float
    rope_theta: float
    rope_divisors: tuple[float, ...] | None = None
    """What the rotary frequencies are divided by, (head_dim / 2,); None: unscaled."""
    tied_head: bool = False
    """The output projection is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer as a GGUF file stores it. `types` are ggml's: 1 normal, 3 control, 4 user defined, 6 byte."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Raw material of a tokenizer: `tokenizer_json` or `vocabulary`, and what surrounds it."""

    tokenizer_json: str | None = None
    vocabulary: Vocabulary | None = None
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool | None = None
    """Whether raw text starts with the BOS token; None: as `tokenizer_json` says."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end the text."""


class Checkpoint(Protocol):
    """A model's files, opened. Nothing of size is read before `tensors`."""

    architecture: str
    """The architecture's short name, for example `llama`."""
    size_bytes: int
    """Bytes of all tensors as stored."""

    def config(self) -> ModelConfig:
        """The model's shape.

        Raises:
            WeightsError: a value is missing, impossible, or asks for a feature that is not supported.
        """
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer's raw material.

        Raises:
            WeightsError: it is missing or unreadable.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model once: our name, and its values in the stored or in a wider float type.

        Raises:
            WeightsError: a tensor is unknown or of an unsupported type.
        """
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model in `path`: a GGUF file, or a folder with `config.json` and safetensors.

    Raises:
        WeightsError: it is missing, corrupt or neither of the two.
    """
    # The formats import this module for its structs.
    from edge.weights.gguf_checkpoint import GgufCheckpoint
    from edge.weights.safetensors_checkpoint import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise WeightsError(f"{path}: there is no such file or folder")


def llama3_divisors(
    *, head_dim: int, theta: float, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of the rotary frequencies under Llama 3's scaling (`rope_type: llama3` of config.json).

    Wavelengths under `original_context / high` stay, those over `original_context / low` are divided by
    `factor`, and those between are interpolated.
    """
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original_context / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(divisors)


def check_config(config: ModelConfig, source: Path) -> ModelConfig:
    """`config` itself, if its numbers fit each other.

    Raises:
        WeightsError: they do not; the message names `source`.
    """
    limits = {"num_layers": 1 << 10, "context_length": 1 << 27, "head_dim": 1 << 12}
    for name in msgspec.structs.fields(ModelConfig):
        value = getattr(config, name.name)
        limit = limits.get(name.name, 1 << 24)
        if name.type is int and not 0 < value <= limit:
            raise WeightsError(f"{source}: {name.name} is {value}, not from 1 to {limit}")
    if config.num_heads % config.num_kv_heads:
        raise WeightsError(f"{source}: {config.num_heads} heads cannot share {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise WeightsError(f"{source}: head_dim {config.head_dim} is odd, so that it cannot be rotated")
    if not (math.isfinite(config.norm_eps) and 0 < config.norm_eps < 1):
        raise WeightsError(f"{source}: norm_eps is {config.norm_eps}, not between 0 and 1")
    if not (math.isfinite(config.rope_theta) and config.rope_theta > 0):
        raise WeightsError(f"{source}: rope_theta is {config.rope_theta}, not a positive number")
    divisors = config.rope_divisors
    if divisors is not None and not (
        len(divisors) == config.head_dim // 2 and all(math.isfinite(d) and d > 0 for d in divisors)
    ):
        raise WeightsError(f"{source}: the rope scaling is not {config.head_dim // 2} positive numbers")
    return config
