"""What KV, D1 and R2 take in several forms: options as a dict or by name, bytes as buffers, streams and the like."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from workers._body import to_body
from workers.streams import ReadableStream
from workers.values import buffer_bytes, plain

MAX_INLINE_BYTES = 64 << 10
"""Up to here, bytes travel as an argument; what is longer is sent as a body."""


def merged(options: Any, more: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options given as a trailing dict (or what `to_py()` makes one of) and those given by name, as one plain dict.

    Raises:
        TypeError: `options` is no dict, or a value in it is of a type that no option has.
    """
    given: dict[str, Any] = plain(options_of(options, more, where), f"the options of {where}")
    return given


def options_of(options: Any, more: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same with values as they were given.

    Raises:
        TypeError: `options` is no dict.
    """
    if not isinstance(options, Mapping) and callable(to_py := getattr(options, "to_py", None)):
        options = to_py()
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"the options of {where} must be a dict, not {type(options).__name__}")
    return {**(options or {}), **more}


def content_of(value: Any, where: str) -> bytes | ReadableStream:
    """What is to be stored: as bytes, or as a stream where it is one.

    Raises:
        TypeError: `value` is no str, buffer, stream, Blob, async iterable or generator.
        OSError: a stream that was read before.
    """
    data = buffer_bytes(value)
    if data is not None:
        return data
    content, _ = to_body(value, where)
    return content if content is not None else b""


def split_content(content: bytes | ReadableStream) -> tuple[bytes | None, bytes | ReadableStream | None]:
    """Argument and body that carry `content`: one of them is None."""
    if isinstance(content, bytes) and len(content) <= MAX_INLINE_BYTES:
        return content, None
    return None, content


def milliseconds(value: Any, where: str) -> float | None:
    """A time given as datetime, as one of JavaScript's dates or in milliseconds since 1970, in milliseconds.

    Raises:
        TypeError: it is none of these.
    """
    if callable(to_py := getattr(value, "to_py", None)):
        value = to_py()
    if isinstance(value, datetime):
        return value.timestamp() * 1000
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise TypeError(f"{where} must be a datetime or milliseconds since 1970, not {type(value).__name__}")
