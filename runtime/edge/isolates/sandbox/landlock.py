"""Landlock: which files a process may open, and what it may reach by TCP, abstract sockets and signals.

It does not protect what needs no open file: whether a path exists, its size and its owner can be learned (stat), and on
kernels before ABI 9 pathname sockets and UDP are not covered. Seccomp and namespaces are for those.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from edge.isolates.sandbox import linux

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14
LIST = _READ_DIR
READ = _READ_FILE | _READ_DIR
"""Never execute: nothing in an isolate may start a program."""
READ_WRITE_FILE = _READ_FILE | _WRITE_FILE
WRITE = (
    READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
)  # no sockets, pipes and devices

_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # by ABI; 16 from 5 on
_FILES_ONLY = ~(_READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER)
_RULE_PATH_BENEATH = 1


def abi() -> int:
    """The kernel's Landlock version; 0: there is none."""
    try:
        return linux.call(linux.LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


class Ruleset:
    """What to allow, being collected; everything else that Landlock knows is refused once `restrict` was called.

    Raises:
        OSError: the kernel has no Landlock.
    """

    def __init__(self, abi: int) -> None:
        self._rights = (1 << _NUM_FILE_RIGHTS.get(abi, 16)) - 1
        network = 3 if abi >= 4 else 0  # binding and connecting TCP sockets
        scopes = 3 if abi >= 6 else 0  # abstract Unix sockets and signals
        attributes = struct.pack("=QQQ", self._rights, network, scopes)
        size = 24 if abi >= 6 else 16 if abi >= 4 else 8
        self.fd = linux.call(linux.LANDLOCK_CREATE_RULESET, attributes[:size], size, 0)

    def allow(self, path: str, rights: int) -> None:
        """Allow `rights` on `path` and what is below it; a path that does not exist is left out.

        A link allows nothing: it can point anywhere, and be changed to at any time.
        """
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self.allow_open(fd, rights)
        finally:
            os.close(fd)

    def allow_open(self, fd: int, rights: int) -> None:
        """The same for what `fd` is open on."""
        rights &= self._rights
        try:
            self._add(fd, rights)
        except OSError:  # no folder
            self._add(fd, rights & _FILES_ONLY)

    def allow_entries(self, folder: str, names: Iterable[str]) -> None:
        """Allow listing `folder`, and reading these entries of it."""
        self.allow(folder, LIST)
        for name in names:
            self.allow(os.path.join(folder, name), READ)

    def restrict(self) -> None:
        """Apply it to this thread, for ever. `no-new-privileges` must be on."""
        linux.call(linux.LANDLOCK_RESTRICT_SELF, self.fd, 0)
        os.close(self.fd)

    def _add(self, fd: int, rights: int) -> None:
        rule = struct.pack("=Qi", rights, fd)
        linux.call(linux.LANDLOCK_ADD_RULE, self.fd, _RULE_PATH_BENEATH, rule, 0)
