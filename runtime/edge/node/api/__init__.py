"""The REST API: Workers AI's routes under `/client/v4`, OpenAI's under `…/ai/v1` and `/v1`, and `/healthz`.

Decodes and encodes; what a call means is in `edge.ai`. Every exception below is caught in exactly one place, `_Api`,
which also says of every request what its head tells. A client that hangs up cancels its call. One module per group of
routes, beside this one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers, State
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.ai.call_report import CallReport
from edge.ai.gate import Gate
from edge.auth.authenticator import Authenticator
from edge.billing.meter import new_id
from edge.config import ApiConfig
from edge.errors import EdgeError, MethodNotAllowed, RequestAborted, UnknownRoute, UrlTooLong
from edge.node.api.accounts import Accounts
from edge.node.api.batches import BatchRoutes
from edge.node.api.binding import Binding
from edge.node.api.bodies import Bodies, Held
from edge.node.api.callers import Context
from edge.node.api.embeddings import EmbeddingRoutes
from edge.node.api.failures import ErrorStyle, error_response
from edge.node.api.files import FileRoutes
from edge.node.api.finetunes import FinetuneRoutes
from edge.node.api.inference import Inference
from edge.node.api.models import Models
from edge.node.api.openapi import OpenApi
from edge.node.api.responses import call_headers, json_response
from edge.node.api.tokens import Tokens
from edge.node.turns import Turns

PREFIX = "/client/v4"
OPENAI_PREFIX = "/v1"
"""OpenAI's routes for the account of the token, so that its clients need no more than a host."""
MAX_URL_BYTES = 32 << 10
"""Of path and query together."""
DEFAULT_CONFIG = ApiConfig()
BODY_TIMEOUT_S = 60.0
"""How long nothing of a request's body may come."""
MIN_BODY_BYTES_PER_S = 16 << 10
"""How fast a body has to come that takes longer than that: it takes a part of what all bodies may."""
_PREFLIGHT_S = 3600
"""How long a browser may remember what a preflight request was answered."""
_MAX_SHOWN_CHARS = 200
_SHOWN_HEADERS = (
    *("cf-ai-req-id", "x-request-id", "cf-ai-neurons", "x-edge-cost-usd", "server-timing", "retry-after"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "x-should-retry"),
)
"""What a page of another origin may read."""

Health = Callable[[], Mapping[str, Any]]
"""What `/healthz` tells beside `"status": "ok"`."""

R = TypeVar("R", Route, Mount)

_log = logging.getLogger(__name__)


class RouteGroup(Protocol):
    """The routes of one module beside this one."""

    def native_routes(self) -> list[Route]:
        """Those below `/accounts/{account}/ai`."""
        ...

    def openai_routes(self) -> list[Route]:
        """Those below a base URL of OpenAI clients."""
        ...


def routes(
    gate: Gate,
    *,
    tokens: Authenticator | Mapping[str, str],
    health: Health = dict,
    config: ApiConfig = DEFAULT_CONFIG,
) -> list[BaseRoute]:
    """The routes of the API. `tokens` tells who calls; a mapping is of tokens to accounts."""
    context = Context(gate, tokens)
    groups: list[RouteGroup] = [
        Binding(context),  # before the models, for one of which its tunnel could be taken
        *(Inference(context), EmbeddingRoutes(context), Models(context)),
        *(BatchRoutes(context), FileRoutes(context), FinetuneRoutes(context)),
    ]
    ai = [route for group in groups for route in group.native_routes()]
    v1 = [route for group in groups for route in group.openai_routes()]
    platform = [*OpenApi().routes(), *Accounts(context).routes(), *Tokens(context).routes()]
    # A mount in between would match what is not there, too: its own "not found" would not be ours.
    native = [*platform, *_below("/accounts/{account}/ai", ai), *_below("/accounts/{account}/ai/v1", v1)]
    turns = Turns()
    return [
        _mount(PREFIX, _with_cors(_Api(native, context.bodies, config, turns), config)),
        _mount(OPENAI_PREFIX, _with_cors(_Api(_below("", v1), context.bodies, config, turns), config)),
        Route("/healthz", _healthz(health), methods=["GET"]),
    ]


def _mount(prefix: str, app: ASGIApp) -> Mount:
    return _with_line_breaks(Mount(prefix, app=app))


def _with_line_breaks(route: R) -> R:
    """`route`, which takes paths with a line break, too: Starlette's own pattern leaves them out."""
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route


def _healthz(health: Health) -> Callable[[Request], Awaitable[Response]]:
    async def healthz(request: Request) -> Response:
        return json_response({"status": "ok", **health()})

    return healthz


