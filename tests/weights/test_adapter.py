"""Reading LoRA adapters as PEFT lays them out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from edge.cli import cli
from edge.errors import WeightsError
from edge.weights.adapter import LowRank
from edge.weights.adapter import read_adapter as read_for
from edge.weights.checkpoint import open_checkpoint
from edge.weights.store import ModelStore

Read = Callable[[Path], dict[str, LowRank]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("adapted") / "model")


@pytest.fixture(scope="module")
def read_adapter(model: Path) -> Read:
    config = open_checkpoint(model).config()
    return lambda folder: read_for(folder, config)


def test_the_scale_is_in_the_matrices(read_adapter: Read, tmp_path: Path) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4, lora_alpha=6)
    stored = tiny_models.adapter_tensors(rank=4)
    adapter = read_adapter(folder)
    assert sorted(adapter)[:2] == ["layers.0.attention.k", "layers.0.attention.o"]
    assert len(adapter) == 3 * 7
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    torch.testing.assert_close(adapter["layers.1.mlp.up"].down, stored[f"{name}A.weight"])
    torch.testing.assert_close(adapter["layers.1.mlp.up"].up, stored[f"{name}B.weight"] * 1.5)


def test_rslora_and_alphas_of_single_modules(read_adapter: Read, tmp_path: Path) -> None:
    changes = {"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"layers.2.self_attn.q_proj": 2, "o_proj": 4}}
    adapter = read_adapter(tiny_models.save_adapter(tmp_path / "a", rank=4, **changes))
    stored = tiny_models.adapter_tensors(rank=4)
    for name, theirs, alpha in (
        ("layers.0.attention.q", "layers.0.self_attn.q_proj", 8),
        ("layers.2.attention.q", "layers.2.self_attn.q_proj", 2),
        ("layers.1.attention.o", "layers.1.self_attn.o_proj", 4),
    ):
        expected = stored[f"base_model.model.model.{theirs}.lora_B.weight"] * alpha / math.sqrt(4)
        torch.testing.assert_close(adapter[name].up, expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"lora_alpha": "big"}, "lora_alpha is 'big', not a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10*, not a number from"),
        ({"lora_alpha": 1e30}, "not a number from"),
        ({"alpha_pattern": {"q_proj": True}}, "lora_alpha is True"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the model's own weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is no object"),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern is no object"),
    ],
)
def test_what_would_be_left_out_is_refused(
    read_adapter: Read, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4, **changes)
    with pytest.raises(WeightsError, match=reason):
        read_adapter(folder)


@pytest.mark.parametrize(
    "pattern",
    ["o_proj", r"model\.layers\.\d+\.self_attn\.(?:q|o)_proj", ".*o_proj$", r"layers.[0-9]+.self_attn.o_proj", "o_.*"],
)
def test_patterns_of_modules_are_followed(read_adapter: Read, tmp_path: Path, pattern: str) -> None:
    plain = read_adapter(tiny_models.save_adapter(tmp_path / "a", rank=4, lora_alpha=2))
    changed = read_adapter(tiny_models.save_adapter(tmp_path / "b", rank=4, lora_alpha=2, alpha_pattern={pattern: 6}))
    assert torch.equal(changed["layers.1.attention.o"].up, plain["layers.1.attention.o"].up * 3)
    assert torch.equal(changed["layers.1.mlp.up"].up, plain["layers.1.mlp.up"].up)


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*x", "(.*)+x", "(.*){20}x", ".*.*.*.*x", r"\w+\w+\w+\w+x", "(?:o_?)+x", "x" * 501, "(" * 300 + ")" * 300],
)
def test_patterns_that_could_take_forever_are_refused(read_adapter: Read, tmp_path: Path, pattern: str) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4, alpha_pattern={pattern: 3})
    with pytest.raises(WeightsError, match="alpha_pattern"):
        read_adapter(folder)


def test_broken_tensors_are_refused(read_adapter: Read, tmp_path: Path) -> None:
    def refusal(tensors: dict[str, torch.Tensor]) -> str:
        folder = tiny_models.save_adapter(tmp_path / "a", rank=4)
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(WeightsError) as caught:
            read_adapter(folder)
        return caught.value.message

    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    down, up = torch.ones(4, 48), torch.ones(48, 4)
    assert "only one of" in refusal({f"{prefix}A.weight": down})
    assert "has rank 4 in lora_A, but 5 in" in refusal(
        {f"{prefix}A.weight": down, f"{prefix}B.weight": torch.ones(48, 5)}
    )
    assert "no finite" in refusal({f"{prefix}A.weight": down * math.nan, f"{prefix}B.weight": up})
    assert "rank 65" in refusal({f"{prefix}A.weight": torch.ones(65, 48), f"{prefix}B.weight": torch.ones(48, 65)})
    assert "is of type F64" in refusal({f"{prefix}A.weight": down.double(), f"{prefix}B.weight": up})
    assert "is no matrix" in refusal({f"{prefix}A.weight": torch.ones(48), f"{prefix}B.weight": up})
    assert "two tensors lora_A" in refusal({f"{prefix}A.weight": down, f"{prefix}A.default.weight": down.clone()})
    for stored in (f"{prefix}A.weight", f"{prefix}B.weight"):
        other = {
            f"{prefix}A.weight": down,
            f"{prefix}B.weight": up,
            stored: torch.ones(47, 4) if "B" in stored else down[:, 1:].clone(),
        }
        assert f"tensor '{stored}' was made for another model" in refusal(other)
    deep = prefix.replace("layers.0", "layers.3")
    assert "this model has 3 layers" in refusal({f"{deep}A.weight": down, f"{deep}B.weight": up})
    assert "adapts something else" in refusal({"base_model.model.lm_head.lora_A.weight": down})
    many_digits = prefix.replace("layers.0", f"layers.{'1' * 5000}")
    assert "adapts something else" in refusal({f"{many_digits}A.weight": down, f"{many_digits}B.weight": up})
    assert "holds no tensors" in refusal({})


def test_broken_files_are_refused(read_adapter: Read, tmp_path: Path) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4)
    (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        read_adapter(folder)


# -- installing --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_call_would_refuse_is_not_installed(model: Path, tmp_path: Path) -> None:
    store = ModelStore.in_state_dir(tmp_path / "state")
    store.add(str(model), "tiny")

    def adapt(folder: Path) -> Result:
        return CliRunner().invoke(cli, ["models", "adapt", "tiny", str(folder), "--state-dir", str(tmp_path / "state")])

    for name, rank, changes, reason in (
        ("dora", 4, {"use_dora": True}, "use_dora is True, which is not supported"),
        ("large", 65, {}, "rank 65, which is not from 1 to 64"),
        ("ia3", 4, {"peft_type": "IA3"}, "only LORA is supported"),
    ):
        refused = adapt(tiny_models.save_adapter(tmp_path / name, rank=rank, **changes))
        assert (refused.exit_code, reason in refused.stderr) == (1, True), refused.stderr
        assert f"{tmp_path / name}/adapter_" in refused.stderr, "the folder that the user named, not our copy of it"
    shutil.rmtree(tmp_path / "dora")
    (tmp_path / "dora").mkdir()
    assert "has no adapter_config.json" in adapt(tmp_path / "dora").stderr
    assert store.adapters("tiny") == ()
    good = tiny_models.save_adapter(tmp_path / "good", rank=4)
    assert adapt(good).exit_code == 0
    assert store.adapters("tiny") == ("good",)
    installed = read_for(store.path("tiny").parent / "adapters" / "good", open_checkpoint(model).config())
    assert len(installed) == 3 * 7


@pytest.mark.slow
def test_an_adapter_of_another_model_is_not_installed(model: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    store.add(str(tiny_models.save_folder(tmp_path / "narrow", num_hidden_layers=2)), "narrow")
    with pytest.raises(WeightsError, match=r"layers\.2\..*was made for another model.*this model has 2 layers"):
        store.add_adapter("narrow", tiny_models.save_adapter(tmp_path / "three", rank=4))
    assert store.adapters("narrow") == ()
