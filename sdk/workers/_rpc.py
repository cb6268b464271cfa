"""Values between workers: arguments and results of RPC, and the bodies of queue messages, as bytes.

What may be sent, and what becomes of it, are the rules of Workers RPC: dict, list, set, datetime, bytes, None, bool,
numbers, str and exceptions, at any depth, and requests, responses, forms and files, which are sent whole. The node
carries these bytes and never looks into them. Unpacking is safe on any bytes, because another worker made them.
"""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from workers._body import Body
from workers._report import message_text
from workers.blob import Blob, File
from workers.formdata import FormData
from workers.request import Request
from workers.response import Response
from workers.streams import ReadableStream
from workers.values import MAX_DEPTH, JsBytes, JsDict, JsList

_BIG_INT, _SET, _DATE, _ERROR, _REQUEST, _RESPONSE, _FORM, _BLOB, _FILE = range(1, 10)
_MS = struct.Struct(">q")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCALARS = frozenset({type(None), bool, float})
_REFUSED = (tuple, bytearray, re.Pattern, Awaitable)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class DataCloneError(TypeError):
    """A value of a class that cannot be sent over RPC."""


def pack(value: Any) -> bytes:
    """`value` as bytes; `await buffered(value)` first if it can hold requests or responses whose bodies stream.

    Raises:
        TypeError: a value in it cannot be sent (DataCloneError for objects of the user's classes).
        ValueError: nested deeper than `MAX_DEPTH` levels (or containing itself), or text or time that has no form.
    """
    try:
        return _encoder.encode(_lower(value, 0))
    except UnicodeEncodeError as error:
        raise ValueError(f"text with a lone surrogate cannot be sent over RPC: {error}") from error


def unpack(data: bytes) -> Any:
    """The value that `pack` made `data` of: dicts, lists and bytes with attribute access and `to_py()`, times naive and
    local, exceptions as plain `Exception`.

    Raises:
        ValueError: `data` was not made by `pack`.
    """
    try:
        return _raise_up(_decoder.decode(data), 0)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError, OSError, struct.error) as error:
        raise ValueError(f"not a value of RPC: {error}") from error


async def buffered(value: Any, depth: int = 0) -> Any:
    """`value` itself, once the bodies of all requests and responses in it are read into memory."""
    if depth <= MAX_DEPTH:
        if isinstance(value, Body):
            if isinstance(value._content, ReadableStream):
                value._content = await value._read()
        elif isinstance(value, dict):
            for item in value.values():
                await buffered(item, depth + 1)
        elif isinstance(value, list):
            for item in value:
                await buffered(item, depth + 1)
    return value


# -- from values to msgpack --------------------------------------------------------------------------------


