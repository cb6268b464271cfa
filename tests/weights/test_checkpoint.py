"""Both formats of checkpoints: what they say about a model, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import save_file

from edge.errors import WeightsError
from edge.weights.checkpoint import ModelConfig, llama3_divisors, open_checkpoint

EXPECTED = ModelConfig(
    vocab_size=tiny_models.VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("folder"))


def with_config(folder: Path, target: Path, **changes: Any) -> Path:
    copy = shutil.copytree(folder, target / "copy")
    (copy / "config.json").write_text(json.dumps(tiny_models.CONFIG | changes))
    return copy


def test_a_folder_and_a_gguf_file_say_the_same(folder: Path, tmp_path: Path) -> None:
    ours = open_checkpoint(folder)
    theirs = open_checkpoint(tiny_models.save_gguf(tmp_path / "m.gguf"))
    assert ours.architecture == theirs.architecture == "llama"
    assert ours.config() == EXPECTED
    assert theirs.config().norm_eps == pytest.approx(1e-5)
    a, b = dict(ours.tensors()), dict(theirs.tensors())
    assert a.keys() == b.keys()
    assert "layers.2.attention.q.weight" in a
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_gguf_tokenizer_files(tmp_path: Path) -> None:
    files = open_checkpoint(tiny_models.save_gguf(tmp_path / "m.gguf")).tokenizer_files()
    assert files.vocabulary is not None
    assert files.vocabulary.pre == "gpt-2"
    assert files.vocabulary.types[-3:] == [3, 3, 3]
    assert (files.bos_token, files.eos_token, files.eos_ids) == ("<|bos|>", "<|im_end|>", {tiny_models.END})
    assert files.chat_template == tiny_models.TEMPLATE


def test_folder_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    copy = with_config(folder, tmp_path, eos_token_id=5)
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    (copy / "chat_template.jinja").write_text("{{ 1 }}")
    files = open_checkpoint(copy).tokenizer_files()
    assert files.eos_ids == {5, 7}
    assert files.chat_template == "{{ 1 }}"  # the file wins over tokenizer_config.json
    assert (files.bos_token, files.eos_token) == ("<|bos|>", "<|im_end|>")


def test_shards_are_read_through_their_index(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "shards")
    (copy / "model.safetensors").unlink()
    tensors = tiny_models.tensors(tiny_models.CONFIG)
    names = sorted(tensors)
    parts = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for part, members in parts.items():
        save_file({name: tensors[name] for name in members}, copy / part)
    index = {"weight_map": {name: part for part, members in parts.items() for name in members}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = dict(open_checkpoint(folder).tensors()), dict(open_checkpoint(copy).tensors())
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_divisors": (4.0,) * 4}),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"model_type": "mistral", "sliding_window": 100}, {"windows": (100,) * 3}),
        ({"model_type": "qwen2", "sliding_window": 100}, {"context_length": 512, "qkv_bias": True}),
        ({"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
        ({"head_dim": None, "tie_word_embeddings": True}, {"head_dim": 8, "tied_head": True}),
    ],
)
def test_config_json(folder: Path, tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = open_checkpoint(with_config(folder, tmp_path, **changes)).config()
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48', not of type int"),
        ({"hidden_size": True}, "hidden_size is True, not of type int"),
        ({"num_attention_heads": 0}, "head_dim is 0|num_heads is 0"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 key-value heads"),
        ({"num_hidden_layers": 100_000}, "num_layers is 100000, not from 1 to 1024"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"rope_theta": "x"}, "rope_theta is 'x', not a number"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope scaling 'yarn' is not supported \(supported: default"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope scaling 'llama3' has missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "not 4 positive numbers"),
        ({"partial_rotary_factor": 0.5}, "over a part of a head"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {}}, "quantized safetensors are not supported"),
    ],
)
def test_a_wrong_config_json_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        open_checkpoint(with_config(folder, tmp_path, **changes)).config()
    assert "config.json" in caught.value.message


def test_broken_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: is not valid JSON"):
        open_checkpoint(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"config\.json: cannot be used: Expected `object`"):
        open_checkpoint(copy)
    (copy / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json: is missing"):
        open_checkpoint(copy)
    with pytest.raises(WeightsError, match="there is no such file or folder"):
        open_checkpoint(tmp_path / "nothing")


def test_broken_safetensors_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(WeightsError, match=r"model\.safetensors: cannot be read as safetensors"):
        list(open_checkpoint(copy).tensors())
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2, dtype=torch.int8)}, weights)
    with pytest.raises(WeightsError, match=r"stored as torch\.int8, which is not supported"):
        list(open_checkpoint(copy).tensors())
    save_file({"model.layers.0.self_attn.k_scale.weight": torch.zeros(2)}, weights)
    with pytest.raises(WeightsError, match="has no place in a llama model"):
        list(open_checkpoint(copy).tensors())
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(WeightsError, match="which is not in the folder"):
        open_checkpoint(copy)


def write_gguf(path: Path, **metadata: Any) -> Path:
    """A GGUF file of one tensor with arbitrary metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NUMBERS: dict[str, Any] = {
    "llama__embedding_length": 8,
    "llama__feed_forward_length": 8,
    "llama__block_count": 1,
    "llama__context_length": 64,
    "llama__attention__head_count": 2,
    "llama__attention__layer_norm_rms_epsilon": 1e-5,
}


def test_gguf_defaults(tmp_path: Path) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", **NUMBERS)).config()
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tied_head) == (2, 4, 10000.0, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": "many"}, r"'llama\.block_count' is a str, not a int"),
        ({"llama__attention__head_count": [2, 2]}, "is a list, not a int"),
        ({"llama__attention__head_count": 0}, "head_dim is 0|num_heads is 0"),
        ({"llama__rope__dimension_count": 2}, "over a part of a head"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"split__count": 3}, "is one part of a split model"),
    ],
)
def test_a_wrong_gguf_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        open_checkpoint(write_gguf(tmp_path / "m.gguf", **(NUMBERS | changes))).config()
    assert "m.gguf" in caught.value.message


def test_missing_gguf_metadata_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(WeightsError, match=r"'llama\.attention\.head_count' is missing"):
        checkpoint.config()
    with pytest.raises(WeightsError, match=r"'tokenizer\.ggml\.tokens' is missing"):
        checkpoint.tokenizer_files()


def test_llama3_divisors_keep_fast_and_slow_down_slow_frequencies() -> None:
    divisors = llama3_divisors(head_dim=64, theta=500000.0, factor=8, low=1, high=4, original_context=8192)
    assert len(divisors) == 32
    assert divisors[0] == 1
    assert divisors[-1] == 8
    assert list(divisors) == sorted(divisors)


@pytest.mark.model
def test_the_packaged_model(model_path: Path) -> None:
    checkpoint = open_checkpoint(model_path)
    config = checkpoint.config()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.context_length, config.tied_head) == (49152, 8192, True)
    assert checkpoint.tokenizer_files().eos_ids == {0, 2}
