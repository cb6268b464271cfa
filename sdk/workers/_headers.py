"""Headers as handlers give them (dict or pairs) and get them (`http.client.HTTPMessage`), and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from email.message import Message
from http.client import HTTPMessage
from typing import Any

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_IN_VALUE = re.compile(r"[\0\r\n]|[^\0-\xff]")


def parse_headers(headers: Any) -> HTTPMessage:
    """`headers` (None, a mapping, (name, value) pairs, or an HTTPMessage) as an HTTPMessage; duplicates are kept.

    Raises:
        TypeError: `headers` is of another type, or a value is None.
        ValueError: a name or value that HTTP does not allow.
    """
    return as_message(parse_pairs(headers))


def parse_pairs(headers: Any) -> list[tuple[str, str]]:
    """The same as pairs, which `as_message` makes an HTTPMessage of. Raises as `parse_headers`."""
    return [(_checked_name(name), _checked_value(name, value)) for name, value in _pairs(headers)]


def as_message(pairs: Iterable[tuple[str, str]]) -> HTTPMessage:
    """Checked headers as an HTTPMessage; duplicates are kept."""
    message = HTTPMessage()
    for name, value in pairs:
        message[name] = value
    return message


def merge_headers(pairs: Iterable[tuple[str, str]]) -> HTTPMessage:
    """Received headers as Fetch shows them: repeated ones joined into one, but for set-cookie."""
    message = HTTPMessage()
    for name, value in pairs:
        if name in message and name.lower() != "set-cookie":
            separator = "; " if name.lower() == "cookie" else ", "
            message.replace_header(name, message[name] + separator + value.strip())
        else:
            message[name] = value.strip()
    return message


def header_pairs(message: HTTPMessage) -> list[tuple[str, str]]:
    """The headers to send. They are checked again, because handlers can change `response.headers` in place."""
    return [(_checked_name(name), _checked_value(name, value)) for name, value in message.items()]


def add_header(message: HTTPMessage, name: Any, value: Any) -> None:
    """Add one header, after those of the same name; the value is stringified (True is "true")."""
    message[_checked_name(name)] = _checked_value(name, value)


def is_token(text: str) -> bool:
    """Whether `text` can be a header's name or a method."""
    return _TOKEN.fullmatch(text) is not None


def _pairs(headers: Any) -> Iterable[tuple[Any, Any]]:
    if headers is None:
        return []
    if isinstance(headers, Mapping | Message):
        return headers.items()
    if isinstance(headers, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in headers):
        return headers
    raise TypeError(
        f"Received unexpected type for headers argument: {type(headers).__name__}; "
        "give a dict or a list of (name, value) tuples"
    )


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not is_token(name):
        raise ValueError(f"{name!r} is no valid header name")
    return name


def _checked_value(name: str, value: Any) -> str:
    if value is None:
        raise TypeError(f"the value of header {name!r} is None; leave the header out instead")
    text = ("true" if value else "false") if isinstance(value, bool) else str(value)
    if _BAD_IN_VALUE.search(text):
        raise ValueError(f"header {name!r} has a line break or a character outside of Latin-1 in its value {text!r}")
    return text.strip(" \t")
