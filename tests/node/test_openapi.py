"""The OpenAPI document is complete, and what the API does is what it says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import schemathesis
from doubles import ScriptedPool, answer, make_gate
from hypothesis import settings
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from edge.node.api import routes
from edge.node.api.openapi import document, formatted
from edge.node.api.operations import PATH

ROOT = Path(__file__).parents[2]


def make_app() -> Starlette:
    return Starlette(routes=routes(make_gate(ScriptedPool(*answer("1", "2"))), tokens={"dev": "dev"}))


def served(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of every route below `app`."""
    for route in getattr(app, "routes", None) or app._router.routes:
        match route:
            case Mount():
                yield from served(route.app, prefix + route.path)
            case Route():
                path = re.sub(r":\w+}", "}", prefix + route.path)
                yield from ((method, path) for method in sorted(route.methods or ()) if method != "HEAD")


def test_every_route_has_an_operation_and_every_operation_a_route() -> None:
    described = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert sorted(served(make_app())) == sorted(described)


def test_the_document_is_kept_in_the_docs() -> None:
    assert (ROOT / "docs" / "openapi.json").read_bytes() == formatted(), (
        "renew it: python -m edge.node.api > docs/openapi.json"
    )


async def test_the_document_is_served_without_a_token() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://node") as client:
        response = await client.get(PATH)
    assert response.json() == json.loads(msgspec.json.encode(document()))


def schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get("schema"), dict):
            yield value["schema"]
        for each in value.values():
            yield from schemas_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from schemas_in(each)


def test_its_schemas_are_schemas_and_its_names_are_there_and_unique() -> None:
    whole = document()
    for schema in [*schemas_in(whole["paths"]), *whole["components"]["schemas"].values()]:
        Draft202012Validator.check_schema(schema)
    for reference in re.findall(r'"\$ref":"#/([^"]+)"', msgspec.json.encode(whole).decode()):
        found = whole
        for key in reference.split("/"):
            found = found[key]
    ids = [operation["operationId"] for methods in whole["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


# Random bodies are better made by test_fuzz, whose generator costs less; here answers are compared with the document.
CONFIG = {"phases": {"coverage": {"enabled": False}}, "generation": {"max-examples": 4, "mode": "positive"}}
api = schemathesis.openapi.from_asgi(PATH, make_app(), config=schemathesis.Config.from_dict(CONFIG))


@api.exclude(path_regex="^/v1/|/tokens(/{token})?$").parametrize()  # tokens need a file
@settings(max_examples=4)
def test_answers_are_as_the_document_says(case: Any) -> None:
    if case.path_parameters and "account" in case.path_parameters:
        case.path_parameters["account"] = "dev"
    case.call_and_validate(
        headers={"authorization": "Bearer dev"},
        checks=[not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance],
    )
