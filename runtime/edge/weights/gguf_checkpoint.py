"""A GGUF file as a checkpoint: metadata to config and tokenizer, stored names and row orders to ours.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py. Everything that the file
says is checked for its type here, because a header can be well-formed and still lie.
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
from edge.weights.checkpoint import MAX_HEAD_DIM, MAX_LAYERS, ModelConfig, TokenizerFiles, Vocabulary, check_config
from edge.weights.dequantize import DECODERS, SUPPORTED, dequantize, unpack
from edge.weights.gguf import GgmlType, GgufTensor, read_header
from edge.weights.quantized import Quantized

T = TypeVar("T")

_NAMES = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "post_attention_norm": "attention_post_norm",
    "post_ffw_norm": "mlp_post_norm",
}
_GEMMA = ("gemma2", "gemma3")
_ROPE_DIVISORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CONTROL = 3
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Control tokens that end a text in the families that have them: GGUF names one EOS, chat models use several."""


def _starts_with_bos(vocabulary: Vocabulary) -> bool:
    """What holds for files that do not say so."""
    return vocabulary.model == "llama" or vocabulary.pre in ("llama-bpe", "llama-v3", "llama3")


class GgufCheckpoint:
    """`edge.weights.checkpoint.Checkpoint` over one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._header = read_header(path)
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        self.architecture = self._header.architecture
        self.size_bytes = sum(tensor.size_bytes for tensor in self._header.tensors)

    def config(self) -> ModelConfig:
        """The config, from the metadata keys of the architecture."""
        num_heads = self._int("attention.head_count")
        hidden_size = self._int("embedding_length")
        head_dim = self._int("attention.key_length", hidden_size // num_heads if num_heads > 0 else 0)
        if self._int("attention.value_length", head_dim) != head_dim:
            raise WeightsError(f"{self._path}: keys and values of different widths are not supported")
        if self._int("rope.dimension_count", head_dim) != head_dim:
            raise WeightsError(f"{self._path}: rotary embeddings over a part of a head are not supported")
        config = ModelConfig(
            vocab_size=self._tensor("token_embd.weight").shape[0],
            hidden_size=hidden_size,
            intermediate_size=self._int("feed_forward_length"),
            num_layers=self._int("block_count"),
            num_heads=num_heads,
            num_kv_heads=self._int("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            context_length=self._int("context_length"),
            norm_eps=self._float("attention.layer_norm_rms_epsilon"),
            rope_theta=self._float("rope.freq_base", 10000.0),
            rope_divisors=self._rope_divisors(min(head_dim, MAX_HEAD_DIM)),
            tied_head="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_up.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            **(self._gemma_features(head_dim) if self.architecture in _GEMMA else {}),
        )
        return check_config(config, self._path)

    def tokenizer_files(self) -> TokenizerFiles:
        """The vocabulary of the metadata keys `tokenizer.*`."""
        tokens = self._list("tokenizer.ggml.tokens", str)
        types = self._list("tokenizer.ggml.token_type", int, [1] * len(tokens))
        if len(types) != len(tokens):
            raise WeightsError(f"{self._path}: {len(tokens)} tokens but {len(types)} token types")
        vocabulary = Vocabulary(
            model=self._get("tokenizer.ggml.model", str),
            pre=self._get("tokenizer.ggml.pre", str, "default"),
            tokens=tokens,
            types=types,
            merges=self._list("tokenizer.ggml.merges", str, []),
            scores=self._list("tokenizer.ggml.scores", float, []),
            add_space_prefix=self._get("tokenizer.ggml.add_space_prefix", bool, True),
        )
        ids = {name: self._token_id(name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
        ends = {ids[name] for name in ("eos", "eot", "eom")}
        ends |= {i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_TOKENS}
        return TokenizerFiles(
            vocabulary=vocabulary,
            chat_template=self._get("tokenizer.chat_template", str, "") or None,
            bos_token="" if ids["bos"] is None else tokens[ids["bos"]],
            eos_token="" if ids["eos"] is None else tokens[ids["eos"]],
            add_bos=self._get("tokenizer.ggml.add_bos_token", bool, _starts_with_bos(vocabulary)),
            eos_ids=frozenset(i for i in ends if i is not None),
        )

    def names(self) -> list[str]:
        """Our names of all tensors, in file order."""
        return list(self._stored)

    def tensor(self, name: str) -> Tensor:
        """The values of `name`, float32."""
        tensor = self._find(name)
        values = dequantize(self._raw(tensor), tensor.type, tensor.shape)
        order = self._row_order(name, tensor)
        return values if order is None else values[order]

    def quantized(self, name: str) -> Quantized | None:
        """The matrix `name` as codes and scales, if it is stored in blocks of those."""
        tensor = self._find(name)
        matrix = unpack(self._raw(tensor), tensor.type, tensor.shape)
        if matrix is None:
            return None
        if not (matrix.scales.isfinite().all() and matrix.minimums.isfinite().all()):
            raise WeightsError(f"{self._path}: tensor {tensor.name!r} has scales that are no finite numbers")
        order = self._row_order(name, tensor)
        return matrix if order is None else matrix.rows(order)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in file order, as float32."""
        for name in self._stored:
            yield name, self.tensor(name)

    @cached_property
    def _stored(self) -> dict[str, GgufTensor]:
        """The tensors by our names."""
        stored: dict[str, GgufTensor] = {}
        for tensor in self._header.tensors:
            name = self._our_name(tensor)
            if name in stored:
                raise WeightsError(f"{self._path}: tensors {stored[name].name!r} and {tensor.name!r} are the same one")
            if name is not None:
                stored[name] = tensor
        return stored

    @cached_property
    def _data(self) -> Tensor:
        """The file's bytes, mapped copy-on-write: they are not held in memory beside the values."""
        return torch.from_file(str(self._path), shared=False, size=self._path.stat().st_size, dtype=torch.uint8)

    def _find(self, name: str) -> GgufTensor:
        tensor = self._stored.get(name)
        if tensor is None:
            raise WeightsError(f"{self._path}: tensor {name!r} is missing")
        if tensor.type not in DECODERS:
            raise WeightsError(
                f"{self._path}: tensor {tensor.name!r} is stored as {tensor.type.name}, which is not supported "
                f"(supported: {', '.join(SUPPORTED)})"
            )
        return tensor

    def _raw(self, tensor: GgufTensor) -> Tensor:
        return self._data[tensor.offset : tensor.offset + tensor.size_bytes]

    def _our_name(self, tensor: GgufTensor) -> str | None:
        if tensor.name == _ROPE_DIVISORS:
            return None
        if layer := _LAYER.fullmatch(tensor.name):
            number, stem, leaf = layer.groups()
            if stem in _LAYER_NAMES:
                return f"layers.{int(number)}.{_LAYER_NAMES[stem]}.{leaf}"
        else:
            stem, _, leaf = tensor.name.rpartition(".")
            if stem in _NAMES:
                return f"{_NAMES[stem]}.{leaf}"
        raise WeightsError(f"{self._path}: tensor {tensor.name!r} has no place in a {self.architecture} model")

    def _row_order(self, name: str, tensor: GgufTensor) -> Tensor | None:
        """Which stored rows the rows of q and k in half-split order are; None: they are in our order.

        Files of architecture `llama` have them interleaved in pairs; those of other architectures do not.
        """
        if self.architecture != "llama" or not name.endswith((".q.weight", ".k.weight", ".q.bias", ".k.bias")):
            return None
        config = self.config()
        num_heads = config.num_heads if ".q." in name else config.num_kv_heads
        if tensor.shape[0] != num_heads * config.head_dim:
            raise WeightsError(f"{self._path}: {name} has {tensor.shape[0]} rows, not {num_heads * config.head_dim}")
        pairs = torch.arange(tensor.shape[0]).view(num_heads, config.head_dim // 2, 2)  # (H, D/2, 2)
        return pairs.transpose(1, 2).flatten()

    def _gemma_features(self, head_dim: int) -> dict[str, Any]:
        """What files leave out that is the same for all models of a kind."""
        gemma2, num_layers = self.architecture == "gemma2", self._int("block_count")
        hidden_size, num_heads = max(0, self._int("embedding_length")), max(1, self._int("attention.head_count"))
        window = self._int("attention.sliding_window", 4096)
        period = 2 if gemma2 else 6  # every second or sixth layer sees everything
        is_27b = num_layers == (46 if gemma2 else 62)
        return {
            "post_norms": True,
            "activation": "gelu_tanh",
            "embedding_scale": hidden_size**0.5,
            "attention_scale": max(1, hidden_size // num_heads if is_27b else head_dim) ** -0.5,
            "attention_softcap": self._float("attn_logit_softcapping", 50.0) if gemma2 else None,
            "logit_softcap": self._float("final_logit_softcapping", 30.0) if gemma2 else None,
            "windows": tuple(window if (i + 1) % period else None for i in range(min(num_layers, MAX_LAYERS))),
            "local_rope_theta": None if gemma2 else self._float("rope.freq_base_swa", 10_000.0),
        }

    def _rope_divisors(self, head_dim: int) -> tuple[float, ...] | None:
        if tensor := self._tensors.get(_ROPE_DIVISORS):
            if tensor.type is not GgmlType.F32:
                raise WeightsError(f"{self._path}: {_ROPE_DIVISORS} is stored as {tensor.type.name}, not as F32")
            with self._path.open("rb") as file:
                file.seek(tensor.offset)
                raw = torch.frombuffer(bytearray(file.read(tensor.size_bytes)), dtype=torch.float32)
            return tuple(raw.tolist())
        kind = self._get(f"{self.architecture}.rope.scaling.type", str, "none")
        if kind == "none":
            return None
        if kind == "linear":
            return (self._float("rope.scaling.factor"),) * (head_dim // 2)
        raise WeightsError(f"{self._path}: rope scaling {kind!r} is not supported (supported: linear, rope_freqs)")

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise WeightsError(f"{self._path}: tensor {name!r} is missing")
        return self._tensors[name]

    def _token_id(self, name: str, num_tokens: int) -> int | None:
        token = self._get(f"tokenizer.ggml.{name}_token_id", int, -1)
        if token >= num_tokens:
            raise WeightsError(f"{self._path}: the {name} token {token} is beyond the {num_tokens} tokens")
        return None if token < 0 else token

    def _int(self, key: str, default: int | None = None) -> int:
        return self._get(f"{self.architecture}.{key}", int, default)

    def _float(self, key: str, default: float | None = None) -> float:
        return self._get(f"{self.architecture}.{key}", float, default)

    def _list(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        values = self._get(key, list, default)
        if values and type(values[0]) is not kind:  # all elements of a GGUF array have one type
            raise WeightsError(f"{self._path}: metadata {key!r} does not hold {kind.__name__} values")
        return values

    def _get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value: Any = self._header.metadata.get(key, default)
        if value is None:
            raise WeightsError(f"{self._path}: metadata key {key!r} is missing")
        if type(value) is not kind:
            raise WeightsError(f"{self._path}: metadata {key!r} is a {type(value).__name__}, not a {kind.__name__}")
        return value
