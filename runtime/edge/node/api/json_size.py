"""What a JSON text would take in memory, judged before it is decoded.

Three bytes of JSON can become a list or object of eighty: a body within its own limit could take fifty times as much.
Numbers need no limit here, and how deep a value is nested the decoder bounds.
"""

from __future__ import annotations

import re

from edge.errors import RequestTooLarge

MAX_CONTAINERS = 100_000
"""Lists and objects in one body."""
MAX_STRINGS = 200_000
"""Strings in one body, keys included."""

# Possessive, and closed by the end of the text too: no text makes it look at a byte twice.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def check_json_size(text: bytes | bytearray) -> None:
    """Raise `RequestTooLarge` if `text` has more lists, objects or strings than a body may have."""
    if len(text) <= MAX_CONTAINERS or _is_clearly_small(text):
        return
    outside, num_strings = _STRING.subn(b"", text, count=MAX_STRINGS + 1)  # brackets within strings are text
    if num_strings > MAX_STRINGS:
        raise RequestTooLarge(f"the request body holds more than {MAX_STRINGS} strings: send less at once")
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_containers > MAX_CONTAINERS:
        raise RequestTooLarge(
            f"the request body holds {num_containers} lists and objects, more than {MAX_CONTAINERS}: send less at once"
        )


def _is_clearly_small(text: bytes | bytearray) -> bool:
    return text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS and text.count(b'"') <= 2 * MAX_STRINGS
