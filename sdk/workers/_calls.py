"""The calls that an isolate makes to its node: one odd id each, answered once, cancelled when nobody waits.

It knows nothing of what is called; `ai.py` and `fetch.py` build the frames and read the answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Self

from workers._body import Content
from workers._channel import Channel, Incoming
from workers._report import message_text
from workers._wire import (
    MAX_CHUNK_BYTES,
    Abort,
    AiRun,
    Call,
    CallFailed,
    Cancel,
    Chunk,
    End,
    Result,
    ResultHead,
    Subrequest,
)
from workers.streams import ReadableStream

Answer = Result | ResultHead | CallFailed


class Calls:
    """The calls of one isolate that are not over yet."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ids = itertools.count(1, 2)
        self._open: dict[int, _Call] = {}

    def next_id(self) -> int:
        """An id for a new call."""
        return next(self._ids)

    async def ask(
        self, frame: AiRun | Call | Subrequest, content: Content = None
    ) -> tuple[Answer, ReadableStream | None]:
        """Send `frame`, then `content` as its body, and wait for the answer and the stream that may follow it.

        A cancelled caller, or a closed stream, cancels the call in the node.

        Raises:
            FrameError: `frame` cannot be sent.
        """
        call = self._open[frame.id] = _Call(frame.invocation)
        try:
            self._channel.send(frame)
            if content is not None:
                call.upload = asyncio.create_task(self._upload(frame.id, content))
            answer = await call.answer
        except BaseException:
            self.cancel(frame.id)
            raise
        if call.incoming is None:
            self._forget(frame.id)
            return answer, None
        return answer, ReadableStream(_AnswerBody(self, frame.id, call.incoming))

    def on_answer(self, frame: Answer) -> None:
        """Hand an answer to whoever waits for it."""
        call = self._open.get(frame.id)
        if call is None or call.answer.done():
            return
        if isinstance(frame, ResultHead) and frame.has_body:
            call.incoming = self._channel.receive_body(frame.id)
        call.answer.set_result(frame)

    def cancel(self, id: int) -> None:
        """Stop call `id`, unless it is over."""
        call = self._forget(id)
        if call is not None and not (call.incoming is not None and call.incoming.ended):
            self._channel.forget_body(id)
            self._channel.send(Cancel(id))

    def cancel_all_of(self, invocation: int) -> None:
        """Stop every call that `invocation` left open."""
        for id in [id for id, call in self._open.items() if call.invocation == invocation]:
            self.cancel(id)

    def _forget(self, id: int) -> _Call | None:
        call = self._open.pop(id, None)
        if call is not None and call.upload is not None:
            call.upload.cancel()
        return call

    async def _upload(self, id: int, content: bytes | ReadableStream) -> None:
        """Send a request's body; an error in it breaks off the body, so that the call fails with that reason."""
        if isinstance(content, bytes) and len(content) <= MAX_CHUNK_BYTES:
            self._channel.send(Chunk(id, content), End(id))
            return
        try:
            await self._channel.send_body(id, _pieces(content))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except BaseException as error:  # the body is the handler's code: whatever it raises ends only this body
            self._channel.send(Abort(id, f"{type(error).__name__}: {message_text(error)}"))


class _Call:
    def __init__(self, invocation: int) -> None:
        self.invocation = invocation
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.incoming: Incoming | None = None
        self.upload: asyncio.Task[None] | None = None


class _AnswerBody:
    """An answer's body; closing it early cancels the call, even before the first read."""

    def __init__(self, calls: Calls, id: int, incoming: Incoming) -> None:
        self._calls = calls
        self._id = id
        self._incoming = incoming

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._incoming)
        except (StopAsyncIteration, OSError):
            self._calls.cancel(self._id)
            raise

    async def aclose(self) -> None:
        self._calls.cancel(self._id)
        await self._incoming.aclose()


async def _pieces(content: bytes | ReadableStream) -> AsyncIterator[Any]:
    if isinstance(content, bytes):
        yield content
        return
    async for chunk in content:
        yield chunk
