"""The API as an OpenAPI 3.1 document: `GET /client/v4/openapi.json`.

`python -m edge.node.api` prints it; docs/openapi.json is that. What is in it is in `edge.node.api.operations`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from functools import cache
from itertools import chain, count
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge import errors
from edge.ai import completions, embeddings, response_bodies, schemas
from edge.ai.fields import object_schema
from edge.ai.stream_schemas import EVENTS
from edge.ai.task_schemas import RESULTS, described, input_schemas, list_of
from edge.node.api.operations import OBJECTS, OPERATIONS, PATH, Operation, ref
from edge.node.api.responses import json_response

_ACCOUNT = "/client/v4/accounts/{account}"
_BINDING = (f"{_ACCOUNT}/ai/binding/{{path}}", f"{_ACCOUNT}/ai/run/proxy")
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_ANY: dict[str, Any] = {}
_MIN_SHARED_BYTES = 80
"""Of schemas that have a name of their own, if they occur more than once."""
_CONTAINERS = ("result", "data")
"""Properties whose name says nothing about what they hold."""


class OpenApi:
    """The route of the document."""

    def routes(self) -> list[Route]:
        """Below `/client/v4`."""
        return [Route(PATH.removeprefix("/client/v4"), self.get, methods=["GET"])]

    async def get(self, _request: Request) -> Response:
        """`GET openapi.json`."""
        return json_response(document())


def formatted() -> bytes:
    """The document as it is in docs/openapi.json."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=1) + b"\n"


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, Any] = {}
    for key, operation in OPERATIONS.items():
        method, _, path = key.partition(" ")
        for full in _full_paths(path):
            paths.setdefault(full, {})[method.lower()] = _described(operation, method, full)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "edge-workers-ai",
            "version": "4",
            "description": "Workers AI's REST API, and OpenAI's below `/v1` and `/client/v4/accounts/{account}/ai/v1`. "
            "In bodies a null is as good as an absent key, and unknown keys have no effect.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                **input_schemas(),
                **RESULTS,
                **EVENTS,
                **OBJECTS,
                "ChatBody": schemas.chat_schema(),
                "Completion": object_schema(completions.COMPLETION),
                "ResponseBody": object_schema(response_bodies.RESPONSE),
                "Embeddings": object_schema(embeddings.OPENAI),
                "Error": _error_schema(),
                "OpenAiError": _openai_error_schema(),
                "BindingError": _binding_error_schema(),
                "ResultInfo": described(
                    dict.fromkeys(("page", "per_page", "count", "total_count", "total_pages"), _INTEGER)
                ),
            },
            "parameters": {
                name: {"name": name, "in": "path", "required": True, "schema": {**_STRING, "minLength": 1}}
                for path in paths
                for name in _names_in(path)
            },
            "responses": dict(_error_responses()),
        },
    }
    return _with_shared(whole)


def _full_paths(path: str) -> list[str]:
    """Where the path is: some are below an account, those of OpenAI also below `/v1`."""
    if path.startswith("/v1/"):
        return [f"{_ACCOUNT}/ai{path}", path]
    if path.startswith("/ai/"):
        return [_ACCOUNT + path]
    return [path if path in ("/healthz", PATH) else f"/client/v4{path}"]


def _names_in(path: str) -> list[str]:
    return re.findall(r"{(\w+)}", path)


def _described(operation: Operation, method: str, path: str) -> dict[str, Any]:
    in_path = [{"$ref": f"#/components/parameters/{name}"} for name in _names_in(path)]
    in_query = [
        {"name": name, "in": "query", "required": field.required, "schema": field.json_type() | _default(field.default)}
        | ({"description": field.description} if field.description else {})
        for name, field in operation.query.items()
    ]
    name = re.sub(r"\W+", "_", path.removeprefix("/client/v4")).strip("_")
    style = "OpenAi" if "/v1/" in path else "Binding" if path in _BINDING else ""
    failures = (
        {} if operation.is_open else {kind: {"$ref": f"#/components/responses/{style}Error{kind}"} for kind in _KINDS}
    )
    return {
        "operationId": f"{method.lower()}_{name}",
        "summary": operation.summary,
        "parameters": in_path + in_query,
        **_body(operation),
        "responses": {"200": {"description": "What was asked for."} | _answer(operation), **failures},
        **({"security": []} if operation.is_open else {}),
    }


def _body(operation: Operation) -> dict[str, Any]:
    if operation.form is not None:
        return {"requestBody": _content(operation.form, "multipart/form-data") | {"required": True}}
    return {} if operation.body is None else {"requestBody": _content(operation.body) | {"required": True}}


