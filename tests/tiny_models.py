"""Tiny models with random weights for tests: a safetensors folder, the same as a GGUF file, and requests for them.

Their tokenizer has one token per byte, so that every answer is a stream of arbitrary bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edge.frames import Generate, Sampling

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(ALPHABET) + len(SPECIAL)
BOS, START, END = range(len(ALPHABET), VOCAB_SIZE)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": None,
    "bos_token_id": None,
}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the names of Hugging Face, large enough for clear winners among the logits."""
    torch.manual_seed(seed)
    C, I, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]  # noqa: E741
    D = config["head_dim"]
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    has_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    named = {"model.embed_tokens.weight": torch.randn(V, C), "model.norm.weight": 1 + torch.randn(C) / 10}
    if not config["tie_word_embeddings"]:
        named["lm_head.weight"] = torch.randn(V, C) / 2
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, C),
            "self_attn.k_proj": (kv, C),
            "self_attn.v_proj": (kv, C),
            "self_attn.o_proj": (C, q),
            "mlp.gate_proj": (I, C),
            "mlp.up_proj": (I, C),
            "mlp.down_proj": (C, I),
        }
        for name, (rows, columns) in shapes.items():
            named[f"model.layers.{i}.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
            if has_bias and "self_attn" in name and (config["attention_bias"] or "o_proj" not in name):
                named[f"model.layers.{i}.{name}.bias"] = torch.randn(rows) / 4
        for norm in ("input_layernorm", "post_attention_layernorm"):
            named[f"model.layers.{i}.{norm}.weight"] = 1 + torch.randn(C) / 10
    return named


def save_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model folder as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": SPECIAL[0]}, "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_gguf(path: Path, *, seed: int = 0, arch: str = "llama", **changes: Any) -> Path:
    """The model of `save_folder` as a GGUF file: float32 tensors, rows of q and k interleaved as `llama` wants."""
    config = CONFIG | {"model_type": arch} | changes
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ALPHABET + SPECIAL)
    writer.add_token_types([1] * len(ALPHABET) + [3] * len(SPECIAL))
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors(config, seed).items():
        writer.add_tensor(_gguf_name(name), _interleaved(name, tensor, config, arch))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    for old, new in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }.items():
        name = name.replace(old, new)
    return name


def _interleaved(name: str, tensor: torch.Tensor, config: dict[str, Any], arch: str) -> np.ndarray:
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.view(num_heads, 2, config["head_dim"] // 2, -1)
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.contiguous().numpy()


def request(prompt: str = "hello", **changes: Any) -> Generate:
    """A greedy request for the model `tiny`, unless `changes` say otherwise."""
    values: dict[str, Any] = {
        "id": 1,
        "model": "tiny",
        "messages": None,
        "prompt": prompt,
        "raw": True,
        "sampling": Sampling(temperature=0),
        "max_tokens": 24,
        "stop": [],
        "credit": 1000,
    }
    return Generate(**(values | changes))
