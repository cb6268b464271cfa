"""An ASGI wrapper that serves static assets of a worker before the worker is asked."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from edge.bindings.assets import Site, decoded_path
from edge.isolates.base import StreamAnswer
from edge.node.connection import hung_up, while_connected
from edge.node.translation import raw_path, text_headers


class AssetsFirst:
    """Serves the files that `site_of` a request has, and hands every other request to `app`."""

    def __init__(self, app: ASGIApp, site_of: Callable[[Scope], Site | None]) -> None:
        self._app = app
        self._site_of = site_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        site = self._site_of(scope) if scope["type"] == "http" else None
        if site is None:
            await self._app(scope, receive, send)
            return
        headers = text_headers(scope)
        is_navigation = ("sec-fetch-mode", "navigate") in headers
        path = decoded_path(raw_path(scope))
        asset = site.asset_before_worker(path, is_navigation)
        if asset is None:
            await self._app(scope, receive, send)
            return
        answer = site.respond(asset, scope["method"], path, headers, scope["query_string"].decode("latin-1"))
        try:
            await while_connected(_send(answer, send), hung_up(receive))
        finally:
            close = getattr(answer.body, "aclose", None)
            if close is not None:
                await close()


async def _send(answer: StreamAnswer, send: Send) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    async for piece in answer.body:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
