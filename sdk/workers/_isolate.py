"""The life of a handler process after it was forked: import the worker, serve its invocations, end with the node.

User code runs inside of this loop, so nothing that it raises, SystemExit included, may get past it. What the process
may do to the machine is decided before, by whoever forked it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import sys
import time
from typing import Any

from workers import _run_sync, _runtime, _shim_path, _transports
from workers._calls import Calls
from workers._channel import MAX_HELD_FRAMES, Channel
from workers._cpu import MeteredLoop
from workers._invocation import EventInvocation, FetchInvocation, Invocation
from workers._load import Worker, load
from workers._report import Reporter, message_text, traceback_text
from workers._wire import (
    Binding,
    CallFailed,
    Cancel,
    CpuUsed,
    Event,
    Fetch,
    Finished,
    Frame,
    FrameError,
    Init,
    Probe,
    Ready,
    Result,
    ResultHead,
    Sandboxed,
    StartFailed,
    Threw,
    ToIsolate,
)
from workers.ai import Ai
from workers.bindings import make_binding
from workers.entrypoints import Env
from workers.values import wrap


def serve(sock: socket.socket, sandboxed: Sandboxed) -> None:
    """Serve one worker over `sock` until the node closes it. Never returns; the process exits.

    Args:
        sandboxed: the sandbox that this process is under, for the node to check before it sends code.
    """
    loop = MeteredLoop()
    asyncio.set_event_loop(loop)
    _run_sync.install(loop)
    isolate = Isolate(loop)
    os.register_at_fork(after_in_child=lambda: _leave_to_parent(sock.fileno(), loop))
    main = loop.create_task(isolate.run(sock, sandboxed))
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


class Isolate:
    """One worker version in this process."""

    def __init__(self, loop: MeteredLoop) -> None:
        self.loop = loop
        self._init: asyncio.Future[Init | None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._invocations: dict[int, Invocation] = {}
        self._sources: dict[str, Any] = {}
        self._last: list[tuple[int, list[Frame]]] = []
        self._context = contextvars.copy_context()  # of no invocation
        self.channel: Channel
        self.reporter: Reporter
        self.worker: Worker
        self.calls: Calls
        self.env: Env

    async def run(self, sock: socket.socket, sandboxed: Sandboxed) -> None:
        """Everything, from the first frame to the end of the connection."""
        self.channel = await Channel.open(sock, ToIsolate, self._on_frame, self._on_lost)
        self.reporter = Reporter(self.channel)
        self.calls = Calls(self.channel)
        self.channel.send(sandboxed)
        init = await self._init
        if init is not None:
            self._start(init)
        await self._lost  # which also waits until everything is sent
        if (asgi := sys.modules.get("workers.asgi")) is not None:  # imported by workers that serve an application
            await asgi.shut_down()

    def new_env(self) -> Env:
        """The environment for one invocation: nothing in it is shared with another one."""
        env = Env(self._sources, _make_value)
        env.__dict__.update(_runtime.env_patches)
        return env

    def finish(self, invocation: int, last: list[Frame]) -> None:
        """`invocation` is over: end what it left behind and send its last frames.

        Where others are in flight, that is at the end of this turn of the loop, together with what they have by then:
        each write is a system call that wakes the node up.
        """
        del self._invocations[invocation]
        self.calls.cancel_all_of(invocation)
        self.channel.forget_body(invocation)
        self.reporter.flush(invocation)
        if not self._last:
            if not self._invocations:
                self.send_answer(invocation, last)
                return
            self.loop.call_soon(self._send_last, context=self._context)
        self._last.append((invocation, last))
        if len(self._last) >= MAX_HELD_FRAMES:
            self._send_last()

    def send_answer(self, invocation: int, frames: list[Frame]) -> None:
        """Send (a part of) the answer of `invocation`, or that it cannot be sent."""
        try:
            self.channel.send(*frames)
        except FrameError as error:  # headers of many MiB, for example
            rest = [] if invocation in self._invocations else [Finished(invocation)]
            self.channel.send(Threw(invocation, "ValueError", f"the answer cannot be sent: {error}", ""), *rest)

    def _send_last(self) -> None:
        waiting, self._last = self._last, []
        try:
            self.channel.send(*[frame for _, frames in waiting for frame in frames])
        except FrameError:
            for invocation, frames in waiting:
                self.send_answer(invocation, frames)

    def threw(self, invocation: int, error: BaseException) -> Threw:
        """How the node is told that `error` ended `invocation`."""
        return Threw(invocation, type(error).__name__, message_text(error), traceback_text(error))

    def report(self, error: BaseException) -> None:
        """Log what ended a task of the user's."""
        self.reporter.log("error", f"a background task ended with:\n{traceback_text(error)}")

    def _start(self, init: Init) -> None:
        """Import the worker and say how that went. The event loop stands still meanwhile, but output still goes out."""
        self._prepare(init)
        _runtime.runtime = self
        self.compatibility_flags = init.compatibility_flags
        self._sources = {**init.vars, **init.bindings}
        self.env = self.new_env()
        start = time.perf_counter_ns()
        try:
            self.worker = self._load(init)
        except BaseException as error:  # the process edge: this is the user's code
            self.reporter.flush(0)
            self.channel.send(StartFailed(type(error).__name__, message_text(error), traceback_text(error)))
            self.channel.close()
            return
        self.reporter.flush(0)
        self.channel.send(Ready(self.worker.handlers, (time.perf_counter_ns() - start) // 1000))

    def _prepare(self, init: Init) -> None:
        """Make of the interpreter what the worker's code expects."""
        self.reporter.capture()
        sys.path[:0] = init.search_paths
        _shim_path.activate()
        _transports.activate()
        sys.dont_write_bytecode = True  # the worker's folder is its author's, and caches made within a second mislead

    def _load(self, init: Init) -> Worker:
        """Import the worker. Raises whatever its code raises."""
        return load(init.root, init.main, init.compatibility_flags)

    def _on_frame(self, frame: Any) -> None:
        match frame:
            case Fetch(id):
                invocation = self._invocations[id] = FetchInvocation(self, frame)
                invocation.start()
            case Probe():
                used = [(id, invocation.cpu_us) for id, invocation in self._invocations.items()]
                self.channel.send(CpuUsed(used))
            case Event(id):
                event = self._invocations[id] = EventInvocation(self, frame)
                event.start()
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


def _make_value(name: str, source: Any) -> Any:
    """What `env.NAME` is."""
    if not isinstance(source, Binding):
        return wrap(source)
    return Ai(name) if source.kind == "ai" else make_binding(source.kind, name, source.props)
