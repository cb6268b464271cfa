"""What `Request` and `Response` have in common: a body that is read once, at once or as it arrives."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterable, Iterator
from typing import Any

from workers.streams import ReadableStream
from workers.values import JsBytes, wrap

Bytes = bytes  # inside the class below, `bytes` is a method
Content = Bytes | ReadableStream | None


class Body:
    """Mixin of `Request` and `Response`. A missing body reads as empty, any number of times."""

    _content: Content
    _stream: ReadableStream | None = None
    _used = False

    @property
    def body(self) -> ReadableStream | None:
        """The body as a stream of `JsBytes`, or None. Reading it uses the body up."""
        if isinstance(self._content, ReadableStream):
            return self._content
        if self._content is not None and self._stream is None:
            self._stream = ReadableStream(iter([self._content]))
        return self._stream

    @property
    def body_used(self) -> bool:
        """Whether the body was read, in whole or in part."""
        stream = self._content if isinstance(self._content, ReadableStream) else self._stream
        return self._used or (stream is not None and stream.disturbed)

    @property
    def bodyUsed(self) -> bool:
        """The same as `body_used`."""
        return self.body_used

    async def text(self) -> str:
        """The body, decoded as UTF-8; broken bytes become U+FFFD.

        Raises:
            OSError: the body was used already, or broke off.
        """
        return (await self._read()).decode("utf-8-sig", "replace")

    async def bytes(self) -> Bytes:
        """The body. Raises as `text()`."""
        return await self._read()

    async def buffer(self) -> JsBytes:
        """The body as bytes with `to_bytes()`. Raises as `text()`."""
        return JsBytes(await self._read())

    async def _parse_json(self, **options: Any) -> Any:
        return wrap(json.loads((await self._read()).decode("utf-8-sig", "replace"), **options))

    async def _read(self) -> Bytes:
        content = self._take()
        if isinstance(content, ReadableStream):
            return b"".join([chunk async for chunk in content])
        if content is not None:
            self._used = True
        return content or b""

    def _take(self) -> Content:
        """The content for whoever reads or sends it now."""
        if self.body_used:
            raise OSError("Body already used; clone() it before the first read to read it twice")
        return self._content

    def _copy(self) -> Content:
        """The content for a clone; a stream is split in two."""
        content = self._take()
        if isinstance(content, ReadableStream):
            self._content, content = content.tee()
        return content


def to_content(body: Any, where: str) -> Content:
    """What a handler gave as a body, ready to be read or sent.

    Raises:
        TypeError: `body` is none of None, str, bytes, an async iterable or a sync iterator (generator).
    """
    if body is None or isinstance(body, ReadableStream):
        if body is not None and body.disturbed:
            raise OSError("Body already used; this stream was read before")
        return body
    if isinstance(body, str):
        return body.encode("utf-8", "replace")
    if isinstance(body, bytes):
        return bytes(body)
    if isinstance(body, AsyncIterable | Iterator):
        return ReadableStream(body)
    error = TypeError(f"Unsupported type in {where}: {type(body).__name__}")
    if isinstance(body, dict | list | tuple):
        error.add_note(f"{where}.json(value) or json.dumps(value) makes a body of it.")
    elif isinstance(body, bytearray | memoryview):
        error.add_note("Give bytes(value) instead.")
    elif inspect.iscoroutine(body):
        body.close()  # it is never going to be awaited, and saying so once is enough
        error.add_note("Is an `await` missing?")
    raise error
