"""The life of a handler process after it was forked: import the worker, serve its invocations, end with the node.

User code runs inside of this loop, so nothing that it raises, SystemExit included, may get past it. What the process
may do to the machine is decided before, by whoever forked it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from workers import _runtime
from workers._calls import Calls
from workers._channel import Channel
from workers._headers import header_pairs
from workers._load import Worker, load
from workers._report import Reporter, message_text, traceback_text
from workers._wire import (
    MAX_CHUNK_BYTES,
    Abort,
    CallFailed,
    Cancel,
    Chunk,
    End,
    Fetch,
    Finished,
    Init,
    Ready,
    ResponseHead,
    Result,
    ResultHead,
    Sandboxed,
    StartFailed,
    Threw,
    ToIsolate,
)
from workers.ai import Ai
from workers.entrypoints import Context, Env
from workers.request import Request
from workers.response import Response
from workers.streams import ReadableStream
from workers.values import wrap

WAIT_UNTIL_S = 30.0
"""How long `waitUntil` work may go on after the response."""


def serve(sock: socket.socket, layers: list[str]) -> None:
    """Serve one worker over `sock` until the node closes it. Never returns; the process exits.

    Args:
        layers: the sandbox layers that this process is under, for the node to check before it sends code.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    isolate = _Isolate(loop)
    os.register_at_fork(after_in_child=lambda: _leave_to_parent(sock.fileno(), loop))
    main = loop.create_task(isolate.run(sock, layers))
    while not main.done():
        try:
            loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
            # A task of the user's raised it or stopped the loop; asyncio lets these through. The others go on.
            isolate.report(error)
    os._exit(0)


