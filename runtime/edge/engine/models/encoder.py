"""Text encoders: BERT and its relatives, from tokens to one vector, or the probabilities of labels, for each text.

A batch is packed: the tokens of all texts are the rows of one matrix, so that nothing is computed for padding but a
part of the attention between texts of similar length. Letters: T tokens of all texts, N texts, L tokens of the longest
of a group, C hidden size, H heads, D head dimension, I width of the MLP.

This module knows nothing about requests, tokenizers or files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.engine.layers import Projection, make_linear
from edge.weights.encoder_checkpoint import EncoderCheckpoint
from edge.weights.quantized import Quantized

MAX_PADDING = 0.2
"""Share of a group's places without a token, at most, that is worth fewer calls."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


class Encoder:
    """Embedding, layers, pooling and, of a classifier, its head."""

    def __init__(self, checkpoint: EncoderCheckpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        """Build it, with weights of `dtype` on `device`.

        Raises:
            WeightsError: a tensor is missing, of the wrong shape, or not finite.
        """
        self.config = config = checkpoint.config()
        self.device = device
        self.num_parameters = 0
        self._checkpoint = checkpoint
        self._dtype = dtype
        C, I = config.hidden_size, config.intermediate_size  # noqa: E741
        self._tokens = self._table("tokens.weight", config.vocab_size, C)
        self._positions = self._table("positions.weight", config.num_positions, C)
        if config.num_types:  # every token is of the first type
            self._positions = self._positions + self._table("types.weight", config.num_types, C)[0]
        self._norm = self._layer_norm("norm", C)
        self._layers = [self._layer(f"layers.{i}", C, I) for i in range(config.num_layers)]
        self._dense = self._out = None
        if config.head in ("tanh", "relu"):
            self._dense = self._linear(("head.dense",), C, C)
        if config.head != "none":
            self._out = self._linear(("head.out",), len(config.labels), C)

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]], poolings: Sequence[str]) -> Generator[None, None, Tensor]:
        """Rows (N, C), or (N, labels) of a classifier, float32 on the CPU, for `texts`; yields after each layer.

        Args:
            texts: tokens of each text, the longest text first.
            poolings: `mean` or `cls` for each; of no effect in a classifier.
        """
        lengths = [len(text) for text in texts]
        first = self.config.first_position
        tokens = torch.tensor(list(itertools.chain.from_iterable(texts)), device=self.device)
        positions = torch.cat([torch.arange(first, first + length) for length in lengths]).to(self.device)
        x = F.embedding(tokens, self._tokens) + F.embedding(positions, self._positions)
        x = self._norm(x)  # (T, C)
        groups = [Group(lengths, start, end, self.device) for start, end in similar(lengths)]
        for layer in self._layers:
            x = layer(x, groups)
            yield
        return self._rows(x.float(), lengths, poolings).cpu()

    def _rows(self, x: Tensor, lengths: list[int], poolings: Sequence[str]) -> Tensor:
        counts = torch.tensor(lengths, device=self.device)
        firsts = x[counts.cumsum(0) - counts]  # (N, C)
        if self._dense is not None and self._out is not None:
            hidden = _ACTIVATIONS[self.config.head](self._dense(firsts.to(self._dtype)))
            return self._scores(self._out(hidden))
        owners = torch.repeat_interleave(counts)
        sums = x.new_zeros(len(lengths), x.shape[1]).index_add_(0, owners, x)
        is_mean = torch.tensor([pooling == "mean" for pooling in poolings], device=self.device)
        vectors = torch.where(is_mean.unsqueeze(1), sums / counts.unsqueeze(1), firsts)
        if self.config.normalize or self._out is not None:
            vectors = F.normalize(vectors, dim=1)
        return vectors if self._out is None else self._scores(self._out(vectors.to(self._dtype)))

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.config.multi_label else logits.float().softmax(1)

    def _layer(self, name: str, C: int, I: int) -> _Layer:  # noqa: E741
        return _Layer(
            self.config.num_heads,
            qkv=self._linear((f"{name}.q", f"{name}.k", f"{name}.v"), C, C),
            o=self._linear((f"{name}.o",), C, C),
            attention_norm=self._layer_norm(f"{name}.attention_norm", C),
            up=self._linear((f"{name}.up",), I, C),
            activation=_ACTIVATIONS[self.config.activation],
            down=self._linear((f"{name}.down",), C, I),
            mlp_norm=self._layer_norm(f"{name}.mlp_norm", C),
        )

    def _table(self, name: str, *shape: int) -> Tensor:
        return self._floats(name, *shape).to(self.device, self._dtype)

    def _layer_norm(self, name: str, C: int) -> Callable[[Tensor], Tensor]:
        weight, bias = self._table(f"{name}.weight", C), self._table(f"{name}.bias", C)
        return partial(F.layer_norm, normalized_shape=(C,), weight=weight, bias=bias, eps=self.config.norm_eps)

    def _linear(self, names: tuple[str, ...], rows: int, columns: int) -> Projection:
        """The linear whose rows are those of all `names`, in order."""
        weights: list[Tensor | Quantized] = [self._floats(f"{name}.weight", rows, columns) for name in names]
        biases = [self._floats(f"{name}.bias", rows) for name in names]
        return make_linear(weights, biases, dtype=self._dtype, device=self.device, kernels=None)

    def _floats(self, name: str, *shape: int) -> Tensor:
        values = self._checkpoint.tensor(name, *shape)
        self.num_parameters += values.numel()
        return values


