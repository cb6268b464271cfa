"""What the engine needs of a model's files, whatever their format: one Protocol and the plain data it hands out.

Tensor names are ours, the same for all formats: `embed.weight`, `norm.weight`, `head.weight` and, for layer i,
`layers.i.attention_norm.weight`, `layers.i.attention.{q,k,v,o}.{weight,bias}`, `layers.i.mlp_norm.weight`,
`layers.i.mlp.{gate,up,down}.{weight,bias}`; some architectures also have `layers.i.attention.{q,k}_norm.weight`,
`layers.i.attention_post_norm.weight` and `layers.i.mlp_post_norm.weight`. Rotary embeddings are in the half-split
order, and norms are what is multiplied by (Gemma's files may hold one less).

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
from edge.weights.folder import read_quantization
from edge.weights.quantized import Quantized

MAX_LAYERS = 1 << 10
MAX_HEAD_DIM = 1 << 12


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
    qk_norm: bool = False
    """Queries and keys are normed head by head, before they are rotated."""
    post_norms: bool = False
    """What attention and MLP give is normed, before it is added."""
    activation: str = "silu"
    """Of the MLP's gate: `silu` or `gelu_tanh`."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """What a query times a key is multiplied by; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Attention scores s become cap * tanh(s / cap)."""
    logit_softcap: float | None = None
    """So do logits."""
    windows: tuple[int | None, ...] = ()
    """How many tokens a query of each layer sees, the last one its own; None: all. Empty: all, in every layer."""
    local_rope_theta: float | None = None
    """Theta, unscaled, of the layers with a window; None: they are rotated as all others."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer as a GGUF file stores it. `types` are ggml's: 1 normal, 2 unknown, 3 control, 4 user defined, 6 byte.

    `merges` are of byte-level tokenizers (`gpt2`), `scores` of those from SentencePiece (`llama`).
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float] = []
    add_space_prefix: bool = True
    """Whether a text, and what follows a special token, is read as if it started with a space; SentencePiece only."""


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
    """A model's files, opened. Nothing of size is read before `tensor` and `quantized`."""

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

    def names(self) -> list[str]:
        """Our names of all tensors, in the order in which they are stored.

        Raises:
            WeightsError: a tensor has no place in a model of this architecture, or two have the same one.
        """
        ...

    def tensor(self, name: str) -> Tensor:
        """The values of one of `names()`, in the stored or in a wider float type.

        Raises:
            WeightsError: it is missing, unreadable, or of an unsupported type.
        """
        ...

    def quantized(self, name: str) -> Quantized | None:
        """The matrix `name` as codes and scales, if the file has it in such a form; its values are `tensor(name)`.

        They are equal, but for K types of GGUF, whose scales and minimums are rounded to float16 here.

        Raises:
            WeightsError: as `tensor`; or its scales are no numbers that float16 holds.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model once: our name, and its values.

        Raises:
            WeightsError: as `names` and `tensor`.
        """
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model in `path`: a GGUF file, or a folder with `config.json` and safetensors.

    Raises:
        WeightsError: it is missing, corrupt or neither of the two.
    """
    # The formats import this module for its structs.
    from edge.weights.gguf_checkpoint import GgufCheckpoint
    from edge.weights.quantized_checkpoint import QuantizedCheckpoint
    from edge.weights.safetensors_checkpoint import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path) if read_quantization(path) is None else QuantizedCheckpoint(path)
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
    limits = {"num_layers": MAX_LAYERS, "context_length": 1 << 27, "head_dim": MAX_HEAD_DIM}
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
    for key in ("embedding_scale", "attention_scale", "attention_softcap", "logit_softcap", "local_rope_theta"):
        number = getattr(config, key)
        if number is not None and not (math.isfinite(number) and number > 0):
            raise WeightsError(f"{source}: {key} is {number}, not a positive number")
    if len(config.windows) not in (0, config.num_layers):
        raise WeightsError(f"{source}: the kinds of {len(config.windows)} layers are given, not of {config.num_layers}")
    if any(window is not None and not 0 < window <= 1 << 27 for window in config.windows):
        raise WeightsError(f"{source}: the sliding window is not a positive number of tokens")
    divisors = config.rope_divisors
    if divisors is not None and not (
        len(divisors) == config.head_dim // 2 and all(math.isfinite(d) and d > 0 for d in divisors)
    ):
        raise WeightsError(f"{source}: the rope scaling is not {config.head_dim // 2} positive numbers")
    return config
