"""The node's side of the zygote: starts it, asks it for processes, starts it again when it is gone."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from edge.errors import IsolateLost
from edge.isolates.sandbox import KEPT_VARIABLES
from edge.isolates.zygote import EXITED, FORK, FORK_FAILED, FORKED, KILL, MESSAGE, READY

START_TIMEOUT_S = 30.0
# The interpreter needs the last two where it is not installed in a standard place.
_ZYGOTE_VARIABLES = (*KEPT_VARIABLES, "LD_LIBRARY_PATH", "PYTHONPATH")

OnExit = Callable[[int], None]
"""Called with the exit code of a process; negative: the number of the signal that killed it."""


class Spawner:
    """Forks handler processes. Must be used from the thread that lives as long as the node: the zygote dies with it."""

    def __init__(self) -> None:
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[int], OnExit]] = {}
        self._on_exit: dict[int, OnExit] = {}
        self._starting = asyncio.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The zygote's pid, or None if none is running."""
        return self._zygote.pid if self._zygote is not None and self._control is not None else None

    async def start(self) -> None:
        """Start a zygote, unless one is running.

        Raises:
            IsolateLost: it did not come up, or this is closed.
        """
        async with self._starting:
            if self._is_closed:
                raise IsolateLost("the node is stopping")
            if self._control is None:
                await self._reap()
                await self._start()

    async def fork(self, on_exit: OnExit) -> tuple[int, socket.socket]:
        """A new handler process: its pid and the node's end of its socket. `on_exit` is called when it ends.

        Raises:
            IsolateLost: no process could be had.
        """
        for attempt in range(2):
            await self.start()
            ours, theirs = socket.socketpair()
            try:
                return await self._fork(theirs, on_exit), ours
            except BaseException as error:
                ours.close()  # ends the child, should there be one after all
                if not isinstance(error, IsolateLost) or attempt == 1 or self._control is not None:
                    raise
            finally:
                theirs.close()
        raise AssertionError("unreachable")

    def kill(self, pid: int) -> None:
        """SIGKILL a process that `fork` made; harmless if it has ended."""
        if self._control is not None and pid in self._on_exit:
            with suppress(OSError):  # a dead zygote's children die anyway
                self._control.send(MESSAGE.pack(KILL, 0, 0, pid))

    async def close(self) -> None:
        """End the zygote and, with it, every process that it forked."""
        async with self._starting:
            self._is_closed = True
            self._disconnect("the node is stopping")
            await self._reap()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._zygote = _launch(theirs.fileno())
        ours.setblocking(False)
        self._control = ours
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._on_readable)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._ready
        except TimeoutError:
            self._disconnect("it took too long to start")
            raise IsolateLost(
                f"the zygote (python -m edge.isolates.zygote) did not start within {START_TIMEOUT_S:g} s; "
                "is the machine overloaded?"
            ) from None

    async def _fork(self, theirs: socket.socket, on_exit: OnExit) -> int:
        assert self._control is not None
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, on_exit
        try:
            socket.send_fds(self._control, [MESSAGE.pack(FORK, number, 0, 0)], [theirs.fileno()])
            return await answer
        except OSError as error:
            raise IsolateLost(f"the zygote could not be asked for a process: {error}") from error
        finally:
            self._waiting.pop(number, None)

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(MESSAGE.size)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._disconnect("the zygote died")
                return
            self._on_message(*MESSAGE.unpack(data))

    def _on_message(self, kind: bytes, number: int, status: int, pid: int) -> None:
        if kind == READY and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        elif kind == EXITED and pid in self._on_exit:
            self._on_exit.pop(pid)(os.waitstatus_to_exitcode(status))
        elif kind in (FORKED, FORK_FAILED) and number in self._waiting:
            answer, on_exit = self._waiting.pop(number)
            if kind == FORKED:
                self._on_exit[pid] = on_exit
            if answer.done():
                return
            if kind == FORKED:
                answer.set_result(pid)
            else:
                answer.set_exception(
                    IsolateLost(
                        f"no handler process could be forked: {os.strerror(status)}; check `ulimit -u` and memory"
                    )
                )

    def _disconnect(self, reason: str) -> None:
        """The zygote is gone, or has to go; its children die with it."""
        if self._control is None:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        lost = IsolateLost(f"the zygote, which forks handler processes, is gone: {reason}")
        for answer in (self._ready, *(answer for answer, _ in self._waiting.values())):
            if answer is not None and not answer.done():
                answer.set_exception(lost)
        self._waiting.clear()
        on_exits = list(self._on_exit.values())
        self._on_exit.clear()
        for on_exit in on_exits:
            on_exit(-signal.SIGKILL)

    async def _reap(self) -> None:
        """Wait for the zygote that was disconnected."""
        if self._zygote is None:
            return
        try:
            await asyncio.to_thread(self._zygote.wait, 2.0)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            await asyncio.to_thread(self._zygote.wait)
        self._zygote = None


def _launch(control_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "edge.isolates.zygote", str(control_fd), str(os.getpid())],
        pass_fds=[control_fd],
        stdin=subprocess.DEVNULL,
        cwd="/",
        env={name: os.environ[name] for name in _ZYGOTE_VARIABLES if name in os.environ},
        start_new_session=True,  # Ctrl-C in a terminal is for the node, which then closes the zygote
    )
