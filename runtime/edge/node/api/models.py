"""Routes about the models that there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai import openai
from edge.ai.catalogue import Catalogue
from edge.ai.listing import search_authors, search_models, search_tasks
from edge.ai.task_schemas import schemas_of
from edge.auth import scopes
from edge.errors import InvalidInput
from edge.node.api.callers import Context
from edge.node.api.responses import envelope, json_response

Search = Callable[[Catalogue, Mapping[str, Any]], dict[str, Any]]


class Models:
    """The routes about models."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def native_routes(self) -> list[Route]:
        """Below `/accounts/{account}/ai`."""
        return [
            Route("/models/search", self._searching(search_models), methods=["GET"]),
            Route("/models/schema", self.get_schema, methods=["GET"]),
            Route("/tasks/search", self._searching(search_tasks), methods=["GET"]),
            Route("/authors/search", self._searching(search_authors), methods=["GET"]),
        ]

    def openai_routes(self) -> list[Route]:
        """Below a base URL of OpenAI clients."""
        return [
            Route("/models", self.list_models, methods=["GET"]),
            Route("/models/{model:path}", self.get_model, methods=["GET"]),
        ]

    async def list_models(self, request: Request) -> Response:
        """`GET models`."""
        self._context.principal(request, "openai", scopes.AI_READ)
        return json_response(openai.model_list(self._context.gate.catalogue))

    async def get_model(self, request: Request) -> Response:
        """`GET models/{model}`."""
        self._context.principal(request, "openai", scopes.AI_READ)
        return json_response(openai.model_object(self._context.gate.catalogue.resolve(request.path_params["model"])))

    async def get_schema(self, request: Request) -> Response:
        """`GET ai/models/schema?model=`."""
        self._context.principal(request, "rest", scopes.AI_READ)
        model = request.query_params.get("model")
        if not model:
            raise InvalidInput("model is missing: add ?model= with the name of one", param="model")
        return json_response(envelope(schemas_of(self._context.gate.catalogue.resolve(model))))

    def _searching(self, search: Search) -> Callable[[Request], Awaitable[Response]]:
        """The route of a `search` with pages."""

        async def answer(request: Request) -> Response:
            self._context.principal(request, "rest", scopes.AI_READ)
            found = search(self._context.gate.catalogue, request.query_params)
            return json_response(envelope(None) | found)

        return answer
