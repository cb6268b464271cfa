"""What handler processes write past Python's own streams, brought to the node's log in small and harmless pieces."""

from __future__ import annotations

import asyncio
import logging
import os

_PIPE_BYTES = 64 << 10
_DROP_S = 0.01
OUTPUT_BYTES_PER_S = 16 << 10
"""Of what processes write past Python's streams that is logged."""

logger = logging.getLogger(__name__)


class Output:
    """What zygote and handler processes write past Python's own streams: crashes, and output of native code.

    It goes to the node's log, a little of it and made harmless. They never get the node's own streams: those may be a
    terminal, which whoever may write to it may read from as well.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._num_bytes, self._since = 0, 0.0
        self._pause: asyncio.TimerHandle | None = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._on_readable)

    def close(self) -> None:
        """Log what is left, and end."""
        if self._fd < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._on_readable()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._fd)
            return
        now = self._loop.time()
        if now - self._since >= 1:
            self._num_bytes, self._since = 0, now
        if self._num_bytes < OUTPUT_BYTES_PER_S:
            text = " | ".join(data[:OUTPUT_BYTES_PER_S].decode(errors="replace").splitlines())
            logger.warning("handler process: %s", "".join(each if each.isprintable() else "?" for each in text))
        self._num_bytes += max(len(data), 256)  # each is a line in the log
        if self._num_bytes >= OUTPUT_BYTES_PER_S:
            # The rest is dropped, at a pace that costs the node little and holds up no neighbour for long.
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(_DROP_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._on_readable)
