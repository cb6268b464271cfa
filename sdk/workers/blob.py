"""`Blob` and `File`: bytes with a content type and, for a file, a name. They are whole in memory and never change."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any

from workers.streams import ReadableStream
from workers.values import JsBytes, JsClass, buffer_bytes

Bytes = bytes  # inside the class below, `bytes` is a method


class BlobEnding(StrEnum):
    """What becomes of line ends in the str parts of a blob."""

    TRANSPARENT = "transparent"
    NATIVE = "native"


class Blob:
    """Bytes with a content type.

    Args:
        parts: str (as UTF-8), bytes, another buffer or a Blob; or an iterable of these, which are joined.
        content_type: for example `image/png`; that of a single Blob unless given.
        endings: `native` writes the line ends of str parts as `\\n`.

    Raises:
        TypeError: a part of another type.
        ValueError: another value for `endings`.
    """

    constructor = JsClass("Blob")

    content_type: str
    _data: Bytes

    def __init__(
        self, parts: Any = (), content_type: str | None = None, endings: BlobEnding | str | None = None
    ) -> None:
        is_native = endings is not None and BlobEnding(endings) is BlobEnding.NATIVE
        if content_type is None and isinstance(parts, Blob):
            content_type = parts.content_type
        self.content_type = (content_type or "").lower()
        self._data = b"".join([_part(part, is_native) for part in _as_parts(parts)])

    @property
    def size(self) -> int:
        """Bytes in it."""
        return len(self._data)

    @property
    def type(self) -> str:
        """The content type, under JavaScript's name."""
        return self.content_type

    @property
    def js_object(self) -> Blob:
        """Itself: there is no JavaScript object behind it."""
        return self

    async def text(self) -> str:
        """The bytes, decoded as UTF-8; broken ones become U+FFFD."""
        return self._data.decode("utf-8", "replace")

    async def bytes(self) -> Bytes:
        """The bytes."""
        return self._data

    async def arrayBuffer(self) -> JsBytes:
        """The bytes, with `to_bytes()` and `to_py()`."""
        return JsBytes(self._data)

    def stream(self) -> ReadableStream:
        """The bytes as a stream."""
        return ReadableStream(iter([self._data]))

    def slice(self, start: int | None = None, end: int | None = None, content_type: str | None = None) -> Blob:
        """The bytes from `start` to before `end`, as in Python's slices; nothing else is kept."""
        return Blob(self._data[start:end], content_type)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size}, content_type={self.content_type!r})"

    def _as_body(self) -> tuple[Bytes, str | None]:
        return self._data, self.content_type or None


class File(Blob):
    """A Blob with a name and the time of its last change, in ms since 1970 (now unless given).

    A single File as `parts` gives its name and time on, unless others are given. Raises as Blob does, and TypeError
    without a name.
    """

    constructor = JsClass("File")

    name: str
    last_modified: int

    def __init__(
        self,
        parts: Any,
        filename: str | None = None,
        content_type: str | None = None,
        endings: BlobEnding | str | None = None,
        last_modified: int | datetime | None = None,
    ) -> None:
        super().__init__(parts, content_type, endings)
        if isinstance(parts, File):
            filename = parts.name if filename is None else filename
            last_modified = parts.last_modified if last_modified is None else last_modified
        if not isinstance(filename, str):
            raise TypeError(f"File() needs a filename of type str, not {type(filename).__name__}")
        if isinstance(last_modified, datetime):
            last_modified = int(last_modified.timestamp() * 1000)
        self.name = filename
        self.last_modified = int(time.time() * 1000) if last_modified is None else last_modified

    @property
    def lastModified(self) -> int:
        """The same as `last_modified`."""
        return self.last_modified

    def __repr__(self) -> str:
        return f"File(name={self.name!r}, size={self.size}, content_type={self.content_type!r})"


BlobValue = str | Bytes | bytearray | memoryview | Blob
"""What a blob can be made of."""


def _as_parts(parts: Any) -> Iterable[Any]:
    if isinstance(parts, str | bytes | bytearray | memoryview | Blob) or not isinstance(parts, Iterable):
        return [parts]
    return parts


def _part(part: Any, is_native: bool) -> bytes:
    if isinstance(part, str):
        text = part.replace("\r\n", "\n").replace("\r", "\n") if is_native else part
        return text.encode("utf-8", "replace")
    if isinstance(part, Blob):
        return part._data
    data = buffer_bytes(part)
    if data is not None:
        return data
    raise TypeError(f"Unsupported type in Blob: {type(part).__name__}; give str, bytes, a Blob, or a list of these")
