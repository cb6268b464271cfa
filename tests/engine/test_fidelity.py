from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny_models
import torch

from edge.config import ModelOptions
from edge.engine.fidelity import Subject, compare, log_probs, make_cache
from edge.engine.models import load_model
from edge.engine.models.decoder import Decoder
from edge.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
TEXTS = [[(7 * i * i + i) % 250 for i in range(300)], [3, 1, 4, 1, 5]]


def model(folder: Path) -> Decoder:
    options = ModelOptions(weights="float32")
    return load_model(open_checkpoint(folder), options=options, dtype=torch.float32, device=CPU, kernels=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Decoder]:
    root = tmp_path_factory.mktemp("models")
    return [model(tiny_models.save_folder(root / str(seed), seed=seed)) for seed in range(2)]


def subject(model: Decoder, kv: str = "float32") -> Subject:
    return Subject(model, make_cache(model.config, 300, kv, CPU))


def test_a_model_is_like_itself(models: list[Decoder]) -> None:
    report = compare(subject(models[0]), subject(models[0]), TEXTS)
    assert report.num_tokens == 299 + 4
    assert (report.mean_kl, report.kl_999, report.top1) == (0, 0, 1)
    assert report.perplexity == report.perplexity_reference


def test_another_model_is_measured_as_by_definition(models: list[Decoder]) -> None:
    report = compare(subject(models[0]), subject(models[1]), TEXTS)
    pairs = []
    for text in TEXTS:
        p, q = (torch.cat(list(log_probs(subject(each), text))).double() for each in models)
        pairs.append((p, q, torch.tensor(text[1:])))
    p, q, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    kl = (p.exp() * (p - q)).sum(-1)
    assert report.mean_kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert report.kl_999 == pytest.approx(float(kl.quantile(0.999)), rel=1e-4)
    assert report.top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    rows = torch.arange(len(targets))
    assert report.perplexity_reference == pytest.approx(math.exp(-float(p[rows, targets].mean())), rel=1e-5)
    assert report.perplexity == pytest.approx(math.exp(-float(q[rows, targets].mean())), rel=1e-5)


def test_kv_formats_can_be_compared(models: list[Decoder]) -> None:
    reports = [compare(subject(models[0]), subject(models[0], kv), TEXTS) for kv in ("bfloat16", "int8", "int4")]
    divergences = [report.mean_kl for report in reports]
    assert 0 < divergences[0] < divergences[1] < divergences[2] < 1


def test_what_cannot_be_compared(models: list[Decoder]) -> None:
    with pytest.raises(ValueError, match="no text has two tokens"):
        compare(subject(models[0]), subject(models[0]), [[1]])
    with pytest.raises(ValueError, match="399 tokens do not fit a cache of 304"):
        compare(subject(models[0]), subject(models[0]), [[1] * 400])
