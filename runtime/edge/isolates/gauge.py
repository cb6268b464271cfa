"""Reads from outside what a process uses: CPU time and memory. What the process says of itself is never asked."""

from __future__ import annotations

import os
import time

_STATUS_BYTES = 4096
_MEMORY_KEYS = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


class Gauge:
    """The gauges of one process; once it is gone they stay where they were."""

    def __init__(self, pid: int) -> None:
        self._status_path = f"/proc/{pid}/status"
        self._clock_id = (~pid << 3) | 2  # CPUCLOCK_SCHED of a process (linux/posix-timers.h, clock_getcpuclockid)
        self._cpu_us = 0
        self._memory_bytes = 0
        self._is_frozen = False

    def freeze(self) -> None:
        """The process is gone: its number may soon be another's."""
        self._is_frozen = True

    def cpu_us(self) -> int:
        """Microseconds of CPU time of all its threads since it was forked."""
        if self._is_frozen:
            return self._cpu_us
        try:
            self._cpu_us = time.clock_gettime_ns(self._clock_id) // 1000
        except OSError:
            return self._cpu_us
        return self._cpu_us

    def memory_bytes(self) -> int:
        """Bytes of memory that are not pages of files: anonymous, shared and swapped ones."""
        if self._is_frozen:
            return self._memory_bytes
        try:
            fd = os.open(self._status_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return self._memory_bytes
        try:
            status = os.read(fd, _STATUS_BYTES)
        except ProcessLookupError:
            return self._memory_bytes
        finally:
            os.close(fd)
        self._memory_bytes = sum(_kib(status, key) << 10 for key in _MEMORY_KEYS)
        return self._memory_bytes


def _kib(status: bytes, key: bytes) -> int:
    start = status.find(key)
    if start < 0:  # a process that has just ended has no memory any more
        return 0
    return int(status[start + len(key) : status.index(b"kB", start)])
