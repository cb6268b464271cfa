"""What the scripts beside this file share: where the node is, and a list of checks that each print one line.

They run in an environment of their own, with nothing of the project in it, as users' programs would.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

BASE_URL = os.environ["WAI_BASE_URL"]
ACCOUNT = os.environ["WAI_ACCOUNT_ID"]
TOKEN = os.environ["WAI_TOKEN"]
OPENAI_URL = os.environ["WAI_OPENAI_URL"]
TEXT = os.environ["WAI_MODEL_TEXT"]
EMBED = os.environ["WAI_MODEL_EMBED"]
TIMEOUT_S = 300.0

QUESTION = "Name the capital of France."

_checks: list[tuple[Callable[[], Any], bool]] = []


def check(*models: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A check of the script; it is skipped where one of the `models` that it needs is `-`. It may be a coroutine."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((function, "-" in models))
        return function

    return add


def run() -> None:
    """Run all checks and exit."""
    numbers = {"ok  ": 0, "FAIL": 0, "SKIP": 0}
    with asyncio.Runner() as runner:  # one loop for all: some clients keep their connections between calls
        for function, is_skipped in _checks:
            outcome, why = ("SKIP", "") if is_skipped else _outcome(function, runner)
            numbers[outcome] += 1
            print(outcome, function.__name__, why, flush=True)
    print("{} passed, {} failed, {} skipped".format(*numbers.values()))
    sys.exit(1 if numbers["FAIL"] or not numbers["ok  "] else 0)


def _outcome(function: Callable[[], Any], runner: asyncio.Runner) -> tuple[str, str]:
    try:
        if inspect.iscoroutinefunction(function):
            runner.run(function())
        else:
            function()
    except Exception as error:
        return "FAIL", f"- {type(error).__name__} {' '.join(str(error).split())[:600]}"
    return "ok  ", ""
