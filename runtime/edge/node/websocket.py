"""One WebSocket between a client and a worker: the handshake, and messages in both directions.

What the isolate sends is not trusted: bytes that are no messages, and messages over the limit, end the connection.
Flow control is that of bodies: while the worker does not read, nothing more is read from the client, and vice versa.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.types import Message, Receive, Scope, Send

from edge.errors import EdgeError, HandlerFailed
from edge.isolates.base import InboundRequest, OutboundResponse
from edge.node.translation import cf_of, checked_headers, client_ip, text_headers, url_of, with_client_ip
from workers._websocket import ABNORMAL, Close, MessageDecoder, WebSocketError, encode

CLOSE_GRACE_S = 5.0
"""How long the worker has to end its side after the client has closed."""
MAX_DENIAL_BYTES = 1 << 20

_NOT_FORWARDED = frozenset({b"sec-websocket-accept", b"sec-websocket-extensions", b"upgrade", b"content-length"})


class ClientSocket:
    """The client's side, over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._headers = text_headers(scope)
        self._is_open = asyncio.Event()  # or refused: in any case, it is known whether messages can come
        self._is_gone = asyncio.Event()
        self._is_closed = False

    def describe(self) -> str:
        """Path, for messages."""
        return f"WebSocket {self.scope['path']}"

    def header(self, name: str) -> str:
        """Value of the first request header called `name` (lower case), or an empty string."""
        return next((value for key, value in self._headers if key == name), "")

    def request(self) -> InboundRequest:
        """The handshake as the isolates take it."""
        return InboundRequest(
            method="GET",
            url=url_of(self.scope, self.header("host")),
            headers=with_client_ip(self._headers, client_ip(self.scope)),
            body=self._incoming(),
            cf=cf_of(self.scope.get("http_version", "1.1")),
            is_websocket=True,
        )

    async def connected(self) -> None:
        """Wait for the handshake."""
        await self._receive()

    async def accept(self, response: OutboundResponse) -> None:
        """Open the WebSocket.

        Raises:
            HandlerFailed: a header is not valid, or the subprotocol not one that the client offered.
            OSError: the client has gone.
        """
        headers = checked_headers(200, response.headers)
        chosen = next((value.decode("latin-1") for name, value in headers if name == b"sec-websocket-protocol"), None)
        if chosen is not None and chosen not in self.scope.get("subprotocols", []):
            raise HandlerFailed(f"the worker chose the subprotocol {chosen!r}, which the client did not offer")
        kept = [pair for pair in headers if pair[0] not in _NOT_FORWARDED and pair[0] != b"sec-websocket-protocol"]
        await self._send({"type": "websocket.accept", "subprotocol": chosen, "headers": kept})
        self._is_open.set()

    async def relay(self, response: OutboundResponse) -> None:
        """Send what the worker sends until one side closes.

        Raises:
            HandlerFailed: the worker broke off, or sent what is no message; the client is told with a close.
            EdgeError: the process died; likewise.
        """
        assert response.body is not None
        reading = asyncio.ensure_future(self._forward(response.body))
        leaving = asyncio.ensure_future(self._is_gone.wait())
        try:
            await asyncio.wait([reading, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait([reading], timeout=CLOSE_GRACE_S)
            if reading.done():
                reading.result()
        except OSError:
            return  # the client has gone
        except EdgeError:
            await self._close(1011, "the worker failed")
            raise
        except WebSocketError as error:
            await self._close(error.code, "")
            raise HandlerFailed(f"the worker sent {error}") from error
        finally:
            reading.cancel()
            leaving.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)

    async def deny(self, response: OutboundResponse, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer the handshake with a response that opens nothing."""
        body = bytearray()
        if response.body is not None:
            async for chunk in response.body:
                body += chunk
                if len(body) > MAX_DENIAL_BYTES:
                    raise HandlerFailed(f"the worker refused a WebSocket with a body of over {MAX_DENIAL_BYTES} bytes")
        await self.deny_with(response.status, headers, bytes(body))

    async def deny_with(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Answer the handshake with these."""
        self._is_open.set()
        self._is_closed = True
        if "websocket.http.response" not in self.scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": 1000})
            return
        headers = [pair for pair in headers if pair[0] not in _NOT_FORWARDED]
        await self._send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": body})

    async def _forward(self, body: AsyncGenerator[bytes, None]) -> None:
        decoder = MessageDecoder()
        async for data in body:
            for message in decoder.feed(data):
                match message:
                    case Close(code, reason):
                        await self._close(code, reason)
                        return
                    case str(text):
                        await self._send({"type": "websocket.send", "text": text})
                    case binary:
                        await self._send({"type": "websocket.send", "bytes": binary})
        raise HandlerFailed("the worker's side of the WebSocket ended without a close")

    async def _close(self, code: int, reason: str) -> None:
        if not self._is_closed and not self._is_gone.is_set():
            self._is_closed = True
            await self._send({"type": "websocket.close", "code": _sendable(code), "reason": reason})

    async def _incoming(self) -> AsyncIterator[bytes]:
        """What the client sends, as the isolate gets it."""
        await self._is_open.wait()
        if self._is_closed:  # refused
            return
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._is_gone.set()
                yield encode(Close(message.get("code") or ABNORMAL, message.get("reason") or ""))
                return
            yield encode(_content(message))


def _content(message: Message) -> str | bytes:
    text = message.get("text")
    return message["bytes"] if text is None else text  # type: ignore[no-any-return]


def _sendable(code: int) -> int:
    """`code`, if a close may carry it; 1005, 1006 and 1015 only say that there was none."""
    return code if (1000 <= code <= 1014 and code not in (1004, 1005, 1006)) or 3000 <= code <= 4999 else 1011
