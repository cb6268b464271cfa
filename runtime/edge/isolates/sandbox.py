"""What a forked handler process gives up before it sees any code or secret.

`enter` is the one place where layers are applied. Today these are the base layers: a process of its own with nothing
inherited. They keep a crash, a leak or a stray descriptor of one worker away from the node and from other workers.

They do NOT protect against code that means harm: it can still read the files that this user can read, open sockets, use
all memory and CPU, start processes and signal other processes of this user. Namespaces, Landlock, seccomp and resource
limits are for that, and are not applied yet: run only code that you trust.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38

KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")

_libc = ctypes.CDLL(None, use_errno=True)


def enter(sock_fd: int, parent_pid: int) -> list[str]:
    """Apply every layer to this process, which was just forked; only `sock_fd` and 0, 1, 2 stay open.

    Returns:
        The names of the layers that are on. All of them are mandatory.

    Raises:
        OSError: a layer cannot be applied; the process must end.
    """
    os.setsid()
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)
    _clear_environment()
    _close_descriptors(sock_fd)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # No ptrace and no /proc/PID/mem for other processes of the same user. Not earlier: it also hides /proc/self/fd.
    _prctl(_PR_SET_DUMPABLE, 0)
    random.seed()
    return [
        "session",
        "parent-death-signal",
        "no-core-dump",
        "umask",
        "clean-environment",
        "closed-descriptors",
        "no-new-privileges",
        "not-dumpable",
        "reseeded-random",
    ]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent's thread ends; exit now if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}) failed: {os.strerror(number)}; Linux 3.5 or later is needed")


def _clear_environment() -> None:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)


def _close_descriptors(sock_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != sock_fd:
            try:
                os.close(fd)
            except OSError:  # the listing's own descriptor is closed already
                continue