def _lower(value: Any, depth: int) -> Any:
    """`value` as what msgpack knows."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth > MAX_DEPTH:
        raise ValueError(
            f"a value nested deeper than {MAX_DEPTH} levels, or containing itself, cannot be sent over RPC"
        )
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return _lower_int(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes | memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {_key(key): _lower(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_lower(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return _ext(_SET, [_lower(item, depth + 1) for item in value])
    if isinstance(value, datetime):
        return msgspec.msgpack.Ext(_DATE, _MS.pack(_as_ms(value)))
    if isinstance(value, Exception):
        return _ext(_ERROR, message_text(value))
    return _lower_object(value, depth)


def _lower_int(value: int) -> int | msgspec.msgpack.Ext:
    if -(1 << 63) <= value < 1 << 64:
        return value
    num_bytes = value.bit_length() // 8 + 1
    return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(num_bytes, "big", signed=True))


def _lower_object(value: Any, depth: int) -> Any:
    match value:
        case Request():
            cf = _lower(value.cf, depth + 1)
            return _ext(_REQUEST, [str(value.method), value.url, _pairs(value), cf, value.redirect, _whole_body(value)])
        case Response():
            return _ext(_RESPONSE, [value.status, value.status_text, _pairs(value), value.url, _whole_body(value)])
        case FormData():
            return _ext(_FORM, [[name, _lower(item, depth + 1)] for name, item in value.items()])
        case File():
            return _ext(_FILE, [value._data, value.content_type, value.name, value.last_modified])
        case Blob():
            return _ext(_BLOB, [value._data, value.content_type])
    return _lower_foreign(value, depth)


def _lower_foreign(value: Any, depth: int) -> Any:
    """Objects that stand for a value, such as those of the `js` module; everything else is refused."""
    name = type(value).__name__
    if inspect.iscoroutine(value):
        value.close()  # it is never going to be awaited, and saying so once is enough
    if isinstance(value, _REFUSED):
        raise TypeError(f"{name} cannot be sent over RPC.{_advice(value)}")
    if isinstance(value, ReadableStream):
        raise TypeError(f"{name} cannot be sent over RPC. Read it first, or use fetch(), whose bodies stream.")
    if isinstance(value, Callable) and not isinstance(value, type):  # type: ignore[arg-type]
        raise TypeError(
            f"{name} cannot be sent over RPC: functions (RPC stubs) are not supported by this runtime. "
            "Have the other worker call a method of yours through a service binding."
        )
    inner = getattr(value, "js_object", value)
    if inner is not value:
        return _lower(inner, depth + 1)
    if callable(getattr(value, "to_py", None)):
        return _lower(value.to_py(), depth + 1)
    raise DataCloneError(f"{name} cannot be sent over RPC. Send a dict of what it holds.")


def _advice(value: Any) -> str:
    if isinstance(value, tuple):
        return " Send a list."
    if isinstance(value, bytearray):
        return " Send bytes(value)."
    return " Is an `await` missing?" if isinstance(value, Awaitable) else ""


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    if type(key) is int:
        return str(key)  # as JavaScript's objects do
    raise TypeError(f"a dict with the key {key!r} cannot be sent over RPC; keys must be str")


def _as_ms(value: datetime) -> int:
    try:
        return (value.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
    except (OverflowError, OSError, ValueError) as error:
        raise ValueError(f"{value!r} cannot be sent over RPC: {error}") from error


def _pairs(message: Body) -> list[tuple[str, str]]:
    return list(message.headers.items())


def _whole_body(message: Body) -> bytes | None:
    content = message._take()
    if isinstance(content, ReadableStream):
        name = type(message).__name__
        raise TypeError(f"{name} cannot be sent over RPC here, because its body streams. Read it first.")
    return content


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encoder.encode(value))


# -- from msgpack to values --------------------------------------------------------------------------------


def _raise_up(value: Any, depth: int) -> Any:
    """The opposite of `_lower`, on data that anybody may have made."""
    if depth > MAX_DEPTH + 1:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return JsDict({_expect(key, str): _raise_up(item, depth + 1) for key, item in value.items()})
        case list():
            return JsList([_raise_up(item, depth + 1) for item in value])
        case bytes():
            return JsBytes(value)
        case msgspec.msgpack.Ext():
            return _from_ext(value.code, bytes(value.data), depth + 1)
    raise ValueError(f"it holds a {type(value).__name__}")


def _from_ext(code: int, data: bytes, depth: int) -> Any:
    if code == _BIG_INT:
        return int.from_bytes(data, "big", signed=True)
    if code == _DATE:
        seconds, ms = divmod(_MS.unpack(data)[0], 1000)
        return datetime.fromtimestamp(seconds) + timedelta(milliseconds=ms)
    if code not in _READERS:
        raise ValueError(f"it holds an object of the unknown kind {code}")
    return _READERS[code](_decoder.decode(data), depth)


def _read_set(items: Any, depth: int) -> set[Any]:
    return {_raise_up(item, depth) for item in _expect(items, list)}


def _read_error(message: Any, depth: int) -> Exception:
    return Exception(_expect(message, str))


def _read_request(fields: Any, depth: int) -> Request:
    method, url, headers, cf, redirect, body = _expect(fields, list)
    cf = _raise_up(cf, depth)
    return Request(
        _expect(url, str),
        method=_expect(method, str),
        headers=[(_expect(name, str), _expect(text, str)) for name, text in headers],
        body=None if body is None else _expect(body, bytes),
        redirect=_expect(redirect, str),
        cf=None if cf is None else _expect(cf, dict),
    )


def _read_response(fields: Any, depth: int) -> Response:
    status, status_text, headers, url, body = _expect(fields, list)
    response = Response(
        None if body is None else _expect(body, bytes),
        _expect(status, int),
        _expect(status_text, str),
        [(_expect(name, str), _expect(text, str)) for name, text in headers],
    )
    response.url = _expect(url, str)
    return response


def _read_form(fields: Any, depth: int) -> FormData:
    form = FormData()
    for name, value in _expect(fields, list):
        form.append(_expect(name, str), _raise_up(value, depth))
    return form


def _read_blob(fields: Any, depth: int) -> Blob:
    data, content_type = _expect(fields, list)
    return Blob(_expect(data, bytes), _expect(content_type, str))


def _read_file(fields: Any, depth: int) -> File:
    data, content_type, name, last_modified = _expect(fields, list)
    return File(
        _expect(data, bytes), _expect(name, str), _expect(content_type, str), last_modified=_expect(last_modified, int)
    )


_READERS: dict[int, Callable[[Any, int], Any]] = {
    _SET: _read_set,
    _ERROR: _read_error,
    _REQUEST: _read_request,
    _RESPONSE: _read_response,
    _FORM: _read_form,
    _BLOB: _read_blob,
    _FILE: _read_file,
}


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was expected instead of {type(value).__name__}")
    return value
