"""Serves ASGI applications (FastAPI, Starlette, Django, …): `return await asgi.fetch(app, request, self.env)`.

The lifespan of an application starts once per process, before its first request, and its shutdown runs when the
process ends in good order. Bodies stream in both directions. Work that goes on after the response, such as background
tasks, counts as `waitUntil` of the invocation.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from workers import _runtime
from workers._websocket import Close
from workers._websocket_pair import WebSocketPair
from workers.entrypoints import WorkerEntrypoint
from workers.gateway import BaseOptions as Options
from workers.request import Request
from workers.response import NULL_BODY_STATUSES, Response
from workers.streams import ReadableStream

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

STARTUP_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 0.9
"""Less than what the node gives a process to end."""

_VERSIONS = {"version": "3.0", "spec_version": "2.4"}
_log = logging.getLogger("asgi")


def __getattr__(name: str) -> Any:
    if name == "env":  # needs FastAPI, which only those who ask for it have
        return importlib.import_module("fastapi").Depends(_env_dependency())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


async def fetch(app: App, request: Request, env: Any, ctx: Any = None, *, options: Options | None = None) -> Response:
    """The response of `app` to `request`, as soon as it begins. WebSocket requests are answered as by `websocket()`.

    Args:
        env: what the application finds as `scope["env"]`.
        ctx: not needed; the running invocation's is used.
        options: without effect here.

    Raises:
        RuntimeError: the application's startup failed, or it ended without a response.
        BaseException: whatever the application raises before its response begins.
    """
    if _is_websocket(request):
        return await websocket(app, request, env)
    exchange = Exchange(request)
    scope = await _http_scope(app, request, env)
    return await exchange.respond(asyncio.ensure_future(app(scope, exchange.receive, exchange.send)))


async def websocket(app: App, request: Request, env: Any = None) -> Response:
    """Accept a WebSocket request and let `app` talk to the client.

    Raises:
        TypeError: `request` is no WebSocket request.
        RuntimeError, BaseException: as `fetch`, before the application accepts.
    """
    if not _is_websocket(request):
        raise TypeError("asgi.websocket() needs a WebSocket request; this one has no `Upgrade: websocket` header")
    connection = _Connection()
    scope = await _websocket_scope(app, request, env)
    running = asyncio.ensure_future(connection.run(app, scope))
    await _until_answered(running, connection.answered, "The application neither accepted nor closed the WebSocket")
    return connection.answered.result()


def entrypoint(app: App, *, options: Options | None = None, **_options: Any) -> type[WorkerEntrypoint]:
    """A handler class that serves `app`: `Default = asgi.entrypoint(app)`."""

    class Default(WorkerEntrypoint):
        async def fetch(self, request: Request) -> Response:
            return await fetch(app, request, self.env, self.ctx)

    return Default


async def shut_down() -> None:
    """Let every application that has started run its shutdown, for at most `SHUTDOWN_TIMEOUT_S`."""
    if _lifespans:
        endings = [lifespan.shut_down() for lifespan in _lifespans.values()]
        _lifespans.clear()
        await asyncio.wait([asyncio.ensure_future(ending) for ending in endings], timeout=SHUTDOWN_TIMEOUT_S)


# -- scopes ------------------------------------------------------------------------------------------------------


async def _http_scope(app: App, request: Request, env: Any) -> Message:
    scheme, server, shared = _connection_scope(request)
    return {
        "type": "http",
        "method": str(request.method),
        "scheme": scheme,
        "server": server,
        **shared,
        "env": env,
        "state": await _state_of(app),
        "extensions": {},
    }


async def _websocket_scope(app: App, request: Request, env: Any) -> Message:
    scheme, server, shared = _connection_scope(request)
    offered = request.headers.get("sec-websocket-protocol", "")
    return {
        "type": "websocket",
        "scheme": scheme.replace("http", "ws"),
        "server": server,
        **shared,
        "subprotocols": [name.strip() for name in offered.split(",") if name.strip()],
        "env": env,
        "state": await _state_of(app),
        "extensions": {"websocket.http.response": {}},
    }


def _connection_scope(request: Request) -> tuple[str, tuple[str, int], Message]:
    """Scheme, server, and the keys that both kinds of scope have alike."""
    url = urlsplit(request.url)
    raw_path = url.path.encode("latin-1", "replace")
    client = request.headers.get("cf-connecting-ip")
    return (
        url.scheme,
        (url.hostname or "", url.port or (443 if url.scheme == "https" else 80)),
        {
            "asgi": dict(_VERSIONS),
            "http_version": "1.1",
            "path": unquote_to_bytes(raw_path).decode("utf-8", "replace"),
            "raw_path": raw_path,
            "query_string": url.query.encode("latin-1", "replace"),
            "root_path": "",
            "headers": [
                (name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
                for name, value in request.headers.items()
            ],
            "client": (client, 0) if client else None,
        },
    )


def _is_websocket(request: Request) -> bool:
    return str(request.headers.get("upgrade", "")).lower() == "websocket"


# -- HTTP --------------------------------------------------------------------------------------------------------


class ClientGone(OSError):
    """Nobody reads the rest of the response."""


class Exchange:
    """One request and its response, as an application sees them: `receive` and `send`."""

    def __init__(self, request: Request) -> None:
        self._body = aiter(stream) if (stream := request.body) is not None else None
        self._is_body_read = False
        self._head: Message = {}
        self._first: Message = {}
        self._pieces: asyncio.Queue[Message] = asyncio.Queue(1)  # the application waits for whoever reads the response
        self._is_complete = False
        self._over = asyncio.Event()
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def receive(self) -> Message:
        """See the ASGI specification."""
        if self._is_body_read:
            await self._over.wait()
            return {"type": "http.disconnect"}
        try:
            if self._body is not None:
                return {"type": "http.request", "body": bytes(await anext(self._body)), "more_body": True}
        except StopAsyncIteration:
            pass
        except OSError:
            self._is_body_read = True
            self._over.set()
            return {"type": "http.disconnect"}
        self._is_body_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message: Message) -> None:
        """See the ASGI specification. Raises ClientGone once the client is gone."""
        if self._over.is_set() and not self._is_complete:
            raise ClientGone("the client went away")
        match message["type"]:
            case "http.response.start" if not self._head:
                self._head = message
                if not any(name.lower() == b"content-length" for name, _ in message.get("headers", [])):
                    self._answer(b"", more=True)  # a stream, whose first event may be long in coming
            case "http.response.body" if self._head and not self._is_complete:
                self._is_complete = not message.get("more_body", False)
                await self._send_body(message)
            case kind:
                raise RuntimeError(f"unexpected ASGI message {kind!r}: the response has not begun, or is complete")

    async def respond(self, running: asyncio.Future[None]) -> Response:
        """The response that the application `running` makes, as soon as it begins.

        Raises:
            RuntimeError: it ended without one; BaseException: it raised before that.
        """
        await _until_answered(running, self._answered, "The application did not generate a response")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._head.get("headers", [])]
        status = self._head["status"]
        body: Any = None
        if status not in NULL_BODY_STATUSES:
            body = ReadableStream(self._stream(running)) if self._first.get("more_body") else self._first["body"]
        return Response(body, status, headers=headers)

    async def _send_body(self, message: Message) -> None:
        if self._answered.done():
            await self._pieces.put(message)
        else:
            self._answer(bytes(message.get("body", b"")), more=message.get("more_body", False))
        if self._is_complete and not self._first.get("more_body"):
            self._over.set()

    def _answer(self, body: bytes, *, more: bool) -> None:
        self._first = {"body": body, "more_body": more}
        self._answered.set_result(None)

    async def _stream(self, running: asyncio.Future[None]) -> AsyncIterator[bytes]:
        try:
            message: Message = self._first
            while True:
                if message.get("body"):
                    yield bytes(message["body"])
                if not message.get("more_body", False):
                    return
                message = await self._next_piece(running)
        finally:
            self._over.set()
            if not self._is_complete:
                running.cancel()  # nobody reads the rest

    async def _next_piece(self, running: asyncio.Future[None]) -> Message:
        getting = asyncio.ensure_future(self._pieces.get())
        awaited: list[asyncio.Future[Any]] = [getting, running]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        if not self._pieces.empty():
            return self._pieces.get_nowait()
        raise RuntimeError("the application ended in the middle of its response")


async def _until_answered(running: asyncio.Future[None], answered: asyncio.Future[Any], otherwise: str) -> None:
    """Wait until the application has answered; what it does after that keeps the invocation open."""
    awaited: list[asyncio.Future[Any]] = [running, answered]
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        running.cancel()
        raise
    if not answered.done():
        running.result()  # raises what the application raised
        raise RuntimeError(otherwise)
    _let_finish(running)


def _let_finish(running: asyncio.Future[None]) -> None:
    """Keep the invocation until the application has returned; what it raises from here on is logged."""
    finishing = _log_failure(running)
    context = _runtime.context.get()
    if context is not None:
        context.waitUntil(finishing)
    else:
        _unattended.add(task := asyncio.ensure_future(finishing))
        task.add_done_callback(_unattended.discard)


_unattended: set[asyncio.Future[None]] = set()


async def _log_failure(running: asyncio.Future[None]) -> None:
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        running.cancel()
        raise
    error = None if running.cancelled() else running.exception()
    if error is not None and not isinstance(error, ClientGone):
        _log.error("the application failed after its response had begun", exc_info=error)


# -- WebSocket ---------------------------------------------------------------------------------------------------


class _Connection:
    """One WebSocket request and what comes of it."""

    def __init__(self) -> None:
        self._client, self._server = WebSocketPair().object_values()
        self._denial: Message = {}
        self._denial_body = bytearray()
        self._is_connected = False
        self.answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    async def run(self, app: App, scope: Message) -> None:
        """Run `app`; however it ends, the connection ends with it."""
        try:
            await app(scope, self.receive, self.send)
        except BaseException:
            self._server.send_close(1011)
            raise
        self._server.send_close(1000)

    async def receive(self) -> Message:
        if not self._is_connected:
            self._is_connected = True
            return {"type": "websocket.connect"}
        match await self._server.receive():
            case Close(code, reason):
                return {"type": "websocket.disconnect", "code": code, "reason": reason}
            case str(text):
                return {"type": "websocket.receive", "text": text}
            case data:
                return {"type": "websocket.receive", "bytes": data}

    async def send(self, message: Message) -> None:
        match message["type"]:
            case "websocket.accept" if not self.answered.done():
                self._accept(message)
            case "websocket.send" if self.answered.done():
                if self._server.is_left:
                    raise ClientGone("the client has closed the WebSocket")
                text = message.get("text")
                self._server.send(message["bytes"] if text is None else text)
                await self._server.room()
            case "websocket.close" if self.answered.done():
                self._server.send_close(message.get("code", 1000), message.get("reason") or "")
            case "websocket.close":
                self.answered.set_result(Response(None, 403))
            case "websocket.http.response.start" if not self.answered.done():
                self._denial = message
            case "websocket.http.response.body" if self._denial and not self.answered.done():
                self._deny(message)
            case kind:
                raise RuntimeError(f"unexpected ASGI message {kind!r} on a WebSocket in this state")

    def _accept(self, message: Message) -> None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", [])]
        if message.get("subprotocol"):
            headers.append(("sec-websocket-protocol", message["subprotocol"]))
        self.answered.set_result(Response(None, 101, headers=headers, web_socket=self._client))

    def _deny(self, message: Message) -> None:
        self._denial_body += message.get("body", b"")
        if not message.get("more_body", False):
            pairs = self._denial.get("headers", [])
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]
            self.answered.set_result(Response(bytes(self._denial_body), self._denial["status"], headers=headers))


# -- lifespan ----------------------------------------------------------------------------------------------------


class _Lifespan:
    """The lifespan of one application in this process."""

    def __init__(self, app: App) -> None:
        self.app = app  # held, so that no other application gets its id
        self.state: dict[str, Any] = {}
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._stopping = asyncio.Event()
        self._is_started = False
        # Not in the context of the request that happens to be the first: this outlives it.
        self._running = loop.create_task(self._run(), context=contextvars.Context())

    async def start(self) -> None:
        """Wait for the startup; raises RuntimeError if it fails."""
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            await asyncio.shield(self._started)

    async def shut_down(self) -> None:
        """Let the application shut down and wait until it has."""
        self._stopping.set()
        await asyncio.wait([self._running])

    def cancel(self) -> None:
        """Give the startup up."""
        self._running.cancel()

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": dict(_VERSIONS), "state": self.state}
        try:
            await self.app(scope, self._receive, self._send)
        except BaseException as error:  # an application without lifespan support may raise anything
            if self._is_started and not isinstance(error, asyncio.CancelledError):
                _log.error("the application's lifespan failed", exc_info=error)
        if not self._started.done():
            self._started.set_result(None)

    async def _receive(self) -> Message:
        if not self._is_started:
            self._is_started = True
            return {"type": "lifespan.startup"}
        await self._stopping.wait()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: Message) -> None:
        match message["type"]:
            case "lifespan.startup.complete" if not self._started.done():
                self._started.set_result(None)
            case "lifespan.startup.failed" if not self._started.done():
                text = message.get("message") or "it gave no reason"
                self._started.set_exception(RuntimeError(f"the application's startup failed: {text}"))
            case "lifespan.shutdown.failed":
                _log.error("the application's shutdown failed: %s", message.get("message", ""))


_lifespans: dict[int, _Lifespan] = {}


async def _state_of(app: App) -> dict[str, Any]:
    """A copy of the state that the application's startup left; starts the application first if need be."""
    lifespan = _lifespans.get(id(app))
    if lifespan is None:
        lifespan = _lifespans[id(app)] = _Lifespan(app)
    try:
        await lifespan.start()
    except (RuntimeError, TimeoutError):
        if _lifespans.get(id(app)) is lifespan:
            del _lifespans[id(app)]  # the next request tries again
        lifespan.cancel()
        raise
    return dict(lifespan.state)


def _env_dependency() -> Callable[[Any], Any]:
    connection = importlib.import_module("fastapi.requests").HTTPConnection

    def env(request: Any) -> Any:
        return request.scope["env"]

    env.__annotations__ = {"request": connection, "return": Any}
    return env
