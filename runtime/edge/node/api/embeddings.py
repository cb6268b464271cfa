"""OpenAI's route for text embeddings. Workers AI's own form goes through `ai/run`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai import embeddings
from edge.node.api.callers import Context
from edge.node.api.responses import json_response, stream_or_nothing
from edge.node.connection import hung_up, while_connected


class EmbeddingRoutes:
    """The route of embeddings."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def native_routes(self) -> list[Route]:
        """Below `/accounts/{account}/ai`."""
        return []

    def openai_routes(self) -> list[Route]:
        """Below a base URL of OpenAI clients."""
        return [Route("/embeddings", self.embed, methods=["POST"])]

    async def embed(self, request: Request) -> Response:
        """`POST embeddings`."""
        principal = self._context.principal(request, "openai")
        async with self._context.bodies.json_of(request) as body:
            call = embeddings.openai(self._context.gate, principal, body)
            result = await while_connected(call, hung_up(request.receive))
        return json_response(result) if result is not None else stream_or_nothing(None)
