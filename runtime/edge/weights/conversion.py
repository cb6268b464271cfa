"""What `edge models quantize` asks the quantizer for and what it gets back: a recipe, a report, and the gates.

This module knows nothing about torch, nor about how weights are quantized or compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

REPORT_FILE = "report.json"

_TEXTS = Path(__file__).parent
CALIBRATION_TEXT = _TEXTS / "calibration.txt"
HELDOUT_TEXT = _TEXTS / "heldout.txt"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are quantized."""

    bits: Literal[4, 8]
    group: Annotated[int, msgspec.Meta(ge=0)]
    """Columns that share a scale; 0: a whole row. Matrices whose width is no multiple get a smaller one."""
    symmetric: bool = False
    search: bool = True
    """Whether codes and scales are searched for that suit a calibration text; else weights are just rounded."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One conversion; all texts but the recipe are absolute paths."""

    source: str
    """A GGUF file, or a folder with safetensors."""
    folder: str
    """An empty folder for the result."""
    recipe: Recipe
    calibration: str
    """A text that the search is made on."""
    heldout: str
    """A text that the result is measured on."""
    cache_dir: str
    """Where compiled kernels are kept."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate against a reference, over all positions of a text that have a next token."""

    num_tokens: int
    perplexity_reference: float
    perplexity: float
    mean_kl: float
    """Mean Kullback-Leibler divergence from reference to candidate, in nats."""
    kl_999: float
    """Its 99.9% quantile."""
    top1: float
    """Share of positions at which both find the same token the most likely, 0 to 1."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job, beside the weights."""

    recipe: Recipe
    report: Report
    size_bytes_source: int
    size_bytes: int
    quantize_s: float


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """How far quantized weights may be from their source."""

    max_kl: float
    """Mean, in nats."""
    min_top1: float


GATES = {8: Gate(max_kl=2e-3, min_top1=0.97), 4: Gate(max_kl=0.03, min_top1=0.95)}
"""By bits."""


def misses(result: Result) -> list[str]:
    """What keeps `result` from passing its gate, with the number, the limit, and by how much; empty: it passes."""
    gate, report = GATES[result.recipe.bits], result.report
    found = []
    if not report.mean_kl <= gate.max_kl:
        found.append(
            f"the mean KL divergence is {report.mean_kl:.4g}, {report.mean_kl / gate.max_kl:.1f} times the limit of "
            f"{gate.max_kl:g}"
        )
    if not report.top1 >= gate.min_top1:
        found.append(
            f"the top-1 agreement is {report.top1:.1%}, {100 * (gate.min_top1 - report.top1):.1f} points below the "
            f"limit of {gate.min_top1:.0%}"
        )
    return found
