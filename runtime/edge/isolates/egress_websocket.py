"""Outbound WebSockets of handlers: the handshake over a connected socket, and messages in both directions.

What the isolate sends is not trusted: bytes that are no messages, and messages over the limit, end the connection.
Neither side is read faster than the other one takes it. It knows nothing about which hosts may be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import EXTERNAL_CLOSE_CODES

from edge.isolates.base import StreamAnswer
from workers._headers import is_token
from workers._websocket import ABNORMAL, MAX_MESSAGE_BYTES, Close, MessageDecoder, WebSocketError, encode

CLOSE_TIMEOUT_S = 2.0
"""What the other side gets to answer a close."""
MAX_QUEUED = 2
"""Messages that are read ahead of the handler."""

_MAX_REASON_BYTES = 123
"""What fits into the frame of a close (RFC 6455, 5.5)."""
_GOING_AWAY, _INTERNAL_ERROR = 1001, 1011
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_OWN_HEADERS = frozenset({"connection", "content-length", "host", "transfer-encoding", "upgrade"})


class _Connect(connect):
    """Hands a redirect on as the answer that it is: following it would go past the rules of who may be reached."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def open_websocket(
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    url: str,
    headers: list[tuple[str, str]],
    messages: AsyncIterator[bytes],
    timeout_s: float,
    on_close: Callable[[int, int], None],
) -> StreamAnswer:
    """The answer to a handshake at `url`: with status 101 its body are the messages that come, else what was said.

    Args:
        sock: connected to the host of `url`, which is `ws://` or, with `tls`, `wss://`. It is closed in the end.
        messages: what to send, as `workers._websocket` has it.
        timeout_s: for the handshake.
        on_close: called once with the bytes of messages sent and received, but not if this raises.

    Raises:
        OSError, TimeoutError, websockets.exceptions.WebSocketException: there is no answer.
        ValueError: a header that cannot be sent.
    """
    for name, value in headers:
        if not is_token(name) or not _HEADER_VALUE.fullmatch(value):
            sock.close()
            raise ValueError(f"the header {name[:100]!r} cannot be sent")
    given = {name.lower(): value for name, value in headers}
    protocols = [each.strip() for each in given.get("sec-websocket-protocol", "").split(",") if each.strip()]
    try:
        connection = await _Connect(
            url,
            sock=sock,
            ssl=tls,
            proxy=None,
            subprotocols=protocols or None,  # type: ignore[arg-type]
            additional_headers=[pair for pair in headers if not _is_own(pair[0].lower())],
            user_agent_header=None if "user-agent" in given else "edge-workers-ai",
            open_timeout=timeout_s,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=MAX_QUEUED,
        )
    except InvalidStatus as refusal:
        on_close(0, 0)
        response = refusal.response
        return StreamAnswer(response.status_code, _received(response.headers), _Once(bytes(response.body or b"")))
    except BaseException:
        sock.close()
        raise
    assert connection.response is not None
    return StreamAnswer(101, _received(connection.response.headers), _Messages(connection, messages, on_close))


class _Messages:
    """The messages that come, and a close at the end. Closing this closes the connection."""

    def __init__(
        self, connection: ClientConnection, outgoing: AsyncIterator[bytes], on_close: Callable[[int, int], None]
    ) -> None:
        self._connection = connection
        self._on_close = on_close
        self._sent_bytes = self._received_bytes = 0
        self._is_over = self._is_closed = False
        self._sending = asyncio.create_task(self._send(outgoing))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            message = await self._connection.recv()
        except ConnectionClosed as closed:
            self._is_over = True
            frame = closed.rcvd or closed.sent
            return encode(Close(ABNORMAL) if frame is None else Close(frame.code, frame.reason))
        self._received_bytes += len(message)
        return encode(message)

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = self._is_over = True
            self._on_close(self._sent_bytes, self._received_bytes)
            self._sending.cancel()
            await self._connection.close(_GOING_AWAY)

    async def _send(self, outgoing: AsyncIterator[bytes]) -> None:
        with contextlib.suppress(ConnectionClosed):
            try:
                close = await self._send_messages(outgoing)
            except WebSocketError as error:
                close = Close(error.code)
            except OSError:  # the handler's side broke off
                close = Close(_INTERNAL_ERROR)
            reason = close.reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
            await self._connection.close(_sendable(close.code), reason)

    async def _send_messages(self, outgoing: AsyncIterator[bytes]) -> Close:
        decoder = MessageDecoder()
        async for data in outgoing:
            for message in decoder.feed(data):
                if isinstance(message, Close):
                    return message
                await self._connection.send(message)
                self._sent_bytes += len(message)
        return Close(_GOING_AWAY)


class _Once:
    """A body that is one piece."""

    def __init__(self, content: bytes) -> None:
        self._rest = [content] if content else []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._rest:
            raise StopAsyncIteration
        return self._rest.pop()


async def connected_socket(address: Any, port: int, timeout_s: float) -> socket.socket:
    """A socket that is connected to an IP address. Raises OSError (TimeoutError after `timeout_s`)."""
    sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


def _is_own(name: str) -> bool:
    """Whether the handshake sets the header itself."""
    return name in _OWN_HEADERS or name.startswith("sec-websocket-")


def _received(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.raw_items() if name.lower() not in _OWN_HEADERS]


def _sendable(code: int) -> int:
    """`code`, if a close may carry it."""
    return code if code in EXTERNAL_CLOSE_CODES or 3000 <= code <= 4999 else _INTERNAL_ERROR
