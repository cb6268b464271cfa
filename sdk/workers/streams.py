"""`ReadableStream`: a body as it arrives, for `async for` and for JavaScript's reader protocol.

It knows nothing about where the bytes come from: any async or sync iterator of str and bytes is a source.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any

from workers.values import JsBytes, JsClass


class ReadableStream:
    """An async iterator of `JsBytes`, to be read once.

    Iterating, `getReader()` and returning it in a `Response` are three ways to read the same bytes. A source that
    yields anything but str or bytes makes the read raise TypeError.
    """

    constructor = JsClass("ReadableStream")

    def __init__(self, source: AsyncIterable[Any] | Iterator[Any]) -> None:
        self._source = aiter(source) if isinstance(source, AsyncIterable) else _in_turns(source)
        self._locked = False
        self._disturbed = False

    @property
    def locked(self) -> bool:
        """Whether a reader holds this stream."""
        return self._locked

    @property
    def disturbed(self) -> bool:
        """Whether anything was read from it, or it was cancelled."""
        return self._disturbed

    def __aiter__(self) -> AsyncIterator[JsBytes]:
        return self

    async def __anext__(self) -> JsBytes:
        self._disturbed = True
        return JsBytes(_as_bytes(await anext(self._source)))

    def getReader(self) -> Reader:
        """A reader with `await reader.read()`.

        Raises:
            TypeError: another reader holds the stream; `releaseLock()` it first.
        """
        if self._locked:
            raise TypeError("This ReadableStream is currently locked to a reader; call releaseLock() on that one")
        self._locked = True
        return Reader(self)

    def tee(self) -> tuple[ReadableStream, ReadableStream]:
        """Two streams of the same bytes. What only one of them has read is kept for the other."""
        self._disturbed = True
        tee = _Tee(self._source)
        return ReadableStream(tee.branch(0)), ReadableStream(tee.branch(1))

    async def cancel(self, reason: Any = None) -> None:
        """Stop the source: nobody will read the rest."""
        await self.aclose()

    async def aclose(self) -> None:
        """The same as `cancel()`, under the name that async generators use."""
        self._disturbed = True
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


class Read:
    """What `reader.read()` gives: `done`, and the chunk as `value` unless done."""

    __slots__ = ("done", "value")

    def __init__(self, done: bool, value: JsBytes | None) -> None:
        self.done = done
        self.value = value

    def __repr__(self) -> str:
        return f"Read(done={self.done}, value={self.value!r})"


class Reader:
    """JavaScript's default reader over one stream."""

    def __init__(self, stream: ReadableStream) -> None:
        self._stream: ReadableStream | None = stream

    async def read(self) -> Read:
        """The next chunk, or `done` at the end."""
        try:
            return Read(False, await anext(self._held()))
        except StopAsyncIteration:
            return Read(True, None)

    async def cancel(self, reason: Any = None) -> None:
        """Stop the source: nobody will read the rest."""
        await self._held().cancel(reason)

    def releaseLock(self) -> None:
        """Let go of the stream, so that another reader can have it."""
        if self._stream is not None:
            self._stream._locked = False
            self._stream = None

    def _held(self) -> ReadableStream:
        if self._stream is None:
            raise TypeError("This reader has released its stream")
        return self._stream


class _Tee:
    """One source, read on demand of whichever branch is ahead."""

    def __init__(self, source: AsyncIterator[Any]) -> None:
        self._source = source
        self._pending: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._lock = asyncio.Lock()
        self._ended = False
        self._error: BaseException | None = None

    async def branch(self, index: int) -> AsyncIterator[Any]:
        pending = self._pending[index]
        while True:
            while pending:
                yield pending.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            async with self._lock:
                if not pending and not self._ended:
                    await self._advance()

    async def _advance(self) -> None:
        try:
            chunk = await anext(self._source)
        except StopAsyncIteration:
            self._ended = True
        except asyncio.CancelledError:  # of this branch's reader; the other one can go on
            raise
        except BaseException as error:
            self._ended, self._error = True, error
        else:
            for pending in self._pending:
                pending.append(chunk)


async def _in_turns(source: Iterator[Any]) -> AsyncIterator[Any]:
    """A sync iterator as an async one; other tasks get a turn between its items."""
    for item in source:
        yield item
        await asyncio.sleep(0)


def _as_bytes(chunk: Any) -> bytes:
    if isinstance(chunk, str):
        return chunk.encode()
    if isinstance(chunk, bytes | bytearray | memoryview):
        return bytes(chunk)
    raise TypeError(f"Unsupported type in stream: {type(chunk).__name__}; a body's chunks must be str or bytes")
