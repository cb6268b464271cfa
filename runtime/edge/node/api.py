"""The REST API: Workers AI's routes under `/client/v4`, OpenAI's under `…/ai/v1`, and `/healthz`.

Decodes and encodes; what a call means is in `edge.ai`. Every exception below becomes a response in exactly one
place, `_Api`. A client that hangs up cancels its call.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Message, Receive, Scope, Send

from edge.ai import native, openai
from edge.ai.answers import AnswerStream, error_body, error_message
from edge.ai.catalogue import catalogue_item
from edge.ai.gate import Gate, Principal
from edge.billing.meter import Trigger, new_id
from edge.errors import (
    EdgeError,
    InvalidInput,
    InvalidJson,
    MethodNotAllowed,
    OutOfCapacity,
    RequestTooLarge,
    Unauthorized,
    UnknownAccount,
    UnknownModel,
    UnknownRoute,
)
from edge.node.connection import hung_up, while_connected

PREFIX = "/client/v4"
MAX_BODY_BYTES = 10 << 20
MAX_HELD_BYTES = 64 << 20
"""Of the bodies of all requests that are not answered yet; what they decode to takes a few times as much."""
_MAX_PER_PAGE = 1000
_DEFAULT_PER_PAGE = 100
_MAX_PAGE = 10**9
_PLATFORM_ERRORS = (Unauthorized, UnknownAccount, UnknownRoute, MethodNotAllowed)
_CLIENT_GONE = 499
_FALSE = ("", "0", "false")
"""Query parameters that ask for nothing."""

Health = Callable[[], Mapping[str, Any]]
"""What `/healthz` tells beside `"status": "ok"`."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder(decimal_format="number")


def routes(gate: Gate, *, tokens: Mapping[str, str], health: Health = dict) -> list[BaseRoute]:
    """The routes of the API. `tokens` maps bearer tokens to the accounts that they belong to."""
    return [Mount(PREFIX, app=_Api(gate, tokens)), Route("/healthz", _healthz(health), methods=["GET"])]


def _healthz(health: Health) -> Callable[[Request], Awaitable[Response]]:
    async def healthz(request: Request) -> Response:
        return _json({"status": "ok", **health()})

    return healthz


