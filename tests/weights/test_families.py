"""What is read of the config of each family of models, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from edge.errors import WeightsError
from edge.weights.checkpoint import ModelConfig, open_checkpoint

GEMMA2, GEMMA3 = tiny_models.FAMILIES["gemma2"], tiny_models.FAMILIES["gemma3"]
QWEN2 = tiny_models.FAMILIES["qwen2"]


def read_config(folder: Path, changes: dict[str, Any], *, without: tuple[str, ...] = ()) -> ModelConfig:
    """The config of a folder with tiny weights whose config.json has `changes`, and no keys of `without`."""
    tiny_models.save_folder(folder)
    values = {key: value for key, value in (tiny_models.CONFIG | changes).items() if key not in without}
    (folder / "config.json").write_text(json.dumps(values))
    return open_checkpoint(folder).config()


@pytest.mark.parametrize(
    ("changes", "without", "expected"),
    [
        ({"model_type": "mistral"}, (), {"windows": (4096,) * 3}),
        ({"model_type": "mistral", "sliding_window": None}, (), {"windows": ()}),
        ({"model_type": "llama", "sliding_window": 9}, (), {"windows": ()}),
        (
            QWEN2 | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
            (),
            {"windows": (None,) * 2 + (9,)},
        ),
        ({"model_type": "qwen3"}, ("head_dim",), {"head_dim": 128, "qk_norm": True, "qkv_bias": False}),
        (
            {"model_type": "gemma2"},
            ("head_dim", "tie_word_embeddings"),
            {
                "head_dim": 256,
                "tied_head": True,
                "post_norms": True,
                "qk_norm": False,
                "activation": "gelu_tanh",
                "embedding_scale": 48**0.5,
                "attention_scale": 1 / 16,
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
                "windows": (4096, None, 4096),
                "local_rope_theta": None,
            },
        ),
        (
            GEMMA2 | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
            (),
            {"logit_softcap": None, "attention_softcap": None},
        ),
        (
            GEMMA3,
            (),
            {
                "qk_norm": True,
                "attention_softcap": None,
                "logit_softcap": None,
                "windows": (20, 20, None),
                "rope_theta": 500_000.0,
                "rope_divisors": (8.0,) * 4,
                "local_rope_theta": 100.0,
            },
        ),
        (
            {"model_type": "gemma3_text"},
            ("rope_theta", "tie_word_embeddings"),
            {"rope_theta": 1e6, "local_rope_theta": 1e4, "windows": (4096,) * 3, "tied_head": True},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 5.0}},
            },
            (),
            {"rope_theta": 7.0, "local_rope_theta": 5.0, "rope_divisors": None},
        ),
        (
            GEMMA3 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            (),
            {"windows": (None, 20, None)},
        ),
    ],
)
def test_config_json_of_a_family(
    tmp_path: Path, changes: dict[str, Any], without: tuple[str, ...], expected: dict[str, Any]
) -> None:
    config = read_config(tmp_path, changes, without=without)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "Gemma 3 models with images are not supported; use one of model_type gemma3_text"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "bidirectional attention are not supported"),
        (
            GEMMA3 | {"hidden_activation": "gelu"},
            r"hidden_activation 'gelu' is not supported \(supported: silu, gelu_py",
        ),
        (GEMMA3 | {"layer_types": ["full_attention", "linear_attention", "x"]}, "layer type 'linear_attention' is not"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "the kinds of 1 layers are given, not of 3"),
        (GEMMA3 | {"layer_types": [{}, []]}, "layer type {} is not supported"),
        (GEMMA3 | {"layer_types": "all"}, "layer_types is 'all', not of type list"),
        (GEMMA3 | {"sliding_window": 0}, "the sliding window is not a positive number of tokens"),
        (GEMMA3 | {"sliding_window": "wide"}, "sliding_window is 'wide', not of type int"),
        (GEMMA3 | {"sliding_window_pattern": 0, "num_hidden_layers": 10**9}, "num_layers is 1000000000, not from 1 to"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not a positive number"),
        (GEMMA3 | {"hidden_size": -48}, "hidden_size is -48"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, "rope parameters of a kind of layers are not an object"),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "rope scaling of the layers with a window is not supported",
        ),
        (GEMMA3 | {"head_dim": 10**12}, "head_dim is 1000000000000, not from 1 to 4096"),
        (GEMMA3 | {"rope_local_base_freq": -1}, "local_rope_theta is -1.0, not a positive number"),
        (GEMMA2 | {"attn_logit_softcapping": 0}, "attention_softcap is 0.0, not a positive number"),
        (GEMMA2 | {"final_logit_softcapping": "high"}, "final_logit_softcapping is 'high', not a number"),
    ],
)
def test_a_wrong_config_json_of_a_family_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        read_config(tmp_path, changes)
    assert "config.json" in caught.value.message


def test_norms_of_gemma_are_what_is_multiplied_by(tmp_path: Path) -> None:
    folder = tiny_models.save_folder(tmp_path, **GEMMA3)
    stored = tiny_models.tensors(tiny_models.CONFIG | GEMMA3)
    checkpoint = open_checkpoint(folder)
    for ours, theirs in {
        "norm": "norm",
        "layers.1.attention_norm": "layers.1.input_layernorm",
        "layers.1.attention_post_norm": "layers.1.post_attention_layernorm",
        "layers.1.mlp_norm": "layers.1.pre_feedforward_layernorm",
        "layers.1.mlp_post_norm": "layers.1.post_feedforward_layernorm",
        "layers.2.attention.q_norm": "layers.2.self_attn.q_norm",
        "layers.2.attention.k_norm": "layers.2.self_attn.k_norm",
    }.items():
        assert torch.equal(checkpoint.tensor(f"{ours}.weight"), stored[f"model.{theirs}.weight"] + 1)
    assert torch.equal(
        checkpoint.tensor("layers.0.attention.q.weight"), stored["model.layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize(("arch", "family"), [("qwen3", "qwen3"), ("gemma2", "gemma2"), ("gemma3", "gemma3")])
def test_a_gguf_file_says_what_a_folder_says(tmp_path: Path, arch: str, family: str) -> None:
    # What files leave out: the scale of scores, and that every sixth layer of Gemma 3 sees everything.
    changes = tiny_models.FAMILIES[family] | {
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
    }
    theirs = open_checkpoint(tiny_models.save_gguf(tmp_path / "m.gguf", arch=arch, **changes)).config()
    ours = open_checkpoint(tiny_models.save_folder(tmp_path / "m", **changes)).config()
    assert theirs.norm_eps == pytest.approx(ours.norm_eps)
    assert {name: getattr(theirs, name) for name in ModelConfig.__struct_fields__ if name != "norm_eps"} == {
        name: getattr(ours, name) for name in ModelConfig.__struct_fields__ if name != "norm_eps"
    }
