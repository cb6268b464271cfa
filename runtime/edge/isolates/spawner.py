"""The node's side of the zygote: starts it, asks it for processes, starts it again when it is gone."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from edge.errors import IsolateLost
from edge.isolates.output import Output
from edge.isolates.places import Place, Places
from edge.isolates.sandbox import KEPT_VARIABLES, LIBRARY_SETTINGS, ForkSpec, Plan
from edge.isolates.zygote import (
    EXITED,
    FORK,
    FORK_FAILED,
    FORKED,
    KILL,
    MAX_SPEC_BYTES,
    MESSAGE,
    READY,
    SPEC_LENGTH,
)

__all__ = ["ForkSpec", "OnExit", "Spawner"]

START_TIMEOUT_S = 30.0
# The interpreter needs the last two where it is not installed in a standard place.
_ZYGOTE_VARIABLES = (*KEPT_VARIABLES, "LD_LIBRARY_PATH", "PYTHONPATH")
SPARE_DELAY_S = 0.05
"""How long after a process was needed the next spare one is made: the first one is to have the processor until then."""
WATCH_S = 0.25
"""How often the size of temporary folders is looked at that are no mounts of their own."""

logger = logging.getLogger(__name__)

OnExit = Callable[[int], None]
"""Called with the exit code of a process; negative: the number of the signal that killed it."""


class _Child:
    """A forked process, which may not know yet what it is for."""

    def __init__(self, place: Place, sock: socket.socket) -> None:
        self.place = place
        self.sock = sock
        """The node's end."""
        self.pid = 0
        self.on_exit: OnExit = lambda _: None
        self.is_gone = False

    def after_exit(self, code: int) -> None:
        self.is_gone = True
        self.place.give_back()
        self.on_exit(code)


