"""Temporary folders that untrusted code has filled: measures and removes them, whatever it has put there.

Nesting of any depth, paths too long for the system, folders that their owner may not read, links and changes in the
meantime: nothing of that may hide a file from the measure, leave something behind or raise.
"""

from __future__ import annotations

import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAX_DEPTH = 64
"""Of folders within a temporary folder; deeper ones count as too much."""
_MIN_ENTRY_BYTES = 4096
"""Each entry counts for a page, so that empty files cannot use up the inodes."""


def num_bytes(folder: str) -> float:
    """What a folder takes on the disk; infinity if it is nested too deeply, or holds a folder that cannot be read."""
    return _num_bytes(folder, None, 0)


def remove(folder: str) -> None:
    """Remove a folder and all that is in it. What somebody holds on to stays; there is nobody to tell."""
    with suppress(OSError):
        with _opened(folder, None) as top:
            waiting = _without_files(top)
            while waiting:
                with suppress(OSError):
                    waiting += _flattened(waiting.pop(), top)
        os.rmdir(folder)


def _num_bytes(name: str, dir_fd: int | None, depth: int) -> float:
    if depth > MAX_DEPTH:
        return math.inf
    total = 0.0
    try:
        with _opened(name, dir_fd) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    total += max(found.st_blocks * 512, _MIN_ENTRY_BYTES)
                    if stat.S_ISDIR(found.st_mode):
                        total += _num_bytes(entry.name, fd, depth + 1)
    except PermissionError:
        return math.inf
    except OSError:  # it is gone, or something else by now
        return total
    return total


def _flattened(name: str, top: int) -> list[str]:
    """Remove a folder in `top`; the new names of the folders in it, which are in `top` now.

    So no path gets longer than two names, and no call nests, however deep the folders are.
    """
    moved = []
    with _opened(name, top) as fd:
        for inner in _without_files(fd):
            moved.append(secrets.token_hex(16))
            os.rename(inner, moved[-1], src_dir_fd=fd, dst_dir_fd=top)
    os.rmdir(name, dir_fd=top)
    return moved


def _without_files(fd: int) -> list[str]:
    """Remove all files from a folder; the folders in it, which can be read and emptied now."""
    folders = []
    for name in os.listdir(fd):
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=fd)
            folders.append(name)
        else:
            os.unlink(name, dir_fd=fd)
    return folders


@contextmanager
def _opened(name: str, dir_fd: int | None) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)
