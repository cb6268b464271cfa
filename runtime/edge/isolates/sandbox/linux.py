"""System calls that Python has no function for, by number through ctypes. It decides nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

MACHINE = platform.machine()

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

CAP_DAC_READ_SEARCH = 2
CAP_SYS_ADMIN = 21

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
_MOUNT_ATTR_RDONLY = 0x1
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

# The same on every architecture, as are all calls that are newer than Linux 5.0.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
_MOUNT_SETATTR = 442
_CLOSE_RANGE = 436

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """System call `number`. Raises OSError with the reason."""
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted), f"system call {number}")


def prctl(option: int, value: int | ctypes.Array[ctypes.c_char] = 0) -> None:
    """prctl(2) with one argument. Raises OSError with the reason."""
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    _checked(_libc.prctl(option, argument, 0, 0, 0), f"prctl({option})")


def set_seccomp_filter(program: bytes) -> None:
    """Install `program` (struct sock_filter[]) for this thread, for ever. Raises OSError with the reason."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = len(program) // 8 | ctypes.addressof(instructions) << 64  # struct sock_fprog, padded to its pointer
    fprog = ctypes.create_string_buffer(header.to_bytes(16, "little"), 16)
    _checked(_libc.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0), "prctl(PR_SET_SECCOMP)")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError with the reason."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2). Raises OSError with the reason."""
    texts = [text.encode() or None for text in (source, target, kind)]
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def make_mounts_read_only() -> None:
    """All mounts of this process's mount namespace, at once. Raises OSError with the reason."""
    attributes = _MOUNT_ATTR_RDONLY.to_bytes(8, "little") + bytes(24)  # struct mount_attr
    call(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))


def set_capabilities(capabilities: int) -> None:
    """Keep only these (a bit mask), none of them inheritable. Raises OSError with the reason."""
    low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
    header = (0x20080522).to_bytes(4, "little") + bytes(4)
    words = (low, low, 0, high, high, 0)
    data = b"".join(word.to_bytes(4, "little") for word in words)
    _checked(_libc.capset(header, data), "capset")


def close_all_but(kept: list[int]) -> None:
    """Close every descriptor above 2 that is not among `kept`."""
    start = 3
    for fd in [*sorted(kept), 1 << 31]:
        if fd > start:
            _close_range(start, fd - 1)
        start = fd + 1


def _close_range(first: int, last: int) -> None:
    try:
        call(_CLOSE_RANGE, first, last, 0)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        os.closerange(first, min(last + 1, os.sysconf("SC_OPEN_MAX")))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
