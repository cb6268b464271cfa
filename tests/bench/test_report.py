import json

import pytest
from bench.report import Target, as_json, compared, measured, missing, table

ROWS = [
    compared("speed", 30.0, "tok/s", peer="vllm", peer_value=20.0, target=Target(">=", 1.2, "x")),
    compared("wait", 30.0, "ms", peer="vllm", peer_value=20.0, target=Target(">=", 1.5, "x"), is_less_better=True),
    measured("share", 12.0, "%", target=Target("<=", 15, "%")),
    missing("speed", "tok/s", "it does not build here", value=30.0, peer="llama.cpp", target=Target(">=", 1, "x")),
    measured("size", 3.0, "MB"),
]


def test_a_ratio_is_how_many_times_better_the_value_is() -> None:
    faster, slower = ROWS[:2]
    assert faster.ratio == pytest.approx(1.5)
    assert faster.ok is True
    assert slower.ratio == pytest.approx(2 / 3)
    assert slower.ok is False


def test_what_is_missing_is_never_a_pass() -> None:
    assert ROWS[3].ok is False
    assert ROWS[3].ratio is None
    assert ROWS[3].note == "it does not build here"


def test_the_table_has_a_line_for_each_row_under_one_head() -> None:
    head, *lines = table(ROWS).splitlines()
    assert head.split() == ["metric", "value", "unit", "peer", "its", "value", "ratio", "target", "note"]
    assert [line.split()[0] for line in lines] == ["ok", "NO", "ok", "NO", "size"]
    assert len({line.index(row.metric) for line, row in zip(lines, ROWS, strict=True)}) == 1


def test_the_json_is_one_line_with_the_rows_and_where_they_are_from() -> None:
    text = as_json("engine", ROWS, {"vllm": "1.0"})
    assert "\n" not in text
    report = json.loads(text)
    assert list(report) == ["bench", "commit", "machine", "versions", "rows"]
    assert report["versions"]["vllm"] == "1.0"
    assert report["versions"]["torch"]
    assert report["machine"]["num_cores"] >= 1
    assert report["rows"][0] == {
        "metric": "speed",
        "value": 30.0,
        "unit": "tok/s",
        "peer": "vllm",
        "peer_value": 20.0,
        "ratio": 1.5,
        "target": ">= 1.2x",
        "ok": True,
        "note": "",
    }
