"""The time that a test's bindings and events see. It knows nothing about what asks for it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


class Clock:
    """Goes like the real one until it is told otherwise. `scheduled` and `queue` events, the expiry of KV entries,
    delays of queues, times of R2 objects and rate limits go by it; `time.time()` in a handler does not."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._frozen_s: float | None = None

    def __call__(self) -> float:
        """Seconds since 1970."""
        return time.time() + self._offset_s if self._frozen_s is None else self._frozen_s

    @property
    def now(self) -> datetime:
        """The time, in UTC."""
        return datetime.fromtimestamp(self(), UTC)

    @property
    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return round(self() * 1000)

    def freeze(self, at: datetime | str | float | None = None) -> None:
        """Stand still, at the time `at`: a datetime, a text such as `2026-11-30T09:00:00Z`, or seconds since 1970; by
        default now. Times without a zone are UTC."""
        self._frozen_s = self() if at is None else seconds_of(at)

    def advance(self, seconds: float = 0, *, minutes: float = 0, hours: float = 0, days: float = 0) -> None:
        """Go on by that much at once, frozen or not."""
        step_s = timedelta(seconds=seconds, minutes=minutes, hours=hours, days=days).total_seconds()
        if step_s < 0:
            raise ValueError(f"advance() goes forward; {step_s:g} s would go back. freeze(at) sets any time")
        if self._frozen_s is None:
            self._offset_s += step_s
        else:
            self._frozen_s += step_s

    def resume(self) -> None:
        """Go on from the time at which it was frozen."""
        if self._frozen_s is not None:
            self._offset_s, self._frozen_s = self._frozen_s - time.time(), None


def seconds_of(at: datetime | str | float) -> float:
    """Seconds since 1970 of a datetime, of a text in ISO format, or of a number, which is that already.

    Raises:
        ValueError: the text is no time.
    """
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    if isinstance(at, datetime):
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    return float(at)
