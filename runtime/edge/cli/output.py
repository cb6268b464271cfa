"""Tables for people, JSON for programs: what a command found goes to stdout in one of the two forms."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

MAX_PIPE_WIDTH = 10_000
_NUMERIC = re.compile(r"-?[\d,.]*( [kMGT]?B)?")


def emit(
    rows: list[dict[str, Any]],
    columns: Sequence[tuple[str, str]],
    *,
    as_json: bool,
    footer: str | None = None,
) -> None:
    """Print `rows` as a table of `columns` (key, title), or as a JSON list of the whole rows.

    Columns of numbers are right-aligned; None and empty text are shown as "-". `footer` is a line below the table, for
    people only. Without a terminal a table is as wide as its text, so that nothing is cut off in a pipe.
    """
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    _print_table(rows, columns)
    if footer is not None:
        print(footer)


def _print_table(rows: list[dict[str, Any]], columns: Sequence[tuple[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for key, title in columns:
        numeric = bool(rows) and all(_NUMERIC.fullmatch(_cell(row.get(key))) for row in rows)
        table.add_column(Text(title), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(key))) for key, _ in columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = MAX_PIPE_WIDTH
    console.print(table)


def _cell(value: Any) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for people: 98362432 is "98.4 MB"."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