class _Layer:
    """Attention among the tokens of a text, and an MLP; what each gives is added to its input and then normed."""

    def __init__(
        self,
        num_heads: int,
        *,
        qkv: Projection,
        o: Projection,
        attention_norm: Callable[[Tensor], Tensor],
        up: Projection,
        activation: Callable[[Tensor], Tensor],
        down: Projection,
        mlp_norm: Callable[[Tensor], Tensor],
    ) -> None:
        self._num_heads = num_heads
        self._qkv, self._o, self._attention_norm = qkv, o, attention_norm
        self._up, self._activation, self._down, self._mlp_norm = up, activation, down, mlp_norm

    def __call__(self, x: Tensor, groups: list[Group]) -> Tensor:
        """x (T, C) after this layer; `x` itself may be overwritten."""
        qkv = self._qkv(x)  # (T, 3C)
        attended = torch.cat([group.attend(qkv[group.rows], self._num_heads) for group in groups])  # (T, C)
        x = self._attention_norm(self._o(attended, residual=x))
        return self._mlp_norm(self._down(self._activation(self._up(x)), residual=x))


class Group:
    """Texts of similar length that attend in one call, padded to the longest: N texts of at most L tokens."""

    def __init__(self, lengths: list[int], start: int, end: int, device: torch.device) -> None:
        """The texts from `start` to `end` of a batch with those `lengths`, the longest first."""
        first = sum(lengths[:start])
        self.rows = slice(first, first + sum(lengths[start:end]))
        self._num_texts, self._longest = end - start, lengths[start]
        self._places: Tensor | None = None
        """Of the N L places, those with a token, in order; None: all."""
        if lengths[end - 1] < self._longest:
            is_token = torch.arange(self._longest) < torch.tensor(lengths[start:end]).unsqueeze(1)  # (N, L)
            self._places = is_token.flatten().nonzero().flatten().to(device)
            # Of padding, any row will do: it is masked as a key, and nobody reads it as a query.
            self._index = (is_token.flatten().cumsum(0) - 1).to(device)  # (N L,)
            self._mask = is_token.view(self._num_texts, 1, 1, self._longest).to(device)

    def attend(self, qkv: Tensor, num_heads: int) -> Tensor:
        """The attention of the group's rows of queries, keys and values, (rows, 3C), as (rows, C)."""
        N, L, H = self._num_texts, self._longest, num_heads
        padded = qkv if self._places is None else qkv[self._index]  # (N L, 3C)
        q, k, v = padded.view(N, L, 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)  # (N, H, L, D) each
        mask = None if self._places is None else self._mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.transpose(1, 2).reshape(N * L, -1)  # (N L, C)
        return out if self._places is None else out[self._places]


def similar(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where to cut `lengths`, which fall, into groups of which no more than `MAX_PADDING` is padding: start and end."""
    groups = []
    start = num_tokens = 0
    for i, length in enumerate(lengths):
        num_places = lengths[start] * (i - start + 1)
        if i > start and num_tokens + length < (1 - MAX_PADDING) * num_places:
            groups.append((start, i))
            start, num_tokens = i, 0
        num_tokens += length
    if lengths:
        groups.append((start, len(lengths)))
    return groups
