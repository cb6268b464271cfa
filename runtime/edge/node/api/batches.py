"""Routes about asynchronous batches: the native list, and OpenAI's batches."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai import batch_native, batch_openai
from edge.ai.batch import Batches
from edge.ai.listing import page_info
from edge.auth import scopes
from edge.errors import NotSupported
from edge.node.api.bodies import count
from edge.node.api.callers import Context
from edge.node.api.responses import envelope, json_response

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100
_MAX_PAGE = 10**9


class BatchRoutes:
    """The routes about batches."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def native_routes(self) -> list[Route]:
        """Below `/accounts/{account}/ai`. Batches are made and polled by `ai/run`."""
        return [
            Route("/batches", self.list_native, methods=["GET"]),
            Route("/batches/{batch}", self.get_native, methods=["GET"]),
            Route("/batches/{batch}/cancel", self.cancel_native, methods=["POST"]),
        ]

    def openai_routes(self) -> list[Route]:
        """Below a base URL of OpenAI clients."""
        return [
            Route("/batches", self.create, methods=["POST"]),
            Route("/batches", self.list, methods=["GET"]),
            Route("/batches/{batch}", self.get, methods=["GET"]),
            Route("/batches/{batch}/cancel", self.cancel, methods=["POST"]),
        ]

    async def list_native(self, request: Request) -> Response:
        """`GET ai/batches?page=&per_page=`: newest first, empty past the end."""
        account = self._context.principal(request, "rest", scopes.AI_READ).account
        batches = batches_of(self._context)
        page = count(request.query_params, "page", 1, _MAX_PAGE)
        per_page = count(request.query_params, "per_page", _DEFAULT_LIMIT, _MAX_LIMIT)
        found = await batches.store.page(account, is_native=True, offset=(page - 1) * per_page, limit=per_page)
        total = await batches.store.count(account)
        info = page_info(page, per_page, len(found), total)
        return json_response(envelope([batch_native.state_object(*each) for each in found]) | {"result_info": info})

    async def get_native(self, request: Request) -> Response:
        """`GET ai/batches/{request_id}`: how far it is, without its answers."""
        account = self._context.principal(request, "rest", scopes.AI_READ).account
        found = await batches_of(self._context).store.get(account, request.path_params["batch"], is_native=True)
        return json_response(envelope(batch_native.state_object(*found)))

    async def cancel_native(self, request: Request) -> Response:
        """`POST ai/batches/{request_id}/cancel`: what has not begun is given up."""
        account = self._context.principal(request, "rest").account
        found = await self._cancelled(account, request, is_native=True)
        return json_response(envelope(batch_native.state_object(*found)))

    async def create(self, request: Request) -> Response:
        """`POST batches`."""
        principal = self._context.principal(request, "openai")
        async with self._context.bodies.json_of(request) as body:
            return json_response(await batch_openai.create(batches_of(self._context), principal, body))

    async def list(self, request: Request) -> Response:
        """`GET batches?after=&limit=`: newest first."""
        account = self._context.principal(request, "openai", scopes.AI_READ).account
        limit = count(request.query_params, "limit", _DEFAULT_LIMIT, _MAX_LIMIT)
        after = request.query_params.get("after") or None
        store = batches_of(self._context).store
        found = await store.page(account, is_native=False, after=after, limit=limit + 1)
        return json_response(batch_openai.page_object([batch_openai.batch_object(*each) for each in found], limit))

    async def get(self, request: Request) -> Response:
        """`GET batches/{batch}`."""
        account = self._context.principal(request, "openai", scopes.AI_READ).account
        found = await batches_of(self._context).store.get(account, request.path_params["batch"], is_native=False)
        return json_response(batch_openai.batch_object(*found))

    async def cancel(self, request: Request) -> Response:
        """`POST batches/{batch}/cancel`."""
        account = self._context.principal(request, "openai").account
        found = await self._cancelled(account, request, is_native=False)
        return json_response(batch_openai.batch_object(*found))

    async def _cancelled(self, account: str, request: Request, *, is_native: bool) -> Any:
        batches = batches_of(self._context)
        batch = request.path_params["batch"]
        await batches.store.cancel(account, batch, batches.now, is_native=is_native)
        batches.wake()
        return await batches.store.get(account, batch, is_native=is_native)


def batches_of(context: Context) -> Batches:
    """The batches of the node.

    Raises:
        NotSupported: it keeps none.
    """
    if context.gate.batches is None:
        raise NotSupported("this node keeps no batches")
    return context.gate.batches
