"""WebSockets that a handler opens: the end that it gets, and the call of the node that the other end is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from workers._websocket_pair import WebSocketPair
from workers.streams import ReadableStream


class Opening:
    """A WebSocket that is asked for. `outgoing` is the body of the call; `answered` has to be told of its answer."""

    def __init__(self) -> None:
        self.client, self._server = WebSocketPair().object_values()
        self._incoming: asyncio.Future[ReadableStream | None] = asyncio.get_running_loop().create_future()
        self.outgoing = ReadableStream(self._relayed())

    def answered(self, incoming: ReadableStream | None) -> None:
        """The messages that come, or None: there is no WebSocket."""
        if not self._incoming.done():
            self._incoming.set_result(incoming)

    async def _relayed(self) -> AsyncIterator[bytes]:
        incoming = await self._incoming
        if incoming is not None:
            async with aclosing(incoming), aclosing(self._server.relay(incoming)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    yield message