class Spawner:
    """Forks handler processes. Must be used from the thread that lives as long as the node: the zygote dies with it.

    From the first process on there is a spare one, forked and in its sandbox but for the layers that depend on what it
    is for; it holds nobody's code, and is what the next request for a process gets.

    Args:
        policy: which layers of the sandbox there are to be (`edge.isolates.sandbox.layers.POLICIES`). The caller
            compares it with what each process reports (`layers.refusal`).
        preload: names of packages that the zygote imports, so that handler processes find them imported.
        tmp_root: where temporary folders are made; default: the system's.
    """

    def __init__(self, policy: str = "best-effort", preload: Sequence[str] = (), tmp_root: Path | None = None) -> None:
        self.policy = policy
        self._preload = tuple(preload)
        self._tmp_root = tmp_root
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._places: Places | None = None
        self._output: Output | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[int], _Child]] = {}
        self._children: dict[int, _Child] = {}
        self._spare: _Child | None = None
        self._making_spare: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The zygote's pid, or None if none is running."""
        return self._zygote.pid if self._zygote is not None and self._control is not None else None

    @property
    def spare_pid(self) -> int | None:
        """The process that waits for a use, or None."""
        return self._spare.pid if self._spare is not None and not self._spare.is_gone else None

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

    async def fork(self, spec: ForkSpec, on_exit: OnExit) -> tuple[int, socket.socket]:
        """A new handler process: its pid and the node's end of its socket. `on_exit` is called when it ends.

        Raises:
            IsolateLost: no process could be had.
        """
        data = msgspec.msgpack.encode(spec)
        if len(data) > MAX_SPEC_BYTES:
            raise IsolateLost(f"the paths that the process is to read take {len(data)} bytes, over {MAX_SPEC_BYTES}")
        child = await self._next_child()
        child.on_exit = on_exit
        try:
            child.place.limit_memory(spec.memory_mb)
            child.sock.sendall(SPEC_LENGTH.pack(len(data)) + data)
        except OSError as error:
            self.kill(child.pid)
            child.sock.close()
            raise IsolateLost(f"a handler process could not be put to use: {error}") from error
        if self._making_spare is None:
            self._making_spare = asyncio.create_task(self._make_spare())
        return child.pid, child.sock

    def kill(self, pid: int) -> None:
        """SIGKILL a process that `fork` made; harmless if it has ended."""
        if self._control is not None and pid in self._children:
            with suppress(OSError):  # a dead zygote's children die anyway
                self._control.send(MESSAGE.pack(KILL, 0, 0, pid))

    async def close(self) -> None:
        """End the zygote and, with it, every process that it forked."""
        async with self._starting:
            self._is_closed = True
            for task in (self._watching, self._making_spare):
                if task is not None:
                    task.cancel()
            self._disconnect("the node is stopping")
            await self._reap()

    async def _start(self) -> None:
        try:
            self._places = await asyncio.to_thread(Places, self._tmp_root, self.policy)
        except OSError as error:
            raise IsolateLost(f"no folder for the temporary files of handlers can be made: {error}") from error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, their_output = os.pipe()
        with theirs:
            self._zygote = _launch(theirs.fileno(), their_output, self.policy, self._preload)
        os.close(their_output)
        self._output = Output(output)
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

    async def _next_child(self) -> _Child:
        """The spare process, or a new one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if not spare.is_gone:
                return spare
            spare.sock.close()
        for attempt in range(2):
            await self.start()
            try:
                return await self._fork(is_spare=False)
            except IsolateLost:
                if attempt == 1 or self._control is not None:
                    raise
        raise AssertionError("unreachable")

    async def _make_spare(self) -> None:
        try:
            await asyncio.sleep(SPARE_DELAY_S)
            if self._control is not None and self._spare is None:
                self._spare = await self._fork(is_spare=True)
        except IsolateLost as error:  # whoever needs a process will try to fork one
            logger.info("no spare process: %s", error)
        finally:
            self._making_spare = None

    async def _fork(self, *, is_spare: bool) -> _Child:
        assert self._control is not None
        assert self._places is not None
        places = self._places
        try:
            place = places.take()
        except OSError as error:
            raise IsolateLost(f"no temporary folder for a handler process can be made: {error}") from error
        ours, theirs = socket.socketpair()
        child = _Child(place, ours)
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, child
        plan = Plan(child.place.tmp_dir, child.place.uid, places.why_no_cgroup, is_spare)
        try:
            with theirs:
                message = MESSAGE.pack(FORK, number, 0, 0) + msgspec.msgpack.encode(plan)
                socket.send_fds(self._control, [message], [theirs.fileno()])
        except OSError as error:
            del self._waiting[number]
            child.place.give_back()
            ours.close()
            raise IsolateLost(f"the zygote could not be asked for a process: {error}") from error
        try:
            child.pid = await answer
            if self._watching is None and not places.has_own_mounts:
                self._watching = asyncio.create_task(self._watch_folders())
            await places.admit(child.place, child.pid)
        except OSError as error:
            self.kill(child.pid)
            ours.close()
            raise IsolateLost(f"a handler process could not be put into its control group: {error}") from error
        except BaseException:
            ours.close()  # ends the child, should there be one after all
            raise
        return child

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
        if kind == READY and self._ready is not None and self._places is not None and not self._ready.done():
            self._places.abilities = status
            self._ready.set_result(None)
        elif kind == EXITED and pid in self._children:
            self._children.pop(pid).after_exit(os.waitstatus_to_exitcode(status))
        elif kind in (FORKED, FORK_FAILED) and number in self._waiting:
            answer, child = self._waiting.pop(number)
            if kind == FORKED:
                self._children[pid] = child
                if not answer.done():
                    answer.set_result(pid)
                return
            child.place.give_back()
            error = f"no handler process could be forked: {os.strerror(status)}; check `ulimit -u` and memory"
            if not answer.done():
                answer.set_exception(IsolateLost(error))

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
        if self._spare is not None:
            self._spare.sock.close()
            self._spare = None
        children = list(self._children.values())
        self._children.clear()
        for child in children:
            child.after_exit(-signal.SIGKILL)

    async def _watch_folders(self) -> None:
        """End processes that keep too much in a temporary folder that nothing else limits."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._places is not None:
                for pid in await asyncio.to_thread(self._places.over_their_size):
                    logger.warning("the handler process %d was killed: its temporary folder holds too much", pid)
                    self.kill(pid)

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
        if self._output is not None:
            self._output.close()
        if self._places is not None:
            await asyncio.to_thread(self._places.remove)


def _launch(control_fd: int, output_fd: int, policy: str, preload: Sequence[str]) -> subprocess.Popen[bytes]:
    arguments = [str(control_fd), str(os.getpid()), policy, *preload]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "edge.isolates.zygote", *arguments],
        pass_fds=[control_fd],
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        cwd="/",
        env=LIBRARY_SETTINGS | {name: os.environ[name] for name in _ZYGOTE_VARIABLES if name in os.environ},
        start_new_session=True,  # Ctrl-C in a terminal is for the node, which then closes the zygote
    )
