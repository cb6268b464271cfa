"""Architectures by name, and how a model is made from a checkpoint."""

from __future__ import annotations

import torch

from edge.config import ModelOptions
from edge.engine.kernels import Kernels
from edge.engine.kernels.attention import make_attention
from edge.engine.models.decoder import Decoder
from edge.engine.models.loader import Loader
from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text")


def load_model(
    checkpoint: Checkpoint,
    *,
    options: ModelOptions,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None,
) -> Decoder:
    """The model of `checkpoint` with its weights on `device`.

    Args:
        checkpoint: the opened files.
        options: how weights are held, and the format of the cache that the model will be called with.
        dtype: of weights that are held as floats, and of activations too where there are no `kernels`.
        device: where it runs.
        kernels: native kernels, for the CPU; with them activations are float32.

    Raises:
        WeightsError: the architecture is not supported, or tensors are missing, unknown, of the wrong shape or not
            finite.
    """
    if checkpoint.architecture not in ARCHITECTURES:
        raise WeightsError(
            f"models of architecture {checkpoint.architecture!r} are not supported "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )
    config = checkpoint.config()
    loader = Loader(checkpoint, config, options=options, dtype=dtype, device=device, kernels=kernels)
    attention = make_attention(config.num_heads, config.num_kv_heads, config.head_dim, options.kv, kernels)
    return Decoder(config, loader, attention, device)
