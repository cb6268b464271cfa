"""Memory for packed weights in large pages: streaming through small ones costs a tenth to a third of the bandwidth.

It knows nothing about what is kept in it. A chunk lives as long as something holds a piece of it.
"""

from __future__ import annotations

import ctypes
import mmap

CHUNK_BYTES = 64 << 20
"""Address space taken at a time; memory is used from the first write on."""
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64


class Arena:
    """Hands out memory piece by piece."""

    def __init__(self) -> None:
        self._chunk = memoryview(b"")
        self._used = 0

    def take(self, size_bytes: int) -> memoryview:
        """Zeros, writable, on a border of 64 bytes."""
        if self._used + size_bytes > len(self._chunk):
            self._chunk, self._used = _chunk(max(size_bytes, CHUNK_BYTES)), 0
        start = self._used
        self._used += -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
        return self._chunk[start : start + size_bytes]


def _chunk(size_bytes: int) -> memoryview:
    mapped = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    padding = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE_BYTES
    return memoryview(mapped)[padding : padding + size_bytes]
