"""The values that cross into a handler: dicts, lists and bytes that read like JavaScript's and like Python's.

Two generations of handler code exist: one calls `.to_py()` and reads attributes, the other expects plain dicts and
lists. These types are real subclasses of the plain ones, so both work. This module knows nothing about frames.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MAX_DEPTH = 64

_SCALARS = frozenset({type(None), bool, int, float, str})


class JsClass:
    """`value.constructor.name`, by which code tells JavaScript's objects apart; to be made an attribute of a class.

    Args:
        name: JavaScript's for the class.
    """

    def __init__(self, name: str) -> None:
        self._class = SimpleNamespace(name=name)

    def __get__(self, value: object, kind: type) -> SimpleNamespace:
        return self._class


class JsDict(dict[str, Any]):
    """A dict whose keys are attributes too. Names of dict's own methods (`items`, `keys`, …) are keys only by item."""

    __slots__ = ()
    constructor = JsClass("Object")

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            keys = ", ".join(map(str, self)) or "none"
            raise AttributeError(f"there is no {name!r} here; the keys are: {keys}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(name, name=name, obj=self) from None

    def to_py(self, **_options: Any) -> dict[str, Any]:
        """This as plain dicts and lists, at every depth. Pyodide's options (`depth=…`) are accepted and not needed."""
        return {key: to_py(value) for key, value in self.items()}


class JsList(list[Any]):
    """A list with `to_py()`."""

    __slots__ = ()
    constructor = JsClass("Array")

    def to_py(self, **_options: Any) -> list[Any]:
        """This as plain dicts and lists, at every depth."""
        return [to_py(value) for value in self]


class JsBytes(bytes):
    """Bytes with the conversions that a JavaScript buffer has in Pyodide."""

    __slots__ = ()
    constructor = JsClass("ArrayBuffer")

    def to_bytes(self) -> bytes:
        """These bytes as plain `bytes`."""
        return bytes(self)

    tobytes = to_bytes

    def to_py(self, **_options: Any) -> memoryview:
        """A view of these bytes, as Pyodide gives for a buffer."""
        return memoryview(self)


def wrap(value: Any) -> Any:
    """`value` with every plain dict, list, tuple and bytes in it replaced by the types above."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        return JsDict({key: wrap(item) for key, item in value.items()})
    if kind in (list, tuple):
        return JsList([wrap(item) for item in value])
    if kind is bytes:
        return JsBytes(value)
    return value


def to_py(value: Any) -> Any:
    """`value` with everything in it that has `to_py()` unwrapped into plain Python."""
    if isinstance(value, dict):
        return {key: to_py(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_py(item) for item in value]
    if isinstance(value, bytes):
        return bytes(value)
    return value


def buffer_bytes(value: Any) -> bytes | None:
    """The bytes of a buffer, Python's or one of JavaScript's, which has `to_bytes()`; None: `value` is none."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    to_bytes = getattr(value, "to_bytes", None)
    return bytes(to_bytes()) if callable(to_bytes) and not isinstance(value, int) else None


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """`value` as something that fits into a frame: None, bool, int, float, str, bytes, and dicts and lists of these.

    Objects with `to_py()` (results, Pyodide's proxies) are unwrapped; tuples become lists, buffers become bytes.

    Raises:
        TypeError: a value of another type, or a dict key that is no str; the message names its place in `where`.
        ValueError: nested deeper than `MAX_DEPTH` (or containing itself).
    """
    if type(value) in _SCALARS:
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"{where.split('.')[0]} is nested deeper than {MAX_DEPTH} levels, or contains itself")
    if isinstance(value, dict):
        return {_key(key, where): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [
            item if type(item) in _SCALARS else plain(item, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | int | float):  # subclasses, such as enums
        return _base_value(value)
    if callable(getattr(value, "to_py", None)):
        return plain(value.to_py(), where, depth + 1)
    raise TypeError(f"{where} is a {type(value).__name__}, which cannot be sent; send JSON-like values or bytes")


def _base_value(value: str | int | float) -> str | int | float:
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) else float(value)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; keys must be str")
    return str.__str__(key)
