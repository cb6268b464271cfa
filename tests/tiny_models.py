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
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from edge.config import EngineConfig, ModelOptions
from edge.engine.kernels import Kernels
from edge.engine.loaded import LoadedModel
from edge.engine.lora import AdapterStore
from edge.engine.runner import load_runner
from edge.engine.tokenizer import Tokenizer
from edge.frames import Generate, Sampling
from edge.weights.checkpoint import open_checkpoint

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
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 11}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gemma2": _GEMMA
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": _GEMMA
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
"""What to change of `CONFIG` for a model of each family."""


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the names of Hugging Face, large enough for clear winners among the logits."""
    torch.manual_seed(seed)
    C, I, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]  # noqa: E741
    D = config["head_dim"]
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    has_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    named = {"model.embed_tokens.weight": torch.randn(V, C)}
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
    # Gemma's norms multiply by one more than their weight.
    mean = 0 if config["model_type"].startswith("gemma") else 1
    return named | {name: mean + torch.randn(size) / 4 for name, size in _norms(config).items()}


def _norms(config: dict[str, Any]) -> dict[str, int]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"].startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    sizes = dict.fromkeys(names, config["hidden_size"])
    if config["model_type"] in ("qwen3", "gemma3_text"):
        sizes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config["head_dim"])
    layers = range(config["num_hidden_layers"])
    named = {f"model.layers.{i}.{name}.weight": size for i in layers for name, size in sizes.items()}
    return named | {"model.norm.weight": config["hidden_size"]}


def save_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model folder as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    tokenizer = HfTokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": SPECIAL[0]}, "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_gguf(
    path: Path,
    *,
    seed: int = 0,
    arch: str = "llama",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    **changes: Any,
) -> Path:
    """The model of `save_folder` as a GGUF file, rows of q and k interleaved as `llama` wants.

    Matrices whose name has a key of `types` in it, the first that fits, are stored so; all others as float32.
    """
    config = CONFIG | {"model_type": arch} | changes
    gemma = config["model_type"].startswith("gemma")
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
    if gemma:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_float32(f"{arch}.rope.freq_base_swa", config.get("rope_local_base_freq", 10_000.0))
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "rope_scaling" in config:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ALPHABET + SPECIAL)
    writer.add_token_types([1] * len(ALPHABET) + [3] * len(SPECIAL))
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors(config, seed).items():
        factor = tensor + 1 if gemma and "norm" in name else tensor
        values = _interleaved(name, factor, config, arch)
        kind = next((kind for part, kind in (types or {}).items() if part in name), gguf.GGMLQuantizationType.F32)
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name, gemma), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name, gemma), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str, gemma: bool) -> str:
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
        "post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }.items():
        name = name.replace(old, new)
    return name


def _interleaved(name: str, tensor: torch.Tensor, config: dict[str, Any], arch: str) -> np.ndarray:
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.view(num_heads, 2, config["head_dim"] // 2, -1)
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.contiguous().numpy()


def request(prompt: str | list[int] = "hello", **changes: Any) -> Generate:
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


def adapter_tensors(*, rank: int, seed: int = 0, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """A random LoRA adapter of all linears of the model of `config`, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    named = {}
    for name, weight in tensors(config).items():
        if name.endswith("_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            named[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
            named[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / rank**0.5
    return named


def save_adapter(folder: Path, *, rank: int, seed: int = 0, **changes: Any) -> Path:
    """The adapter of `adapter_tensors` as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(adapter_tensors(rank=rank, seed=seed), folder / "adapter_model.safetensors")
    return folder


def load(
    folder: Path, *, options: ModelOptions | None = None, kernels: Kernels | None = None, **config: Any
) -> LoadedModel:
    """The model in `folder` as an engine with the settings `config` loads it, by default in float32."""
    settings, options = EngineConfig(**config), options or ModelOptions(weights="float32")
    checkpoint = open_checkpoint(folder)
    device = torch.device("cpu")
    runner = load_runner(
        checkpoint,
        options=options,
        device=device,
        kernels=kernels,
        kv_tokens=settings.kv_tokens,
        max_running=settings.max_batch_size,
        step_tokens=settings.step_tokens,
    )
    adapters = AdapterStore(folder.parent / "adapters", runner.model.config, device)
    return LoadedModel("tiny", runner, Tokenizer(checkpoint.tokenizer_files()), adapters, options, settings)