def _default(value: Any) -> dict[str, Any]:
    return {} if value is None else {"default": value}


def _answer(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    if operation.is_enveloped:
        info = {"result_info": ref("ResultInfo")} if operation.is_paged else {}
        answer = described(
            {"result": answer, "success": {"const": True}, "errors": {"maxItems": 0}, "messages": list_of(_ANY), **info}
        )
    content = _content(answer, operation.media_type)
    if operation.events:
        content["content"]["text/event-stream"] = {"schema": _event(operation.events)}
    return content


def _event(events: tuple[str, ...]) -> dict[str, Any]:
    """The schema of each event of a stream, as OpenAPI before its version 3.2 is commonly read."""
    payload = {"anyOf": [ref(name) for name in (*events, "ErrorEvent")]}
    is_json = {"contentMediaType": "application/json", "contentSchema": payload}
    data = {**_STRING, "anyOf": [{"const": "[DONE]"}, is_json]}
    return {
        "description": "One server-sent event. Its data is JSON, but for the last one, where it is `[DONE]`.",
        "type": "object",
        "properties": {"event": _STRING, "data": data},
        "required": ["data"],
    }


def _content(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


# -- errors ------------------------------------------------------------------------------------------------


def _error_schema() -> dict[str, Any]:
    return described(
        {
            "result": {"enum": [None]},
            "success": {"const": False},
            "errors": list_of(described({"code": _INTEGER, "message": _STRING})),
            "messages": list_of(_ANY),
        }
    )


def _openai_error_schema() -> dict[str, Any]:
    nullable = {"type": ["string", "null"]}
    error = described({"message": _STRING, "type": _STRING, "param": nullable, "code": nullable})
    return {"allOf": [ref("Error"), described({"error": error})]}


def _binding_error_schema() -> dict[str, Any]:
    return described({"internalCode": _INTEGER, "name": _STRING, "message": _STRING, "description": _STRING})


_KINDS = ("4XX", "5XX")


def _error_responses() -> Iterator[tuple[str, dict[str, Any]]]:
    for group in _KINDS:
        kinds = sorted(
            (kind for kind in errors.catalogue() if f"{kind.status // 100}XX" == group),
            key=lambda kind: (kind.status, kind.code),
        )
        description = "\n".join(f"* {kind.status}, {kind.code} {kind.name}: {kind.cause}" for kind in kinds)
        for name in ("Error", "OpenAiError", "BindingError"):
            yield f"{name}{group}", {"description": description} | _content(ref(name))


# -- what occurs more than once ----------------------------------------------------------------------------


def _with_shared(whole: dict[str, Any]) -> dict[str, Any]:
    """`whole`, in which a property that is described more than once is described among the components, by its name."""
    schemas = dict(whole["components"]["schemas"])
    names = {_text(schema): name for name, schema in schemas.items()}
    num_seen = Counter(_text(schema) for _, schema in _properties(whole))
    for key, schema in _properties(whole):
        text = _text(schema)
        if key not in _CONTAINERS and num_seen[text] > 1 and len(text) >= _MIN_SHARED_BYTES and text not in names:
            names[text] = _free_name("".join(part.capitalize() for part in key.split("_")), schemas)
            schemas[names[text]] = schema
    whole = _with_references(whole, names)
    whole["components"]["schemas"] = {
        name: {key: _with_references(value, names) for key, value in schema.items()} for name, schema in schemas.items()
    }
    return whole


def _free_name(wanted: str, taken: Container[str]) -> str:
    return next(name for name in chain([wanted], (f"{wanted}{number}" for number in count(2))) if name not in taken)


def _properties(value: Any) -> Iterator[tuple[str, Any]]:
    """The name and schema of every property in `value`, each before those in it."""
    if isinstance(value, list):
        for each in value:
            yield from _properties(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            is_map = key == "properties" and isinstance(inner, dict)
            if is_map:
                yield from inner.items()
            yield from _properties(list(inner.values()) if is_map else inner)  # a property can be called so itself


def _with_references(value: Any, names: Mapping[bytes, str]) -> Any:
    """`value` with references in place of the schemas in `names`, which are by their JSON."""
    if isinstance(value, list):
        return [_with_references(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    name = names.get(_text(value))
    return {key: _with_references(each, names) for key, each in value.items()} if name is None else ref(name)


def _text(value: Any) -> bytes:
    return msgspec.json.encode(value)
