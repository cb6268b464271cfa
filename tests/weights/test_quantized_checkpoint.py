from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint, open_checkpoint
from edge.weights.facts import read_facts
from edge.weights.folder import Quantization
from edge.weights.quantized import Quantized, quantize
from edge.weights.quantized_checkpoint import QuantizedCheckpoint, save_quantized

ABOUT = Quantization(bits=4, group_size=16, bits_by_name={"embed.weight": 8, "head.weight": 8})


def contents(source: Checkpoint) -> dict[str, torch.Tensor | Quantized]:
    values: dict[str, torch.Tensor | Quantized] = {}
    for name in source.names():
        tensor = source.tensor(name)
        bits = ABOUT.bits_of(name)
        values[name] = quantize(tensor, bits=bits, group=16) if tensor.dim() == 2 else tensor
    return values


@pytest.fixture(params=["llama", "gemma3"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(tiny_models.save_folder(tmp_path / "source", **tiny_models.FAMILIES[request.param]))


@pytest.fixture
def folder(source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("edge.weights.quantized_checkpoint.MAX_SHARD_BYTES", 40_000)
    folder = tmp_path / "quantized"
    folder.mkdir()
    save_quantized(folder, source, ABOUT, contents(source).items())
    return folder


def test_what_was_saved_comes_back(source: Checkpoint, folder: Path) -> None:
    saved, opened = contents(source), open_checkpoint(folder)
    assert isinstance(opened, QuantizedCheckpoint)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (opened.architecture, opened.config()) == (source.architecture, source.config())
    assert opened.tokenizer_files() == source.tokenizer_files()
    assert sorted(opened.names()) == sorted(source.names())
    for name, tensor in opened.tensors():
        expected, matrix = saved[name], opened.quantized(name)
        if isinstance(expected, Quantized):
            assert matrix is not None
            assert (matrix.bits, matrix.group) == (expected.bits, 16)
            assert torch.equal(tensor, expected.dequantize())
        else:
            assert matrix is None
            assert torch.equal(tensor, expected)


def test_facts_are_those_of_the_source(source: Checkpoint, folder: Path) -> None:
    facts = read_facts(folder)
    assert facts.num_parameters == sum(source.tensor(name).numel() for name in source.names())
    assert (facts.architecture, facts.context_length, facts.task) == (source.architecture, 512, "text-generation")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"quantized: tensor 'layers\.9\.mlp\.up\.weight' is missing"):
        open_checkpoint(folder).tensor("layers.9.mlp.up.weight")


def damage(folder: Path, name: str, change: Any) -> None:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            save_file({**tensors, name: change(tensors[name]).contiguous()}, shard)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("codes", lambda codes: codes[:, :-1]),
        ("codes", lambda codes: codes[:-1]),
        ("codes", lambda codes: codes.float()),
        ("codes", lambda codes: codes.flatten()),
        ("scales", lambda scales: scales[:, :0]),
        ("scales", lambda scales: scales.float()),
        ("scales", lambda scales: scales * float("nan")),
        ("minimums", lambda minimums: minimums + float("inf")),
        ("minimums", lambda minimums: minimums[:1]),
    ],
)
def test_damaged_matrices_are_refused(folder: Path, part: str, change: Any) -> None:
    name = "layers.0.mlp.down.weight"
    damage(folder, f"{name}.{part}", change)
    with pytest.raises(WeightsError, match=f"{name}' do not fit each other.*edge models quantize"):
        open_checkpoint(folder).quantized(name)


def test_other_damage_is_refused(folder: Path) -> None:
    damage(folder, "norm.weight", lambda weight: weight.int())
    with pytest.raises(WeightsError, match=r"'norm\.weight' is stored as torch\.int32, not as floats"):
        open_checkpoint(folder).tensor("norm.weight")
    save_file({"embed.weight": torch.zeros(2, 2)}, folder / "other.safetensors")
    with pytest.raises(WeightsError, match="both as floats and as codes"):
        open_checkpoint(folder).names()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, r"quant_method is 'awq'\); use the unquantized model or a GGUF file"),
        ({"bits": 3}, "quantization_config cannot be used"),
        ({"group_size": "x"}, "quantization_config cannot be used"),
    ],
)
def test_other_quantizations_are_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(folder)
