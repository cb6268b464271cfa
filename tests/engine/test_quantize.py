from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import tiny_models
import torch

from edge.engine.lora import AdapterStore
from edge.engine.quantize import run
from edge.errors import WeightsError
from edge.weights.checkpoint import open_checkpoint
from edge.weights.conversion import CALIBRATION_TEXT, HELDOUT_TEXT, Job, Recipe, Result

CPU = torch.device("cpu")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """Two short texts: the packaged ones have thousands of tokens for a tokenizer of bytes."""
    paths = (tmp_path / "calibration.txt", tmp_path / "heldout.txt")
    for path, packaged in zip(paths, (CALIBRATION_TEXT, HELDOUT_TEXT), strict=True):
        path.write_text(packaged.read_text()[:1500])
    return paths


def job(source: Path, folder: Path, texts: tuple[Path, Path], recipe: Recipe) -> Job:
    folder.mkdir(parents=True)
    calibration, heldout = texts
    return Job(
        source=str(source),
        folder=str(folder),
        recipe=recipe,
        calibration=str(calibration),
        heldout=str(heldout),
        cache_dir=str(folder / "no-kernels"),
    )


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_int8_is_close_to_the_source_in_every_family(family: str, tmp_path: Path, texts: tuple[Path, Path]) -> None:
    source = tiny_models.save_folder(tmp_path / "source", **tiny_models.FAMILIES[family])
    result = run(job(source, tmp_path / "out", texts, Recipe(bits=8, group=16)))
    assert result.report.mean_kl < 2e-3
    assert result.report.top1 > 0.97
    opened = open_checkpoint(tmp_path / "out")
    assert opened.config() == open_checkpoint(source).config()
    assert opened.tokenizer_files() == open_checkpoint(source).tokenizer_files()
    assert {matrix.bits for name in opened.names() if (matrix := opened.quantized(name)) is not None} == {8}
    assert msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Result) == result


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_search_makes_int4_better(tmp_path: Path, texts: tuple[Path, Path], symmetric: bool) -> None:
    source = tiny_models.save_gguf(tmp_path / "source.gguf")
    divergences = []
    for search in (False, True):
        recipe = Recipe(bits=4, group=64, symmetric=symmetric, search=search)
        result = run(job(source, tmp_path / str(search), texts, recipe))
        divergences.append(result.report.mean_kl)
        opened = open_checkpoint(tmp_path / str(search))
        embedding, query = opened.quantized("embed.weight"), opened.quantized("layers.0.attention.q.weight")
        assert embedding is not None
        assert query is not None
        # 64 does not divide the width of 48; 32 does not either.
        assert (embedding.bits, query.bits, query.group) == (8, 4, 16)
        assert bool(opened.factors()) == search
    assert divergences[1] < divergences[0]


def test_factors_change_nothing_but_the_rounding(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    """Dividing them out again gives the source's matrices."""
    source = tiny_models.save_folder(tmp_path / "source", **tiny_models.FAMILIES["qwen2"])
    run(job(source, tmp_path / "out", texts, Recipe(bits=8, group=16)))
    original, scaled = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    factors = scaled.factors()
    for i in range(3):
        for part in ("attention.q", "attention.v", "attention.o", "mlp.up", "mlp.down"):
            name = f"layers.{i}.{part}"
            values = scaled.tensor(f"{name}.weight") / factors[f"{name}.inputs"]
            if f"{name}.outputs" in factors:
                values = values * factors[f"{name}.outputs"][:, None]
            expected = original.tensor(f"{name}.weight")
            assert (values - expected).abs().max() < 0.02 * expected.abs().max()
    bias = scaled.tensor("layers.1.attention.v.bias") * factors["layers.1.attention.v.outputs"]
    assert torch.allclose(bias, original.tensor("layers.1.attention.v.bias"))


def test_a_head_that_is_stored_as_codes_stays_as_it_is(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    import gguf

    kinds = {"embed_tokens": gguf.GGMLQuantizationType.Q8_0, "lm_head": gguf.GGMLQuantizationType.Q4_1}
    source = tiny_models.save_gguf(tmp_path / "s.gguf", types=kinds, hidden_size=64, num_attention_heads=8)
    run(job(source, tmp_path / "out", texts, Recipe(bits=4, group=64, search=False)))
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for name, bits in (("embed.weight", 8), ("head.weight", 4)):
        matrix = after.quantized(name)
        assert matrix is not None
        assert (matrix.bits, matrix.group) == (bits, 32)
        assert torch.equal(matrix.dequantize(), before.tensor(name))


def test_adapters_mean_the_same_on_the_quantized_model(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    source = tiny_models.save_folder(tmp_path / "source")
    run(job(source, tmp_path / "out", texts, Recipe(bits=8, group=16)))
    tiny_models.save_adapter(tmp_path / "adapters" / "mine", rank=4)
    config, factors = open_checkpoint(source).config(), open_checkpoint(tmp_path / "out").factors()
    plain = AdapterStore(tmp_path / "adapters", config, CPU).get("mine")
    scaled = AdapterStore(tmp_path / "adapters", config, CPU, factors).get("mine")
    ones = torch.ones(1)
    for part in ("attention.q", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down"):
        a, b = plain.part(1, part), scaled.part(1, part)
        assert a is not None
        assert b is not None
        name = f"layers.1.{part}"
        inputs, outputs = factors.get(f"{name}.inputs", ones), factors.get(f"{name}.outputs", ones)
        # What reaches the linear is divided by `inputs`, and what leaves it is expected to be divided by `outputs`.
        update = (b.down / inputs).t() @ b.up * outputs
        assert torch.allclose(update, a.down.t() @ a.up, atol=1e-4)


def test_texts_that_are_too_short(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    texts[0].write_text("Hello.")
    source = tiny_models.save_folder(tmp_path / "source")
    with pytest.raises(WeightsError, match=r"calibration\.txt: 6 tokens are too few, at least 256 are needed"):
        run(job(source, tmp_path / "out", texts, Recipe(bits=8, group=0)))
