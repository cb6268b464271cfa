"""Serves WSGI applications (Flask, Django, …): `return await wsgi.fetch(app, request, self.env)`.

The application runs in a thread, so that one that waits holds up no other request, and `run_sync` works in it. Bodies
stream in both directions.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from workers.asgi import Exchange
from workers.entrypoints import WorkerEntrypoint
from workers.gateway import BaseOptions as Options
from workers.request import Request
from workers.response import Response

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

MAX_THREADS = 64


async def fetch(app: App, request: Request, env: Any, ctx: Any = None, *, options: Options | None = None) -> Response:
    """The response of `app` to `request`, as soon as it begins.

    Args:
        env: what the application finds as `environ["workers.env"]`.
        ctx: not needed; the running invocation's is used.
        options: without effect here.

    Raises:
        RuntimeError: the application ended without a response.
        BaseException: whatever the application raises before its response begins.
    """
    loop = asyncio.get_running_loop()
    call = _Call(Exchange(request), loop)
    run = contextvars.copy_context().run
    return await call.exchange.respond(loop.run_in_executor(_threads(), run, call.serve, app, _environ(request, env)))


def entrypoint(app: App, *, options: Options | None = None, **_options: Any) -> type[WorkerEntrypoint]:
    """A handler class that serves `app`: `Default = wsgi.entrypoint(app)`."""

    class Default(WorkerEntrypoint):
        async def fetch(self, request: Request) -> Response:
            return await fetch(app, request, self.env, self.ctx)

    return Default


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, "wsgi")


class _Call:
    """One call of an application. All but `__init__` runs in a thread."""

    def __init__(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self.exchange = exchange
        self._loop = loop
        self._head: dict[str, Any] | None = None
        self._is_head_sent = False
        self._num_bytes = 0

    def serve(self, app: App, environ: dict[str, Any]) -> None:
        """Call `app` and send its response."""
        environ["wsgi.input"] = io.BufferedReader(_Input(self), 64 << 10)
        chunks = app(environ, self._start_response)
        try:
            for chunk in chunks:
                if chunk:
                    self._write(chunk)
            if self._head is None:
                raise RuntimeError("The application did not generate a response: it did not call start_response()")
            if not self._is_complete():
                self._send(b"", more=False)
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()

    def next_piece(self) -> bytes:
        """The next piece of the request's body; empty at its end."""
        while True:
            message = self._wait(self.exchange.receive())
            if message["type"] == "http.disconnect":
                raise OSError("the client went away while it sent the request's body")
            if message["body"] or not message["more_body"]:
                return message["body"]  # type: ignore[no-any-return]

    def _start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[..., None]:
        try:
            if exc_info and self._is_head_sent:
                raise exc_info[1].with_traceback(exc_info[2])
        finally:
            exc_info = None  # PEP 3333: it would otherwise hold on to this frame
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self._head = {"type": "http.response.start", "status": int(status.split(None, 1)[0]), "headers": pairs}
        return self._write

    def _write(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        self._send(chunk, more=not self._is_complete())

    def _is_complete(self) -> bool:
        """Whether as much is sent as the response's length says."""
        assert self._head is not None
        length = next((value for name, value in self._head["headers"] if name == b"content-length"), b"")
        return length.isdigit() and 0 < int(length) <= self._num_bytes

    def _send(self, chunk: bytes, *, more: bool) -> None:
        self._wait(self._send_all(chunk, more))

    async def _send_all(self, chunk: bytes, more: bool) -> None:
        if not self._is_head_sent:
            assert self._head is not None
            self._is_head_sent = True
            await self.exchange.send(self._head)
        await self.exchange.send({"type": "http.response.body", "body": chunk, "more_body": more})

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Input(io.RawIOBase):
    """The request's body as a file."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._rest = b""
        self._is_over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest and not self._is_over:
            self._rest = self._call.next_piece()
            self._is_over = not self._rest
        piece, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


def _environ(request: Request, env: Any) -> dict[str, Any]:
    """The environment of PEP 3333: native strings of Latin-1."""
    url = urlsplit(request.url)
    environ = {
        "REQUEST_METHOD": str(request.method),
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(url.path).decode("latin-1"),
        "QUERY_STRING": url.query,
        "SERVER_NAME": url.hostname or "",
        "SERVER_PORT": str(url.port or (443 if url.scheme == "https" else 80)),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": request.headers.get("cf-connecting-ip", ""),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": url.scheme,
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        "workers.env": env,
    }
    for name, value in request.headers.items():
        if "_" in name or name.lower() == "proxy":  # x_a would pass for x-a, and HTTP_PROXY for the user's setting
            continue
        key = name.upper().replace("-", "_")
        environ[key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"] = value
    return environ
