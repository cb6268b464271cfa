"""Decoder-only transformers: Llama, and the models that differ from it in numbers, norms, windows and caps.

Letters: T tokens of all sequences in the step, R rows whose next token is wanted, C hidden size, H query heads, K
key-value heads, D head dimension, I width of the MLP, V vocabulary.

This module knows nothing about sequences, sampling or files, nor how its weights are held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edge.engine.attention import Attention, AttentionShape, paged_attention
from edge.engine.kv_cache import KvCache
from edge.engine.layers import GATES, Projection, Rotary
from edge.engine.models.loader import Loader
from edge.engine.step import Adapters, Step
from edge.weights.checkpoint import ModelConfig


class Decoder:
    """Embedding, layers, norm and head of one model.

    A step's Python is this class's loop and a handful of calls for each layer; what can be made once is made here.
    """

    def __init__(self, config: ModelConfig, loader: Loader, attention: Attention, device: torch.device) -> None:
        """Build the model from what `loader` gives.

        Raises:
            WeightsError: a tensor is missing, of the wrong shape, or not finite.
        """
        self.config = config
        self.num_parameters = loader.num_parameters
        self._embed, self._head = loader.embedding_and_head()
        self._norm = loader.applied_norm("norm.weight")
        D, theta, divisors = config.head_dim, config.rope_theta, config.rope_divisors
        self._rotaries = [Rotary(D, theta, divisors=divisors, device=device)]
        if config.local_rope_theta is not None:
            self._rotaries.append(Rotary(D, config.local_rope_theta, device=device))
        self.layers = [Layer(config, i, loader, attention) for i in range(config.num_layers)]
        self.weights_description = loader.description
        """How the weights are held: `bfloat16`, `int4`, or several of them as `int4+int8`."""
        self.is_row_independent = loader.is_row_independent and attention is not paged_attention
        """Whether a token's result does not depend, to the last bit, on what else is in the step."""

    def __call__(self, step: Step, cache: KvCache, rows: Tensor | None = None) -> Tensor:
        """Hidden states (T, C) of the step's tokens, normed; their keys and values are stored in `cache`.

        With `rows` (R,) int64 only these rows are computed to the end, and returned: (R, C). Not with adapters.
        """
        x = self._embed(step.tokens)  # (T, C)
        tables = [rotary.tables(step.positions) for rotary in self._rotaries]
        last = self.layers[-1]
        for layer in self.layers:
            cos, sin = tables[layer.rotary]
            x = layer(x, cos, sin, step, cache, rows if layer is last else None)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, V), float32, of the next token after each of `hidden` (R, C)."""
        logits = self._head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class Layer:
    """Attention and MLP, each after a norm and added to its input; in some models what is added is normed too."""

    def __init__(self, config: ModelConfig, index: int, loader: Loader, attention: Attention) -> None:
        self.index = index
        self.attention = attention
        self.shape = _attention_shape(config, index, loader)
        self.rotary = int(config.local_rope_theta is not None and self.shape.window is not None)
        """Which of the model's rotary embeddings this layer uses."""
        name = f"layers.{index}"
        self.attention_norm = loader.norm(f"{name}.attention_norm.weight")
        self.qkv = loader.linear(f"{name}.attention.q", f"{name}.attention.k", f"{name}.attention.v")
        self.o = loader.linear(f"{name}.attention.o")
        self.mlp_norm = loader.norm(f"{name}.mlp_norm.weight")
        self.gate_up = loader.linear(f"{name}.mlp.gate", f"{name}.mlp.up")
        self.down = loader.linear(f"{name}.mlp.down")
        self.activation = config.activation
        self.attention_post_norm = self.mlp_post_norm = None
        if config.post_norms:
            self.attention_post_norm = loader.applied_norm(f"{name}.attention_post_norm.weight")
            self.mlp_post_norm = loader.applied_norm(f"{name}.mlp_post_norm.weight")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, step: Step, cache: KvCache, rows: Tensor | None = None
    ) -> Tensor:
        """x (T, C) after this layer, or with `rows` (R,) these rows of it; `x` itself is overwritten."""
        adapters, index = step.adapters, self.index
        qkv = self.qkv(x, norm=self.attention_norm)  # (T, (H + 2K) D)
        if adapters is not None:
            adapters.add("qkv", index, x, qkv, self.attention_norm)
        attended = self.attention(qkv, self.shape, cos, sin, cache, index, step)  # (T, H D)
        if rows is not None:
            assert adapters is None, "adapters are told of all rows"
            x, attended = x[rows], attended[rows]
        x = self._plus(x, "o", self.o, attended, None, self.attention_post_norm, adapters)
        gate_up = self.gate_up(x, norm=self.mlp_norm)  # (T, 2I)
        if adapters is not None:
            adapters.add("gate_up", index, x, gate_up, self.mlp_norm)
        return self._plus(x, "down", self.down, gate_up, self.activation, self.mlp_post_norm, adapters)

    def _plus(
        self,
        x: Tensor,
        name: str,
        linear: Projection,
        inputs: Tensor,
        gate: str | None,
        post_norm: Callable[[Tensor], Tensor] | None,
        adapters: Adapters | None,
    ) -> Tensor:
        """x (T, C) plus what `linear` makes of `inputs`; adapters change that before it is normed."""
        out = linear(inputs, gate=gate, residual=x if post_norm is None else None)
        if adapters is not None:
            adapters.add(name, self.index, inputs, out, _unchanged if gate is None else GATES[gate])
        return out if post_norm is None else x.add_(post_norm(out))


def _unchanged(x: Tensor) -> Tensor:
    return x


def _attention_shape(config: ModelConfig, index: int, loader: Loader) -> AttentionShape:
    scale = config.attention_scale
    name = f"layers.{index}.attention"
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if scale is None else scale,
        window=config.windows[index] if config.windows else None,
        softcap=config.attention_softcap,
        q_norm=loader.norm(f"{name}.q_norm.weight") if config.qk_norm else None,
        k_norm=loader.norm(f"{name}.k_norm.weight") if config.qk_norm else None,
    )
