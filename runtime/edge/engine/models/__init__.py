"""Architectures by name, and how one is built from a checkpoint."""

from __future__ import annotations

import torch

from edge.engine.layers import pack
from edge.engine.models.llama import Llama
from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint

ARCHITECTURES = {"llama": Llama, "mistral": Llama, "qwen2": Llama}


def load_model(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Llama:
    """The model of `checkpoint` with its weights, in `dtype` on `device`.

    Raises:
        WeightsError: the architecture is not supported, or tensors are missing, unknown or of the wrong shape.
    """
    build = ARCHITECTURES.get(checkpoint.architecture)
    if build is None:
        raise WeightsError(
            f"models of architecture {checkpoint.architecture!r} are not supported "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )
    model = build(checkpoint.config(), dtype=dtype, device=device)
    missing = model.destinations()
    for name, tensor in checkpoint.tensors():
        place = missing.pop(name, None)
        if place is None:
            raise WeightsError(f"tensor {name} occurs twice or is one that the model's config has no place for")
        if place.shape != tensor.shape:
            raise WeightsError(f"tensor {name} has the shape {tuple(tensor.shape)}, not {tuple(place.shape)}")
        place.copy_(tensor)
    if missing:
        raise WeightsError(f"{len(missing)} tensors are missing, for example {min(missing)}")
    if device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pack(model)
    return model
