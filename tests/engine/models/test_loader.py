from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf import GGMLQuantizationType as Types
from safetensors.torch import load_file, save_file

from edge.config import ModelOptions
from edge.engine.kernels import Kernels
from edge.engine.layers import PackedLinear
from edge.engine.models import ARCHITECTURES, load_model
from edge.engine.models.decoder import Decoder
from edge.errors import WeightsError
from edge.weights.checkpoint import open_checkpoint
from edge.weights.quantized import quantize
from edge.weights.safetensors_checkpoint import SafetensorsCheckpoint

CPU = torch.device("cpu")


def load(path: Path, kernels: Kernels | None = None, **options: Any) -> Decoder:
    dtype = torch.float32 if options.get("weights") == "float32" else torch.bfloat16
    return load_model(open_checkpoint(path), options=ModelOptions(**options), dtype=dtype, device=CPU, kernels=kernels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("weights", ["auto", "float32", "bfloat16", "int8", "int4"])
def test_without_kernels_the_cpu_holds_floats(folder: Path, weights: str) -> None:
    model = load(folder, weights=weights)
    assert model.weights_description == ("float32" if weights == "float32" else "bfloat16")
    assert isinstance(model.layers[0].qkv, PackedLinear)
    assert not model.is_row_independent
    assert model.num_parameters == sum(t.numel() for t in tiny_models.tensors(tiny_models.CONFIG).values())


WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.parametrize(
    ("weights", "group", "description"),
    [
        ("auto", 0, "bfloat16"),
        ("bfloat16", 0, "bfloat16"),
        ("int8", 0, "int8"),
        ("int8", 64, "int8"),
        ("int4", 0, "int4+int8"),
        ("int4", 128, "int4+int8"),
    ],
)
def test_with_kernels_floats_are_rounded_where_that_is_asked_for(
    tmp_path: Path, kernels: Kernels, weights: str, group: int, description: str
) -> None:
    model = load(tiny_models.save_folder(tmp_path, **WIDE), kernels, weights=weights, group=group)
    assert model.weights_description == description


def test_a_group_that_does_not_fit_the_width_becomes_a_smaller_one(tmp_path: Path, kernels: Kernels) -> None:
    # 48 columns are a multiple of 16 only, and 40 not even of that: they are held as floats.
    narrow = load(tiny_models.save_folder(tmp_path / "a"), kernels, weights="int4", group=128)
    assert narrow.weights_description == "int4+int8"
    odd = load(tiny_models.save_folder(tmp_path / "b", intermediate_size=40), kernels, weights="int4", group=128)
    assert odd.weights_description == "bfloat16+int4+int8"


@pytest.mark.parametrize(
    ("weights", "description"),
    [("auto", "int4+int8"), ("int8", "int4+int8"), ("int4", "int4+int8"), ("bfloat16", "bfloat16")],
)
def test_codes_of_a_file_stay_as_they_are_unless_fewer_bits_are_asked_for(
    tmp_path: Path, kernels: Kernels, weights: str, description: str
) -> None:
    types = {"v_proj": Types.Q8_0, "_proj": Types.Q4_1, "embed": Types.Q8_0, "lm_head": Types.Q8_0}
    model = load(tiny_models.save_gguf(tmp_path / "m.gguf", types=types, **WIDE), kernels, weights=weights)
    assert model.weights_description == description


def test_a_linear_of_codes_and_floats_is_held_as_floats(tmp_path: Path, kernels: Kernels) -> None:
    path = tiny_models.save_gguf(tmp_path / "m.gguf", types={"v_proj": Types.F32, "": Types.Q4_0}, **WIDE)
    model = load(path, kernels)
    assert model.weights_description == "bfloat16+int4"
    assert isinstance(model.layers[0].qkv, PackedLinear)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, f"architecture 'mamba' are not supported .supported: {', '.join(ARCHITECTURES)}"),
        ({"num_hidden_layers": 4}, r"9 tensors are missing, for example layers\.3\.attention\.k"),
        ({"num_hidden_layers": 2}, r"tensor layers\.2\..* is one that the model's config has no place for"),
        ({"intermediate_size": 81}, r"has the shape \(80, 48\), not \(81, 48\)"),
        ({"tie_word_embeddings": True, "attention_bias": True}, r"12 tensors are missing"),
        ({"model_type": "qwen3"}, r"6 tensors are missing, for example layers\.0\.attention\.k_norm\.weight"),
        ({"model_type": "gemma2"}, "no place for|missing"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps(tiny_models.CONFIG | changes))
    with pytest.raises(WeightsError, match=message):
        load(broken)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(folder: Path, tmp_path: Path, name: str, bad: float) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors[name].view(-1)[3] = bad
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(WeightsError, match=r"values that are no finite numbers; the file is damaged"):
        load(broken)


def test_weights_too_large_for_codes_are_refused(tmp_path: Path, kernels: Kernels) -> None:
    folder = tiny_models.save_folder(tmp_path, **WIDE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = -1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"layers\.1\.mlp\.up\.weight has values too large for int8; load .* \"bfloat16\""
    ):
        load(folder, kernels, weights="int8")
    assert load(folder, kernels, weights="bfloat16").weights_description == "bfloat16"


def test_groups_without_a_kernel_are_refused(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.save_folder(tmp_path, **WIDE)
    odd = quantize(torch.randn(96, 64), bits=4, group=8)
    monkeypatch.setattr(
        SafetensorsCheckpoint, "quantized", lambda self, name: odd if name.endswith("gate.weight") else None
    )
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.gate .* cannot be computed with as stored: no kernel for"):
        load(folder, kernels, weights="int4")


def test_a_tensor_stored_twice_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    shutil.copy(broken / "model.safetensors", broken / "b.safetensors")
    names = load_file(broken / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors") | {"lm_head.weight": "b.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"is in .* too"):
        load(broken)
