"""The wire of Cloudflare's own `env.AI`, so that the binding of another runtime (workerd, miniflare) can use a node.

That binding asks for `https://workers-binding.ai/PATH` through a service of its runtime; what it asks for at PATH is
here under `ai/binding/PATH`. Older tools send all of it as POST to `ai/run/proxy`, with the address in `X-Forwarded`.
Results have no envelope, and errors the binding's own form. docs/bindings.md says how to point a runtime here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai.answers import AnswerStream
from edge.ai.inputs import Binary, FormInputs
from edge.ai.listing import search_models
from edge.ai.native import run_binding
from edge.auth import scopes
from edge.errors import InvalidInput, InvalidJson, NotSupported, TunnelUnauthorized, Unauthorized, UnknownModel
from edge.node.api.callers import Context
from edge.node.api.responses import envelope, json_response, stream_or_nothing
from edge.node.connection import hung_up, while_connected

_VERSIONS = ("2", "3")
"""Of the wire of `run`; both are this one."""
_OF_THE_WIRE = ("version", "userInputs", "body")
"""Query parameters of `run` that are no options."""
_ABSENT = {
    "to-everything": (
        "toMarkdown() is not supported by this node: convert documents with a package such as markitdown"
    ),
    "ai-gateway": "gateway() is not supported by this node: it has no AI Gateway; run() calls the models",
    "autorag": "autorag() and aiSearch() are not supported by this node: it has no AI Search and no vector indexes",
}
"""What the binding can ask for and a node does not have, by the first part of the path."""


class Binding:
    """The routes that the binding of another runtime uses."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def native_routes(self) -> list[Route]:
        """Below `/accounts/{account}/ai`. They go before `/run/{model}`, which would take the tunnel for a model."""
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return [
            Route("/binding/{path:path}", self.serve, methods=methods),
            Route("/run/proxy", self.tunnel, methods=["POST"]),
        ]

    def openai_routes(self) -> list[Route]:
        """There are none."""
        return []

    async def serve(self, request: Request) -> Response:
        """What the binding asks for at `path`."""
        request.state.error_style = "binding"
        return await self._answer(request, request.method, request.path_params["path"], request.query_params)

    async def tunnel(self, request: Request) -> Response:
        """What the binding asks for at the address in `X-Forwarded`, always as POST."""
        request.state.error_style = "binding"
        try:
            self._context.principal(request, "binding")
        except Unauthorized as error:
            raise TunnelUnauthorized(error.message) from error
        try:
            url = urlsplit(request.headers.get("x-forwarded", ""))
        except ValueError as error:  # brackets around what is no IPv6 address, say
            raise InvalidJson(f"the header X-Forwarded is no address: {error}") from error
        if not url.path:
            raise InvalidJson("the header X-Forwarded is missing: it has the address that the binding asked for")
        return await self._answer(request, None, url.path.lstrip("/"), dict(parse_qsl(url.query)))

    async def _answer(self, request: Request, method: str | None, path: str, query: Mapping[str, str]) -> Response:
        """`method` None: it is not known, and what the path takes."""
        match method, path:
            case (("POST" | None), ("run" | "ai-gateway/run")):
                return await self._run(request, query)
            case "GET", "run":
                raise NotSupported("run() with the option websocket is not supported by this node: use stream: true")
            case (("GET" | None), "ai-api/models/search"):
                self._context.principal(request, "binding", scopes.AI_READ)
                return json_response(envelope(None) | search_models(self._context.gate.catalogue, query))
        self._context.principal(request, "binding")
        absent = _ABSENT.get(path.partition("/")[0], f"the binding's {path[:100]!r} is not supported by this node")
        raise NotSupported(absent)

    async def _run(self, request: Request, query: Mapping[str, str]) -> Response:
        principal = self._context.principal(request, "binding")
        if query.get("version", _VERSIONS[-1]) not in _VERSIONS:
            raise InvalidInput(
                f"version is {query['version'][:40]!r}, must be {' or '.join(_VERSIONS)}", param="version"
            )
        model = self._model(request)
        async with self._call(request, query) as (inputs, options):
            call = run_binding(self._context.gate, principal, model, inputs, options)
            result = await while_connected(call, hung_up(request.receive))
        if result is None or isinstance(result, AnswerStream):
            return stream_or_nothing(result)
        return json_response(result)

    @asynccontextmanager
    async def _call(self, request: Request, query: Mapping[str, str]) -> AsyncIterator[tuple[Any, Mapping[str, Any]]]:
        """The inputs and the options: in the body, or in `query` where the body is one of the inputs."""
        bodies = self._context.bodies
        if "userInputs" in query:
            beside = _user_inputs(query["userInputs"])
            options = {key: value for key, value in query.items() if key not in _OF_THE_WIRE}
            async with bodies.inputs_of(request, is_json=False) as body:
                if isinstance(body, Binary):
                    yield msgspec.structs.replace(body, inputs=beside), options
                else:
                    yield FormInputs(body | beside), options
            return
        async with bodies.json_of(request) as body:
            if not isinstance(body, dict) or not isinstance(body.get("options") or {}, dict):
                raise InvalidJson('the body must be an object {"inputs": …, "options": {…}}')
            yield body.get("inputs"), body.get("options") or {}

    def _model(self, request: Request) -> str:
        """The model's id in the header, there perhaps after a prefix and a colon."""
        label = request.headers.get("cf-consn-model-id", "")
        if not label:
            raise InvalidJson("the header cf-consn-model-id, which names the model, is missing")
        _, colon, rest = label.partition(":")
        if not colon:
            return label
        try:
            return self._context.gate.catalogue.resolve(label).id
        except UnknownModel:
            return rest


def _user_inputs(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidJson(f"the query parameter userInputs is no JSON object: {error}") from error
