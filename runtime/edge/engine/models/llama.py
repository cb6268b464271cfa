"""Llama, and the models that are Llama with other numbers: Mistral, Qwen2, SmolLM2.

Letters: T tokens of all sequences in the step, C hidden size, H query heads, K key-value heads, D head
dimension, I width of the MLP, V vocabulary.

This module knows nothing about sequences, sampling or files.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.engine.attention import Attention, Batch, KvCache, paged_attention
from edge.engine.layers import Linear, RmsNorm, Rotary, rotate
from edge.weights.checkpoint import ModelConfig


class Llama(nn.Module):
    """A decoder-only transformer: embedding, layers, norm, head."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: Attention = paged_attention,
    ) -> None:
        super().__init__()
        self.config = config
        C, V = config.hidden_size, config.vocab_size
        self.embed = nn.Parameter(torch.empty(V, C, dtype=dtype, device=device), requires_grad=False)
        self.layers = nn.ModuleList(
            Layer(config, i, dtype=dtype, device=device, attention=attention) for i in range(config.num_layers)
        )
        self.norm = RmsNorm(C, config.norm_eps, dtype=dtype, device=device)
        self.head = Linear(C, V, bias=False, dtype=dtype, device=torch.device("meta") if config.tied_head else device)
        if config.tied_head:
            self.head.weight = self.embed
        self.rotary = Rotary(config, dtype=dtype, device=device)
        self.num_parameters = sum(tensor.numel() for tensor in self.destinations().values())

    def forward(self, batch: Batch, cache: KvCache) -> Tensor:
        """Hidden states (T, C) of the step's tokens, normed; their keys and values are stored in `cache`."""
        x = F.embedding(batch.tokens, self.embed)  # (T, C)
        cos, sin = self.rotary.tables(batch.positions)
        for layer in self.layers:
            x = layer(x, cos, sin, batch, cache)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, V), float32, of the next token after each of `hidden` (R, C)."""
        return self.head(hidden).float()  # type: ignore[no-any-return]

    def destinations(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes, by our name: (a part of) a parameter, to copy into."""
        named = {"embed.weight": self.embed.data, "norm.weight": self.norm.weight.data}
        if not self.config.tied_head:
            named["head.weight"] = self.head.weight.data
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            named |= {f"layers.{i}.{name}": tensor for name, tensor in layer.destinations().items()}
        return named


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, attention: Attention
    ) -> None:
        super().__init__()
        C, I = config.hidden_size, config.intermediate_size  # noqa: E741 - the letter of the docstring
        D = config.head_dim
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, D
        self.attention = attention
        rows = (config.num_heads + 2 * config.num_kv_heads) * D
        self.attention_norm = RmsNorm(C, config.norm_eps, dtype=dtype, device=device)
        self.qkv = Linear(C, rows, bias=config.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(config.num_heads * D, C, bias=config.output_bias, dtype=dtype, device=device)
        self.mlp_norm = RmsNorm(C, config.norm_eps, dtype=dtype, device=device)
        self.gate_up = Linear(C, 2 * I, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(I, C, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """x (T, C) after this layer."""
        x = x + self._attend(self.attention_norm(x), cos, sin, batch, cache)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # (T, I) each
        return x + self.down(F.silu(gate).mul_(up))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        T = x.shape[0]
        H, K, D = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(x).view(T, H + 2 * K, D)
        qk, v = qkv[:, : H + K], qkv[:, H + K :]
        qk = rotate(qk, cos, sin)
        out = self.attention(qk[:, :H], qk[:, H:], v, cache, self.index, batch)  # (T, H, D)
        return self.o(out.reshape(T, H * D))  # type: ignore[no-any-return]

    def destinations(self) -> dict[str, Tensor]:
        """Where each tensor of this layer goes, by its name inside of the layer."""
        H, K, D = self.num_heads, self.num_kv_heads, self.head_dim
        named = {"attention_norm.weight": self.attention_norm.weight.data, "mlp_norm.weight": self.mlp_norm.weight.data}
        fused = (
            (self.qkv, {"attention.q": H * D, "attention.k": K * D, "attention.v": K * D}),
            (self.o, {"attention.o": self.o.weight.shape[0]}),
            (self.gate_up, {"mlp.gate": self.down.weight.shape[1], "mlp.up": self.down.weight.shape[1]}),
            (self.down, {"mlp.down": self.down.weight.shape[0]}),
        )
        for linear, parts in fused:
            for leaf, whole in (("weight", linear.weight), ("bias", linear.bias)):
                if whole is not None:
                    pieces = torch.split(whole.data, list(parts.values()))
                    named |= {f"{name}.{leaf}": piece for name, piece in zip(parts, pieces, strict=True)}
        return named
