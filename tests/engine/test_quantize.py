from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import tiny_models
import torch

from edge.engine.quantize import Errors, _inverse, run
from edge.errors import WeightsError
from edge.weights.checkpoint import open_checkpoint
from edge.weights.conversion import CALIBRATION_TEXT, HELDOUT_TEXT, Job, Recipe, Result
from edge.weights.quantized import Quantized, quantize


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
    assert divergences[1] < divergences[0]


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


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 96), (8, 96)])
def test_later_columns_make_up_for_the_errors_of_earlier_ones(bits: int, group: int) -> None:
    torch.manual_seed(0)
    samples = torch.randn(4000, 12) @ torch.randn(12, 96) + torch.randn(4000, 96) / 4  # channels go together
    weight = torch.randn(40, 96)
    errors = Errors(samples.T @ samples / len(samples))
    nearest = quantize(weight, bits=bits, group=group, importance=errors.importance)
    handed_on = errors.hand_on(weight, nearest)

    def disturbance(matrix: Quantized) -> float:
        return float((samples @ (matrix.dequantize() - weight).T).square().mean())

    assert torch.equal(handed_on.scales, nearest.scales)
    assert disturbance(handed_on) < 0.5 * disturbance(nearest)


def test_where_channels_are_independent_the_nearest_code_is_the_best() -> None:
    torch.manual_seed(0)
    weight, errors = torch.randn(10, 96), Errors(torch.diag(torch.rand(96)))
    nearest = quantize(weight, bits=4, group=32, importance=errors.importance)
    assert torch.equal(errors.hand_on(weight, nearest).codes, nearest.codes)


def test_channels_that_were_never_used() -> None:
    torch.manual_seed(0)
    errors, weight = Errors(torch.diag((torch.arange(32) % 4 > 0).float())), torch.randn(4, 32)
    matrix = errors.hand_on(weight, quantize(weight, bits=8, group=32, importance=errors.importance))
    assert (matrix.dequantize() - weight).abs().max() < 0.1


def test_texts_that_are_too_short(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    texts[0].write_text("Hello.")
    source = tiny_models.save_folder(tmp_path / "source")
    with pytest.raises(WeightsError, match=r"calibration\.txt: 6 tokens are too few, at least 256 are needed"):
        run(job(source, tmp_path / "out", texts, Recipe(bits=8, group=0)))


@pytest.mark.parametrize("K", [1, 255, 256, 300, 600])
def test_the_inverse_in_blocks_is_the_inverse(K: int) -> None:
    generator = torch.Generator().manual_seed(K)
    upper = torch.randn(K, K, generator=generator).div(4 * K**0.5).triu()
    upper.diagonal().fill_(1)
    whole = torch.linalg.solve_triangular(upper, torch.eye(K), upper=True)
    torch.testing.assert_close(_inverse(upper), whole)
    assert not _inverse(upper).tril(-1).any()
