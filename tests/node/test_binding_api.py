"""The wire of `env.AI` of another runtime, as its source says it; test_workerd.py has the real thing."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from doubles import MODEL, STAND_IN, ScriptedPool, answer, make_gate
from helpers import sse_events
from local_server import serving
from starlette.applications import Starlette

from edge.errors import OutOfCapacity
from edge.node.api import routes

ACCOUNT = "/client/v4/accounts/dev/ai"
BASE = f"{ACCOUNT}/binding"
AUTH = {"authorization": "Bearer dev"}
HEADERS = {"cf-consn-sdk-version": "2.0.0", "cf-consn-model-id": STAND_IN}
URL = "https://workers-binding.ai"


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool(*answer("1", "2"))


@pytest.fixture
async def client(pool: ScriptedPool) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=routes(make_gate(pool), tokens={"dev": "dev", "other": "other"}))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, headers=AUTH) as client:
        yield client


@pytest.mark.parametrize("path", ["run?version=3", "run?version=2", "run", "ai-gateway/run?version=3"])
@pytest.mark.parametrize("label", [STAND_IN, f"prefix:{STAND_IN}"])
async def test_run(client: httpx.AsyncClient, pool: ScriptedPool, path: str, label: str) -> None:
    body = {"inputs": {"prompt": "hi"}, "options": {"gateway": {"id": "g"}, "example": 123, "rejectIfBusy": True}}
    response = await client.post(f"{BASE}/{path}", json=body, headers={**HEADERS, "cf-consn-model-id": label})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert uuid.UUID(response.headers["cf-ai-req-id"]).version == 7
    assert response.json()["response"] == "12"  # without an envelope
    assert (pool.requests[0].prompt, pool.requests[0].reject_if_busy) == ("hi", True)


async def test_run_streams(client: httpx.AsyncClient) -> None:
    body = {"inputs": {"prompt": "hi", "stream": True}, "options": {}}
    response = await client.post(f"{BASE}/run?version=3", json=body, headers=HEADERS)
    assert response.headers["content-type"] == "text/event-stream"
    assert sse_events(response.text)[-1] == "[DONE]"


async def test_an_input_that_is_a_stream(client: httpx.AsyncClient, pool: ScriptedPool) -> None:
    query = {"version": "3", "userInputs": json.dumps({"max_tokens": 5}), "rejectIfBusy": "true", "tags": "a,b"}
    form = {"prompt": (None, "hi")}
    response = await client.post(f"{BASE}/run", params=query, files=form, headers=HEADERS)
    assert response.json()["response"] == "12"
    assert (pool.requests[0].prompt, pool.requests[0].max_tokens, pool.requests[0].reject_if_busy) == ("hi", 5, True)
    for content_type in ("audio/wav", "text/plain"):
        headers = {**HEADERS, "content-type": content_type}
        response = await client.post(f"{BASE}/run", params=query, content=b"RIFF", headers=headers)
        assert (response.status_code, response.json()["internalCode"]) == (415, 1004)
    query["userInputs"] = "[]"
    response = await client.post(f"{BASE}/run", params=query, content=b"x", headers=HEADERS)
    assert response.json()["internalCode"] == 3003


def failure(response: httpx.Response) -> tuple[int, int, str, str]:
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["message"] == f"{body['name']}: {body['description']}"
    assert body["errors"] == [{"code": body["internalCode"], "message": body["description"]}]
    assert (body["success"], body["result"]) == (False, None)
    return response.status_code, body["internalCode"], body["name"], body["description"]


@pytest.mark.parametrize(
    ("query", "body", "headers", "status", "code"),
    [
        ("?version=3", {"inputs": {}}, HEADERS, 400, 5006),
        ("?version=3", {"inputs": {"prompt": "hi"}}, {**HEADERS, "cf-consn-model-id": "@cf/no/model"}, 400, 5007),
        ("?version=3", {"inputs": {"prompt": "hi"}}, {}, 400, 3003),
        ("?version=3", [], HEADERS, 400, 3003),
        ("?version=3", {"inputs": {"prompt": "hi"}, "options": [1]}, HEADERS, 400, 3003),
        ("?version=3", {}, HEADERS, 400, 3003),
        ("?version=1", {"inputs": {"prompt": "hi"}}, HEADERS, 400, 5006),
        ("?version=3", {"inputs": {"prompt": "hi"}, "options": {"websocket": True}}, HEADERS, 400, 5006),
    ],
)
async def test_errors_are_flat(
    client: httpx.AsyncClient, query: str, body: Any, headers: dict[str, str], status: int, code: int
) -> None:
    response = await client.post(f"{BASE}/run{query}", json=body, headers=headers)
    assert failure(response)[:2] == (status, code)


async def test_a_refusal_of_the_engine(client: httpx.AsyncClient, pool: ScriptedPool) -> None:
    pool.script = [OutOfCapacity("busy", retry_after_s=3)]
    response = await client.post(f"{BASE}/run", json={"inputs": {"prompt": "hi"}}, headers=HEADERS)
    status, code, name, description = failure(response)
    assert (status, code, name, response.headers["retry-after"]) == (429, 3040, "OutOfCapacity", "3")
    assert "busy" in description


async def test_models(client: httpx.AsyncClient) -> None:
    response = await client.get(f"{BASE}/ai-api/models/search", params={"search": "llama"})
    assert [model["name"] for model in response.json()["result"]] == [STAND_IN]
    response = await client.get(f"{BASE}/ai-api/models/search", params={"page": "x"})
    assert failure(response)[:2] == (400, 5006)


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "to-everything/markdown/transformer", "toMarkdown() is not supported"),
        ("GET", "to-everything/markdown/supported", "toMarkdown() is not supported"),
        ("GET", "ai-gateway/gateways/g/url/universal", "no AI Gateway"),
        ("PATCH", "ai-gateway/gateways/g/logs/1", "no AI Gateway"),
        ("POST", "ai-gateway/universal/run/g", "no AI Gateway"),
        ("GET", "autorag/rags", "no AI Search"),
        ("GET", "run?version=3&body={}", "websocket"),
        ("GET", "else", "'else' is not supported"),
        ("GET", "el%0Ase", "is not supported"),
    ],
)
async def test_what_a_node_does_not_have(client: httpx.AsyncClient, method: str, path: str, reason: str) -> None:
    status, code, name, description = failure(await client.request(method, f"{BASE}/{path}"))
    assert (status, code, name) == (400, 1008, "NotSupported")
    assert reason in description


async def test_options_in_the_query_are_text(client: httpx.AsyncClient, pool: ScriptedPool) -> None:
    query = {"version": "3", "userInputs": "{}", "websocket": "false", "rejectIfBusy": "0"}
    form = {"prompt": (None, "hi")}
    for text, status in (("false", 200), ("0", 200), ("true", 400), ("maybe", 400)):
        asked = {**query, "queueRequest": text}
        assert (await client.post(f"{BASE}/run", params=asked, files=form, headers=HEADERS)).status_code == status
    assert [request.reject_if_busy for request in pool.requests] == [False, False]


async def test_strangers(client: httpx.AsyncClient) -> None:
    for path in ("run", "ai-api/models/search", "autorag/rags"):
        for token, status in (("wrong", 401), ("other", 404)):
            headers = {**HEADERS, "authorization": f"Bearer {token}"}
            method = "GET" if "search" in path else "POST"
            assert failure(await client.request(method, f"{BASE}/{path}", headers=headers))[0] == status


async def test_the_tunnel(client: httpx.AsyncClient, pool: ScriptedPool) -> None:
    tunnel, body = f"{ACCOUNT}/run/proxy", {"inputs": {"prompt": "hi"}, "options": {}}
    headers = {**HEADERS, "x-forwarded": f"{URL}/run?version=3"}
    response = await client.post(tunnel, json=body, headers=headers)
    assert response.json()["response"] == "12"
    response = await client.post(tunnel, headers={"x-forwarded": f"{URL}/ai-api/models/search?search=llama"})
    assert [model["name"] for model in response.json()["result"]] == [STAND_IN]
    response = await client.post(tunnel, json=body, headers={**headers, "authorization": "Bearer wrong"})
    assert (response.status_code, response.json()["errors"][0]["code"]) == (403, 1031)
    for address in ("", "http://[", "http://[::1", "http://[x]/run", "http://a]/run"):
        wrong = {**HEADERS, "x-forwarded": address}
        assert failure(await client.post(tunnel, json=body, headers=wrong))[:2] == (400, 3003), address
    assert failure(await client.post(tunnel, headers={"x-forwarded": f"{URL}/autorag/rags"}))[1] == 1008
    assert len(pool.requests) == 1
    assert MODEL in (await client.post(f"{ACCOUNT}/run/proxies", json={"prompt": "hi"})).text
