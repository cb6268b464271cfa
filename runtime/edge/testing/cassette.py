"""Cassettes: model calls of one test with their answers, in a JSON file that is kept beside the tests.

A file is the same byte for byte if nothing in it has changed, so that differences in a review mean something. It knows
nothing about models.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from edge.errors import ConfigError

FORMAT = 1


class Recorded(msgspec.Struct, omit_defaults=True):
    """One call and its answer: `result`, or the `data` of each event of a stream."""

    model: str
    inputs: Any
    options: dict[str, Any] = {}
    result: Any = None
    events: list[Any] | None = None
    input_tokens: int = 0
    """Cached ones included: what is in a cache differs from run to run."""
    output_tokens: int = 0


class _File(msgspec.Struct):
    format: int
    calls: list[Recorded]


class Cassette:
    """The calls in `file`, which is read when it is first needed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._calls: dict[str, list[Recorded]] | None = None
        self._num_played: defaultdict[str, int] = defaultdict(int)
        self._new: list[Recorded] = []

    def play(self, model: str, inputs: Any, options: dict[str, Any]) -> Recorded | None:
        """The answer to that call, None if there is none. Of the same call made again, the next one, and then the last
        again and again.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self._calls is None:
            self._calls = self._read()
        key = _key(model, inputs, options)
        calls = self._calls.get(key)
        if calls is None:
            return None
        self._num_played[key] += 1
        return calls[min(self._num_played[key], len(calls)) - 1]

    def record(self, call: Recorded) -> None:
        """Keep `call` until `save`."""
        self._new.append(call)

    def save(self) -> None:
        """Let what was recorded take the place of what the file had, if anything was."""
        if self._new:
            value = {"format": FORMAT, "calls": [msgspec.to_builtins(call) for call in self._new]}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")

    def _read(self) -> dict[str, list[Recorded]]:
        if not self.file.is_file():
            return {}
        try:
            file = msgspec.json.decode(self.file.read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"the cassette {self.file} cannot be read: {error}; record it again") from error
        if file.format != FORMAT:
            raise ConfigError(f"the cassette {self.file} has the format {file.format}, not {FORMAT}; record it again")
        calls: dict[str, list[Recorded]] = {}
        for call in file.calls:
            calls.setdefault(_key(call.model, call.inputs, call.options), []).append(call)
        return calls


def _key(model: str, inputs: Any, options: dict[str, Any]) -> str:
    return json.dumps([model, inputs, options], sort_keys=True, default=repr)
