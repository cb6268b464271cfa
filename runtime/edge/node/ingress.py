"""HTTP in, worker out: an ASGI app that hands every request to the isolates and streams the answer back.

It trusts nothing that an isolate says: status and headers are checked before they reach the socket. It knows
nothing about models, tokens or money.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from edge.billing.meter import new_id
from edge.errors import EdgeError, HandlerFailed, UnknownWorker
from edge.isolates.base import InboundRequest, OutboundResponse, WorkerKey
from edge.isolates.dispatch import Isolates
from edge.isolates.invocation import WholeBody
from edge.node import pages
from edge.node.connection import HANG_UP, while_connected
from edge.node.translation import cf_of, checked_headers, client_ip, text_headers, url_of, with_client_ip
from edge.node.websocket import ClientSocket

BODILESS = frozenset({204, 205, 304})
"""Statuses of responses that have no body."""


class Described(Protocol):
    """A request, as far as messages about it go."""

    def describe(self) -> str:
        """Method and path."""
        ...

    def header(self, name: str) -> str:
        """Value of the first request header called `name` (lower case), or an empty string."""
        ...


class Ingress:
    """ASGI app of the workers: `route` says whose request it is, None if nobody's.

    With `show_tracebacks` (in `edge dev`) an exception of the handler is answered with its traceback; otherwise
    with an id under which the traceback is in the node's log.
    """

    def __init__(
        self,
        isolates: Isolates,
        route: Callable[[Scope], WorkerKey | None],
        *,
        show_tracebacks: bool,
        error_log: Callable[[str], None],
    ) -> None:
        self._isolates = isolates
        self._route = route
        self._show_tracebacks = show_tracebacks
        self._error_log = error_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request or WebSocket."""
        if scope["type"] == "websocket":
            client = ClientSocket(scope, receive, send)
            await client.connected()
            await self._serve_websocket(client)
            return
        exchange = _Exchange(scope, receive, send)
        hang_up = scope.get("extensions", {}).get(HANG_UP)
        if hang_up is not None:
            await hang_up.end(self._answer(exchange))
        else:
            await while_connected(self._answer(exchange), exchange.client_gone())

    async def _answer(self, exchange: _Exchange) -> None:
        try:
            response = await self._isolates.fetch(self._worker_of(exchange.scope), exchange.request())
        except EdgeError as error:
            await self._send_page(error, exchange)
            return
        try:
            headers = checked_headers(response.status, response.headers)
        except HandlerFailed as error:
            await close(response)
            await self._send_page(error, exchange)
            return
        try:
            await send_response(response, headers, exchange.scope["method"], exchange.send)
        except EdgeError as error:
            self.report_cut(exchange, error)
        finally:
            await close(response)

    async def _send_page(self, error: EdgeError, exchange: _Exchange) -> None:
        status, headers, body = self.error_page(error, exchange)
        await _send_head(status, [*headers, (b"content-length", b"%d" % len(body))], exchange.send)
        await exchange.send(_body_message(b"" if exchange.scope["method"] == "HEAD" else body, more=False))

    async def _serve_websocket(self, client: ClientSocket) -> None:
        is_open = False
        response: OutboundResponse | None = None
        try:
            response = await self._isolates.fetch(self._worker_of(client.scope), client.request())
            if response.status == 101:
                await client.accept(response)
                is_open = True
                await client.relay(response)
            else:
                await client.deny(response, checked_headers(response.status, response.headers))
        except OSError:
            return  # the client has gone
        except EdgeError as error:
            if is_open:
                self._error_log(f"{client.describe()} was cut short: {error.message}")
            else:
                await client.deny_with(*self.error_page(error, client))
        finally:
            if response is not None:
                await close(response)

    def report_cut(self, exchange: Described, error: EdgeError) -> None:
        """Tell the operator that a response ended half-way.

        The head is out, so the only honest signal to the client is that the connection ends without the last chunk.
        """
        self._error_log(f"the response to {exchange.describe()} was cut short: {error.message}")

    def _worker_of(self, scope: Scope) -> WorkerKey:
        key = self._route(scope)
        if key is None:
            raise UnknownWorker("no worker is served under this address")
        return key

    def error_page(self, error: EdgeError, exchange: Described) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of the answer to a request that failed."""
        error_id = new_id()
        self._error_log(f"{exchange.describe()} failed (id {error_id}): {_with_traceback(error)}")
        wants_html = "text/html" in exchange.header("accept")
        if self._show_tracebacks:
            content_type, body = pages.dev_error(error, exchange.describe(), html=wants_html)
        else:
            content_type, body = pages.public_error(error, error_id, html=wants_html)
        headers = [(b"content-type", content_type.encode()), (b"x-edge-error-id", error_id.encode())]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        return error.status, headers, body


class _Exchange:
    """One HTTP request and its response over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self.send = send
        self._headers = text_headers(scope)
        self._first = dict(reversed(self._headers))
        self._has_body = self.header("content-length") not in ("", "0") or "transfer-encoding" in self._first
        self._body_read: asyncio.Event | None = asyncio.Event() if self._has_body else None
        self._is_gone = False

    def header(self, name: str) -> str:
        """Value of the first request header called `name` (lower case), or an empty string."""
        return self._first.get(name, "")

    def describe(self) -> str:
        """Method and path, for messages."""
        return f"{self.scope['method']} {self.scope['path']}"

    def request(self) -> InboundRequest:
        """The request as the isolates take it."""
        return InboundRequest(
            method=self.scope["method"],
            url=url_of(self.scope, self.header("host")),
            headers=with_client_ip(self._headers, client_ip(self.scope)),
            body=self._body(self._body_read) if self._body_read is not None else None,
            cf=cf_of(self.scope["http_version"]),
        )

    async def _body(self, is_read: asyncio.Event) -> AsyncIterator[bytes]:
        while not is_read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                is_read.set()
                raise ConnectionResetError("the client went away while it sent the request body")
            if not message.get("more_body", False):
                is_read.set()
            if message.get("body"):
                yield message["body"]

    async def client_gone(self) -> None:
        """Return once the client has hung up.

        ASGI tells so only to those who read on, so a hang-up shows after the request body has been read.
        """
        if self._body_read is not None:
            await self._body_read.wait()
        while not self._is_gone:
            self._is_gone = (await self._receive())["type"] == "http.disconnect"


