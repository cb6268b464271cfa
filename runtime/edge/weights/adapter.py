"""A LoRA adapter in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Names of what is adapted are those of `edge.weights.checkpoint`. What PEFT can save beside plain LoRA on linear layers
(DoRA, biases, whole modules, embeddings) is refused, because leaving it out would change what the adapter says.

This module knows nothing about how adapters are applied.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.folder import read_json
from edge.weights.store import ADAPTER_FILES

CONFIG_NAME, WEIGHTS_NAME = ADAPTER_FILES
MAX_RANK = 64

_MODULES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.([0-9]{1,4})\.([\w.]+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "trainable_token_indices": None,
}
"""Keys of the config, and the value with which they ask for nothing that is not there."""
_MAX_ALPHA = 1e6
_MAX_PATTERN_CHARS = 500
_MAX_REPEATS = 3
_HARMLESS = re.compile(r"\\\W|\(\?:")
_REPEAT = re.compile(r"(?:\.|\\\w|\[[\w-]+\])[*+]")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LowRank:
    """What is added to a linear: `up @ (down @ x)`."""

    down: Tensor
    """(R, in) float32."""
    up: Tensor
    """(out, R) float32, the adapter's scale included."""


def read_adapter(folder: Path) -> dict[str, LowRank]:
    """The adapter in `folder`, by the name of what it adapts, such as `layers.3.attention.q`.

    Raises:
        WeightsError: files are missing or corrupt, or ask for something that is not supported.
    """
    config = read_json(folder / CONFIG_NAME, dict[str, Any])
    _check(config, folder / CONFIG_NAME)
    path = folder / WEIGHTS_NAME
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 - safe_open cannot be iterated
                match = _TENSOR.fullmatch(stored)
                if match is None or match[2] not in _MODULES:
                    raise WeightsError(
                        f"{path}: tensor {stored!r} adapts something else than the linear layers "
                        f"{', '.join(module.split('.')[1] for module in _MODULES)}, which is not supported"
                    )
                name = f"layers.{int(match[1])}.{_MODULES[match[2]]}"
                halves.setdefault(name, {})[match[3]] = file.get_tensor(stored)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from error
    if not halves:
        raise WeightsError(f"{path}: holds no tensors")
    return {name: _low_rank(name, pair, config, path) for name, pair in halves.items()}


def _check(config: dict[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for key, harmless in _REFUSED.items():
        value = config.get(key, harmless)
        if value != harmless and value not in ([], {}, None):
            raise WeightsError(f"{path}: {key} is {value!r}, which is not supported (supported: {harmless!r})")


def _low_rank(name: str, pair: dict[str, Tensor], config: dict[str, Any], path: Path) -> LowRank:
    if set(pair) != {"A", "B"}:
        raise WeightsError(f"{path}: {name} has only one of lora_A and lora_B")
    down, up = pair["A"], pair["B"]
    if not all(tensor.dim() == 2 and tensor.dtype in _DTYPES for tensor in (down, up)) or down.shape[0] != up.shape[1]:
        raise WeightsError(f"{path}: lora_A and lora_B of {name} are no matrices that fit each other")
    rank = down.shape[0]
    if not 0 < rank <= MAX_RANK:
        raise WeightsError(f"{path}: {name} has rank {rank}, which is not from 1 to {MAX_RANK}")
    scale = _alpha(name, config, path) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    matrices = LowRank(down.float(), up.float() * scale)
    if not all(tensor.isfinite().all() for tensor in (matrices.down, matrices.up)):
        raise WeightsError(f"{path}: {name} holds values that are no finite numbers")
    return matrices


def _alpha(name: str, config: dict[str, Any], path: Path) -> float:
    """`lora_alpha`, or the entry of `alpha_pattern` for this module (a suffix or pattern of its Hugging Face name)."""
    stem = next(theirs for theirs, ours in _MODULES.items() if name.endswith(ours))
    theirs = f"model.layers.{name.split('.')[1]}.{stem}"
    path = path.parent / CONFIG_NAME
    alpha = config.get("lora_alpha", 8)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise WeightsError(f"{path}: alpha_pattern is no object")
    for pattern, value in patterns.items():
        if _pattern(pattern, path).fullmatch(theirs):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -_MAX_ALPHA <= alpha <= _MAX_ALPHA:
        raise WeightsError(f"{path}: lora_alpha is {alpha!r:.40}, not a number from {-_MAX_ALPHA:g} to {_MAX_ALPHA:g}")
    return float(alpha)


def _pattern(pattern: str, path: Path) -> re.Pattern[str]:
    """A key of `alpha_pattern`, for a whole name. Python's matcher can take forever over one that repeats a lot."""
    rest, num_repeats = _REPEAT.subn("", _HARMLESS.sub("", pattern))
    if len(pattern) > _MAX_PATTERN_CHARS or num_repeats > _MAX_REPEATS or any(sign in rest for sign in "*+?{"):
        raise WeightsError(
            f"{path}: alpha_pattern {pattern!r:.80} repeats too much; name the modules, or use .* or \\d+ at most "
            f"{_MAX_REPEATS} times"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError) as error:
        raise WeightsError(f"{path}: alpha_pattern {pattern!r:.80}: {error}") from error
