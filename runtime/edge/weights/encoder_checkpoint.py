"""A folder with a text encoder as the engine needs it: BERT, RoBERTa, XLM-RoBERTa or DistilBERT, in safetensors.

Beside `config.json`, weights and `tokenizer.json` it may have what sentence-transformers writes (`modules.json`,
`1_Pooling/config.json`, `sentence_bert_config.json`), which say how vectors are made, and a classifier: that of a
`...ForSequenceClassification` checkpoint, or `classification_head.safetensors` (`weight` (L, C), `bias` (L,)) over the
vector. Tensor names are ours: `tokens`, `positions`, `types`, `norm` and, for layer i, `layers.i.{q,k,v,o,up,down}` and
`layers.i.{attention_norm,mlp_norm}`; `head.dense` and `head.out` of a classifier; each with `.weight` and `.bias`.

Files are parsed with size limits and checked value by value; pickled weights are never opened.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.encoder_facts import ENCODERS, is_classifier, max_text_tokens
from edge.weights.folder import HEAD_FILE, MAX_JSON_BYTES, find_shards, read_json, read_text
from edge.weights.shards import Shards

MAX_LABELS = 10_000
MAX_LAYERS = 1 << 10
_MAX_SIZE = 1 << 24

Activation = Literal["gelu", "gelu_tanh", "relu", "tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_BERT_LAYER = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "attention.output.dense": "o",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "mlp_norm",
}
_DISTILBERT_LAYER = {
    "attention.q_lin": "q",
    "attention.k_lin": "k",
    "attention.v_lin": "v",
    "attention.out_lin": "o",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "up",
    "ffn.lin2": "down",
    "output_layer_norm": "mlp_norm",
}
_TABLES = {
    "embeddings.word_embeddings": "tokens",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
}
_HEADS = {
    "bert": {"pooler.dense": "head.dense", "classifier": "head.out"},
    "roberta": {"classifier.dense": "head.dense", "classifier.out_proj": "head.out"},
    "distilbert": {"pre_classifier": "head.dense", "classifier": "head.out"},
}
_LAYER = re.compile(r"(?:encoder|transformer)\.layer\.(\d+)\.([\w.]+)\.(weight|bias)")
# Of the task that a model was trained on before, and numbers that follow from the shape.
_UNUSED = re.compile(r"(cls|lm_head|vocab_\w+|pooler)\..*|embeddings\.position_ids")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that shape an encoder, and what is made of its last layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    first_position: int
    """Of the first token of a text."""
    max_tokens: int
    """Of one text, special tokens included; longer ones are cut."""
    num_types: int
    """Kinds of tokens that have a vector of their own; 0: there are none."""
    norm_eps: float
    activation: Activation
    pooling: Literal["mean", "cls"]
    normalize: bool
    """Whether a vector is divided by its length."""
    labels: tuple[str, ...] = ()
    """Of a classifier; else empty."""
    head: Literal["none", "tanh", "relu", "linear"] = "none"
    """A classifier's: a dense layer over the first token with that activation and then a linear one, or only a linear
    one, over the vector."""
    multi_label: bool = False
    """Whether a text can have several labels: each score is a sigmoid then; else all of them are a softmax."""


class EncoderCheckpoint:
    """The encoder in `folder`, opened. Nothing of size is read before `tensor`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_json(folder / "config.json", dict[str, Any])
        self.architecture = str(self._config.get("model_type"))
        if self.architecture not in ENCODERS:
            raise self._wrong(f"model_type {self.architecture!r} is no encoder (supported: {', '.join(ENCODERS)})")
        self._shards = Shards(find_shards(folder))
        head = folder / HEAD_FILE
        self._head = Shards([head]) if head.is_file() else None
        self.size_bytes = self._shards.size_bytes + (self._head.size_bytes if self._head is not None else 0)

    def config(self) -> EncoderConfig:
        """The shape, from `config.json` and the files of sentence-transformers.

        Raises:
            WeightsError: a value is missing, impossible, or asks for a feature that is not supported.
        """
        is_distilbert = self.architecture == "distilbert"
        if self._config.get("position_embedding_type", "absolute") != "absolute":
            raise self._wrong("relative position embeddings are not supported")
        if self._config.get("is_decoder") or self._config.get("add_cross_attention"):
            raise self._wrong("decoders with this model_type are not supported")
        pooling, normalize = self._pooling()
        config = EncoderConfig(
            vocab_size=self._int("vocab_size"),
            hidden_size=self._int("dim" if is_distilbert else "hidden_size"),
            intermediate_size=self._int("hidden_dim" if is_distilbert else "intermediate_size"),
            num_layers=self._int("n_layers" if is_distilbert else "num_hidden_layers", MAX_LAYERS),
            num_heads=self._int("n_heads" if is_distilbert else "num_attention_heads"),
            num_positions=self._int("max_position_embeddings"),
            first_position=ENCODERS[self.architecture].first_position(self._config),
            max_tokens=max_text_tokens(self._folder, self._config),
            num_types=0 if is_distilbert else self._int("type_vocab_size"),
            norm_eps=self._eps(),
            activation=self._activation("activation" if is_distilbert else "hidden_act"),
            pooling=pooling,
            normalize=normalize,
            **self._classifier(),
        )
        if config.hidden_size % config.num_heads:
            raise self._wrong(f"{config.num_heads} heads cannot share a width of {config.hidden_size}")
        return config

    def tokenizer_json(self) -> str:
        """The tokenizer's file.

        Raises:
            WeightsError: it is missing or unreadable.
        """
        return read_text(self._folder / "tokenizer.json", MAX_JSON_BYTES)

    def names(self) -> set[str]:
        """Our names of all tensors.

        Raises:
            WeightsError: a tensor has no place in a model of this architecture.
        """
        return set(self._stored)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The values of `name`, float32, which must be of that `shape`.

        Raises:
            WeightsError: it is missing, unreadable, of another shape or an unsupported type, or not finite.
        """
        place = self._stored.get(name)
        if place is None:
            raise WeightsError(f"{self._folder}: tensor {name!r} is missing")
        shards, stored = place
        values = shards.read(stored)
        if values.dtype not in _DTYPES:
            raise WeightsError(
                f"{self._folder}: tensor {stored!r} is stored as {values.dtype}, which is not supported "
                "(supported: float32, float16, bfloat16)"
            )
        if tuple(values.shape) != shape:
            raise WeightsError(f"{self._folder}: tensor {stored!r} is of shape {tuple(values.shape)}, not {shape}")
        if not values.isfinite().all():
            raise WeightsError(f"{self._folder}: tensor {stored!r} has values that are no finite numbers")
        return values.float()

    @cached_property
    def _stored(self) -> dict[str, tuple[Shards, str]]:
        """Where each tensor is, by our name."""
        stored: dict[str, tuple[Shards, str]] = {}
        for name in self._shards.places:
            if (ours := self._our_name(name)) is not None:
                stored[ours] = (self._shards, name)
        if self._head is not None:
            stored |= {f"head.out.{leaf}": (self._head, leaf) for leaf in ("weight", "bias")}
        return stored

    def _our_name(self, stored: str) -> str | None:
        base = ENCODERS[self.architecture].prefix
        name = stored.removeprefix(f"{base}.")
        if layer := _LAYER.fullmatch(name):
            number, stem, leaf = layer.groups()
            parts = _DISTILBERT_LAYER if self.architecture == "distilbert" else _BERT_LAYER
            if stem in parts:
                return f"layers.{int(number)}.{parts[stem]}.{leaf}"
        stem, _, leaf = name.rpartition(".")
        if stem in _TABLES:
            return f"{_TABLES[stem]}.{leaf}"
        if is_classifier(self._config) and self._head is None and stem in _HEADS[base]:
            return f"{_HEADS[base][stem]}.{leaf}"
        if _UNUSED.fullmatch(name):
            return None
        raise WeightsError(f"{self._folder}: tensor {stored!r} has no place in a {self.architecture} encoder")

    def _pooling(self) -> tuple[Literal["mean", "cls"], bool]:
        """How a vector is made, and whether it is normalised. What says nothing of either: mean, and yes."""
        modules = self._optional_json("modules.json", list)
        kinds = [str(module.get("type")) for module in modules or [] if isinstance(module, dict)]
        kinds = [kind.rpartition(".")[2] for kind in kinds]
        if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
            raise self._wrong(f"modules.json: modules of type {', '.join(sorted(unknown))} are not supported")
        pooling = self._optional_json("1_Pooling/config.json", dict) or {}
        modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
        if modes not in ([], ["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
            raise self._wrong(f"1_Pooling/config.json: {' with '.join(modes)} is not supported (supported: mean, cls)")
        return "cls" if modes == ["pooling_mode_cls_token"] else "mean", modules is None or "Normalize" in kinds

    def _classifier(self) -> dict[str, Any]:
        if self._head is not None:
            return {"labels": self._labels(), "head": "linear"}
        if not is_classifier(self._config):
            return {}
        labels = self._labels()
        kind = self._config.get("problem_type")
        if kind == "regression":
            raise self._wrong("models that give a number and no label (problem_type regression) are not supported")
        return {
            "labels": labels,
            "head": "relu" if self.architecture == "distilbert" else "tanh",
            "multi_label": kind == "multi_label_classification" or len(labels) == 1,
        }

    def _labels(self) -> tuple[str, ...]:
        names = self._config.get("id2label")
        if not isinstance(names, dict):
            names = {"0": "LABEL_0", "1": "LABEL_1"}  # what transformers does without
        labels = [names.get(str(i)) for i in range(len(names))]
        if not 0 < len(labels) <= MAX_LABELS or not all(isinstance(label, str) for label in labels):
            raise self._wrong(f"id2label must name 1 to {MAX_LABELS} labels by their numbers from 0 on")
        return tuple(map(str, labels))

    def _eps(self) -> float:
        value = self._config.get("layer_norm_eps", 1e-12)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise self._wrong(f"layer_norm_eps is {value!r}, not a number between 0 and 1")
        return float(value)

    def _activation(self, key: str) -> Activation:
        name = self._config.get(key, "gelu")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self._wrong(f"{key} {name!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
        return _ACTIVATIONS[name]

    def _int(self, key: str, limit: int = _MAX_SIZE) -> int:
        value = self._config.get(key)
        if type(value) is not int or not 0 < value <= limit:
            raise self._wrong(f"{key} is {value!r}, not an integer from 1 to {limit}")
        return value

    def _optional_json(self, name: str, kind: type) -> Any:
        path = self._folder / name
        return read_json(path, kind) if path.is_file() else None

    def _wrong(self, reason: str) -> WeightsError:
        return WeightsError(f"{self._folder / 'config.json'}: {reason}")