async def send_response(
    response: OutboundResponse, headers: list[tuple[bytes, bytes]], method: str, send: Send
) -> None:
    """Stream `response` to a request of `method` with `headers`, which have been checked.

    Raises:
        EdgeError: the body failed half-way; the response is left unfinished.
    """
    if response.status in BODILESS:
        headers = headers_without_body(response.status, headers)
    elif response.body is None:
        headers = [*(pair for pair in headers if pair[0] != b"content-length"), (b"content-length", b"0")]
    await _send_head(response.status, headers, send)
    last = b""
    if response.body is not None and method != "HEAD" and response.status not in BODILESS:
        if isinstance(response.body, WholeBody):
            last = response.body.content
        else:
            async for chunk in response.body:
                await send(_body_message(chunk, more=True))
    await send(_body_message(last, more=False))


def headers_without_body(status: int, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a response that has no body, whatever length its handler has given it.

    In answers to HEAD it stays: it is that of another response. 205 is a response like others, whose body is empty
    (RFC 9110, 15.3.6).
    """
    if status not in BODILESS:
        return headers
    rest = [pair for pair in headers if pair[0] != b"content-length"]
    return [*rest, (b"content-length", b"0")] if status == 205 else rest


async def _send_head(status: int, headers: list[tuple[bytes, bytes]], send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


def _body_message(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def close(response: OutboundResponse) -> None:
    """Leave what there still is of the body."""
    if response.body is not None:
        await response.body.aclose()


def _with_traceback(error: EdgeError) -> str:
    traceback = getattr(error, "traceback", "")
    return f"{pages.headline(error)}\n{traceback}" if traceback else pages.headline(error)
