from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from bench import wire, wire_load
from bench.settings import Settings


def event(due_us: int, late_us: int) -> bytes:
    data = b'data: {"created":1796040000,"choices":[{"delta":{"content":"%d+%d "}}]}\n\n' % (due_us, late_us)
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_token_is_here_when_the_end_of_its_text_is() -> None:
    first, second = event(7_000_000, 0), event(7_010_000, 1_500)
    pieces = [(7.001, b"HTTP/1.1 200 OK\r\n\r\n" + first[:40]), (7.002, first[40:]), (7.012, second)]
    assert wire_load._arrivals(pieces) == [(7.002, 7.0, 0.0), (7.012, 7.01, 0.0015)]


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 200 OK\r\n\r\n2\r\n{}\r\n", False),
        (b"HTTP/1.1 200 OK\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
    ],
)
def test_where_a_response_ends(data: bytes, is_whole: bool) -> None:
    assert wire_load._is_whole(data) is is_whole


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the bench takes two cores")
def test_a_node_with_the_stub_answers_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "NUM_CLIENTS", 4)
    monkeypatch.setattr(wire, "NUM_STREAMS", 4)
    settings = Settings(state_dir=tmp_path, peers=False, quick=True, sections=("requests", "streams"))
    rows: list[dict[str, Any]] = [dataclasses.asdict(row) for row in wire.run(settings)[0]]
    assert len(rows) == 13
    assert all(row["value"] >= 0 for row in rows), json.dumps(rows)
    per_s, late, burst = rows[0], rows[7], rows[8]
    assert per_s["value"] > 10
    # Without the peer, what is about it is no pass.
    assert (per_s["ok"], per_s["note"]) == (False, "measured with --peers")
    assert late["metric"].endswith("late tokens")
    assert (burst["metric"].endswith("in one instant"), burst["ok"]) == (True, None)
