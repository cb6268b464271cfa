"""What an isolate tries once its sandbox is on, and must not succeed with: the proof that layers hold, not a claim."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from edge.isolates.sandbox import linux


def escapes(layers: list[str]) -> list[str]:
    """The forbidden acts that this process got away with, of those that `layers` are said to prevent."""
    acts: list[tuple[str, str, Callable[[], None]]] = [
        ("seccomp", "open a socket", _open_socket),
        ("seccomp", "start a process", _fork),
        ("seccomp", "trace itself", _trace),
        ("seccomp", "make a namespace", lambda: linux.unshare(0)),
        ("seccomp", "signal its parent", _signal_parent),
        ("landlock-files", "read /etc/passwd", lambda: os.close(os.open("/etc/passwd", os.O_RDONLY))),
        ("landlock-files", "list /proc", lambda: os.close(os.open("/proc", os.O_RDONLY))),
    ]
    return [name for layer, name, act in acts if layer in layers and _succeeds(act)]


def _succeeds(act: Callable[[], None]) -> bool:
    try:
        act()
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOENT)
    return True


def _open_socket() -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _trace() -> None:
    """PTRACE_TRACEME."""
    linux.call(117 if linux.MACHINE == "aarch64" else 101, 0, 0, 0, 0)


def _signal_parent() -> None:
    os.kill(os.getppid(), 0)
