"""Makes a model's norms, linears and embedding from a checkpoint, in the form that the options and the device ask for.

This module knows which tensors a model has, but nothing about how it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from edge.config import ModelOptions
from edge.engine.kernels import Kernels
from edge.engine.kernels.linear import rms_norm
from edge.engine.layers import Embedding, Linear, PackedLinear, Projection, QuantizedLinear, RmsNorm, make_linear
from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint, ModelConfig
from edge.weights.quantized import GROUPS, Quantized, quantize

_BITS = {"int8": 8, "int4": 4}
_BLOCK_ROWS = 16
"""Rows of every product of floats in deterministic mode: few enough to waste little on one row, and enough that a
long prompt is not slower for them."""


class Loader:
    """The parts of the model in `checkpoint`.

    Matrices that the file has as codes stay codes unless the options ask for floats; `int8` and `int4` also round
    floats, and codes of more bits than that. Embedding and head are rounded to 8 bits at most: they matter more.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        options: ModelOptions,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None,
    ) -> None:
        """`dtype` is that of weights held as floats; activations are float32 with `kernels`, else of `dtype` too.

        Raises:
            WeightsError: a tensor is missing, or one is there that the model has no place for.
        """
        self._checkpoint = checkpoint
        self._config = config
        self._options = options
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._shapes = tensor_shapes(config)
        self._kinds: set[str] = set()
        self._block_rows = _BLOCK_ROWS if options.deterministic and kernels is not None else None
        self.is_row_independent = True
        """Whether each of the linears made so far computes a row by itself, to the last bit."""
        self._check_names()

    @property
    def num_parameters(self) -> int:
        """Values in all tensors."""
        return sum(map(math.prod, self._shapes.values()))

    @property
    def description(self) -> str:
        """How the linears made so far hold their weights, for example `int4+int8`."""
        return "+".join(sorted(self._kinds))

    def norm(self, name: str) -> RmsNorm:
        """The norm whose weight is `name`."""
        return RmsNorm(self._floats(name).to(self._device), self._config.norm_eps)

    def applied_norm(self, name: str) -> Callable[[Tensor], Tensor]:
        """The same for use outside of a linear's call."""
        if self._kernels is None:
            return self.norm(name)
        return partial(rms_norm, norm=self.norm(name), kernels=self._kernels)

    def linear(self, *names: str) -> Projection:
        """The linear whose rows are those of all `names`, in order."""
        parts = [self._matrix(f"{name}.weight", _BITS.get(self._options.weights)) for name in names]
        biases = [self._floats(f"{name}.bias") for name in names if f"{name}.bias" in self._shapes]
        return self._make(names, parts, biases or None)

    def embedding_and_head(self) -> tuple[Embedding, Projection]:
        """Token ids to vectors, and vectors to logits."""
        bits = 8 if self._options.weights in _BITS else None
        matrix = self._matrix("embed.weight", bits)
        embedding = Embedding(
            matrix,
            scale=self._config.embedding_scale,
            dtype=torch.float32 if self._kernels is not None else self._dtype,
            device=self._device,
        )
        head = self._make(("head",), [matrix if self._config.tied_head else self._matrix("head.weight", bits)], None)
        return embedding, head

    def _make(self, names: tuple[str, ...], parts: list[Tensor | Quantized], biases: list[Tensor] | None) -> Projection:
        try:
            linear = make_linear(
                parts,
                biases,
                dtype=self._dtype,
                device=self._device,
                kernels=self._kernels,
                block_rows=self._block_rows,
            )
        except ValueError as error:
            raise WeightsError(
                f"{' and '.join(names)} cannot be computed with as stored: {error}; load the model with weights = "
                '"bfloat16" in [engine]'
            ) from error
        match linear:
            case PackedLinear() | Linear():
                self._kinds.add(str(self._dtype).removeprefix("torch."))
                self.is_row_independent &= isinstance(linear, PackedLinear) and linear.block_rows is not None
            case _:
                self._kinds.update(f"int{part.bits}" for part in parts if isinstance(part, Quantized))
                self.is_row_independent &= not isinstance(linear, QuantizedLinear)
        return linear

    def _matrix(self, name: str, bits: int | None) -> Tensor | Quantized:
        """The matrix `name`, as codes where those are used; rounded to `bits` if the file has it more precisely."""
        computes_with_codes = self._kernels is not None or self._device.type != "cpu"
        if self._options.weights in ("float32", "bfloat16") or not computes_with_codes:
            return self._floats(name).to(self._device, self._dtype)
        matrix = self._checkpoint.quantized(name)
        if matrix is not None and (bits is None or matrix.bits <= bits):
            self._check_shape(name, matrix.shape)
            return matrix
        floats = self._floats(name)
        group = self._group(floats.shape[1])
        if bits is None or group is None:
            return floats.to(self._device, self._dtype)
        return self._rounded(name, floats, bits, group)

    def _rounded(self, name: str, floats: Tensor, bits: int, group: int) -> Quantized:
        matrix = quantize(floats, bits=bits, group=group)
        if not (matrix.scales.isfinite().all() and matrix.minimums.isfinite().all()):
            raise WeightsError(
                f"tensor {name} has values too large for {self._options.weights}; load the model with weights = "
                '"bfloat16" in [engine]'
            )
        return matrix

    def _group(self, num_columns: int) -> int | None:
        """The group that the options ask for, or the next smaller one that fits; None: none does."""
        group = self._options.group or 32
        fitting = [size for size in (group, *reversed(GROUPS)) if size <= group and num_columns % size == 0]
        return fitting[0] if fitting else None

    def _floats(self, name: str) -> Tensor:
        values = self._checkpoint.tensor(name)
        self._check_shape(name, tuple(values.shape))
        low, high = values.aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise WeightsError(f"tensor {name} has values that are no finite numbers; the file is damaged")
        return values

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != self._shapes[name]:
            raise WeightsError(f"tensor {name} has the shape {shape}, not {self._shapes[name]}")

    def _check_names(self) -> None:
        names = self._checkpoint.names()
        for name in names:
            if name not in self._shapes:
                raise WeightsError(f"tensor {name} is one that the model's config has no place for")
        if missing := self._shapes.keys() - set(names):
            raise WeightsError(f"{len(missing)} tensors are missing, for example {min(missing)}")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors of a model by our name."""
    C, V = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (V, C), "norm.weight": (C,)}
    if not config.tied_head:
        shapes["head.weight"] = (V, C)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, I, D = config.hidden_size, config.intermediate_size, config.head_dim  # noqa: E741 - the letter of the models
    heads, kv_heads = config.num_heads * D, config.num_kv_heads * D
    linears = {
        "attention.q": (heads, C, config.qkv_bias),
        "attention.k": (kv_heads, C, config.qkv_bias),
        "attention.v": (kv_heads, C, config.qkv_bias),
        "attention.o": (C, heads, config.output_bias),
        "mlp.gate": (I, C, config.mlp_bias),
        "mlp.up": (I, C, config.mlp_bias),
        "mlp.down": (C, I, config.mlp_bias),
    }
    norms = ["attention_norm", "mlp_norm"]
    if config.post_norms:
        norms += ["attention_post_norm", "mlp_post_norm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (C,) for name in norms}
    if config.qk_norm:
        shapes |= {"attention.q_norm.weight": (D,), "attention.k_norm.weight": (D,)}
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes
