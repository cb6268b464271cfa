"""LoRA adapters: equal to merged weights, mixed in one batch, loaded on demand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edge.config import ModelOptions
from edge.engine import kernels as native
from edge.engine import lora
from edge.engine.lora import Adapter, AdapterStore, AdapterTable, StepAdapters
from edge.engine.runner import ModelRunner, load_runner
from edge.engine.scheduler import Chunk, Sequence
from edge.errors import InvalidInput
from edge.weights.adapter import read_adapter
from edge.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
PROMPTS = [list(b"one prompt, seventeen"), list(b"another"), list(b"and a third one that is longer than the others")]


def runner(folder: Path) -> ModelRunner:
    return load_runner(
        open_checkpoint(folder),
        options=ModelOptions(weights="float32"),
        device=CPU,
        kernels=None,
        kv_tokens=1024,
        max_running=8,
        step_tokens=512,
    )


def run(target: ModelRunner, prompts: list[list[int]], adapters: list[Adapter | None]) -> Tensor:
    """The logits after each of `prompts`, computed in one batch."""
    chunks = []
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        sequence = Sequence(number, prompt, len(prompt), credit=1)
        sequence.pages = target.allocator.take(target.allocator.pages_for(len(prompt)))
        if adapter is not None:
            target.adapters[number] = adapter
        chunks.append(Chunk(sequence, len(prompt)))
    logits = target.run(chunks)
    target.adapters.clear()
    for chunk in chunks:
        target.allocator.release(chunk.sequence.pages)
    return logits


def merged(source: Path, adapter: Path, folder: Path) -> Path:
    """The model in `source` with the adapter's updates added to its weights."""
    tiny_models.save_folder(folder)
    weights = load_file(source / "model.safetensors")
    for name, pair in read_adapter(adapter, open_checkpoint(source).config()).items():
        _, layer, part = name.split(".", 2)
        kind = "self_attn" if part.startswith("attention") else "mlp"
        weights[f"model.layers.{layer}.{kind}.{part.split('.')[1]}_proj.weight"] += pair.up @ pair.down
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    model = tiny_models.save_folder(root / "model")
    found = {"model": model}
    for seed, (name, rank) in enumerate({"small": 2, "middle": 8, "large": 64}.items()):
        found[name] = tiny_models.save_adapter(root / "adapters" / name, rank=rank, seed=seed)
        found[f"merged-{name}"] = merged(model, found[name], root / f"merged-{name}")
    return found


def test_adapters_mixed_in_one_batch_equal_merged_weights(folders: dict[str, Path]) -> None:
    base = runner(folders["model"])
    store = AdapterStore(folders["small"].parent, base.model.config, CPU)
    names = ["small", "large", "middle"]
    mixed = run(base, [*PROMPTS, PROMPTS[0]], [*(store.get(name) for name in names), None])
    for row, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True)):
        expected = run(runner(folders[f"merged-{name}"]), [prompt], [None])
        torch.testing.assert_close(mixed[row], expected[0], rtol=1e-4, atol=1e-4)
    plain = run(base, [PROMPTS[0]], [None])[0]
    torch.testing.assert_close(mixed[3], plain, rtol=1e-4, atol=1e-4)
    assert (mixed[0] - plain).abs().max() > 0.5, "the adapter must change something"


def test_the_native_kernel_equals_torch_and_rows_do_not_depend_on_others(
    folders: dict[str, Path], kernels: native.Kernels
) -> None:
    config = runner(folders["model"]).model.config
    store = AdapterStore(folders["small"].parent, config, CPU)
    adapters = tuple(store.get(name) for name in ("small", "middle", "large"))
    torch.manual_seed(0)
    x = torch.randn(40, config.hidden_size)
    rows = torch.tensor([0, 3, *range(5, 30), 39], dtype=torch.int32)
    which = torch.randint(0, 3, (len(rows),), dtype=torch.int32)

    def update(table: AdapterTable, rows: Tensor, which: Tensor) -> Tensor:
        out = torch.zeros(40, (6 + 2 * 2) * 8)
        StepAdapters(table, rows, which).add("qkv", 1, x, out, lambda rows: rows * 2)
        return out

    by_kernel = AdapterTable(adapters, config, kernels)
    together = update(by_kernel, rows, which)
    torch.testing.assert_close(together, update(AdapterTable(adapters, config, None), rows, which))
    untouched = [row for row in range(40) if row not in rows.tolist()]
    assert together[untouched].eq(0).all()
    for row, adapter in zip(rows.tolist(), which.tolist(), strict=True):
        alone = update(by_kernel, torch.tensor([row], dtype=torch.int32), torch.tensor([adapter], dtype=torch.int32))
        assert torch.equal(alone[row], together[row])


def test_adapters_are_loaded_on_demand_and_the_least_used_one_goes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "MAX_LOADED", 2)
    store = AdapterStore(folders["small"].parent, runner(folders["model"]).model.config, CPU)
    small, middle = store.get("small"), store.get("middle")
    assert store.get("small") is small
    store.get("large")
    assert store.get("small") is small
    assert store.get("middle") is not middle


def test_an_adapter_that_is_replaced_or_removed_is_not_used_again(folders: dict[str, Path], tmp_path: Path) -> None:
    config = runner(folders["model"]).model.config
    store = AdapterStore(tmp_path, config, CPU)
    tiny_models.save_adapter(tmp_path / "a", rank=2, seed=0)
    old = store.get("a")
    assert store.get("a") is old
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(InvalidInput, match="has no adapter 'a'"):
        store.get("a")
    tiny_models.save_adapter(tmp_path / "a", rank=2, seed=1)
    new = store.get("a")
    assert new.key != old.key
    assert not torch.equal(new.part(0, "attention.q").down, old.part(0, "attention.q").down)


def test_an_adapter_that_is_not_there_or_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    config = runner(folders["model"]).model.config
    store = AdapterStore(folders["small"].parent, config, CPU)
    for name in ("tiny", "../model", "", "x" * 500, "."):
        with pytest.raises(InvalidInput, match="the model's adapters: large, middle, small") as caught:
            store.get(name)
        assert caught.value.param == "lora"
    with pytest.raises(InvalidInput, match="edge models adapt"):
        AdapterStore(tmp_path / "none", config, CPU).get("x")
    narrow = tiny_models.save_folder(tmp_path / "narrow", num_hidden_layers=2)
    other = AdapterStore(folders["small"].parent, open_checkpoint(narrow).config(), CPU)
    with pytest.raises(InvalidInput, match="was made for another model"):
        other.get("small")
