"""Reading LoRA adapters as PEFT lays them out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import save_file

from edge.errors import WeightsError
from edge.weights.adapter import read_adapter


def test_the_scale_is_in_the_matrices(tmp_path: Path) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4, lora_alpha=6)
    stored = tiny_models.adapter_tensors(rank=4)
    adapter = read_adapter(folder)
    assert sorted(adapter)[:2] == ["layers.0.attention.k", "layers.0.attention.o"]
    assert len(adapter) == 3 * 7
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    torch.testing.assert_close(adapter["layers.1.mlp.up"].down, stored[f"{name}A.weight"])
    torch.testing.assert_close(adapter["layers.1.mlp.up"].up, stored[f"{name}B.weight"] * 1.5)


def test_rslora_and_alphas_of_single_modules(tmp_path: Path) -> None:
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
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is no object"),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern is no object"),
    ],
)
def test_what_would_be_left_out_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4, **changes)
    with pytest.raises(WeightsError, match=reason):
        read_adapter(folder)


@pytest.mark.parametrize(
    "pattern",
    ["o_proj", r"model\.layers\.\d+\.self_attn\.(?:q|o)_proj", ".*o_proj$", r"layers.[0-9]+.self_attn.o_proj", "o_.*"],
)
def test_patterns_of_modules_are_followed(tmp_path: Path, pattern: str) -> None:
    plain = read_adapter(tiny_models.save_adapter(tmp_path / "a", rank=4, lora_alpha=2))
    changed = read_adapter(tiny_models.save_adapter(tmp_path / "b", rank=4, lora_alpha=2, alpha_pattern={pattern: 6}))
    assert torch.equal(changed["layers.1.attention.o"].up, plain["layers.1.attention.o"].up * 3)
    assert torch.equal(changed["layers.1.mlp.up"].up, plain["layers.1.mlp.up"].up)


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*x", "(.*)+x", "(.*){20}x", ".*.*.*.*x", r"\w+\w+\w+\w+x", "(?:o_?)+x", "x" * 501, "(" * 300 + ")" * 300],
)
def test_patterns_that_could_take_forever_are_refused(tmp_path: Path, pattern: str) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4, alpha_pattern={pattern: 3})
    with pytest.raises(WeightsError, match="alpha_pattern"):
        read_adapter(folder)


def test_broken_tensors_are_refused(tmp_path: Path) -> None:
    def refusal(tensors: dict[str, torch.Tensor]) -> str:
        folder = tiny_models.save_adapter(tmp_path / "a", rank=4)
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(WeightsError) as caught:
            read_adapter(folder)
        return caught.value.message

    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    down, up = torch.ones(4, 48), torch.ones(48, 4)
    assert "only one of" in refusal({f"{prefix}A.weight": down})
    assert "no matrices that fit" in refusal({f"{prefix}A.weight": down, f"{prefix}B.weight": torch.ones(48, 5)})
    assert "no finite" in refusal({f"{prefix}A.weight": down * math.nan, f"{prefix}B.weight": up})
    assert "rank 65" in refusal({f"{prefix}A.weight": torch.ones(65, 48), f"{prefix}B.weight": torch.ones(48, 65)})
    assert "adapts something else" in refusal({"base_model.model.lm_head.lora_A.weight": down})
    many_digits = prefix.replace("layers.0", f"layers.{'1' * 5000}")
    assert "adapts something else" in refusal({f"{many_digits}A.weight": down, f"{many_digits}B.weight": up})
    assert "holds no tensors" in refusal({})


def test_broken_files_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.save_adapter(tmp_path / "a", rank=4)
    (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        read_adapter(folder)
