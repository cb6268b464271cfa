"""A folder in the layout of Hugging Face as a checkpoint: `config.json`, safetensors (one file, or shards with an
index), `tokenizer.json`, and the chat template where the folder has one.

Files are parsed with size limits and checked value by value; pickled weights are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.checkpoint import MAX_HEAD_DIM, MAX_LAYERS, ModelConfig, TokenizerFiles, check_config, llama3_divisors
from edge.weights.folder import MAX_JSON_BYTES, find_shards, read_json, read_text
from edge.weights.quantized import Quantized
from edge.weights.shards import Shards

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
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
_GEMMA = ("gemma2", "gemma3_text")
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsCheckpoint:
    """`edge.weights.checkpoint.Checkpoint` over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_json(folder / "config.json", dict[str, Any])
        self._shards = Shards(find_shards(folder))
        self.architecture = self._text("model_type")
        self.size_bytes = self._shards.size_bytes

    def config(self) -> ModelConfig:
        """The config, from `config.json`."""
        if self.architecture == "gemma3":
            raise self._wrong("Gemma 3 models with images are not supported; use one of model_type gemma3_text")
        if self._config.get("use_bidirectional_attention"):
            raise self._wrong("models with bidirectional attention are not supported: they do not generate text")
        num_layers, head_dim = self._int("num_hidden_layers"), self._head_dim()
        attention_bias = self._bool("attention_bias", False)
        theta, divisors, local_theta = self._ropes(min(head_dim, MAX_HEAD_DIM))
        gemma = self._gemma_features() if self.architecture in _GEMMA else {}
        config = ModelConfig(
            vocab_size=self._int("vocab_size"),
            hidden_size=self._int("hidden_size"),
            intermediate_size=self._int("intermediate_size"),
            num_layers=num_layers,
            num_heads=self._int("num_attention_heads"),
            num_kv_heads=self._int("num_key_value_heads", self._int("num_attention_heads")),
            head_dim=head_dim,
            context_length=self._int("max_position_embeddings"),
            norm_eps=self._float("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_divisors=divisors,
            local_rope_theta=local_theta,
            tied_head=self._tied,
            qkv_bias=attention_bias or self.architecture == "qwen2",
            output_bias=attention_bias,
            mlp_bias=self._bool("mlp_bias", False),
            qk_norm=self.architecture in ("qwen3", "gemma3_text"),
            activation=self._activation(),
            windows=self._windows(num_layers),
            **gemma,
        )
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

    def names(self) -> list[str]:
        """Our names of all tensors, shard by shard."""
        return list(self._stored)

    def tensor(self, name: str) -> Tensor:
        """The values of `name`, in their stored type."""
        if name not in self._stored:
            raise WeightsError(f"{self._folder}: tensor {name!r} is missing")
        stored = self._stored[name]
        values = self._shards.read(stored)
        if values.dtype not in _DTYPES:
            raise WeightsError(
                f"{self._shards.places[stored]}: tensor {stored!r} is stored as {values.dtype}, which is not supported "
                "(supported: float32, float16, bfloat16)"
            )
        if self.architecture in _GEMMA and name.endswith("norm.weight"):
            return values.float() + 1
        return values

    def quantized(self, name: str) -> Quantized | None:
        """None: the folder holds floats."""
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, shard by shard, in their stored type."""
        for name in self._stored:
            yield name, self.tensor(name)

    @cached_property
    def _stored(self) -> dict[str, str]:
        """The stored names by ours."""
        names = [name for name in self._shards.places if not name.endswith("rotary_emb.inv_freq")]
        if self._tied:
            names = [name for name in names if name != _HEAD]
        stored = {self._our_name(name): name for name in names}
        if len(stored) < len(names):
            raise WeightsError(f"{self._folder}: several tensors have the same place in the model")
        return stored

    def _our_name(self, stored: str) -> str:
        if stored == _HEAD:
            return "head.weight"
        if stored in _NAMES:
            return _NAMES[stored]
        layer = _LAYER.fullmatch(stored)
        layer_names = _GEMMA_LAYER_NAMES if self.architecture in _GEMMA else _LAYER_NAMES
        if layer and layer[2] in layer_names:
            return f"layers.{int(layer[1])}.{layer_names[layer[2]]}.{layer[3]}"
        raise WeightsError(
            f"{self._shards.places[stored]}: tensor {stored!r} has no place in a {self.architecture} model"
        )

    @property
    def _tied(self) -> bool:
        return self._bool("tie_word_embeddings", self.architecture in _GEMMA)

    def _head_dim(self) -> int:
        num_heads = self._int("num_attention_heads")
        default = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(self.architecture)
        return self._int("head_dim", default or (self._int("hidden_size") // num_heads if num_heads > 0 else 0))

    def _activation(self) -> str:
        key = "hidden_activation" if self.architecture in _GEMMA else "hidden_act"
        name = self._get(key, str, "gelu_pytorch_tanh" if self.architecture in _GEMMA else "silu")
        if name not in _ACTIVATIONS:
            raise self._wrong(f"{key} {name!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
        return _ACTIVATIONS[name]

    def _gemma_features(self) -> dict[str, Any]:
        gemma2, query_scalar = self.architecture == "gemma2", self._float("query_pre_attn_scalar", 256.0)
        if query_scalar <= 0:
            raise self._wrong(f"query_pre_attn_scalar is {query_scalar:g}, not a positive number")
        return {
            "post_norms": True,
            "embedding_scale": max(0, self._int("hidden_size")) ** 0.5,
            "attention_scale": query_scalar**-0.5,
            "attention_softcap": self._nullable("attn_logit_softcapping", 50.0) if gemma2 else None,
            "logit_softcap": self._nullable("final_logit_softcapping", 30.0 if gemma2 else None),
        }

    def _windows(self, num_layers: int) -> tuple[int | None, ...]:
        """The window of each layer; empty if no layer has one."""
        window = self._window()
        if window is None:
            return ()
        kinds = None if self.architecture == "mistral" else self._get("layer_types", list, [])
        if not kinds:
            return tuple(window if self._is_local(i) else None for i in range(min(num_layers, MAX_LAYERS)))
        if unknown := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
            raise self._wrong(f"layer type {unknown[0]!r} is not supported (sliding_attention and full_attention are)")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _window(self) -> int | None:
        match self.architecture:
            case "qwen2" | "qwen3":
                used = self._bool("use_sliding_window", False)
            case architecture:
                used = architecture in ("mistral", *_GEMMA)
        if not used or self._config.get("sliding_window", 0) is None:
            return None
        return self._int("sliding_window", 4096)

    def _is_local(self, layer: int) -> bool:
        """Whether `layer` has a window, where the config does not list the kinds of the layers."""
        match self.architecture:
            case "qwen2" | "qwen3":
                return layer >= self._int("max_window_layers", 28)
            case "gemma2":
                return layer % 2 == 0
            case "gemma3_text":
                return (layer + 1) % max(1, self._int("sliding_window_pattern", 6)) != 0
        return True

    def _ropes(self, head_dim: int) -> tuple[float, tuple[float, ...] | None, float | None]:
        """Theta and divisors, and the theta of layers with a window, where they have one of their own.

        transformers 5 writes `rope_parameters`, older ones `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
        """
        rope = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self._wrong("the rope parameters are not an object")
        if self.architecture != "gemma3_text":
            return *self._rope(rope, self._float("rope_theta", 10_000.0), head_dim), None
        local, whole = rope.get("sliding_attention") or {}, rope.get("full_attention", rope) or {}
        if not (isinstance(local, dict) and isinstance(whole, dict)):
            raise self._wrong("the rope parameters of a kind of layers are not an object")
        local_theta, local_divisors = self._rope(local, self._float("rope_local_base_freq", 10_000.0), head_dim)
        if local_divisors is not None:
            raise self._wrong("rope scaling of the layers with a window is not supported")
        return *self._rope(whole, self._float("rope_theta", 1_000_000.0), head_dim), local_theta

    def _rope(self, rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, tuple[float, ...] | None]:
        """Theta, `theta` unless `rope` says otherwise, and divisors."""
        numbers = {k: float(v) for k, v in rope.items() if isinstance(v, int | float)}
        theta = numbers.get("rope_theta") or theta
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

    def _nullable(self, key: str, default: float | None) -> float | None:
        """The number `key`; `default` if it is missing, but None if it is null."""
        return None if self._config.get(key, default) is None else self._float(key, default or 0.0)

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


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if type(v) is int and v >= 0)


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
