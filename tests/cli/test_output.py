from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.cli.output import Column, emit, format_bytes, table

ROWS = [
    {"name": "a" * 120, "count": 1234, "size": "98.4 MB", "ok": True, "hidden": [1]},
    {"name": "[bold]é", "count": None, "size": "1 B", "ok": False, "hidden": None},
]
COLUMNS = [Column("name", "Name"), Column("count", "Count"), Column("size", "Size"), Column("ok", "Fine")]


def test_a_table_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    emit(ROWS, COLUMNS, as_json=False, footer="2 rows\n" + "word " * 40)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Name", "Count", "Size", "Fine"]
    assert lines[2:4] == [["a" * 120, "1,234", "98.4", "MB", "yes"], ["[bold]é", "-", "1", "B", "no"]]
    assert lines[4:] == [["2", "rows"], ["word"] * 40]


def test_without_rows_there_is_only_the_footer(capsys: pytest.CaptureFixture[str]) -> None:
    emit([], COLUMNS, as_json=False, footer="nothing")
    assert capsys.readouterr().out == "nothing\n"


def test_numbers_are_right_aligned_by_their_points() -> None:
    rows = [
        {"n": 5, "s": "x", "d": "0.25", "u": "98.4 MB", "dash": None},
        {"n": 1000, "s": "yy", "d": "12.125", "u": "172 B", "dash": ""},
        {"n": None, "s": "zzz", "d": "unpriced", "u": "1.0 kB", "dash": None},
    ]
    columns = [Column(key, key.upper()) for key in ("n", "s", "d", "u", "dash")]
    assert table(rows, columns, None) == [
        "    N  S           D        U  DASH",
        "───────────────────────────────────",
        "    5  x       0.25   98.4 MB  -",
        "1,000  yy     12.125    172 B  -",
        "    -  zzz  unpriced   1.0 kB  -",
    ]


def test_what_does_not_fit_is_left_out_and_then_cut_at_its_beginning() -> None:
    rows = [{"id": "@cf/meta/llama-3.2-1b-instruct", "via": "binding", "cached": 0, "usd": "0.000028451709"}]
    columns = [
        Column("id", "Model"),
        Column("via", "Via", drop=2),
        Column("cached", "Cached", drop=1),
        Column("usd", "USD"),
    ]
    more = "(there are more columns in a wider terminal, and with --json)"
    assert table(rows, columns, 63)[2:] == ["@cf/meta/llama-3.2-1b-instruct  binding       0  0.000028451709"]
    assert table(rows, columns, 62)[2:] == ["@cf/meta/llama-3.2-1b-instruct  binding  0.000028451709", more]
    assert table(rows, columns, 50)[2:] == ["@cf/meta/llama-3.2-1b-instruct  0.000028451709", more]
    assert table(rows, columns, 40)[2:] == ["…a/llama-3.2-1b-instruct  0.000028451709", more]
    assert table(rows, columns, 10)[2:] == ["…nstruct  0.000028451709", more]


def test_wide_characters_count_twice() -> None:
    assert table([{"a": "日本語のモデル", "b": "x"}], [Column("a", "A"), Column("b", "B")], 12) == [
        "A          B",
        "────────────",
        "…のモデル  x",
    ]


@given(st.lists(st.tuples(st.text("ab/é日", max_size=40), st.integers(0, 10**12)), min_size=1), st.integers(40, 120))
def test_numbers_are_never_cut(cells: list[tuple[str, int]], width: int) -> None:
    rows = [{"text": text, "number": number} for text, number in cells]
    _, _, *lines = table(rows, [Column("text", "Text"), Column("number", "Number")], width)
    assert [int(re.split(r"\s+", line)[-1].replace(",", "")) for line in lines] == [number for _, number in cells]
    assert max(map(len, lines)) <= width


def test_a_terminal_s_width_is_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    emit(ROWS, COLUMNS, as_json=False, footer="word " * 40)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


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
