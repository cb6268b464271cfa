"""HTTP/1.1 on a socket as uvicorn speaks it, with limits that it lacks, and a short way for simple requests.

The limits are on the size and on the time of a head: without them one connection, which needs no token, can fill the
node's memory with a header that never ends, and idle ones can use up its file descriptors. A request without a valid
host is refused here, since every part behind this takes it for one. This module knows nothing about what is served.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from edge.node.connection import DISCONNECT, HANG_UP, HangUp
from edge.node.direct import Direct, Exchange
from workers._wire import MAX_CHUNK_BYTES

MAX_HEAD_BYTES = 64 << 10
"""Of a request's head, and of anything else around its body: trailers, and what the chunks of a body carry along.
What arrives in one piece with the start, at most a socket's buffer, is not counted."""
MAX_HELD_BYTES = 64 << 10
"""Of a response that wait for what is written next."""
HEAD_TIMEOUT_S = 60.0
"""From the connection, or the first byte of a further request, to the end of the head; again for a short body."""
LINGER_S = 2.0
"""How long what a refused client still sends is read, so that it gets to read why it was refused."""

_TOO_LARGE = f"The request's head is over the limit of {MAX_HEAD_BYTES} bytes."
_NO_HOST = "A request of HTTP/1.1 has one header `host`, with the name or address of this server and maybe a port."
_NO_PATH = "The path `*` is for OPTIONS alone."
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[-A-Za-z0-9._~%!$&'()*+,;=]*)(:\d{0,5})?")
_NOT_SIMPLE = frozenset({b"transfer-encoding", b"upgrade", b"expect"})
"""Headers of requests whose body comes bit by bit, or that become something else."""


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol; a client over a limit is disconnected. Requests carry the extensions `HANG_UP` and
    `DISCONNECT`. Those of HTTP/1.0, which proxies still speak, are answered without chunks.

    With `direct`, what is simple enough is not given to the ASGI app.
    """

    def __init__(self, *arguments: Any, direct: Direct | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._direct = direct
        self._in_message = False
        self._in_head = False
        self._is_refused = False
        self._refusal: tuple[int, str] | None = None
        """Status and reason, while an answer is under way that goes before."""
        self._idle_since: float | None = None
        self._held: _Held | None = None
        self._num_bytes = 0  # received since the piece in which the message, or a part of its body, began
        self.hang_up = HangUp()
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
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        self.hang_up.happen()

    def data_received(self, data: bytes) -> None:
        """Parse `data`, and refuse more of what is no body than the limit."""
        if self._is_refused:
            return
        self._num_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_timer is None:  # most heads come in one piece and need no timer
            self._expect_head()
        if self._in_message and self._num_bytes > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse(431, _TOO_LARGE)

    def on_message_begin(self) -> None:
        """A head begins."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_message, self._in_head, self._num_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._in_head = False
        self._stop_timer()
        if self._is_refused:
            return
        host, num_body_bytes = self._read_headers()
        if self.url == b"*" and self.parser.get_method() == b"OPTIONS":  # about the server as a whole
            self.url = b"/"
        if host is None:
            self._refuse(400, _NO_HOST)
        elif self.url == b"*":
            self._refuse(400, _NO_PATH)
        elif num_body_bytes is None or not self._may_go_directly():
            self._go_the_long_way()
        elif num_body_bytes:
            self._held = _Held(host)
            self._expect_head()  # no handler runs yet, whose limits would end the wait
        elif not self._goes_directly(host, None):
            self._go_the_long_way()

    def on_body(self, body: bytes) -> None:
        """A part of the body is here; it has limits elsewhere."""
        self._num_bytes = 0
        if self._held is not None:
            self._held.body += body
        elif not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._in_message = False
        held, self._held = self._held, None
        if held is not None:
            self._stop_timer()
            content = bytes(held.body)
            if not self._goes_directly(held.host, content):
                self._go_the_long_way()
                super().on_body(content)
        if not self._is_refused and not isinstance(self.cycle, Exchange):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """All of the response has been written."""
        self._gathered.flush()
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        if self._refusal is not None:
            self._hang_up_with(*self._refusal)
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_request(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for long enough.

        The timer runs on through further requests: to cancel it and to set it anew costs as much as to parse one.
        """
        self.timeout_keep_alive_task = None
        if self._idle_since is not None:
            left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
            if left_s > 0:
                self._wait_for_request(left_s)
            else:
                super().timeout_keep_alive_handler()

    def _wait_for_request(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def write_now(self, data: bytes) -> None:
        """Write `data` after what was written before."""
        self._gathered.write_now(data)

    def new_cycle(self, method: str, *, keep_alive: bool) -> RequestResponseCycle:
        """What takes the response to a request of the short way in parts."""
        cycle = RequestResponseCycle(
            scope=cast(Any, {"type": "http", "method": method}),
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )
        if isinstance(self.cycle, Exchange):  # else a further request waits for its turn
            self.cycle = cycle
        return cycle

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if not self._is_refused:
            self._refuse(400, msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            unframed = _Unframed.of(cycle)
            if self.cycle is cycle:  # else it is a further request's, which waits
                self.cycle = unframed
            cycle = unframed
        super()._start_asgi_task(cycle, app)

    def _should_upgrade(self) -> bool:
        return not self._is_refused and super()._should_upgrade()

    def _read_headers(self) -> tuple[str | None, int | None]:
        """The request's host and how long its body is.

        The host is None if it names none, more than one, or what cannot be one; the length, if it is for the long way.
        """
        host, num_body_bytes, is_simple = None, 0, self._direct is not None
        num_hosts = 0
        for name, value in self.headers:
            if name == b"host":
                host = value
                num_hosts += 1
            elif name == b"content-length":
                num_body_bytes = int(value)
            elif name in _NOT_SIMPLE:
                is_simple = False
        if host is None and self.parser.get_http_version() != "1.1":
            return "", None
        if host is None or num_hosts > 1 or not _HOST.fullmatch(host):
            return None, None
        return host.decode(), num_body_bytes if is_simple and num_body_bytes <= MAX_CHUNK_BYTES else None

    def _go_the_long_way(self) -> None:
        """Give the request to the ASGI app, with the scope that uvicorn would have made when it began."""
        head = self.url, self.expect_100_continue, self.headers
        super().on_message_begin()
        self.url, self.expect_100_continue, self.headers = head
        self.scope["headers"] = self.headers
        extensions = {HANG_UP: self.hang_up, DISCONNECT: self.transport.abort}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        super().on_headers_complete()

    def _goes_directly(self, host: str, content: bytes | None) -> bool:
        """Let the request go the short way, if that is open."""
        assert self._direct is not None
        method, target = self.parser.get_method().decode(), self.url.decode()
        exchange = self._direct.start(self, method, target, self.headers, host, content)
        if exchange is None:
            return False
        self.cycle = cast(RequestResponseCycle, exchange)
        return True

    def _may_go_directly(self) -> bool:
        """Whether nothing but the headers keeps a request from the short way: no other one is waited for, and its
        connection stays."""
        return (
            self.parser.should_keep_alive()
            and self.parser.get_http_version() == "1.1"
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused  # a client that reads nothing must not have us hold more and more for it
            and self.url.startswith(b"/")
            and self.url.isascii()
            and b"#" not in self.url
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Upgrades are not supported, and the operator can do nothing about it."""

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, why: str) -> None:
        """Read no more from this client, and say why, behind the answer that it waits for."""
        self._is_refused = True
        self._stop_timer()
        if not self._is_answering():
            self._hang_up_with(status, why)
        elif not self.cycle.more_body:  # it came behind the request that is being answered
            self._refusal = status, why
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._hang_up_with(status, why)

    def _hang_up_with(self, status: int, why: str) -> None:
        """Say why, and close the connection once the client has had time to read it.

        To close while it still sends would reset the connection, with which the answer could get lost.
        """
        head = f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(why)}\r\nconnection: close\r\n\r\n"
        self.write_now(STATUS_LINE[status] + (head + why).encode())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

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


class _Unframed(RequestResponseCycle):
    """Answers HTTP/1.0: a body whose length is not known ends with the connection, since there are no chunks."""

    _has_length = True

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> _Unframed:
        """`cycle`, of which nothing has been sent."""
        unframed = cls.__new__(cls)
        unframed.__dict__.update(vars(cycle))
        return unframed

    async def send(self, message: Any) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" not in names:
                self.chunked_encoding = False
                self._has_length = False
        elif message["type"] == "http.response.body" and not self._has_length and self.scope["method"] != "HEAD":
            self.expected_content_length = len(message.get("body", b""))  # uvicorn checks what it is told
        await super().send(message)


class _Held:
    """A request whose body, a short one, is still to come as a whole before it goes the short way."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.body = bytearray()


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
            self._write(data)

    def write_now(self, data: bytes) -> None:
        """Write `data` at once, after what is held."""
        self.flush()
        self._write(data)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():  # the client has gone since
            self._transport.write(data)

    def write_eof(self) -> None:
        """See asyncio."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """See asyncio."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
