"""The routes about models, over ASGI."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from doubles import MODEL, STAND_IN, ScriptedPool, answer, make_gate
from jsonschema import Draft202012Validator
from starlette.applications import Starlette

from edge.node.api import routes

BASE = "/client/v4/accounts/dev/ai"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=routes(make_gate(ScriptedPool(*answer("1", "2"))), tokens={"dev": "dev"}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://node", headers={"authorization": "Bearer dev"}
    ) as client:
        yield client


@pytest.mark.parametrize("kind", ["models", "tasks", "authors"])
async def test_pages_are_walked_until_an_empty_one(client: httpx.AsyncClient, kind: str) -> None:
    names, page = [], 1
    while items := (await client.get(f"{BASE}/{kind}/search", params={"page": page, "per_page": 1})).json()["result"]:
        names += [item["name"] for item in items]
        page += 1
    expected = {"models": [STAND_IN, MODEL], "tasks": ["Text Generation"], "authors": ["local", "meta"]}
    assert names == expected[kind]
    everything = (await client.get(f"{BASE}/{kind}/search")).json()
    assert (everything["success"], everything["errors"], everything["messages"]) == (True, [], [])
    assert everything["result_info"] == {
        "page": 1,
        "per_page": 100,
        "count": len(names),
        "total_count": len(names),
        "total_pages": 1,
    }
    wrong = await client.get(f"{BASE}/{kind}/search", params={"page": "0", "per_page": "x"})
    assert wrong.status_code == 400
    message = wrong.json()["errors"][0]["message"]
    assert "$.page is 0, must be an integer from 1 to 1000000000" in message
    assert '$.per_page is "x", must be an integer from 1 to 1000' in message


async def test_the_format_of_openrouter(client: httpx.AsyncClient) -> None:
    body = (await client.get(f"{BASE}/models/search", params={"format": "openrouter"})).json()
    assert [item["id"] for item in body["data"]] == [STAND_IN, MODEL]
    assert body["result"] == body["data"]
    assert body["data"][0]["pricing"]["prompt"] == "0.000000027027"


async def test_schema_of_a_model(client: httpx.AsyncClient) -> None:
    async def schema(**query: Any) -> httpx.Response:
        return await client.get(f"{BASE}/models/schema", params=query)

    found = (await schema(model=STAND_IN)).json()["result"]
    assert [variant["title"] for variant in found["input"]["oneOf"]] == ["Prompt", "Messages"]
    assert found["input"]["properties"]["temperature"]["maximum"] == 5
    validator = Draft202012Validator(found["input"])
    validator.check_schema(found["input"])
    assert validator.is_valid({"prompt": "hi", "messages": None})
    assert not validator.is_valid({"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]})
    result = (await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi"})).json()["result"]
    Draft202012Validator(found["output"]).validate(result)
    missing = await schema()
    assert (missing.status_code, missing.json()["errors"][0]["code"]) == (400, 5006)
    assert (await schema(model="@cf/no/such")).json()["errors"][0]["code"] == 5007
