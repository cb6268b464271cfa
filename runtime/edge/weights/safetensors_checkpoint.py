"""A folder in the layout of Hugging Face as a checkpoint: `config.json`, safetensors (one file, or shards with an
index), `tokenizer.json`, and the chat template where the folder has one.

Files are parsed with size limits and checked value by value; pickled weights are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.checkpoint import ModelConfig, TokenizerFiles, check_config, llama3_divisors
from edge.weights.folder import MAX_JSON_BYTES, find_shards, read_json, read_text

MAX_TEMPLATE_BYTES = 1 << 20

T = TypeVar("T")

_NAMES = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"}
_HEAD = "lm_head.weight"
_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsCheckpoint:
    """`edge.weights.checkpoint.Checkpoint` over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_json(folder / "config.json", dict[str, Any])
        self._shards = find_shards(folder)
        self.architecture = self._text("model_type")
        self.size_bytes = sum(shard.stat().st_size for shard in self._shards)

    def config(self) -> ModelConfig:
        """The config, from `config.json`."""
        if self._config.get("quantization_config") is not None:
            raise self._wrong("quantized safetensors are not supported; use the unquantized model or a GGUF file")
        hidden_size, num_heads = self._int("hidden_size"), self._int("num_attention_heads")
        head_dim = self._int("head_dim", hidden_size // num_heads if num_heads > 0 else 0)
        attention_bias = self._bool("attention_bias", False)
        theta, divisors = self._rope(head_dim)
        config = ModelConfig(
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._int("intermediate_size"),
            num_layers=self._int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=self._int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            context_length=self._context_length(),
            norm_eps=self._float("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_divisors=divisors,
            tied_head=self._bool("tie_word_embeddings", False),
            qkv_bias=attention_bias or self.architecture == "qwen2",
            output_bias=attention_bias,
            mlp_bias=self._bool("mlp_bias", False),
        )
        if (act := self._config.get("hidden_act", "silu")) != "silu":
            raise self._wrong(f"hidden_act {act!r} is not supported (supported: silu)")
        return check_config(config, self._folder / "config.json")

    def tokenizer_files(self) -> TokenizerFiles:
        """`tokenizer.json` and what surrounds it."""
        settings = self._optional_json("tokenizer_config.json")
        generation = self._optional_json("generation_config.json")
        eos_ids = _ids(self._config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
        add_bos = settings.get("add_bos_token")
        return TokenizerFiles(
            tokenizer_json=read_text(self._folder / "tokenizer.json", MAX_JSON_BYTES),
            chat_template=self._chat_template(settings),
            bos_token=_token_text(settings.get("bos_token")),
            eos_token=_token_text(settings.get("eos_token")),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            eos_ids=eos_ids,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, shard by shard, in their stored type."""
        tied = self._bool("tie_word_embeddings", False)
        for shard in self._shards:
            try:
                with safe_open(shard, framework="pt") as file:
                    for stored in file.keys():  # noqa: SIM118 - safe_open cannot be iterated
                        if stored.endswith("rotary_emb.inv_freq") or (tied and stored == _HEAD):
                            continue
                        yield self._our_name(stored, shard), _checked(stored, shard, file.get_tensor(stored))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{shard}: cannot be read as safetensors: {error}") from error

    def _our_name(self, stored: str, shard: Path) -> str:
        if stored == _HEAD:
            return "head.weight"
        if stored in _NAMES:
            return _NAMES[stored]
        layer = _LAYER.fullmatch(stored)
        if layer and layer[2] in _LAYER_NAMES:
            return f"layers.{int(layer[1])}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
        raise WeightsError(f"{shard}: tensor {stored!r} has no place in a {self.architecture} model")

    def _rope(self, head_dim: int) -> tuple[float, tuple[float, ...] | None]:
        """Theta and divisors; transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self._wrong("the rope parameters are not an object")
        numbers = {k: float(v) for k, v in rope.items() if isinstance(v, int | float)}
        theta = numbers.get("rope_theta") or self._float("rope_theta", 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if numbers.get("partial_rotary_factor", 1.0) != 1 or self._float("partial_rotary_factor", 1.0) != 1:
            raise self._wrong("rotary embeddings over a part of a head are not supported")
        try:
            if kind == "default":
                return theta, None
            if kind == "linear":
                return theta, (numbers["factor"],) * (head_dim // 2)
            if kind == "llama3":
                return theta, llama3_divisors(
                    head_dim=head_dim,
                    theta=theta,
                    factor=numbers["factor"],
                    low=numbers["low_freq_factor"],
                    high=numbers["high_freq_factor"],
                    original_context=int(numbers["original_max_position_embeddings"]),
                )
        except (KeyError, ArithmeticError, ValueError) as error:
            raise self._wrong(f"rope scaling {kind!r} has missing or impossible values: {error}") from error
        raise self._wrong(f"rope scaling {kind!r} is not supported (supported: default, linear, llama3)")

    def _context_length(self) -> int:
        """The context, cut to the sliding window where there is one: within it, plain attention is the same."""
        context = self._int("max_position_embeddings")
        window = self._config.get("sliding_window")
        if isinstance(window, int) and self._bool("use_sliding_window", self.architecture == "mistral"):
            return min(context, window)
        return context

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return read_text(path, MAX_TEMPLATE_BYTES)
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _optional_json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return read_json(path, dict[str, Any]) if path.is_file() else {}

    def _text(self, key: str) -> str:
        return self._get(key, str)

    def _int(self, key: str, default: int | None = None) -> int:
        return self._get(key, int, default)

    def _bool(self, key: str, default: bool) -> bool:
        return self._get(key, bool, default)

    def _float(self, key: str, default: float) -> float:
        value = self._config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(f"{key} is {value!r}, not a number")
        return float(value)

    def _get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value: Any = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self._wrong(f"{key} is missing")
        if type(value) is not kind:
            raise self._wrong(f"{key} is {value!r}, not of type {kind.__name__}")
        return value

    def _wrong(self, reason: str) -> WeightsError:
        return WeightsError(f"{self._folder / 'config.json'}: {reason}")


def _checked(stored: str, shard: Path, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES:
        raise WeightsError(
            f"{shard}: tensor {stored!r} is stored as {tensor.dtype}, which is not supported "
            "(supported: float32, float16, bfloat16)"
        )
    return tensor


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if type(v) is int and v >= 0)


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
