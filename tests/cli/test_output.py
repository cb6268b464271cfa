from __future__ import annotations

import json

import pytest

from edge.cli.output import emit, format_bytes

ROWS = [
    {"name": "a" * 120, "count": 1234, "size": "98.4 MB", "ok": True, "hidden": [1]},
    {"name": "[bold]é", "count": None, "size": "1 B", "ok": False, "hidden": None},
]
COLUMNS = [("name", "Name"), ("count", "Count"), ("size", "Size"), ("ok", "Fine")]


def test_a_table_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    emit(ROWS, COLUMNS, as_json=False, footer="2 rows")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Name", "Count", "Size", "Fine"]
    assert lines[2:] == [["a" * 120, "1,234", "98.4", "MB", "yes"], ["[bold]é", "-", "1", "B", "no"], ["2", "rows"]]


def test_numbers_are_right_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    emit([{"n": 5, "s": "x"}, {"n": 1000, "s": "yy"}], [("n", "N"), ("s", "S")], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines[2:]] == ["    5   x", "1,000   yy"]


def test_json_has_whole_rows_and_no_footer(capsys: pytest.CaptureFixture[str]) -> None:
    emit(ROWS, COLUMNS, as_json=True, footer="2 rows")
    assert json.loads(capsys.readouterr().out) == ROWS
    emit([], COLUMNS, as_json=True)
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98362432, "98.4 MB"), (24 * 10**9, "24.0 GB"), (10**13, "10.0 TB")],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
