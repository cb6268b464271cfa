"""The pieces that decoder models are made of.

Letters: T tokens, C hidden size, H heads, D head dimension.

Weights start uninitialized: a model is not usable before every tensor of a checkpoint was copied into it. A
quantized layer is another class with the same call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.weights.checkpoint import ModelConfig


class Linear(nn.Module):
    """x (T, in) to x W^T + b (T, out)."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in, dtype=dtype, device=device), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(num_out, dtype=dtype, device=device), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """`Linear` on the CPU with its weight in oneDNN's blocked layout: the same values, 2 to 4 times faster.

    Plain matrix products re-arrange the weight on every call, which costs more than a product of few rows.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, None)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def pack(model: nn.Module) -> None:
    """Swap every `Linear` of `model`, whose weights are final now, for a `PackedLinear`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, PackedLinear(child))


class RmsNorm(nn.Module):
    """x (T, C) divided by its root mean square, times a weight (C,)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embedding in half-split order: dimensions i and i + D/2 turn together."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        D = config.head_dim
        frequencies = config.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)  # (D/2,)
        if config.rope_divisors is not None:
            frequencies = frequencies / torch.tensor(config.rope_divisors)
        self.frequencies = frequencies.to(device)
        self.dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of `positions` (T,), (T, 1, D) each; once per step for all layers."""
        angles = positions[:, None, None].float() * self.frequencies  # (T, 1, D/2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(self.dtype), torch.cat((-sin, sin), dim=-1).to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, H, D) turned by the angles of `Rotary.tables`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
