"""Rows of a bench: as a table, and as the one JSON line that tools read.

This module knows nothing about what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `metric` says what is compared and under which load; `ratio` is what `target` is about."""

    metric: str
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    target: str | None = None
    ok: bool | None = None
    """None: reported only."""
    note: str = ""
    """Why there is no figure, or under what it was measured."""


@dataclass(frozen=True)
class Target:
    """A limit that a ratio or a value must keep."""

    sign: Literal[">=", "<="]
    limit: float
    suffix: str = ""
    """`x` for ratios, or a unit."""

    def holds(self, figure: float) -> bool:
        """Whether `figure` keeps it."""
        return figure >= self.limit if self.sign == ">=" else figure <= self.limit

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}{self.suffix}"


def compared(
    metric: str,
    value: float,
    unit: str,
    *,
    peer: str,
    peer_value: float,
    target: Target | None = None,
    note: str = "",
    is_less_better: bool = False,
) -> Row:
    """A row whose ratio is how many times better `value` is than `peer_value`."""
    ratio = peer_value / value if is_less_better else value / peer_value
    return Row(
        metric=metric,
        value=value,
        unit=unit,
        peer=peer,
        peer_value=peer_value,
        ratio=ratio,
        target=None if target is None else str(target),
        ok=None if target is None else target.holds(ratio),
        note=note,
    )


def measured(metric: str, value: float, unit: str, *, target: Target | None = None, note: str = "") -> Row:
    """A row about `value` alone."""
    return Row(
        metric=metric,
        value=value,
        unit=unit,
        target=None if target is None else str(target),
        ok=None if target is None else target.holds(value),
        note=note,
    )


def missing(
    metric: str,
    unit: str,
    why: str,
    *,
    value: float | None = None,
    peer: str | None = None,
    target: Target | None = None,
) -> Row:
    """A row that could not be measured, or not compared, which is never a pass."""
    return Row(
        metric=metric,
        value=value,
        unit=unit,
        peer=peer,
        target=None if target is None else str(target),
        ok=False,
        note=why,
    )


def table(rows: Iterable[Row]) -> str:
    """The rows in columns, for people."""
    head = ("", "metric", "value", "unit", "peer", "its value", "ratio", "target", "note")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = {2, 5, 6}
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    mark = {True: "ok", False: "NO", None: ""}[row.ok]
    figures = (row.value, row.peer_value, row.ratio)
    value, peer_value, ratio = ("" if figure is None else f"{figure:.4g}" for figure in figures)
    return (mark, row.metric, value, row.unit, row.peer or "", peer_value, ratio, row.target or "", row.note)


def as_json(bench: str, rows: Iterable[Row], versions: dict[str, str]) -> str:
    """The last line of a bench's output: what was measured, where and of what."""
    report: dict[str, Any] = {
        "bench": bench,
        "commit": commit(),
        "machine": machine(),
        "versions": {**own_versions(), **versions},
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(report, ensure_ascii=False)


def commit() -> str:
    """The commit that is checked out, with `+` where files differ from it; `unknown` outside of a repository."""
    try:
        found = [
            subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found[0] + ("+" if found[1] else "")


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, and how busy it is now."""
    lines = _lines("/proc/cpuinfo")
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    return {
        "processor": next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""),
        "flags": [flag for flag in wanted if flag in flags],
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def own_versions() -> dict[str, str]:
    """Versions of what the product itself runs on."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("edge-workers-ai", "torch")},
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
