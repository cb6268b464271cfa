"""Routes about finetunes: the LoRA adapters of an account."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai.finetunes import MAX_FILE_BYTES, Finetune, Finetunes
from edge.auth import scopes
from edge.errors import InvalidInput, NotSupported
from edge.node.api.callers import Context
from edge.node.api.responses import envelope, json_response

_MAX_FORM_BYTES = MAX_FILE_BYTES + (1 << 20)


class FinetuneRoutes:
    """The routes about finetunes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def _finetunes(self) -> Finetunes:
        finetunes = self._context.gate.finetunes
        if finetunes is None:
            raise NotSupported("this node keeps no finetunes")
        return finetunes

    def native_routes(self) -> list[Route]:
        """Below `/accounts/{account}/ai`."""
        return [
            Route("/finetunes", self.create, methods=["POST"]),
            Route("/finetunes", self.list_own, methods=["GET"]),
            Route("/finetunes/public", self.list_public, methods=["GET"]),
            Route("/finetunes/{finetune}/finetune-assets", self.upload, methods=["POST"]),
            Route("/finetunes/{finetune}", self.get, methods=["GET"]),
            Route("/finetunes/{finetune}", self.delete, methods=["DELETE"]),
        ]

    def openai_routes(self) -> list[Route]:
        """There are none: OpenAI's finetunes are trained by the service."""
        return []

    async def create(self, request: Request) -> Response:
        """`POST ai/finetunes`."""
        principal = self._context.principal(request, "rest", scopes.AI_EDIT)
        async with self._context.bodies.json_of(request) as body:
            finetune = await self._finetunes.create(principal.account, body)
        return json_response(envelope(self._shown(finetune)))

    async def list_own(self, request: Request) -> Response:
        """`GET ai/finetunes`: all of the account's."""
        principal = self._context.principal(request, "rest", scopes.AI_READ)
        return json_response(envelope([self._shown(each) for each in self._finetunes.of_account(principal.account)]))

    async def list_public(self, request: Request) -> Response:
        """`GET ai/finetunes/public?limit=&offset=&orderBy=`."""
        self._context.principal(request, "rest", scopes.AI_READ)
        found = self._finetunes.public(request.query_params)
        return json_response(envelope([self._shown(each) for each in found]))

    async def get(self, request: Request) -> Response:
        """`GET ai/finetunes/{id or name}`."""
        principal = self._context.principal(request, "rest", scopes.AI_READ)
        return json_response(
            envelope(self._shown(self._finetunes.find(principal.account, request.path_params["finetune"])))
        )

    async def upload(self, request: Request) -> Response:
        """`POST ai/finetunes/{id or name}/finetune-assets`: a form of `file_name` and `file`."""
        principal = self._context.principal(request, "rest", scopes.AI_EDIT)
        async with (
            self._finetunes.upload(principal.account, request.path_params["finetune"]) as (finetune, folder),
            self._context.bodies.form_of(request, max_bytes=_MAX_FORM_BYTES, folder=folder) as form,
        ):
            name = form.fields.get("file_name")
            files = [file for file in form.files if file.name == "file"]
            if name is None or len(files) != 1 or files[0].path is None:
                raise InvalidInput("the form must have a field file_name and one file, named file", param="file")
            await self._finetunes.add(finetune, name, files[0].path)
        return json_response(envelope({"id": finetune.id, "file_name": name}))

    async def delete(self, request: Request) -> Response:
        """`DELETE ai/finetunes/{id or name}`."""
        principal = self._context.principal(request, "rest", scopes.AI_EDIT)
        finetune = await self._finetunes.delete(principal.account, request.path_params["finetune"])
        return json_response(envelope({"id": finetune.id}))

    def _shown(self, finetune: Finetune) -> dict[str, Any]:
        return {
            "id": finetune.id,
            "model": finetune.model,
            "name": finetune.name,
            "description": finetune.description,
            "public": finetune.public,
            "created_at": _time(finetune.created_at),
            "modified_at": _time(finetune.modified_at),
            "files": self._finetunes.files(finetune),
        }


def _time(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 10**6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
