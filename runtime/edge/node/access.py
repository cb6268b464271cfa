"""An ASGI wrapper that says of every request how it went. It knows nothing about what is served."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.node.connection import SEND


class Access(msgspec.Struct, frozen=True):
    """A request that is over."""

    method: str
    path: str
    status: int | None
    """None: the client hung up before there was one."""
    is_complete: bool
    """Whether the whole response was sent."""
    elapsed_ms: float
    problem: str = ""
    """Why it was refused or failed, if whoever served it said so; else empty."""
    account: str = ""
    """Whose token came with it, if that was looked at."""
    request_id: str = ""
    """What the response says that one can ask about, if it does."""


class AccessLogged:
    """Serves `app` and calls `log` after each HTTP request. What is served can say `problem`,
    `account` and `request_id` in `scope["state"]`."""

    def __init__(self, app: ASGIApp, log: Callable[[Access], None]) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        # Copied, since a router below changes it: the path that it mounts at becomes part of the root path.
        method, path, state = scope["method"], scope["path"], scope.setdefault("state", {})
        scope.setdefault("extensions", {})[SEND] = send
        status: int | None = None
        is_complete = False

        async def send_and_note(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            elapsed_ms = (time.perf_counter() - started) * 1000
            said = (state.get(key, "") for key in ("problem", "account", "request_id"))
            self._log(Access(method, path, status, is_complete, elapsed_ms, *said))
