"""The time limit of a call whose events come one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from edge.errors import CallTimeout

T = TypeVar("T")


async def in_time(events: AsyncGenerator[T, None], timeout_s: float) -> AsyncGenerator[T, None]:
    """`events`, which have `timeout_s` seconds together from the first that is asked for; 0: any time.

    `asyncio.timeout` is not for generators: it would cancel whatever the reader does between two events.

    Raises:
        CallTimeout: that was not enough. `events` is closed then, as always.
    """
    async with aclosing(events):
        if not timeout_s:
            async for event in events:
                yield event
            return
        deadline = _Deadline(timeout_s)
        try:
            while (following := await deadline.next(events)) is not None:
                yield following
        finally:
            deadline.stop()


class _Deadline:
    """Cancels the task that waits for an event, once the time is over."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: asyncio.Task[object] | None = None
        self._is_over = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end)

    async def next(self, events: AsyncGenerator[T, None]) -> T | None:
        """The next event; None after the last."""
        if self._is_over.is_set():
            raise self._failure()
        task = self._waiting = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        try:
            return await anext(events, None)
        except asyncio.CancelledError:
            # Ours, and nobody else's who cancelled the task in the same turn of the loop.
            if self._is_over.is_set() and task.uncancel() <= num_cancels:
                raise self._failure() from None
            raise
        finally:
            self._waiting = None

    def stop(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self._is_over.set()
        if self._waiting is not None:
            self._waiting.cancel()

    def _failure(self) -> CallTimeout:
        return CallTimeout(
            f"the call was stopped after {self._timeout_s:g} s, the limit of this node (call_timeout_s under [api] in "
            "its configuration): ask for fewer tokens",
            retry_after_s=1,
        )
