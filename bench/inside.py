"""What HTTP does not show: sizes of the KV formats, and how far formats move a model's predictions.

Uses the engine's own parts in this process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import torch

from bench.report import Row, Target, measured, missing
from edge.config import ModelOptions
from edge.engine import kernels as native
from edge.engine.fidelity import Subject, compare, make_cache
from edge.engine.kernels import Kernels, KernelsUnavailable
from edge.engine.kv_cache import KvOptions
from edge.engine.models.decoder import Decoder
from edge.engine.process import num_cores
from edge.engine.runner import load
from edge.engine.tokenizer import Tokenizer
from edge.weights.checkpoint import open_checkpoint
from edge.weights.conversion import CALIBRATION_TEXT, HELDOUT_TEXT, Job, Recipe, Report, Result

MAX_TEXT_TOKENS = 2048
QUANTIZE_TIMEOUT_S = 3600.0
RECIPES = {"int8": Recipe(bits=8, group=0), "int4": Recipe(bits=4, group=32)}

KV_VARIANTS = {
    "float32": KvOptions(),
    "int8": KvOptions(),
    "int8, no rotation": KvOptions(rotate_keys=False),
    "int4": KvOptions(),
    "int4, no rotation": KvOptions(rotate_keys=False),
    "int4, keys and values rotated": KvOptions(rotate_values=True),
    "int4, without sink and window": KvOptions(sink_pages=0, window_pages=0),
    "int4, plain rounding": KvOptions(rotate_keys=False, sink_pages=0, window_pages=0),
}
"""A format, what distinguishes it from the default, and the options."""


def kv_sizes(file: Path, num_tokens: int) -> dict[str, float]:
    """Bytes that a sequence of `num_tokens` takes in each KV format, everything included."""
    config = open_checkpoint(file).config()
    return {
        kv: make_cache(config, num_tokens, kv, torch.device("cpu")).size_bytes(num_tokens)
        for kv in ("bfloat16", "int8", "int4")
    }


def kv_fidelity(name: str, file: Path) -> Iterator[Row]:
    """The KV formats against bfloat16 KV, with weights and activations in float32.

    As models are served, activations are rounded to codes, and whatever moves them a little moves some to the next
    code: that alone is a divergence of about 1e-3, in which the difference between formats would drown.
    """
    metric = f"KL to bfloat16 KV, mean, float32 weights, {name}"
    if not file.exists():
        yield from [missing(f"{metric}, {kv}", "nats", _not_installed(file)) for kv in ("int8", "int4")]
        return
    model, texts = _model(file, ModelOptions(weights="float32")), _texts(file)
    num_tokens = max(map(len, texts))
    reference = Subject(model, make_cache(model.config, num_tokens, "bfloat16", torch.device("cpu")))
    for variant, options in KV_VARIANTS.items():
        kv = variant.partition(",")[0]
        candidate = Subject(model, make_cache(model.config, num_tokens, kv, torch.device("cpu"), options))
        target = Target("<=", 2e-3) if variant == "int8" else None
        yield _kl_row(f"{metric}, {variant}", compare(reference, candidate, texts), target)


def weight_fidelity(name: str, file: Path) -> Iterator[Row]:
    """Weights as they are served, and those of the quantizer, against the file's own values in float32."""
    if not file.exists():
        yield from [missing(f"{name}: {kind} weights", "", _not_installed(file)) for kind in RECIPES]
        return
    texts = _texts(file)
    num_tokens = max(map(len, texts))
    reference, served = (
        Subject(model, make_cache(model.config, num_tokens, "float32", torch.device("cpu")))
        for model in (_model(file, ModelOptions(weights=weights)) for weights in ("float32", "auto"))
    )
    metric = f"{name}: mean KL of the file's own weights on our kernels"
    yield _kl_row(metric, compare(reference, served, texts), Target("<=", 2e-3))
    for kind, recipe in RECIPES.items():
        report = _quantize(file, recipe)
        if isinstance(report, str):
            yield missing(f"{name}: {kind} weights of the quantizer", "", report)
        elif kind == "int8":
            yield _kl_row(f"{name}: mean KL of int8 weights, by row", report, Target("<=", 2e-3))
        else:
            metric = f"{name}: top-1 agreement of int4 weights, groups of {recipe.group}"
            yield measured(metric, 100 * report.top1, "%", target=Target(">=", 95, "%"), note=_note(report))


def _quantize(file: Path, recipe: Recipe) -> Report | str:
    """What the quantizer reports of a conversion whose result is thrown away, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
        (Path(folder) / "model").mkdir()
        job = Job(
            source=str(file),
            folder=f"{folder}/model",
            recipe=recipe,
            calibration=str(CALIBRATION_TEXT),
            heldout=str(HELDOUT_TEXT),
            cache_dir=f"{folder}/kernels",
        )
        command = [sys.executable, "-m", "edge.engine.quantize", msgspec.json.encode(job).decode()]
        done = subprocess.run(command, capture_output=True, check=False, timeout=QUANTIZE_TIMEOUT_S)
    if done.returncode != 0:
        return f"the quantizer failed: {done.stderr.decode(errors='replace').strip()[-300:]}"
    return msgspec.json.decode(done.stdout, type=Result).report


def _kl_row(metric: str, report: Report, target: Target | None) -> Row:
    return measured(metric, report.mean_kl, "nats", target=target, note=_note(report))


def _note(report: Report) -> str:
    return (
        f"{report.num_tokens} tokens; mean KL {report.mean_kl:.3g}, 99.9% {report.kl_999:.3g}, "
        f"top-1 {100 * report.top1:.1f}%, perplexity {report.perplexity_reference:.3f} to {report.perplexity:.3f}"
    )


def _not_installed(file: Path) -> str:
    return f"{file.parent.name} is not installed: there is no {file}"


@cache
def _kernels() -> Kernels | None:
    try:
        with tempfile.TemporaryDirectory() as folder:  # it may go once the library is loaded
            kernels = native.load(Path(folder))
    except KernelsUnavailable:
        return None
    kernels.num_threads = num_cores()
    return kernels


def _model(file: Path, options: ModelOptions) -> Decoder:
    return load(open_checkpoint(file), options=options, device=torch.device("cpu"), kernels=_kernels())


def _texts(file: Path) -> list[list[int]]:
    """The tokens of the text that models are judged by, as one piece: KV formats matter most in long texts."""
    return [
        Tokenizer(open_checkpoint(file).tokenizer_files()).encode(HELDOUT_TEXT.read_text(), 1 << 20)[:MAX_TEXT_TOKENS]
    ]
