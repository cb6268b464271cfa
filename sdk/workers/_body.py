"""What `Request` and `Response` have in common: a body that is read once, at once or as it arrives."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterable, Iterator
from http.client import HTTPMessage
from typing import Any

from workers.blob import Blob
from workers.formdata import FormData, parse_form
from workers.streams import ReadableStream
from workers.values import JsBytes, wrap

Bytes = bytes  # inside the class below, `bytes` and `memoryview` are methods
Memoryview = memoryview
Content = Bytes | ReadableStream | None


class Body:
    """Mixin of `Request` and `Response`. A missing body reads as empty, any number of times."""

    headers: HTTPMessage
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

    async def memoryview(self) -> Memoryview:
        """The body as a memoryview. Raises as `text()`."""
        return Memoryview(await self._read())

    async def blob(self) -> Blob:
        """The body as a Blob with the content type of the headers. Raises as `text()`."""
        return Blob(await self._read(), self.headers.get("content-type"))

    async def form_data(self) -> FormData:
        """The fields of a form that was sent as `multipart/form-data` or URL-encoded.

        Raises:
            OSError: the body was used already, or broke off.
            TypeError: the content type is of no form.
            ValueError: the form is broken, or has too many fields.
        """
        return parse_form(await self._read(), self.headers.get("content-type"))

    arrayBuffer = buffer
    formData = form_data
    string = text

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


def to_body(body: Any, where: str) -> tuple[Content, str | None]:
    """What a handler gave as a body, ready to be read or sent, and the content type that goes with it.

    Raises:
        TypeError: `body` is none of None, str, bytes, FormData, Blob, an async iterable or a sync iterator (generator).
        OSError: `body` is a stream that was read before.
    """
    if body is None:
        return None, None
    if isinstance(body, ReadableStream):
        if body.disturbed:
            raise OSError("Body already used; this stream was read before")
        return body, None
    if isinstance(body, str):
        return body.encode("utf-8", "replace"), "text/plain;charset=UTF-8"
    if isinstance(body, bytes):
        return bytes(body), None
    as_body = getattr(type(body), "_as_body", None)
    if as_body is not None:  # FormData, Blob and the like
        content, content_type = as_body(body)
        return content, content_type
    if isinstance(body, AsyncIterable | Iterator):
        return ReadableStream(body), None
    raise _unsupported(body, where)


def _unsupported(body: Any, where: str) -> TypeError:
    error = TypeError(f"Unsupported type in {where}: {type(body).__name__}")
    if isinstance(body, dict | list | tuple):
        error.add_note(f"{where}.json(value) or json.dumps(value) makes a body of it.")
    elif isinstance(body, bytearray | memoryview):
        error.add_note("Give bytes(value) instead.")
    elif inspect.iscoroutine(body):
        body.close()  # it is never going to be awaited, and saying so once is enough
        error.add_note("Is an `await` missing?")
    return error
