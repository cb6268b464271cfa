"""A LoRA adapter in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Names of what is adapted are those of `edge.weights.checkpoint`. What PEFT can save beside plain LoRA on linear layers
(DoRA, biases, whole modules, embeddings) is refused, because leaving it out would change what the adapter says.

`python -m edge.weights.adapter MODEL FOLDER` reads an adapter as engines do and says on stdout why it cannot be used,
for those who must not import torch. This module knows nothing about how adapters are applied.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from edge.errors import WeightsError
from edge.weights.checkpoint import ModelConfig, open_checkpoint
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
    "target_parameters": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
}
"""Keys of the config, and the value with which they ask for nothing that is not there."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts of `init_lora_weights` with which training begins by changing the model's own weights."""
_MAX_ALPHA = 1e6
_MAX_PATTERN_CHARS = 500
_MAX_REPEATS = 3
_HARMLESS = re.compile(r"\\\W|\(\?:")
_REPEAT = re.compile(r"(?:\.|\\\w|\[[\w-]+\])[*+]")
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LowRank:
    """What is added to a linear: `up @ (down @ x)`."""

    down: Tensor
    """(R, in) float32."""
    up: Tensor
    """(out, R) float32, the adapter's scale included."""


def read_adapter(folder: Path, config: ModelConfig) -> dict[str, LowRank]:
    """The adapter in `folder`, for a model of `config`, by the name of what it adapts, as `layers.3.attention.q`.

    Raises:
        WeightsError: files are missing or corrupt, ask for something that is not supported, or were made for a model
            of another shape.
    """
    settings = read_json(folder / CONFIG_NAME, dict[str, Any])
    _check(settings, folder / CONFIG_NAME)
    path = folder / WEIGHTS_NAME
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 - safe_open cannot be iterated
                match = _TENSOR.fullmatch(stored)
                if match is None or match[2] not in _MODULES:
                    raise WeightsError(
                        f"{path}: tensor {stored!r:.200} adapts something else than the linear layers "
                        f"{', '.join(module.split('.')[1] for module in _MODULES)}, which is not supported"
                    )
                name = f"layers.{int(match[1])}.{_MODULES[match[2]]}"
                _check_half(file.get_slice(stored), stored, name, match[3], config, path)
                pair = halves.setdefault(name, {})
                if match[3] in pair:
                    raise WeightsError(f"{path}: there are two tensors lora_{match[3]} of {name}")
                pair[match[3]] = file.get_tensor(stored)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from error
    if not halves:
        raise WeightsError(f"{path}: holds no tensors")
    return {name: _low_rank(name, pair, settings, path) for name, pair in halves.items()}


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of what can be adapted in each layer of a model, by names such as `attention.q`."""
    C, I = config.hidden_size, config.intermediate_size  # noqa: E741 - the letter of the models
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attention.q": (C, heads),
        "attention.k": (C, kv_heads),
        "attention.v": (C, kv_heads),
        "attention.o": (heads, C),
        "mlp.gate": (C, I),
        "mlp.up": (C, I),
        "mlp.down": (I, C),
    }


def _check(config: dict[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for key, harmless in _REFUSED.items():
        value = config.get(key, harmless)
        if value != harmless and value not in ([], {}, None):
            raise WeightsError(f"{path}: {key} is {value!r:.200}, which is not supported (supported: {harmless!r})")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise WeightsError(
            f"{path}: init_lora_weights is {start!r:.40}, with which training changes the model's own weights; convert "
            "the adapter to plain LoRA (PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _check_half(stored: Any, label: str, name: str, half: str, config: ModelConfig, path: Path) -> None:
    """Refuse the tensor `label` by what the file's header tells, before its values are read."""
    shape, dtype = stored.get_shape(), stored.get_dtype()
    if dtype not in _DTYPES:
        raise WeightsError(f"{path}: tensor {label!r} is of type {dtype} (supported: {', '.join(_DTYPES)})")
    if len(shape) != 2:
        raise WeightsError(f"{path}: tensor {label!r} is no matrix, but has the shape {shape}")
    rank, width = shape if half == "A" else reversed(shape)
    if not 0 < rank <= MAX_RANK:
        raise WeightsError(f"{path}: tensor {label!r} has rank {rank}, which is not from 1 to {MAX_RANK}")
    _, layer, part = name.split(".", 2)
    num_in, num_out = adaptable(config)[part]
    wanted = num_in if half == "A" else num_out
    if int(layer) >= config.num_layers or width != wanted:
        raise WeightsError(
            f"{path}: tensor {label!r} was made for another model: it is of layer {layer} and has {width} "
            f"{'inputs' if half == 'A' else 'outputs'}; this model has {config.num_layers} layers, with {wanted} there"
        )


def _low_rank(name: str, pair: dict[str, Tensor], config: dict[str, Any], path: Path) -> LowRank:
    if set(pair) != {"A", "B"}:
        raise WeightsError(f"{path}: {name} has only one of lora_A and lora_B")
    down, up = pair["A"], pair["B"]
    rank = down.shape[0]
    if up.shape[1] != rank:
        raise WeightsError(f"{path}: {name} has rank {rank} in lora_A, but {up.shape[1]} in lora_B")
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


def main(arguments: list[str]) -> int:
    """Check the adapter in the second folder of `arguments` against the model in the first; the exit code."""
    model, folder = map(Path, arguments)
    try:
        read_adapter(folder, open_checkpoint(model).config())
    except WeightsError as error:
        print(error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
