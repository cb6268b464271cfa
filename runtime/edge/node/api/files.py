"""Routes about files, which are what OpenAI's batches read and write."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from edge.ai.batch_openai import file_object, page_object
from edge.ai.fields import Choice, Custom, Fields, Table
from edge.auth import scopes
from edge.errors import UnknownFile
from edge.node.api.batches import batches_of
from edge.node.api.bodies import count
from edge.node.api.callers import Context
from edge.node.api.forms import Upload
from edge.node.api.responses import json_response

MAX_FILE_BYTES = 200 << 20
_FORM_BYTES = 1 << 20
"""Of a form, on top of its file."""
_MAX_NAME_CHARS = 255
_DEFAULT_LIMIT = 10_000
_MAX_LIMIT = 10_000


def _read_file(fields: Fields, path: str, value: Any) -> Upload | None:
    if isinstance(value, Upload):
        return value
    fields.problem(path, "is a field: send it as a file, with a filename")
    return None


FILE: Table = {
    "purpose": Choice("There is no other use here.", values=("batch",), required=True),
    "file": Custom(
        "A call per line, as JSON.", json={"type": "string", "format": "binary"}, reader=_read_file, required=True
    ),
}
"""The form with which a file is made."""


class FileRoutes:
    """The routes about files."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def native_routes(self) -> list[Route]:
        """There are none."""
        return []

    def openai_routes(self) -> list[Route]:
        """Below a base URL of OpenAI clients."""
        return [
            Route("/files", self.create, methods=["POST"]),
            Route("/files", self.list, methods=["GET"]),
            Route("/files/{file}", self.get, methods=["GET"]),
            Route("/files/{file}", self.delete, methods=["DELETE"]),
            Route("/files/{file}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """`POST files`: a form of `purpose` and `file`."""
        account = self._context.principal(request, "openai").account
        batches = batches_of(self._context)
        max_bytes = MAX_FILE_BYTES + _FORM_BYTES
        async with (
            batches.store.files.upload(account) as (folder, reserve),
            self._context.bodies.form_of(request, max_bytes=max_bytes, folder=folder, reserve=reserve) as form,
        ):
            fields = Fields({**form.fields, **{file.name: file for file in form.files}}, "the form", FILE)
            purpose, file = fields["purpose"], fields["file"]
            fields.raise_problems()
            name = file.filename[-_MAX_NAME_CHARS:]
            stored = await batches.store.files.add(account, name, purpose, batches.now, file.path)
        return json_response(file_object(stored, batches.retention_s))

    async def list(self, request: Request) -> Response:
        """`GET files?purpose=&after=&limit=`: newest first."""
        account = self._context.principal(request, "openai", scopes.AI_READ).account
        batches = batches_of(self._context)
        query = request.query_params
        limit = count(query, "limit", _DEFAULT_LIMIT, _MAX_LIMIT)
        found = await batches.store.files.page(
            account, purpose=query.get("purpose") or None, after=query.get("after") or None, limit=limit + 1
        )
        return json_response(page_object([file_object(each, batches.retention_s) for each in found], limit))

    async def get(self, request: Request) -> Response:
        """`GET files/{file}`."""
        account = self._context.principal(request, "openai", scopes.AI_READ).account
        batches = batches_of(self._context)
        file = await batches.store.files.get(account, request.path_params["file"])
        return json_response(file_object(file, batches.retention_s))

    async def content(self, request: Request) -> Response:
        """`GET files/{file}/content`: the bytes of the file."""
        account = self._context.principal(request, "openai", scopes.AI_READ).account
        store = batches_of(self._context).store
        file = await store.files.get(account, request.path_params["file"])
        path = store.files.path(file)
        if not path.is_file():
            raise UnknownFile(f"the file {file.id!r} has just been removed")
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """`DELETE files/{file}`."""
        account = self._context.principal(request, "openai").account
        id = request.path_params["file"]
        await batches_of(self._context).store.files.remove(account, id)
        return json_response({"id": id, "object": "file", "deleted": True})
