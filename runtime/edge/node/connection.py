"""Work on behalf of a client that may hang up at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


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
