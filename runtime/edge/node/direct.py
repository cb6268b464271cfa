"""The short way of a request: from the connection to a handler process and back, with no task and no ASGI in between.

It is for requests that are here as a whole, and for which a process is there; most are answered in one piece. All
others go through `edge.node.ingress`, which does the same in more steps. What is checked is the same here and there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from edge.errors import EdgeError, HandlerFailed
from edge.isolates.base import InboundRequest, OutboundResponse, WorkerKey
from edge.isolates.dispatch import Isolates
from edge.isolates.invocation import WholeBody
from edge.isolates.isolate import Isolate
from edge.node.access import Access
from edge.node.connection import HangUp
from edge.node.ingress import BODILESS, Ingress, close, headers_without_body, send_response
from edge.node.translation import cf_of, checked_headers, with_client_ip

_CF = cf_of("1.1")


class Connection(Protocol):
    """The connection of a client, with uvicorn's names."""

    client: tuple[str, int] | None
    server_state: ServerState
    hang_up: HangUp
    transport: asyncio.Transport

    def write_now(self, data: bytes) -> None:
        """Write, after what was written before."""
        ...

    def on_response_complete(self) -> None:
        """The connection is free for the next request."""
        ...

    def new_cycle(self, method: str, *, keep_alive: bool) -> RequestResponseCycle:
        """What takes the response to a request in parts. It is the connection's current one if nothing came since."""
        ...


class Direct:
    """Starts requests on the short way.

    Args:
        route: whose request a path is; None: it has to go the long way.
        ingress: the long way, whose error pages these are.
        log: called after each request.
    """

    def __init__(
        self,
        isolates: Isolates,
        route: Callable[[str], WorkerKey | None],
        ingress: Ingress,
        log: Callable[[Access], None],
    ) -> None:
        self._isolates = isolates
        self._route = route
        self.ingress = ingress
        self.log = log

    def start(
        self,
        connection: Connection,
        method: str,
        target: str,
        headers: list[tuple[bytes, bytes]],
        host: str,
        content: bytes | None,
    ) -> Exchange | None:
        """Begin to serve a request, or leave it to the long way (None).

        Args:
            content: its body.
            target: as the client wrote it, beginning with a slash, without a fragment.
        """
        path = target.partition("?")[0]
        if "%" in path:
            path = unquote(path)
        key = self._route(path)
        isolate = self._isolates.take(key) if key is not None else None
        if isolate is None:
            return None
        ip = connection.client[0] if connection.client is not None else ""
        text_headers = with_client_ip(
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers], ip
        )
        url = f"http://{host or 'localhost'}{target}"
        exchange = Exchange(self, connection, isolate, method, path, text_headers)
        exchange.start(InboundRequest(method, url, text_headers, content, _CF))
        return exchange


class Exchange:
    """A request on the short way. To uvicorn it is a cycle, and a task, which can be counted and cancelled."""

    __slots__ = (
        "_connection", "_direct", "_headers", "_invocation", "_is_cancelled", "_isolate", "_method", "_path",
        "_started", "_status", "disconnected", "keep_alive", "more_body", "response_complete",
    )  # fmt: skip
    message_event: ClassVar[asyncio.Event] = asyncio.Event()
    """For bodies, of which there is none."""

    def __init__(
        self,
        direct: Direct,
        connection: Connection,
        isolate: Isolate,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
    ) -> None:
        self._direct = direct
        self._connection = connection
        self._isolate = isolate
        self._method = method
        self._path = path
        self._headers = headers
        self._started = time.perf_counter()
        self._status: int | None = None
        self._is_cancelled = False
        self.keep_alive = True
        self.disconnected = False
        self.more_body = False
        self.response_complete = False

    def start(self, request: InboundRequest) -> None:
        """Hand the request to the process."""
        self._connection.server_state.tasks.add(cast(Any, self))
        try:
            self._invocation = self._isolate.start_fetch(request, "", {})
        except EdgeError as error:
            self._fail(error)
        else:
            self._connection.hang_up.add(self)
            self._invocation.answer.add_done_callback(self._on_answer)

    def cancel(self, msg: str = "") -> None:
        """Nobody waits for the answer any more."""
        self._is_cancelled = True
        self._invocation.answer.cancel()
        self._isolate.cancel(self._invocation)

    def header(self, name: str) -> str:
        """Value of the first request header called `name` (lower case), or an empty string."""
        return next((value for each, value in self._headers if each == name), "")

    def describe(self) -> str:
        """Method and path, for messages."""
        return f"{self._method} {self._path}"

    def _on_answer(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            self._end(is_complete=False)
            return
        if self._is_cancelled:  # when the answer was there, but not taken yet
            answer.exception()
            self._end(is_complete=False)
            return
        try:
            response = self._isolate.response_of(self._invocation)
        except EdgeError as error:
            self._fail(error)
            return
        try:
            headers = checked_headers(response.status, response.headers)
        except HandlerFailed as error:
            self._isolate.cancel(self._invocation)
            self._fail(error)
            return
        body = response.body
        if body is None or isinstance(body, WholeBody):
            self._respond(response.status, headers, b"" if body is None else body.content)
        else:
            self._leave()
            cycle = self._connection.new_cycle(self._method, keep_alive=self.keep_alive)
            streaming = asyncio.get_running_loop().create_task(self._stream(cycle, response, headers))
            self._connection.server_state.tasks.add(streaming)
            streaming.add_done_callback(self._connection.server_state.tasks.discard)

    def _fail(self, error: EdgeError) -> None:
        self._respond(*self._direct.ingress.error_page(error, self))

    def _respond(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """Write a whole response; its length is what it is, whatever the handler says of it."""
        self._status = status
        parts = [STATUS_LINE[status]]
        for name, value in self._connection.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        if self._method == "HEAD" or status in BODILESS:
            headers, content = headers_without_body(status, headers), b""
        else:
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(content)))
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", content)
        self._connection.write_now(b"".join(parts))
        if not self.keep_alive:
            self._connection.transport.close()
        self._end(is_complete=True)

    async def _stream(
        self, cycle: RequestResponseCycle, response: OutboundResponse, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """Write a response whose body comes in parts."""
        self._status = response.status

        async def respond(send: Send) -> None:
            try:
                await send_response(response, headers, self._method, send)
            except EdgeError as error:
                self._direct.ingress.report_cut(self, error)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._connection.hang_up.end(respond(send))

        try:
            await cycle.run_asgi(cast(Any, app))
        finally:
            await close(response)
            self._log(is_complete=cycle.response_complete)

    def _end(self, *, is_complete: bool) -> None:
        self.response_complete = True
        self._leave()
        if is_complete:
            self._connection.on_response_complete()
        self._log(is_complete=is_complete)

    def _leave(self) -> None:
        self._connection.server_state.tasks.discard(cast(Any, self))
        self._connection.hang_up.discard(self)

    def _log(self, *, is_complete: bool) -> None:
        elapsed_ms = (time.perf_counter() - self._started) * 1000
        self._direct.log(Access(self._method, self._path, self._status, is_complete, elapsed_ms))
