"""Reads the fields of a body by hand, so that everything that is wrong with it is said at once, each with its path.

This module knows nothing about what the fields mean.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from edge.errors import InvalidInput, InvalidJson

MAX_DEPTH = 64
"""Levels of objects and lists in a value that is handed on as it came."""
_MAX_PROBLEMS = 20
_MAX_SHOWN_CHARS = 60

Harmless = Callable[[Any], bool]
"""Whether a value asks for nothing, so that the key may be there."""


class Fields:
    """Reads the fields of one object and gathers what is wrong with them. A null is as good as an absent key."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise InvalidJson(f"{what} must be a JSON object, not {shown(value)}")
        self._values = value
        self._problems: list[tuple[str, str]] = []

    def get(self, key: str) -> Any:
        """The value of `key`, as it came."""
        return self._values.get(key)

    def nearest(self, key: str) -> str:
        """A hint if one of the keys that are there may be a misspelt `key`; else empty."""
        close = difflib.get_close_matches(
            key, [name for name in map(str, self._values) if len(name) < 2 * len(key)], n=1
        )
        return f" ({close[0]} is not {key})" if close else ""

    def problem(self, path: str, text: str) -> None:
        """Note that what is at `path` is wrong."""
        self._problems.append((path, text))
        if len(self._problems) == _MAX_PROBLEMS:  # a body of megabytes can hold millions
            self.raise_problems()

    def raise_problems(self) -> None:
        """Raise `InvalidInput` with all problems, if there are any."""
        if not self._problems:
            return
        texts = [f"{path} {text}" for path, text in self._problems]
        if len(texts) == _MAX_PROBLEMS:
            texts.append("and perhaps more")
        raise InvalidInput(f"bad input: {'; '.join(texts)}", param=self._problems[0][0].removeprefix("$."))

    def wrong(self, path: str, value: Any, allowed: str) -> None:
        """Note that `value` at `path` is none of `allowed`."""
        self.problem(path, f"is {shown(value)}, must be {allowed}")

    def refuse_unsupported(self, features: Mapping[str, Harmless]) -> None:
        """Refuse each of `features` that is asked for."""
        self.refuse_in(self._values, "$", features)

    def refuse_in(self, values: dict[str, Any], path: str, features: Mapping[str, Harmless]) -> None:
        """Refuse each of `features` that is asked for in `values` at `path`."""
        for key, is_harmless in features.items():
            if key in values and not is_harmless(values[key]):
                self.problem(f"{path}.{key}", f"is {shown(values[key])}, which is not supported yet: leave it out")

    def json_text(self, path: str, value: Any, max_chars: int) -> str | None:
        """`value` as JSON; None, and a problem, if it is longer than `max_chars` or nested deeper than `MAX_DEPTH`."""
        if is_deep(value):
            self.problem(path, f"is nested too deeply: at most {MAX_DEPTH} levels")
            return None
        try:
            text = msgspec.json.encode(value).decode()
        except (TypeError, ValueError) as error:  # of a handler, which is not held to JSON: lone surrogates, odd keys
            self.problem(path, f"cannot be written as JSON: {error}")
            return None
        if len(text) > max_chars:
            self.problem(path, f"has {len(text)} characters as JSON, more than {max_chars}")
            return None
        return text

    def boolean(self, key: str) -> bool:
        """True or false; false by default."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(f"$.{key}", value, "true or false")
        return value is True

    def string(self, key: str) -> str | None:
        """A string that is not empty."""
        value = self.get(key)
        if value is None or (isinstance(value, str) and value and is_unicode(value)):
            return value
        self.wrong(f"$.{key}", value, "a string of at least one character")
        return None

    def number(self, key: str, low: float, high: float, default: Any = None) -> Any:
        """A number from `low` to `high` as a float, else `default`."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        self.wrong(f"$.{key}", value, f"a number from {low:g} to {high:g}")
        return default

    def integer(self, key: str, low: int, high: int) -> int | None:
        """An integer from `low` to `high`; 3.0 is one too, as in JSON Schema."""
        value = self.get(key)
        if value is None:
            return None
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if is_whole and not isinstance(value, bool) and low <= value <= high:
            return int(value)
        self.wrong(f"$.{key}", value, f"an integer from {low} to {high}")
        return None


def is_deep(value: Any) -> bool:
    """Whether `value` has more than `MAX_DEPTH` levels of objects and lists."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def is_unicode(text: str) -> bool:
    """Whether `text` can be sent on: a lone surrogate, which Python allows, is in no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """`value` in a few words, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return "not a finite number"
        case int() | float():
            return str(value) if abs(value) < 10**20 else "a huge number"
        case str():
            return f'"{_short(value)}"'
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _short(text: str) -> str:
    printable = "".join(character if character.isprintable() else "�" for character in text[:_MAX_SHOWN_CHARS])
    return printable if len(text) <= _MAX_SHOWN_CHARS else printable + "…"
