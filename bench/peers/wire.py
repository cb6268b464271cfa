"""The peer's side of the pipe between the bench and a peer: one JSON object a line, request and answer in turn.

A request is a batch: `{"prompts": [[token ids], ...], "num_outputs": N}`. All prompts are there at once, N tokens
are chosen greedily for each whatever they are, and the answer says when each of them was there:
`{"token_times_s": [[seconds since the batch was given, ...], ...]}`.

Imported by the scripts beside it, which run in their own interpreters: nothing but the standard library here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1

Generate = Callable[[list[list[int]], int], list[list[float]]]
"""(prompts, num_outputs) to the times of each one's tokens, in seconds since the call."""


def serve(start: Callable[[dict[str, Any]], tuple[Generate, dict[str, str]]]) -> None:
    """Answer batches until the bench closes the pipe.

    `start` gets the first line, `{"model": path, "num_threads": N, ...}`, and gives what generates, and versions
    and settings to report.
    """
    # It may be stopped when the bench is killed, and would stay for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What a peer prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    generate, facts = start(json.loads(sys.stdin.readline()))
    _answer(answers, {"ready": facts})
    for line in sys.stdin:
        batch = json.loads(line)
        _answer(answers, {"token_times_s": generate(batch["prompts"], batch["num_outputs"])})


def _answer(answers: Any, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the bench has given up; the end of stdin follows
        answers.write(json.dumps(message) + "\n")
        answers.flush()
