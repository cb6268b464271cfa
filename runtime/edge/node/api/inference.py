"""Routes that run models: Workers AI's `ai/run`, and OpenAI's under `ai/v1`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai import native, openai
from edge.ai.answers import AnswerStream
from edge.ai.completions import completion
from edge.ai.gate import Gate, Principal
from edge.ai.responses import count_response_tokens, response
from edge.node.api.callers import Context
from edge.node.api.responses import envelope, json_response, stream_or_nothing
from edge.node.connection import hung_up, while_connected

_Answer = Callable[[Gate, Principal, Any], Coroutine[Any, Any, dict[str, Any] | AnswerStream]]


class Inference:
    """The routes that run models."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def native_routes(self) -> list[Route]:
        """Below `/accounts/{account}/ai`."""
        # Models are matched on the decoded path, so that `@cf/meta/x` may come as three segments or as one (%2F).
        return [Route("/run/{model:path}", self.run, methods=["POST"])]

    def openai_routes(self) -> list[Route]:
        """Below a base URL of OpenAI clients."""
        return [
            Route("/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/chat/completions/input_tokens", self.count_chat_tokens, methods=["POST"]),
            Route("/completions", self.completions, methods=["POST"]),
            Route("/responses", self.responses, methods=["POST"]),
            Route("/responses/input_tokens", self.count_response_tokens, methods=["POST"]),
        ]

    async def run(self, request: Request) -> Response:
        """`POST ai/run/{model}`."""
        principal = self._context.principal(request, "rest")
        options: dict[str, Any] = dict(request.query_params)
        async with self._context.bodies.inputs_of(request) as inputs:
            if isinstance(inputs, dict) and isinstance(inputs.get("options"), dict):
                options |= inputs["options"]
            call = native.run_binding(self._context.gate, principal, request.path_params["model"], inputs, options)
            result = await while_connected(call, hung_up(request.receive))
        if result is None or isinstance(result, AnswerStream):
            return stream_or_nothing(result)
        return json_response(envelope(result))

    async def chat_completions(self, request: Request) -> Response:
        """`POST chat/completions`."""
        return await self._answer(request, openai.chat_completion)

    async def completions(self, request: Request) -> Response:
        """`POST completions`."""
        return await self._answer(request, completion)

    async def responses(self, request: Request) -> Response:
        """`POST responses`."""
        return await self._answer(request, response)

    async def count_chat_tokens(self, request: Request) -> Response:
        """`POST chat/completions/input_tokens`, for chat bodies what OpenAI has for those of responses."""
        return await self._answer(request, openai.count_chat_tokens)

    async def count_response_tokens(self, request: Request) -> Response:
        """`POST responses/input_tokens`."""
        return await self._answer(request, count_response_tokens)

    async def _answer(self, request: Request, answer: _Answer) -> Response:
        """What `answer` makes of the body, which stops when the client hangs up."""
        principal = self._context.principal(request, "openai")
        async with self._context.bodies.json_of(request) as body:
            call = answer(self._context.gate, principal, body)
            result = await while_connected(call, hung_up(request.receive))
        if result is None or isinstance(result, AnswerStream):
            return stream_or_nothing(result)
        return json_response(result)
