"""One clock for all processes of the node: lets each look after its limits, often while it is busy."""

from __future__ import annotations

import asyncio
from typing import Protocol

BUSY_INTERVAL_S = 0.05
IDLE_INTERVAL_S = 1.0


class Watched(Protocol):
    """What the watch looks after."""

    load: int

    def check(self, now: float) -> None:
        """Called every `BUSY_INTERVAL_S` while `load` is not 0, else every `IDLE_INTERVAL_S`; `now` as of the loop."""
        ...


class Watch:
    """Calls `check` of everything that was added, from one timer."""

    def __init__(self, idle_interval_s: float = IDLE_INTERVAL_S) -> None:
        self._idle_interval_s = min(idle_interval_s, IDLE_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        self._watched: set[Watched] = set()
        self._busy: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_fast = False
        self._idle_due = 0.0

    def add(self, watched: Watched) -> None:
        """Look after `watched` until it is removed."""
        self._watched.add(watched)
        if self._timer is None:
            self._start_timer()

    def remove(self, watched: Watched) -> None:
        """Leave `watched` alone."""
        self._watched.discard(watched)
        self._busy.discard(watched)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def set_busy(self, watched: Watched) -> None:
        """`watched` has something to do; the watch itself finds out when it has not any more."""
        self._busy.add(watched)
        if not self._is_fast and self._timer is not None:
            self._timer.cancel()
            self._start_timer()

    def _start_timer(self) -> None:
        self._is_fast = bool(self._busy)
        self._timer = self._loop.call_later(BUSY_INTERVAL_S if self._is_fast else self._idle_interval_s, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        due = self._busy.copy()
        if now >= self._idle_due:
            self._idle_due = now + self._idle_interval_s
            due |= self._watched
        for watched in due:
            watched.check(now)
        self._busy = {watched for watched in self._busy if watched.load}
        if self._watched:
            self._start_timer()
        else:
            self._timer = None
