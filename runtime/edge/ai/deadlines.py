"""The time limit of a call whose events come one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from edge.errors import CallTimeout

T = TypeVar("T")


class InTime(Generic[T]):
    """`events`, which have `timeout_s` seconds together from now on; 0: any time. To be closed, or its clock stopped.

    `asyncio.timeout` is not for generators: it would cancel whatever the reader does between two events. This is on the
    path of each token, which is why it is no generator itself.

    Raises:
        CallTimeout: that was not enough. `events` is closed then, as always.
    """

    def __init__(self, events: AsyncGenerator[T, None], timeout_s: float) -> None:
        self._events = events
        self._next = events.__anext__
        self._timeout_s = timeout_s
        self._waiting: asyncio.Task[object] | None = None
        """Who waits for an event."""
        self._is_over = asyncio.Event()
        self._num_cancels = 0
        """How often others had cancelled that task by then."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end) if timeout_s else None

    def __aiter__(self) -> InTime[T]:
        """Itself: events are read once."""
        return self

    async def __anext__(self) -> T:
        """The next event."""
        if self._is_over.is_set():
            await self.aclose()
            raise self._failure()
        self._waiting = asyncio.current_task()
        try:
            event = await self._next()
        except asyncio.CancelledError:
            task, self._waiting = self._waiting, None
            # Ours, and nobody else's who cancelled the task in the same turn of the loop.
            if self._is_over.is_set() and task is not None and task.uncancel() <= self._num_cancels:
                raise self._failure() from None
            raise
        except BaseException:
            self._waiting = None
            raise
        self._waiting = None
        return event

    def stop_clock(self) -> None:
        """From now on there is any time."""
        if self._timer is not None:
            self._timer.cancel()

    async def aclose(self) -> None:
        """Close `events`."""
        self.stop_clock()
        await self._events.aclose()

    def _end(self) -> None:
        self._is_over.set()
        if self._waiting is not None:
            self._num_cancels = self._waiting.cancelling()
            self._waiting.cancel()

    def _failure(self) -> CallTimeout:
        return CallTimeout(
            f"the call was stopped after {self._timeout_s:g} s, the limit of this node (call_timeout_s under [api] in "
            "its configuration): ask for fewer tokens",
            retry_after_s=1,
        )
