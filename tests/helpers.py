"""What tests of several packages need in one form: the command `edge`, event streams, waiting."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

EDGE = [sys.executable, "-c", "from edge.cli import main; main()"]
"""The command `edge` of the interpreter that runs the tests, whatever is on the path."""


def sse_events(body: str | bytes) -> list[Any]:
    """The events of a whole event stream, parsed; `[DONE]` as it is. Every event must be one line of data."""
    text = body.decode() if isinstance(body, bytes) else body
    *events, end = text.split("\n\n")
    assert end == "", "the stream ends in the middle of an event"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def num_examples(number: int) -> int:
    """How many examples a property is tried on that needs `number`: all of them, or the quick subset's share."""
    return max(5, number * settings().max_examples // 100)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], Any], limit_s: float = 120) -> Any:
    """What `condition` gives, once that is true; it fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    return value


def mostly_slow(values: Iterable[Any], num_quick: int = 1) -> list[Any]:
    """`values` as parameters of a test, of which the quick subset takes the first `num_quick`."""
    return [value if i < num_quick else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]
