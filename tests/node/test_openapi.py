"""The OpenAPI document is complete, and what the API does is what it says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from doubles import BGE_M3, ENCODER, STAND_IN, ScriptedPool, make_gate
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.core import NotSet
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from whole_api import ACCOUNT, CHAT, HANG_S, MODELS, RESPONSES, Served, served

from edge.node.api import routes
from edge.node.api.openapi import document, formatted

ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(document()))
OPERATIONS = {(method.upper(), path): each for path, item in DOCUMENT["paths"].items() for method, each in item.items()}
ACCOUNT_PATH = "/client/v4/accounts/{account}"


# -- the document ------------------------------------------------------------------------------------------


def routes_of(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of every route below `app`."""
    for route in getattr(app, "routes", None) or app._router.routes:
        match route:
            case Mount():
                yield from routes_of(route.app, prefix + route.path)
            case Route():
                path = re.sub(r":\w+}", "}", prefix + route.path)
                yield from ((method, path) for method in sorted(route.methods or ()) if method != "HEAD")


def test_every_route_has_an_operation_and_every_operation_a_route() -> None:
    app = Starlette(routes=routes(make_gate(ScriptedPool()), tokens={}))
    assert sorted(routes_of(app)) == sorted(OPERATIONS)


def test_the_document_is_kept_in_the_docs() -> None:
    assert (ROOT / "docs" / "openapi.json").read_bytes() == formatted(), (
        "renew it: python -m edge.node.api > docs/openapi.json"
    )


def schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get("schema"), dict):
            yield value["schema"]
        for each in value.values():
            yield from schemas_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from schemas_in(each)


def test_it_is_an_openapi_document_whose_names_are_there_used_and_unique() -> None:
    assert list(OPENAPI_31_VALIDATOR.iter_errors(DOCUMENT)) == []
    for schema in [*schemas_in(DOCUMENT["paths"]), *DOCUMENT["components"]["schemas"].values()]:
        Draft202012Validator.check_schema(schema)
    names = set(re.findall(r'"\$ref":"#/components/([^"]+)"', msgspec.json.encode(DOCUMENT).decode()))
    kinds = ("schemas", "parameters", "responses")
    assert names == {f"{kind}/{name}" for kind in kinds for name in DOCUMENT["components"][kind]}
    ids = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(ids)) == len(ids)


# -- answers -----------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]}
FORCED = {**TOOLS, "tool_choice": "required"}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}}
STREAM = {"stream": True}
USAGE = {**STREAM, "stream_options": {"include_usage": True}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
TEXT_FORMS: list[dict[str, Any]] = [{}, TOOLS, FORCED, JSON, {"max_tokens": 2}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "legacy": [{**kind, **form} for kind in ({"prompt": "hi"}, {"messages": HI}) for form in TEXT_FORMS],
    "chat": [{"messages": HI, **form} for form in [*TEXT_FORMS, {"n": 2}, LOGPROBS]]
    + [{"prompt": "hi", **form} for form in ({}, JSON, {"logprobs": 2}, {"n": 2})],
    "responses": [
        {"input": text, **form}
        for text in ("hi", [{"role": "user", "content": "hi"}])
        for form in ({}, TOOLS, FORCED, {"max_output_tokens": 2}, {"top_logprobs": 2, "reasoning": {"effort": "low"}})
    ],
    "embeddings": [
        {"text": "a"},
        {"text": ["a", "b"], "pooling": "cls", "truncate_inputs": True},
        {"contexts": [{"text": "a"}]},
        {"query": "a", "contexts": [{"text": "a"}, {"text": "b"}], "top_k": 1},
    ],
    "classification": [{"text": "good"}],
}
"""Valid bodies, without a model, of each kind."""
RUNS: list[tuple[str, dict[str, Any]]] = [(MODELS[kind], body) for kind, bodies in BODIES.items() for body in bodies]
RUNS += [(RESPONSES, body) for body in BODIES["chat"]]
RUNS += [(STAND_IN, {"requests": [{"prompt": "hi"}]}), (STAND_IN, {"prompt": "hi", "options": {"queueRequest": True}})]
RUNS += [
    (model, {**body, **STREAM}) for model, body in RUNS if model in (STAND_IN, CHAT, RESPONSES) and "n" not in body
]
RUNS = [(model, body) for model, body in RUNS if not ("stream" in body and ("requests" in body or "options" in body))]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hi"},
    {"prompt": ["a", "b"], "n": 2, "logprobs": 2},
    {"prompt": "hi", "echo": True, **STREAM},
    {"prompt": "hi", "logprobs": 1, **USAGE},
    {"prompt": "hi", **JSON},
]
V1_BODIES: dict[str, list[dict[str, Any]]] = {
    "/chat/completions": [
        {"messages": HI, **form, **how} for form in [*TEXT_FORMS, {"n": 2}, LOGPROBS] for how in ({}, STREAM, USAGE)
    ],
    "/chat/completions/input_tokens": [{"messages": HI, **TOOLS}],
    "/completions": COMPLETIONS,
    "/responses": [{**body, **how} for body in BODIES["responses"] for how in ({}, STREAM)],
    "/responses/input_tokens": [{"input": "hi"}],
}
QUERIES: dict[str, list[str]] = {
    "/ai/models/search": ["", "?search=llama&per_page=1", "?format=openrouter", "?task=text-embeddings&page=2"],
    "/ai/models/schema": [f"?model={model}" for model in MODELS.values()],
    "/ai/batches": ["?page=1&per_page=1"],
    "/files": ["", "?purpose=batch&limit=1"],
    "/batches": ["?limit=1"],
    "/ai/finetunes/public": ["?limit=2&orderBy=name"],
}
NAMES = {"purpose": "batch"}


