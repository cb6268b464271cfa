"""Tables for people, JSON for programs: what a command found goes to stdout in one of the two forms.

In a terminal a table fits the line: columns that matter less are left out, then long texts lose their beginning,
because the end of an id or a path tells it apart. Numbers are never cut. In a pipe everything is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

_NUMBER_OR_TIME = re.compile(r"[-\d.,: ]*\d( [kMGT]?B)?|-|unpriced")
_DECIMAL = re.compile(r"-?[\d,]+\.\d+")
_GAP = "  "
_MIN_TEXT_WIDTH = 8


class Column(NamedTuple):
    """A column of a table: what of a row it shows, and when it is left out."""

    key: str
    title: str
    drop: int = 0
    """Where the line is too short, columns go in this order, 1 first; 0 stays."""


def emit(rows: list[dict[str, Any]], columns: Sequence[Column], *, as_json: bool, footer: str = "") -> None:
    """Print `rows` as a table of `columns`, or as a JSON list of the whole rows.

    Columns of numbers and times are right-aligned; None and empty text are shown as "-". `footer` is what follows the
    table, for people only.
    """
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    width = line_width()
    if rows:
        head, *lines = table(rows, columns, width)
        click.secho(head, bold=True)
        click.echo("\n".join(lines))
    for line in footer.splitlines():
        click.echo(textwrap.fill(line, width) if width else line)


def line_width() -> int | None:
    """How many characters a line of stdout holds; None: any number, as in a pipe for which COLUMNS is not set."""
    if not os.environ.get("COLUMNS") and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def table(rows: list[dict[str, Any]], columns: Sequence[Column], width: int | None) -> list[str]:
    """The lines of a table of at least one row: titles, a rule, the rows; and a word on columns that had no room."""
    shown = {column: [_cell(row.get(column.key)) for row in rows] for column in columns}
    whole = {column for column, cells in shown.items() if _is_of_numbers(cells)}
    for column, cells in shown.items():
        shown[column] = [column.title, *(_with_points_aligned(cells) if column in whole else cells)]
    widths = {column: max(map(_cell_width, cells)) for column, cells in shown.items()}
    if width is not None:
        _leave_out(shown, widths, width)
        _narrow([column for column in shown if column not in whole], widths, width - _width(shown, widths))
    padded = [[_pad(cell, widths[column], column in whole) for cell in cells] for column, cells in shown.items()]
    head, *body = [_GAP.join(cells).rstrip() for cells in zip(*padded, strict=True)]
    lines = [head, "─" * _width(shown, widths), *body]
    if len(shown) < len(columns):
        lines.append("(there are more columns in a wider terminal, and with --json)")
    return lines


def _leave_out(shown: dict[Column, list[str]], widths: dict[Column, int], width: int) -> None:
    for column in sorted((column for column in shown if column.drop), key=lambda column: column.drop):
        if _width(shown, widths) > width:
            del shown[column]


def _narrow(texts: list[Column], widths: dict[Column, int], room: int) -> None:
    """Take what is missing (a negative `room`) from the widest texts."""
    for _ in range(-room):
        widest = max(texts, key=lambda column: widths[column], default=None)
        if widest is None or widths[widest] <= _MIN_TEXT_WIDTH:
            return
        widths[widest] -= 1


def _width(shown: dict[Column, list[str]], widths: dict[Column, int]) -> int:
    return sum(widths[column] for column in shown) + len(_GAP) * (len(shown) - 1)


# -- cells -------------------------------------------------------------------------------------------------


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


def _is_of_numbers(cells: list[str]) -> bool:
    return all(map(_NUMBER_OR_TIME.fullmatch, cells)) and any(cell[-1].isdigit() or cell[-1] == "B" for cell in cells)


def _with_points_aligned(cells: list[str]) -> list[str]:
    """The cells of a column of numbers, so that right-aligned ones have their decimal points below each other."""
    num_decimals = [len(cell) - cell.rfind(".") if _DECIMAL.fullmatch(cell) else 0 for cell in cells]
    return [
        cell + " " * (max(num_decimals) - num) if num else cell for cell, num in zip(cells, num_decimals, strict=True)
    ]


def _pad(text: str, width: int, is_number: bool) -> str:
    if _cell_width(text) > width:
        while _cell_width(text) > width - 1:
            text = text[1:]
        text = f"…{text}"
    blanks = " " * (width - _cell_width(text))
    return blanks + text if is_number else text + blanks


def _cell_width(text: str) -> int:
    """The columns that `text` takes in a terminal."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for people: 98362432 is "98.4 MB"."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
