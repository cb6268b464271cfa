"""Work on behalf of a client that may hang up at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

T = TypeVar("T")

HANG_UP = "edge.hang_up"
"""The ASGI extension under which a server that can tell gives a request its connection's `HangUp`."""
DISCONNECT = "edge.disconnect"
"""The ASGI extension under which a server that can do so gives what ends the connection at once, unsent data too."""

SEND = "edge.send"
"""The ASGI extension with the server's own `send`, past all that looks at a response's head and end: a long body spares
the rest of its pieces the way through."""


class Cancellable(Protocol):
    """A task, or something like one."""

    def cancel(self) -> object:
        """End it before its time."""
        ...


class HangUp:
    """The moment in which one client goes away: it ends what is done for it, at no cost for all that is done before.

    A task that waits for `hung_up` says the same to everybody, for the price of a task per request.
    """

    def __init__(self) -> None:
        self._has_happened = False
        self._work: set[Cancellable] = set()

    def happen(self) -> None:
        """The client has gone."""
        self._has_happened = True
        for work in list(self._work):
            work.cancel()

    def add(self, work: Cancellable) -> None:
        """Cancel `work` if the client goes away before it is discarded, or has gone already."""
        self._work.add(work)
        if self._has_happened:
            work.cancel()

    def discard(self, work: Cancellable) -> None:
        """It is over."""
        self._work.discard(work)

    async def end(self, work: Coroutine[Any, Any, object]) -> None:
        """Do `work` in this task; if the client goes away it is cancelled, and this returns once it has ended."""
        task = asyncio.current_task()
        assert task is not None
        self.add(task)
        try:
            await work
        except asyncio.CancelledError:
            if not self._has_happened or task.uncancel() > 0:
                raise
        finally:
            self.discard(task)


async def hung_up(receive: Receive) -> None:
    """Return once the client has gone. What it still sends is thrown away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Coroutine[Any, Any, T], hang_up: Coroutine[Any, Any, object]) -> T | None:
    """The result of `work`, which is cancelled, and its end awaited, once `hang_up` returns; then None."""
    working, hanging_up = asyncio.ensure_future(work), asyncio.ensure_future(hang_up)
    try:
        await asyncio.wait({working, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, hanging_up):
            task.cancel()
        await asyncio.gather(working, hanging_up, return_exceptions=True)
