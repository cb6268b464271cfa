"""In-process mode: the SDK's own isolate in the interpreter of the tests, instead of in a forked process.

Requests, events and calls of bindings take the same way as ever, over a socket. What differs: there is no sandbox and
no limit on CPU time and memory; HTTP libraries connect by themselves; a handler that blocks cannot be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

from edge.errors import EdgeError, HandlerFailed, WorkerStartFailed
from edge.isolates.sandbox.layers import ForkSpec
from edge.isolates.spawner import OnExit, Spawner
from edge.node.bundle import SKIPPED_FOLDERS
from workers import _runtime, _shim_path
from workers._channel import Channel
from workers._cpu import MeteredLoop
from workers._isolate import Isolate
from workers._load import Worker, load
from workers._wire import Init, Sandboxed, Threw

_FIRST_NUMBER = (1 << 22) + 1
"""Instead of pids: Linux has none above 2**22, so that gauges read nothing and no signal hits anybody."""
CLOSE_S = 10.0
"""How long isolates have to end."""
_NOT_OF_WORKERS = SKIPPED_FOLDERS | {"site-packages", "dist-packages", "tests", "test"}
_SDK_FOLDER = os.path.dirname(os.path.abspath(_runtime.__file__)) + os.sep


class InProcessSpawner(Spawner):
    """Starts isolates in the loop that asks for them, one at a time.

    Args:
        keeps_modules: whether the worker's modules are imported once, as tests import them too, and keep their state;
            otherwise each isolate imports them afresh.
    """

    def __init__(self, keeps_modules: bool) -> None:
        super().__init__("none")
        self.output = Output()
        self._keeps_modules = keeps_modules
        self._process_numbers = itertools.count(_FIRST_NUMBER)
        self._isolates: dict[int, InProcessIsolate] = {}
        self._last: InProcessIsolate | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def module(self) -> ModuleType:
        """The main module that was imported last."""
        assert self._last is not None
        return self._last.module

    def original(self, error: EdgeError) -> BaseException:
        """The exception that `error` tells of, with the handler's part of its traceback; `error` itself if unknown."""
        if self._last is None:
            return error
        original: BaseException | None = None
        if isinstance(error, HandlerFailed):
            original = self._last.errors.get((error.type, error.message, error.traceback))
        elif isinstance(error, WorkerStartFailed):
            original = self._last.start_error
        return error if original is None else original.with_traceback(_from_handler(original.__traceback__))

    async def start(self) -> None:
        """Nothing has to be."""

    async def fork(self, spec: ForkSpec, on_exit: OnExit) -> tuple[int, socket.socket]:
        """A new isolate: a number, and the node's end of its socket. `on_exit` is called when it ends."""
        number = next(self._process_numbers)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeteredLoop)
        isolate = self._last = self._isolates[number] = InProcessIsolate(loop, self.output, self._keeps_modules)
        running = loop.create_task(isolate.run(theirs, Sandboxed([])), context=contextvars.Context())

        def end(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            del self._isolates[number]
            on_exit(0)

        self._running.add(running)
        running.add_done_callback(end)
        return number, ours

    def kill(self, pid: int) -> None:
        """End that isolate; a handler that does not give way goes on until it does."""
        if pid in self._isolates:
            self._isolates[pid].end()

    async def close(self) -> None:
        """End all isolates."""
        for isolate in list(self._isolates.values()):
            isolate.end()
        if self._running:  # a task that is left over would be cleared away in another thread, which its stack forbids
            await asyncio.wait(self._running, timeout=CLOSE_S)


class InProcessIsolate(Isolate):
    """An isolate that leaves the interpreter as it was."""

    channel: Channel | None = None  # type: ignore[assignment]

    def __init__(self, loop: MeteredLoop, output: Output, keeps_modules: bool) -> None:
        super().__init__(loop)
        self.errors: dict[tuple[str, str, str], BaseException] = {}
        """By what the node is told of them."""
        self.start_error: BaseException | None = None
        self.module: ModuleType
        self._output = output
        self._keeps_modules = keeps_modules
        self._undo = contextlib.ExitStack()

    async def run(self, sock: socket.socket, sandboxed: Sandboxed) -> None:
        """See `Isolate`."""
        try:
            await super().run(sock, sandboxed)
        finally:
            self._undo.close()

    def end(self) -> None:
        """Hang up and cancel what runs."""
        if self.channel is not None:
            self.channel.fail(ConnectionResetError("the isolate was ended"))
        for invocation in list(self._invocations.values()):
            invocation.cancel()

    def threw(self, invocation: int, error: BaseException) -> Threw:
        """See `Isolate`."""
        frame = super().threw(invocation, error)
        self.errors[frame.type, frame.message, frame.traceback] = error
        return frame

    def _prepare(self, init: Init) -> None:
        self._undo.callback(setattr, _runtime, "runtime", None)
        self._undo.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
        sys.dont_write_bytecode = True
        self._undo.enter_context(self._output.to(self.reporter.streams()))
        if not self._keeps_modules:
            self._undo.enter_context(_own_modules(init))
        sys.path[:0] = init.search_paths
        _shim_path.activate()

    def _load(self, init: Init) -> Worker:
        try:
            worker = self._kept(init) or load(init.root, init.main, init.compatibility_flags)
        except BaseException as error:
            self.start_error = error
            raise
        self.module = sys.modules[Path(init.main).stem]
        return worker

    def _kept(self, init: Init) -> Worker | None:
        """The worker, if its main module is imported already."""
        path = Path(init.root, init.main)
        module = sys.modules.get(path.stem) if self._keeps_modules else None
        if module is None or getattr(module, "__file__", None) != str(path):
            return None
        return Worker(module, init.main, init.compatibility_flags)


@contextlib.contextmanager
def _own_modules(init: Init) -> Iterator[None]:
    """Within this, no module of the worker is imported yet; afterwards all is as it was."""
    path, modules = list(sys.path), _modules_of(init)
    for name in modules:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in _modules_of(init):
            del sys.modules[name]
        sys.modules.update(modules)
        sys.path[:] = path


def _modules_of(init: Init) -> dict[str, ModuleType]:
    """The modules that are the worker's own code, and whatever has the name of its main module."""
    root = init.root.rstrip(os.sep) + os.sep
    main = Path(init.main).stem
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(root):
            *folders, last = file[len(root) :].split(os.sep)
            if _NOT_OF_WORKERS.isdisjoint(folders) and not last.startswith(("test_", "conftest.")):
                found[name] = module
        elif name == main and main not in sys.stdlib_module_names:
            found[name] = module
    return found


def _from_handler(traceback: TracebackType | None) -> TracebackType | None:
    """`traceback` from the first frame on that is not the SDK's; all of it if there is none."""
    entry = traceback
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith((_SDK_FOLDER, "<frozen importlib")):
        entry = entry.tb_next
    return entry or traceback


class Output:
    """What handlers print and log goes to their isolate's `Log` frames, and where it would have gone anyway as well.

    Only what other threads than the test's write is taken for theirs.
    """

    def __init__(self) -> None:
        self._streams: tuple[TextIO, ...] = ()
        self._depth = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def to(self, streams: Iterator[TextIO]) -> Iterator[None]:
        """Within this, an isolate takes what is written to stdout and stderr."""
        self._streams = tuple(streams)
        try:
            yield
        finally:
            self._streams = ()

    def write(self, index: int, text: str) -> None:
        """Hand `text` to the isolate: 0 for stdout, 1 for stderr."""
        if self._streams:
            self._streams[index].write(text)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Within this, to be entered in the test's thread, `sys.stdout`, `sys.stderr` and logging lead here."""
        if self._depth == 0:
            self._install()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._undo.close()

    def _install(self) -> None:
        for index, name in enumerate(("stdout", "stderr")):
            before = getattr(sys, name)
            tee = _Tee(before, self, index)
            setattr(sys, name, tee)
            self._undo.callback(_put_back, name, tee, before)
        handler = _Records(self)
        logging.getLogger().addHandler(handler)
        self._undo.callback(logging.getLogger().removeHandler, handler)


def _put_back(name: str, tee: _Tee, before: TextIO) -> None:
    if getattr(sys, name) is tee:
        setattr(sys, name, before)


class _Tee:
    """A text stream that writes to another one and, from other threads than the one it was made in, to an isolate."""

    def __init__(self, stream: TextIO, output: Output, index: int) -> None:
        self._stream = stream
        self._output = output
        self._index = index
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            self._output.write(self._index, text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Records(logging.Handler):
    """Hands records of handlers to their isolate, with their level."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        isolate = _runtime.runtime
        if threading.get_ident() != self._thread and isinstance(isolate, InProcessIsolate):
            for line in self.format(record).splitlines():
                isolate.reporter.log(record.levelname.lower(), line)