def _leave_to_parent(sock_fd: int, loop: asyncio.AbstractEventLoop) -> None:
    """In a process that a handler has forked: node and event loop are its parent's, which both would else serve.

    The code that forked goes on, as with `multiprocessing`; if it gets back into the loop, the process ends there.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, sock_fd)
    os.close(null)
    loop.call_soon(os._exit, 0)


class _Isolate:
    """One worker version in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._init: asyncio.Future[Init | None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._invocations: dict[int, _Invocation] = {}
        self.channel: Channel
        self.reporter: Reporter
        self.worker: Worker
        self.calls: Calls
        self.env: Env

    async def run(self, sock: socket.socket, layers: list[str]) -> None:
        """Everything, from the first frame to the end of the connection."""
        self.channel = await Channel.open(sock, ToIsolate, self._on_frame, self._on_lost)
        self.reporter = Reporter(self.channel)
        self.calls = Calls(self.channel)
        self.channel.send(Sandboxed(layers))
        init = await self._init
        if init is not None:
            self._start(init)
        await self._lost  # which also waits until everything is sent

    def new_env(self) -> Env:
        """The environment for one invocation: nothing in it is shared with another one."""
        init = self._init.result()
        assert init is not None
        bindings = wrap(init.vars)
        bindings |= {name: Ai() for name, binding in init.bindings.items() if binding.kind == "ai"}
        return Env(bindings)

    def finished(self, invocation: int) -> None:
        """`invocation` is over; whatever it left behind is cleared away."""
        del self._invocations[invocation]
        self.calls.cancel_all_of(invocation)
        self.channel.forget_body(invocation)
        self.reporter.flush(invocation)
        self.channel.send(Finished(invocation))

    def report(self, error: BaseException) -> None:
        """Log what ended a task of the user's."""
        self.reporter.log("error", f"a background task ended with:\n{traceback_text(error)}")

    def _start(self, init: Init) -> None:
        """Import the worker and say how that went. The event loop stands still meanwhile, but output still goes out."""
        self.reporter.capture()
        sys.dont_write_bytecode = True  # the worker's folder is its author's, and caches made within a second mislead
        _runtime.runtime = self
        self.env = self.new_env()
        start = time.perf_counter_ns()
        try:
            self.worker = load(init.root, init.main)
        except BaseException as error:  # the process edge: this is the user's code
            self.reporter.flush(0)
            self.channel.send(StartFailed(type(error).__name__, message_text(error), traceback_text(error)))
            self.channel.close()
            return
        self.reporter.flush(0)
        self.channel.send(Ready(self.worker.handlers, (time.perf_counter_ns() - start) // 1000))

    def _on_frame(self, frame: Any) -> None:
        match frame:
            case Fetch(id):
                self._invocations[id] = _Invocation(self, frame)
            case Cancel(id):
                if id in self._invocations:
                    self._invocations[id].cancel()
            case Result() | ResultHead() | CallFailed():
                self.calls.on_answer(frame)
            case Init() if not self._init.done():
                self._init.set_result(frame)

    def _on_lost(self, error: Exception | None) -> None:
        for future in (self._init, self._lost):
            if not future.done():
                future.set_result(None)


class _Invocation:
    """One event: the handler's response first, then what it left to `waitUntil`."""

    def __init__(self, isolate: _Isolate, frame: Fetch) -> None:
        self._isolate = isolate
        self._channel = isolate.channel
        self._frame = frame
        self._ctx = Context(frame.id)
        self._is_cancelled = False
        body = ReadableStream(self._channel.receive_body(frame.id)) if frame.has_body else None
        variables = contextvars.copy_context()
        variables.run(_runtime.context.set, self._ctx)
        self._response = asyncio.create_task(self._respond(body), context=variables)
        self._rest = asyncio.create_task(self._finish(), context=variables)

    def cancel(self) -> None:
        """Nobody waits for the response. `waitUntil` work goes on, as its name says."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._response.cancel()

    async def _respond(self, body: ReadableStream | None) -> None:
        """Run the handler and send what it returns. Raises nothing."""
        id = self._frame.id
        try:
            response = await self._call(body)
            content = response._take()
            head = _head(id, response, content)
        except BaseException as error:  # the edge between the user's code and ours: SystemExit must not end the process
            if isinstance(error, TypeError | AttributeError) and "'coroutine' object" in message_text(error):
                error.add_note("Is an `await` missing?")
            self._channel.send(Threw(id, type(error).__name__, message_text(error), traceback_text(error)))
            return
        if self._is_cancelled:  # and the handler caught it; nobody waits for this response
            await _close(content)
            self._channel.send(Threw(id, "CancelledError", "the invocation was cancelled", ""))
        elif content is None:
            self._channel.send(head)
        elif isinstance(content, bytes) and len(content) <= MAX_CHUNK_BYTES:
            self._channel.send(head, Chunk(id, content), End(id))
        else:
            self._channel.send(head)
            await self._stream(content)

    async def _call(self, body: ReadableStream | None) -> Response:
        frame, worker = self._frame, self._isolate.worker
        request = Request._received(frame.method, frame.url, frame.headers, body, frame.cf)
        result = worker.call("fetch", request, self._ctx, self._isolate.new_env())
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Response):
            return result
        error = TypeError(f"{worker.name_of('fetch')} must return a Response, but returned {_describe(result)}")
        if isinstance(result, dict | list):
            error.add_note("Response.json(value) makes a JSON response of it.")
        elif isinstance(result, str | bytes):
            error.add_note("Response(value) makes a response of it.")
        raise error

    async def _stream(self, content: bytes | ReadableStream) -> None:
        try:
            async with aclosing(_chunks(content)) as chunks:
                await self._channel.send_body(self._frame.id, chunks)
        except ConnectionResetError:
            return  # the process ends with its connection
        except BaseException as error:  # as in `_respond`: the body is the user's code too
            if self._is_cancelled:
                self._channel.send(Abort(self._frame.id, "the invocation was cancelled"))
                return
            self._isolate.reporter.log("error", f"the response's body broke off:\n{traceback_text(error)}")
            self._channel.send(Abort(self._frame.id, f"{type(error).__name__}: {message_text(error)}"))

    async def _finish(self) -> None:
        await asyncio.wait([self._response])
        self._ctx._is_over = not self._ctx._waits
        if self._ctx._waits:
            await self._await_rest()
        self._isolate.finished(self._frame.id)

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


def _head(id: int, response: Response, content: Any) -> ResponseHead:
    """The response's head; of a body that is complete the length is known."""
    headers = header_pairs(response.headers)
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