class _Api:
    """ASGI app of everything under a prefix."""

    def __init__(self, routes: list[Route], bodies: Bodies, config: ApiConfig, turns: Turns) -> None:
        self._bodies = bodies
        self._config = config
        self._turns = turns
        self._routes = routes
        self._router = Router(routes, redirect_slashes=False, default=_no_such_route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every response has the id that a user can ask about."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "WebSockets are not supported yet"})
            return
        await self._turns.wait()
        held = Held(self._bodies, State(scope.setdefault("state", {})))
        try:
            await self._serve(scope, receive, send, held)
        finally:
            held.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, held: Held) -> None:
        request_id, report = new_id(), CallReport()
        state = scope["state"]
        state |= {"request_id": request_id, "report": report, "held": held, "api": self._config, "turns": self._turns}
        scope["path"] = joined(scope["path"].rstrip("/"))
        head_sent = False

        async def send_with_headers(message: Message) -> None:
            nonlocal head_sent
            if message["type"] == "http.response.start":
                head_sent = True
                told = [("cf-ai-req-id", request_id), ("x-request-id", request_id)]
                told += call_headers(report, is_success=message["status"] < 400)
                message["headers"] = [*message["headers"], *((name.encode(), value.encode()) for name, value in told)]
            await send(message)

        headers: Mapping[str, str] = {}
        try:
            _check_url(scope)
            await self._router(scope, _Body(receive).receive, send_with_headers)
            return
        except ClientDisconnect:  # while it sent its request
            return
        except EdgeError as error:
            failure = error
        except HTTPException as error:
            failure, headers = self._translated(error, scope)
        except Exception:
            _log.exception("request %s failed: %s %r", request_id, scope["method"], scope["path"])
            failure = EdgeError("internal error; the node's log has the reason under this id")
        if head_sent:  # nothing but an unfinished response can tell the client now
            raise failure
        state["problem"] = failure.message
        style = state.get("error_style") or _error_style(scope["path"])
        response = error_response(failure, style, request_id, headers)
        await response(scope, receive, send_with_headers)

    def _translated(self, error: HTTPException, scope: Scope) -> tuple[EdgeError, Mapping[str, str]]:
        """What the router has against the request, in our own terms, and headers that say more."""
        if error.status_code != MethodNotAllowed.status:
            return _unknown_route(scope), {}
        # Several routes can have this path, each for other methods; the router has looked at the first only.
        found = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in found for method in route.methods or ()}))
        path = scope["path"][:_MAX_SHOWN_CHARS]
        return MethodNotAllowed(f"{path} does not take {scope['method']}: use {allowed}"), {"allow": allowed}


class _Body:
    """What comes of a request: a body that stops coming, or comes too slowly, is not waited for."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_complete = False
        self._since_s = time.monotonic()
        self._num_bytes = 0

    async def receive(self) -> Message:
        """See ASGI."""
        if self._is_complete:  # what comes now is the end of the connection
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            raise RequestAborted(f"nothing more of the request's body came for {BODY_TIMEOUT_S:g} s") from None
        self._is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        limit_s = BODY_TIMEOUT_S + self._num_bytes / MIN_BODY_BYTES_PER_S
        if not self._is_complete and time.monotonic() - self._since_s > limit_s:
            raise RequestAborted(
                f"{self._num_bytes} bytes of the request's body took over {limit_s:.0f} s, and it is not complete: "
                f"send at least {MIN_BODY_BYTES_PER_S} bytes a second"
            )
        return message


def _with_cors(app: ASGIApp, config: ApiConfig) -> ASGIApp:
    """`app`, which pages of the configured origins may call. Tokens are sent by hand, so that there are no cookies."""
    if not config.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=_SHOWN_HEADERS,
        max_age=_PREFLIGHT_S,
    )


def is_preflight(method: str, headers: Headers, config: ApiConfig) -> bool:
    """Whether a request is a browser's question on behalf of a page that may call the API, with a token, from afar."""
    wanted = [name.strip().lower() for name in headers.get("access-control-request-headers", "").split(",")]
    return (
        method == "OPTIONS"
        and "access-control-request-method" in headers
        and not {"authorization", "x-auth-key"}.isdisjoint(wanted)
        and ("*" in config.cors_origins or headers.get("origin", "") in config.cors_origins)
    )


def joined(path: str) -> str:
    """`path` without the empty segments within it, which a base URL that ends in a slash makes."""
    return re.sub("/{2,}", "/", path) if "//" in path else path


def _check_url(scope: Scope) -> None:
    num_bytes = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if num_bytes > MAX_URL_BYTES:
        raise UrlTooLong(
            f"path and query have {num_bytes} bytes, more than {MAX_URL_BYTES}: send long values in the body"
        )


def _error_style(path: str) -> ErrorStyle:
    is_openai = "/ai/v1/" in f"{path}/" or f"{path}/".startswith(f"{OPENAI_PREFIX}/")
    return "openai" if is_openai else "native"


def _unknown_route(scope: Scope) -> UnknownRoute:
    return UnknownRoute(f"no route for {scope['method']} {scope['path'][:_MAX_SHOWN_CHARS]}")


def _below(prefix: str, routes: list[Route]) -> list[Route]:
    return [
        _with_line_breaks(Route(prefix + route.path, route.endpoint, methods=list(route.methods or ())))
        for route in routes
    ]


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise _unknown_route(scope)
