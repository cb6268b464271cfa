"""One event in a handler process: the handler first, then what it left to `waitUntil`.

User code runs inside, so nothing that it raises, SystemExit included, may get past this module.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from workers import _rpc, _runtime
from workers._body import Content
from workers._channel import Channel
from workers._cpu import MeteredLoop
from workers._events import Message, MessageBatch, ScheduledController
from workers._load import Worker
from workers._report import Reporter, message_text, traceback_text
from workers._wire import (
    MAX_CHUNK_BYTES,
    Abort,
    Event,
    EventResult,
    Fetch,
    Finished,
    Frame,
    ResponseHead,
    Threw,
)
from workers.entrypoints import Context, Env
from workers.request import Request
from workers.response import Response
from workers.streams import ReadableStream

WAIT_UNTIL_S = 30.0
"""How long `waitUntil` work may go on after the response."""


class Isolate(Protocol):
    """The process that an invocation runs in."""

    loop: MeteredLoop
    channel: Channel
    reporter: Reporter
    worker: Worker

    def new_env(self) -> Env:
        """The environment for one invocation."""

    def finish(self, invocation: int, last: list[Frame]) -> None:
        """`invocation` is over: end what it left behind and, soon, send its last frames."""

    def send_answer(self, invocation: int, frames: list[Frame]) -> None:
        """Send (a part of) the answer of `invocation`, or that it cannot be sent."""

    def threw(self, invocation: int, error: BaseException) -> Threw:
        """How the node is told that `error` ended `invocation`."""


class Invocation:
    """Base of the two kinds. Once it is started, it tells the isolate when it is over."""

    def __init__(self, isolate: Isolate, frame: Fetch | Event) -> None:
        self._isolate = isolate
        self._id = frame.id
        self._entrypoint = frame.entrypoint
        self._ctx = Context(frame.id, frame.props)
        self._is_cancelled = False
        self._is_over = False
        self._variables = contextvars.copy_context()
        self._variables.run(_runtime.context.set, self._ctx)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with the handler. Must be called by a callback of the loop, and not by a task."""
        self._task = self._isolate.loop.start_task(self._run(), self._variables, self._ctx._cpu)
        if self._task.done():
            self._after_task()
        else:
            self._task.add_done_callback(self._after_task, context=self._variables)

    @property
    def cpu_us(self) -> int:
        """Microseconds of CPU time that it has used so far."""
        return self._ctx._cpu.us

    def cancel(self) -> None:
        """Nobody waits for the answer. `waitUntil` work goes on, as its name says."""
        if not self._is_cancelled:
            self._is_cancelled = True
            if self._task is not None:
                self._task.cancel()

    async def _serve(self) -> list[Frame]:
        """Run the handler; the frames that are the (end of the) answer. Raises nothing."""
        raise NotImplementedError

    async def _run(self) -> None:
        frames = await self._serve()
        if self._ctx._waits:
            self._isolate.send_answer(self._id, frames)
        else:
            self._end(frames)  # together with the answer: each write wakes the node up

    def _after_task(self, _: asyncio.Task[None] | None = None) -> None:
        if self._ctx._waits:
            rest = self._isolate.loop.create_task(self._await_rest(), context=self._variables)
            rest.add_done_callback(lambda _: self._end([]), context=self._variables)
        else:
            self._end([])

    def _end(self, frames: list[Frame]) -> None:
        if not self._is_over:
            self._is_over = self._ctx._is_over = True
            if frames and isinstance(head := frames[-1], ResponseHead):
                head.cpu_us = self.cpu_us
            else:
                frames = [*frames, Finished(self._id, self.cpu_us)]
            self._isolate.finish(self._id, frames)

    async def _call(self, event: str, argument: Any) -> Any:
        """What the handler of `event` returns."""
        env = self._ctx._env = self._isolate.new_env()
        result = self._isolate.worker.call(event, argument, self._ctx, env, self._entrypoint)
        return await result if inspect.isawaitable(result) else result

    def _threw(self, error: BaseException) -> Threw:
        if isinstance(error, TypeError | AttributeError) and "'coroutine' object" in message_text(error):
            error.add_note("Is an `await` missing?")
        return self._isolate.threw(self._id, error)

    async def _await_rest(self) -> None:
        """Wait for what was given to `waitUntil`, also while that gives it more, but not for ever."""
        deadline = time.monotonic() + WAIT_UNTIL_S
        waits = self._ctx._waits
        while waits:
            done, _ = await asyncio.wait(
                waits, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            for wait in done:
                self._log_failure(wait)
            waits -= done
            if not done:
                text = f"waitUntil() work was cancelled: it went on for over {WAIT_UNTIL_S:g} s after the response"
                self._isolate.reporter.log("warning", text)
                break
        self._ctx._is_over = True
        for wait in waits:
            wait.cancel()

    def _log_failure(self, wait: asyncio.Future[Any]) -> None:
        if wait.cancelled():
            return
        error = wait.exception()
        if error is not None:
            self._isolate.reporter.log("error", f"waitUntil() work failed:\n{traceback_text(error)}")


class FetchInvocation(Invocation):
    """An HTTP request. Its answer is a `ResponseHead` and a body, or `Threw`."""

    def __init__(self, isolate: Isolate, frame: Fetch) -> None:
        body = ReadableStream(isolate.channel.receive_body(frame.id)) if frame.has_body else None
        self._frame = frame
        self._body = None if frame.is_websocket else body
        self._messages = body if frame.is_websocket else None
        super().__init__(isolate, frame)

    async def _serve(self) -> list[Frame]:
        try:
            response = await self._respond()
            content = self._content_of(response)
            head = _head(self._id, response, content)
        except BaseException as error:  # the edge between the user's code and ours: SystemExit must not end the process
            return [self._threw(error)]
        if self._is_cancelled:  # and the handler caught it; nobody waits for this response
            await _close(content)
            return [Threw(self._id, "CancelledError", "the invocation was cancelled", "")]
        if content is None:
            return [head]
        if isinstance(content, bytes) and len(content) <= MAX_CHUNK_BYTES:
            head.has_body, head.content = False, content
            return [head]
        self._isolate.channel.send(head)
        return await self._stream(content)

    async def _respond(self) -> Response:
        frame, worker = self._frame, self._isolate.worker
        result = await self._call(
            "fetch", Request._received(frame.method, frame.url, frame.headers, self._body, frame.cf)
        )
        if isinstance(result, Response):
            return result
        error = TypeError(
            f"{worker.name_of('fetch', self._entrypoint)} must return a Response, but returned {_describe(result)}"
        )
        if isinstance(result, dict | list):
            error.add_note("Response.json(value) makes a JSON response of it.")
        elif isinstance(result, str | bytes):
            error.add_note("Response(value) makes a response of it.")
        raise error

    def _content_of(self, response: Response) -> Content:
        if response.web_socket is None:
            return response._take()
        if self._messages is None:
            raise TypeError("a response with web_socket is the answer to WebSocket requests only; this is none")
        return ReadableStream(response.web_socket.relay(self._messages))

    async def _stream(self, content: bytes | ReadableStream) -> list[Frame]:
        """Send a body that is long or not complete yet; the frames that end it if it breaks off."""
        try:
            async with aclosing(_chunks(content)) as chunks:
                await self._isolate.channel.send_body(self._id, chunks)
        except ConnectionResetError:
            return []  # the process ends with its connection
        except BaseException as error:  # as in `_serve`: the body is the user's code too
            if self._is_cancelled:
                return [Abort(self._id, "the invocation was cancelled")]
            self._isolate.reporter.log("error", f"the response's body broke off:\n{traceback_text(error)}")
            return [Abort(self._id, f"{type(error).__name__}: {message_text(error)}")]
        return []


class EventInvocation(Invocation):
    """A scheduled event, a batch of a queue, or a call of a method. Its answer is `EventResult` or `Threw`."""

    def __init__(self, isolate: Isolate, frame: Event) -> None:
        self._kind = frame.kind
        self._payload = frame.payload
        super().__init__(isolate, frame)

    async def _serve(self) -> list[Frame]:
        try:
            return [EventResult(self._id, await self._answer())]
        except BaseException as error:  # as for requests
            return [self._threw(error)]

    async def _answer(self) -> Any:
        match self._kind:
            case "scheduled":
                return await self._scheduled()
            case "queue":
                return await self._queue()
            case "rpc":
                return await self._rpc()
        raise TypeError(f"this worker's SDK serves no events of the kind {self._kind!r}")

    async def _scheduled(self) -> dict[str, Any]:
        controller = ScheduledController(self._payload["cron"], self._payload["scheduledTime"])
        await self._call("scheduled", controller)
        return {"noRetry": controller.is_final}

    async def _queue(self) -> dict[str, Any]:
        """Run the handler. What it acknowledged counts even if it raised afterwards."""
        messages = [
            Message(message["id"], message["timestamp"], message["body"], message["attempts"])
            for message in self._payload["messages"]
        ]
        batch = MessageBatch(self._payload["queue"], messages)
        error = None
        try:
            await self._call("queue", batch)
        except BaseException as raised:  # as for requests
            threw = self._threw(raised)
            error = {"type": threw.type, "message": threw.message, "traceback": threw.traceback}
        acks, retries = batch.outcome()
        return {"acks": acks, "retries": retries, "error": error}

    async def _rpc(self) -> bytes:
        method = self._payload["method"]
        args = _rpc.unpack(self._payload["args"])
        env = self._ctx._env = self._isolate.new_env()
        result = self._isolate.worker.call_method(method, args, self._ctx, env, self._entrypoint)
        if inspect.isawaitable(result):
            result = await result
        return _rpc.pack(await _rpc.buffered(result))


def _head(id: int, response: Response, content: Any) -> ResponseHead:
    """The response's head; of a body that is complete the length is known."""
    headers = response._header_pairs()
    if isinstance(content, bytes):
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        headers.append(("content-length", str(len(content))))
    return ResponseHead(id, response.status, headers, has_body=content is not None)


async def _chunks(content: bytes | ReadableStream) -> AsyncGenerator[bytes, None]:
    if isinstance(content, bytes):
        yield content
        return
    async with aclosing(content):
        async for chunk in content:
            yield chunk


async def _close(content: Any) -> None:
    if isinstance(content, ReadableStream):
        await content.aclose()


def _describe(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    if isinstance(value, Coroutine):
        value.close()  # it is never going to be awaited, and saying so once is enough
        return "a coroutine (is an `await` missing?)"
    return f"a {type(value).__name__}"
