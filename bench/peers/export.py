"""A Llama model of ours as a folder that `transformers` and vLLM read: config.json and safetensors in bfloat16.

The peers get token ids, so there is no tokenizer in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from edge.weights.checkpoint import Checkpoint, ModelConfig, open_checkpoint

_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "mlp": "mlp",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}


def export(model: Path, folder: Path) -> None:
    """Write the model in `model` into `folder`, unless it is there. Only architecture `llama` without rope scaling.

    Raises:
        ValueError: it is of another kind.
    """
    if (folder / "config.json").exists():
        return
    checkpoint = open_checkpoint(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_name(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in checkpoint.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Last, so that a folder with a config is complete.
    (folder / "config.json").write_text(json.dumps(_config(checkpoint), indent=1))


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    config: ModelConfig = checkpoint.config()
    if checkpoint.architecture != "llama" or config.rope_divisors is not None:
        raise ValueError(f"only Llama models without rope scaling can be exported, not {checkpoint.architecture}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _name(ours: str) -> str:
    """`layers.3.attention.q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    parts = [_NAMES.get(part, part) for part in ours.split(".")]
    return ".".join(["model", *parts] if parts[0] == "layers" else parts)
