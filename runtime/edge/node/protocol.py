"""HTTP/1.1 on a socket as uvicorn speaks it, with two limits that it lacks: on the size and on the time of a head.

Without them one connection, which needs no token, can fill the node's memory with a header that never ends, and idle
ones can use up its file descriptors. This module knows nothing about what is served.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.node.connection import HANG_UP, HangUp

MAX_HEAD_BYTES = 64 << 10
"""Of a request's head, and of anything else around its body: trailers, and what the chunks of a body carry along.
What arrives in one piece with the start, at most a socket's buffer, is not counted."""
MAX_HELD_BYTES = 64 << 10
"""Of a response that wait for what is written next."""
HEAD_TIMEOUT_S = 60.0
"""From the connection, or the first byte of a further request, to the end of the head."""

_TOO_LARGE = f"The request's head is over the limit of {MAX_HEAD_BYTES} bytes."


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol; a client over a limit is disconnected. Requests carry the extension `HANG_UP`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_message = False
        self._in_head = False
        self._num_bytes = 0  # received since the piece in which the message, or a part of its body, began
        self._hang_up = HangUp()
        self._gathered: _Gathered
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first head."""
        self._gathered = _Gathered(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._gathered))
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and all work for this client."""
        self._stop_timer()
        super().connection_lost(exc)
        self._hang_up.happen()

    def data_received(self, data: bytes) -> None:
        """Parse `data`, and refuse more of what is no body than the limit."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_timer is None:  # most heads come in one piece and need no timer
            self._expect_head()
        if self._in_message and self._num_bytes > MAX_HEAD_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self._hang_up}  # type: ignore[dict-item]
        self._in_message, self._in_head, self._num_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is here; it has limits elsewhere."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """All of the response has been written."""
        self._gathered.flush()
        super().on_response_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Upgrades are not supported, and the operator can do nothing about it."""

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self) -> None:
        if not self._is_answering():
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
                f"content-length: {len(_TOO_LARGE)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write((head + _TOO_LARGE).encode())
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if self._is_answering():  # an answer to an earlier request is not cut for the sake of the next one
            self._expect_head()
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Gathered:
    """A transport that puts what is written in one turn of the event loop, such as head and body, into one write."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    def write(self, data: bytes) -> None:
        """See asyncio."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what there is now."""
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._num_held_bytes = 0
            self._transport.write(data)

    def close(self) -> None:
        """See asyncio."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
