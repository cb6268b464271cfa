"""`python -m edge.isolates.zygote CONTROL_FD PARENT_PID POLICY [PACKAGE...]`: forks handler processes for the node.

It has the SDK and the named packages imported and nothing else of ours, one thread, no event loop and no secret, so
that a fork of it is a handler process that only lacks its code. It ends with the node, and its children end with it.

One message each on the control socket (SEQPACKET): the node asks to `FORK` (with the child's socket attached, and a
`Plan` behind the message) or to `KILL`; the zygote answers `FORKED` or `FORK_FAILED`, and reports each `EXITED`. What
the child is for comes over the child's own socket, maybe much later: a `ForkSpec` with its length before it. Only
the parent of a process can kill it by its number without hitting a stranger that got the number later, so kills are
asked for here.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import traceback
from asyncio import selector_events
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

import workers  # noqa: F401 - imported before forking, so that children have it
from edge.isolates import sandbox
from workers import _isolate
from workers._rehearsal import rehearse
from workers._wire import Sandboxed

FORK, KILL = b"F", b"K"
READY, FORKED, FORK_FAILED, EXITED = b"R", b"f", b"e", b"x"
MESSAGE = struct.Struct("=cIiI")
"""Kind, request number, wait status or errno (with READY: abilities), pid."""
MAX_PLAN_BYTES = 4 << 10
SPEC_LENGTH = struct.Struct("=I")
MAX_SPEC_BYTES = 64 << 10
_LATE = {
    "fastapi": ("pydantic.v1", "fastapi.telemetry._runtime", "workers.asgi"),
    "starlette": ("workers.asgi",),
    "flask": ("workers.wsgi",),
    "django": ("workers.wsgi",),
}
"""What belongs to a preloaded package, but is imported only when that is first used. Not each version has all of it."""
HAS_OWN_MOUNTS, CAN_CHANGE_USER = 1, 2
"""Abilities: of temporary folders in memory, and of giving each isolate a user of its own."""


def main(control_fd: int, parent_pid: int, policy: str, packages: Sequence[str]) -> NoReturn:
    """Serve fork requests until the node closes the control socket."""
    sandbox.die_with_parent(parent_pid)
    control = socket.socket(fileno=control_fd)
    selector_events._HAS_SENDMSG = False  # type: ignore[attr-defined]  # Python 3.12 would use a call that is refused
    for package in packages:
        _preload(package)
    rehearse()
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("the zygote has more than one thread; a fork of it could deadlock")
    box = sandbox.Sandbox(policy)
    sandbox.die_with_parent(parent_pid)  # a change of credentials may have undone it
    gc.collect()
    gc.freeze()  # children would otherwise copy every page that a collection touches
    _Zygote(control, box).run()


def _preload(package: str) -> None:
    """Import `package`; a worker that needs one that cannot be imported says so itself."""
    try:
        importlib.import_module(package)
    except Exception as error:
        print(f"isolates.preload: {package} cannot be imported: {error}", file=sys.stderr)
        return
    for module in _LATE.get(package, ()):
        with suppress(ImportError):
            importlib.import_module(module)


class _Zygote:
    def __init__(self, control: socket.socket, box: sandbox.Sandbox) -> None:
        self._control = control
        self._sandbox = box
        self._pid = os.getpid()
        self._children: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._plans = msgspec.msgpack.Decoder(sandbox.Plan)

    def run(self) -> NoReturn:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        abilities = HAS_OWN_MOUNTS * self._sandbox.has_own_mounts | CAN_CHANGE_USER * self._sandbox.can_change_user
        self._control.send(MESSAGE.pack(READY, 0, abilities, self._pid))
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_read in ready:
                self._drain_wakeups()
                self._reap()
            if self._control.fileno() in ready:
                self._serve_one()

    def _serve_one(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MESSAGE.size + MAX_PLAN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # the node went away without having read all our answers
            self._end()
        if not data:
            self._end()
        kind, number, _, pid = MESSAGE.unpack_from(data)
        if kind == KILL:
            if pid in self._children:
                _kill(pid)
        elif kind == FORK and fds:
            self._fork(number, fds[0], self._plans.decode(data[MESSAGE.size :]))

    def _fork(self, number: int, fd: int, plan: sandbox.Plan) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            self._answer(FORK_FAILED, number, error.errno or errno.EAGAIN, 0)
            return
        if pid == 0:
            _become_isolate(fd, self._pid, self._sandbox, plan)
        os.close(fd)
        self._children.add(pid)
        self._answer(FORKED, number, 0, pid)

    def _reap(self) -> None:
        while self._children:
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is None:
                return
            _kill(exited.si_pid)  # what it started; while it is not reaped, its number is nobody else's
            pid, status = os.waitpid(exited.si_pid, 0)
            self._children.discard(pid)
            self._answer(EXITED, 0, status, pid)

    def _answer(self, kind: bytes, number: int, status: int, pid: int) -> None:
        try:
            self._control.send(MESSAGE.pack(kind, number, status, pid))
        except (BrokenPipeError, ConnectionResetError):
            self._end()

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            return

    def _end(self) -> NoReturn:
        """The node is gone or wants us gone: leave no child behind."""
        for pid in self._children:
            _kill(pid)
        for pid in self._children:
            os.waitpid(pid, 0)
        os._exit(0)


def _kill(pid: int) -> None:
    """Kill a child that is not reaped yet, and every process of its group (it leads one once it is in its sandbox)."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become_isolate(fd: int, zygote_pid: int, box: sandbox.Sandbox, plan: sandbox.Plan) -> NoReturn:
    """The forked child's whole life; nothing may return into the zygote's loop."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock = socket.socket(fileno=fd)
        report = box.enter(fd, zygote_pid, plan, lambda: _next_spec(sock, plan.is_spare))
        _isolate.serve(sock, Sandboxed(report.layers, report.missing, report.escapes))
    except BaseException:  # the process edge
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(70)


def _next_spec(sock: socket.socket, has_time: bool) -> sandbox.ForkSpec:
    """What this process is for, once the node says so; it ends if the node needs it no more."""
    if has_time:
        rehearse()  # each page that a fork writes to for the first time has to be copied: better now than then
    (length,) = SPEC_LENGTH.unpack(_receive(sock, SPEC_LENGTH.size))
    return msgspec.msgpack.decode(_receive(sock, length), type=sandbox.ForkSpec)


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = sock.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        os._exit(0)
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
