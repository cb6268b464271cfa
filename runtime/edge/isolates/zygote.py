"""`python -m edge.isolates.zygote CONTROL_FD PARENT_PID`: forks handler processes for the node.

It has the SDK imported and nothing else of ours, one thread, no event loop and no secret, so that a fork of it is a
handler process that only lacks its code. It ends with the node, and its children end with it.

One message each on the control socket (SEQPACKET): the node asks to `FORK` (with the child's socket attached) or to
`KILL`; the zygote answers `FORKED` or `FORK_FAILED`, and reports each `EXITED`. Only the parent of a process can kill
it by its number without hitting a stranger that got the number later, so kills are asked for here.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import workers  # noqa: F401 - imported before forking, so that children have it
from edge.isolates import sandbox
from workers import _isolate

FORK, KILL = b"F", b"K"
READY, FORKED, FORK_FAILED, EXITED = b"R", b"f", b"e", b"x"
MESSAGE = struct.Struct("=cIiI")
"""Kind, request number, wait status or errno, pid."""


def main(control_fd: int, parent_pid: int) -> NoReturn:
    """Serve fork requests until the node closes the control socket."""
    sandbox.die_with_parent(parent_pid)
    control = socket.socket(fileno=control_fd)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("the zygote has more than one thread; a fork of it could deadlock")
    gc.collect()
    gc.freeze()  # children would otherwise copy every page that a collection touches
    _Zygote(control).run()


class _Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._children: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> NoReturn:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._control.send(MESSAGE.pack(READY, 0, 0, self._pid))
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
            data, fds, _, _ = socket.recv_fds(self._control, MESSAGE.size, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # the node went away without having read all our answers
            self._end()
        if not data:
            self._end()
        kind, number, _, pid = MESSAGE.unpack(data)
        if kind == KILL:
            if pid in self._children:
                _kill(pid)
        elif kind == FORK and fds:
            self._fork(number, fds[0])

    def _fork(self, number: int, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            self._answer(FORK_FAILED, number, error.errno or errno.EAGAIN, 0)
            return
        if pid == 0:
            _become_isolate(fd, self._pid)
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


def _become_isolate(fd: int, zygote_pid: int) -> NoReturn:
    """The forked child's whole life; nothing may return into the zygote's loop."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        layers = sandbox.enter(fd, zygote_pid)
        _isolate.serve(socket.socket(fileno=fd), layers)
    except BaseException:  # the process edge
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(70)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