def bodies_of(path: str, api: Served) -> list[dict[str, Any]]:
    """What to send to a path that takes JSON."""
    short = re.sub(r"^.*/v1(?=/)|^/client/v4/(user|accounts/{account})", "", path)
    if short in V1_BODIES:
        return [{"model": STAND_IN, **body} for body in V1_BODIES[short]]
    token = {
        "name": "t",
        "policies": [{"permission_groups": [{"id": "ai:read"}]}],
        "expires_on": "2090-01-01T00:00:00Z",
    }
    return {
        "/embeddings": [
            {"model": model, "input": texts, **more}
            for model in (BGE_M3, ENCODER)
            for texts in ("a", ["a", "b"])
            for more in ({}, {"encoding_format": "base64"}, {"dimensions": 1})
        ],
        "/batches": [
            {
                "input_file_id": api.ids["file"][0],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "metadata": {"k": "v"},
            }
        ],
        "/tokens": [token],
        "/ai/finetunes": [{"model": STAND_IN, "name": "third", "description": ""}],
    }[short]


Call = tuple[str, dict[str, Any]]
"""A URL, and what else a client sends."""


def calls_of(method: str, path: str, api: Served) -> Iterator[Call]:
    """Calls of an operation that succeed, in this order."""
    url = path.replace("{account}", ACCOUNT)
    if path.endswith("/ai/run/{model}"):
        yield from ((url.replace("{model}", model), {"json": body}) for model, body in RUNS)
        yield url.replace("{model}", STAND_IN), {"json": {"request_id": api.ids["batch"][0]}}
    elif "{binding" in path or path.endswith(("/ai/run/proxy", "{path}")):
        return  # it says nothing about what comes back
    elif names := re.findall(r"{(\w+)}", url):
        (name,) = names
        kind = "openai_batch" if name == "batch" and "/v1/" in url else name
        ids = [STAND_IN] if name == "model" else [api.ids[kind].pop() if method == "DELETE" else api.ids[kind][0]]
        form = {"data": {"file_name": "adapter_config.json"}, "files": {"file": ("a", b"{}")}}
        yield from ((url.replace(f"{{{name}}}", id), form if "assets" in url else {}) for id in ids)
    elif "multipart/form-data" in OPERATIONS[method, path].get("requestBody", {}).get("content", ()):
        yield url, {"data": NAMES, "files": {"file": ("in.jsonl", b"{}\n")}}
    elif method == "POST":
        yield from ((url, {"json": body}) for body in bodies_of(path, api))
    else:
        short = re.sub(r"^.*/v1(?=/)|^/client/v4(/accounts/{account}(?=/))?", "", path)
        yield from ((url + query, {}) for query in QUERIES.get(short, [""]))


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Of a schema of the document."""
    return Draft202012Validator({"$ref": "#/schema", "schema": schema, "components": DOCUMENT["components"]})


def check(schema: dict[str, Any], value: Any) -> None:
    problems = [f"{error.json_path}: {error.message[:300]}" for error in validator(schema).iter_errors(value)]
    assert not problems, (problems, json.dumps(value)[:1000])


def check_events(schema: dict[str, Any], text: str) -> None:
    """That each event of a stream is as the document says."""
    done, payload = schema["properties"]["data"]["anyOf"]
    is_event = validator(payload["contentSchema"])
    assert done == {"const": "[DONE]"}
    events = [event.split("\n")[-1].removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    assert len(events) > 1
    assert events.pop() == "[DONE]" or '"type":"response.' in text
    for event in events:
        if event != "[DONE]":
            is_event.validate(json.loads(event))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture(scope="module")
def client(api: Served) -> Iterator[httpx.Client]:
    with api.client() as client:
        yield client


SUCCEEDING = sorted(
    (key for key in OPERATIONS if not key[1].endswith(("{path}", "/run/proxy"))),
    key=lambda key: (key[0] == "DELETE", key[1]),
)


@pytest.mark.parametrize("operation", SUCCEEDING, ids=" ".join)
def test_answers_of_all_kinds_are_as_the_document_says(
    api: Served, client: httpx.Client, operation: tuple[str, str]
) -> None:
    method, path = operation
    described = OPERATIONS[operation]
    num_calls = 0
    for url, request in calls_of(method, path, api):
        if "json" in request:
            check(described["requestBody"]["content"]["application/json"]["schema"], request["json"])
        response = client.request(method, url, **request)
        assert response.status_code == 200, (url, request, response.text)
        content = described["responses"]["200"]["content"]
        media_type = response.headers["content-type"].partition(";")[0]
        match media_type:
            case "application/json":
                check(content[media_type]["schema"], response.json())
            case "text/event-stream":
                check_events(content[media_type]["schema"], response.text)
            case _:
                assert media_type in content
        num_calls += 1
    assert num_calls


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_takes_and_gives_what_its_own_schema_says(client: httpx.Client, kind: str) -> None:
    place = f"/client/v4/accounts/{ACCOUNT}/ai"
    schema = client.get(f"{place}/models/schema", params={"model": MODELS[kind]}).json()["result"]
    for body in BODIES[kind]:
        Draft202012Validator(schema["input"]).validate(body)
        result = client.post(f"{place}/run/{MODELS[kind]}", json=body).json()["result"]
        Draft202012Validator(schema["output"]).validate(result)


# -- requests of all kinds ---------------------------------------------------------------------------------


def loaded() -> Any:
    """What the document says, for values that a node has: else most calls would be of models that do not exist."""
    narrowed = json.loads(msgspec.json.encode(DOCUMENT))
    for name, schema in narrowed["components"]["schemas"].items():
        if "model" in schema.get("properties", {}) and name in ("ChatBody", "Completion", "ResponseBody", "Embeddings"):
            schema["properties"]["model"] = {"enum": [BGE_M3 if name == "Embeddings" else STAND_IN]}
    narrowed["components"]["schemas"]["N"] = {"enum": [None, 1, 2]}
    narrowed["components"]["parameters"]["account"]["schema"] = {"enum": [ACCOUNT]}
    narrowed["components"]["parameters"]["model"]["schema"] = {"enum": list(MODELS.values())}
    return schemathesis.openapi.from_dict(narrowed, config=schemathesis.Config.from_dict({}))


GENERATED = {operation.ok().label: operation.ok() for operation in loaded().get_all_operations()}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def send_generated(api: Served, label: str, mode: GenerationMode, num_examples: int) -> None:
    """Requests of an operation; those whose body does not fit the document have to be refused."""
    method, path = label.split(" ", 1)
    content = OPERATIONS[method, path].get("requestBody", {}).get("content", {})
    fits = validator(content["application/json"]["schema"]) if "application/json" in content else None
    session = requests.Session()
    session.headers["authorization"] = f"Bearer {api.tokens[ACCOUNT]}"

    @settings(
        max_examples=num_examples,
        phases=[Phase.explicit, Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(GENERATED[label].as_strategy(mode))
    def send(case: Any) -> None:
        response = case.call(base_url=api.url, session=session, timeout=HANG_S)
        case.validate_response(response, checks=CHECKS)
        if fits is not None and not isinstance(case.body, NotSet) and not fits.is_valid(case.body):
            assert response.status_code >= 400, case.body

    with session:
        send()


@pytest.mark.parametrize("label", GENERATED)
def test_generated_requests_are_answered_as_the_document_says(api: Served, label: str) -> None:
    send_generated(api, label, GenerationMode.POSITIVE, 2)


@pytest.mark.slow
@pytest.mark.parametrize("label", GENERATED)
def test_many_generated_requests_are_answered_as_the_document_says(api: Served, label: str) -> None:
    send_generated(api, label, GenerationMode.POSITIVE, 12)


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in GENERATED if "security" not in OPERATIONS[*label.split(" ", 1)]])
def test_many_wrong_requests_are_answered_as_the_document_says(api: Served, label: str) -> None:
    send_generated(api, label, GenerationMode.NEGATIVE, 12)