class _Api:
    """ASGI app of everything under `PREFIX`."""

    def __init__(self, gate: Gate, tokens: Mapping[str, str]) -> None:
        self._gate = gate
        self._bodies = _Bodies()
        self._tokens = [(token.encode(), account) for token, account in tokens.items()]
        account = "/accounts/{account}/ai"
        # Models are matched on the decoded path, so that `@cf/meta/x` may come as three segments or as one (%2F).
        self._router = Router(
            [
                Route(account + "/run/{model:path}", self._run, methods=["POST"]),
                Route(account + "/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route(account + "/v1/models", self._list_models, methods=["GET"]),
                Route(account + "/v1/models/{model:path}", self._get_model, methods=["GET"]),
                Route(account + "/models/search", self._search_models, methods=["GET"]),
            ],
            redirect_slashes=False,
            default=_no_such_route,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every response has the id that a user can ask about."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "WebSockets are not supported yet"})
            return
        request_id = new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        head_sent = False

        async def send_with_id(message: Message) -> None:
            nonlocal head_sent
            if message["type"] == "http.response.start":
                head_sent = True
                headers = MutableHeaders(scope=message)
                headers["cf-ai-req-id"] = headers["x-request-id"] = request_id
            await send(message)

        headers: Mapping[str, str] | None = None
        try:
            await self._router(scope, receive, send_with_id)
            return
        except ClientDisconnect:  # while it sent its request
            return
        except EdgeError as error:
            failure = error
        except HTTPException as error:
            failure, headers = _translated(error, scope), error.headers
        except Exception:
            _log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if head_sent:  # nothing but an unfinished response can tell the client now
                raise
            failure = EdgeError("internal error; the node's log has the reason under this id")
        scope["state"]["problem"] = failure.message
        response = _error_response(failure, scope["path"], request_id, headers)
        await response(scope, receive, send_with_id)

    # -- routes --------------------------------------------------------------------------------------------

    async def _run(self, request: Request) -> Response:
        principal = self._principal(request, "rest")
        options: dict[str, Any] = {k: v for k, v in request.query_params.items() if v not in _FALSE}
        async with self._bodies.json_of(request) as inputs:
            if isinstance(inputs, dict) and isinstance(inputs.get("options"), dict):
                options |= inputs["options"]
            call = native.run_binding(self._gate, principal, request.path_params["model"], inputs, options)
            result = await while_connected(call, hung_up(request.receive))
        if not isinstance(result, dict):
            return _stream_or_nothing(result)
        return _json(_envelope(result), headers=_neurons_header(result))

    async def _chat_completions(self, request: Request) -> Response:
        principal = self._principal(request, "openai")
        async with self._bodies.json_of(request) as body:
            call = openai.chat_completion(self._gate, principal, body)
            result = await while_connected(call, hung_up(request.receive))
        if not isinstance(result, dict):
            return _stream_or_nothing(result)
        return _json(result, headers=_neurons_header(result))

    async def _list_models(self, request: Request) -> Response:
        self._principal(request, "openai")
        return _json(openai.model_list(self._gate.catalogue))

    async def _get_model(self, request: Request) -> Response:
        self._principal(request, "openai")
        return _json(openai.model_object(self._gate.catalogue.resolve(request.path_params["model"])))

    async def _search_models(self, request: Request) -> Response:
        self._principal(request, "rest")
        query = request.query_params
        if query.get("format", "default") not in ("", "default"):
            raise InvalidInput(f"format {query['format']!r} is not supported yet: leave it out", param="format")
        page = _count(query, "page", 1, _MAX_PAGE)
        per_page = _count(query, "per_page", _DEFAULT_PER_PAGE, _MAX_PER_PAGE)
        filters = {key: query.get(key, "") for key in ("search", "task", "author")}
        models = self._gate.catalogue.models(**filters)
        shown = models[(page - 1) * per_page : page * per_page]
        info = {
            "page": page,
            "per_page": per_page,
            "count": len(shown),
            "total_count": len(models),
            "total_pages": -(-len(models) // per_page),
        }
        items = [catalogue_item(model, self._gate.catalogue.prices) for model in shown]
        return _json(_envelope(items) | {"result_info": info})

    def _principal(self, request: Request, trigger: Trigger) -> Principal:
        """Who calls.

        Raises:
            Unauthorized: there is no token, or a wrong one.
            UnknownAccount: the token is for another account.
        """
        account = self._account_of(request.headers.get("authorization", ""))
        if account != request.path_params["account"]:
            raise UnknownAccount(
                f"the token has no access to the account {request.path_params['account'][:100]!r}, if it exists; "
                f"its own is {account!r}"
            )
        return Principal(account=account, trigger=trigger, request_id=request.state.request_id)

    def _account_of(self, authorization: str) -> str:
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode()
        # Every token is compared, each in constant time: how long it takes tells nothing about any of them.
        accounts = [account for known, account in self._tokens if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not accounts:
            raise Unauthorized(
                "authentication error: send the header `Authorization: Bearer TOKEN` with a token of this node "
                "(`edge dev` prints its own at start)"
            )
        return accounts[0]


# -- requests ----------------------------------------------------------------------------------------------


class _Bodies:
    """Reads the bodies of requests, and bounds what those under way hold together."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @asynccontextmanager
    async def json_of(self, request: Request) -> AsyncIterator[Any]:
        """The JSON value in the body of `request`; what follows in the `async with` block counts as under way.

        Raises:
            RequestTooLarge: the body is longer than `MAX_BODY_BYTES`; not more than that is read.
            OutOfCapacity: the bodies under way are longer than `MAX_HELD_BYTES` together.
            InvalidJson: it is no JSON.
        """
        body = bytearray()
        num_bytes = 0
        try:
            async for chunk in request.stream():
                body += chunk
                num_bytes += len(chunk)
                self._num_bytes += len(chunk)
                if num_bytes > MAX_BODY_BYTES:
                    raise RequestTooLarge(f"the request body is over the limit of {MAX_BODY_BYTES} bytes")
                if self._num_bytes > MAX_HELD_BYTES:
                    raise OutOfCapacity("too many large requests are under way; try again later", retry_after_s=1)
            value = _decoded(body)
            del body
            yield value
        finally:
            self._num_bytes -= num_bytes


def _decoded(body: bytearray) -> Any:
    if not body:
        raise InvalidJson("the request has no body: send a JSON object")
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidJson(f"the request body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidJson("the request body is nested too deeply") from error


def _count(query: Mapping[str, str], key: str, default: int, limit: int) -> int:
    text = query.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or not 1 <= int(text) <= limit:
        raise InvalidInput(f"{key} is {text[:40]!r}, must be an integer from 1 to {limit}", param=key)
    return int(text)


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise UnknownRoute(f"no route for {scope['method']} {scope['path'][:200]}")


def _translated(error: HTTPException, scope: Scope) -> EdgeError:
    """What the router has against the request, in our own terms."""
    if error.status_code == MethodNotAllowed.status:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"{scope['path']} does not take {scope['method']}: use {allowed}")
    return UnknownRoute(f"no route for {scope['method']} {scope['path'][:200]}")


# -- responses ---------------------------------------------------------------------------------------------


class _EventStream(Response):
    """Sends an answer stream as it comes, and closes it whatever happens."""

    def __init__(self, stream: AnswerStream) -> None:
        super().__init__(media_type=None, headers={"cache-control": "no-cache"})
        self._stream = stream
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends or the client hangs up."""
        try:
            await while_connected(self._send(send), hung_up(receive))
        finally:
            await self._stream.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._stream:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _stream_or_nothing(stream: AnswerStream | None) -> Response:
    """The response with `stream`; None means that the client has gone, and nobody reads this one."""
    return _EventStream(stream) if stream is not None else Response(status_code=_CLIENT_GONE)


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # The content type is exactly this: the binding compares the whole string.
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def _envelope(result: Any) -> dict[str, Any]:
    return {"result": result, "success": True, "errors": [], "messages": []}


def _neurons_header(result: dict[str, Any]) -> dict[str, str]:
    neurons = result["usage"].get("neurons")
    return {} if neurons is None else {"cf-ai-neurons": f"{neurons:.6f}"}


def _error_response(error: EdgeError, path: str, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    """The one place where an exception becomes a response."""
    is_openai = "/ai/v1/" in path
    status = 404 if is_openai and isinstance(error, UnknownModel) else error.status
    if is_openai:
        body = error_body(error, request_id)
    else:
        is_platform = isinstance(error, _PLATFORM_ERRORS)
        message = error.message if is_platform else error_message(error, request_id)
        body = {"result": None, "success": False, "errors": [{"code": error.code, "message": message}], "messages": []}
    retry = {"retry-after": str(error.retry_after_s or 1)} if error.retryable or error.retry_after_s else {}
    return _json(body, status=status, headers={**(headers or {}), **retry})
