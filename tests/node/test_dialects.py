"""The text dialects over HTTP."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from doubles import MODEL, STAND_IN, ListMeter, ScriptedPool, answer, catalogue, make_gate
from local_server import serving
from starlette.applications import Starlette

from edge.ai.gate import Gate
from edge.node.api import routes

CHAT_MODEL = "@cf/qwen/qwen3-30b-a3b-fp8"
"""One that answers `ai/run` in OpenAI's dialect."""
V1 = "/client/v4/accounts/dev/ai/v1"
BODIES: dict[str, Any] = {
    "chat/completions": {"model": STAND_IN, "messages": [{"role": "user", "content": "one two"}]},
    "completions": {"model": STAND_IN, "prompt": "one two"},
    "responses": {"model": STAND_IN, "input": "one two"},
}


LANGCHAIN = """
import functools, operator, sys
from langchain_cloudflare import ChatCloudflareWorkersAI
url, model = sys.argv[1:]
chat = ChatCloudflareWorkersAI(model=model, base_url=f"{url}/client/v4", account_id="dev", api_token="dev")
whole = functools.reduce(operator.add, chat.stream("hi"))
print(whole.content, whole.response_metadata["usage"]["total_tokens"])
"""


@pytest.fixture
def meter() -> ListMeter:
    return ListMeter()


@pytest.fixture
async def client(meter: ListMeter) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=routes(make_gate(ScriptedPool(*answer("1", "2")), meter), tokens={"dev": "dev"}))
    transport, headers = httpx.ASGITransport(app), {"authorization": "Bearer dev"}
    async with httpx.AsyncClient(transport=transport, base_url="http://node", headers=headers) as client:
        yield client


@pytest.mark.parametrize("route", BODIES)
async def test_answers_are_bare_and_streams_end_with_done_once(
    client: httpx.AsyncClient, meter: ListMeter, route: str
) -> None:
    whole = await client.post(f"{V1}/{route}", json=BODIES[route])
    assert whole.headers["content-type"] == "application/json"
    assert "success" not in whole.json()
    assert whole.json()["model"] == STAND_IN
    assert whole.json()["usage"]["total_tokens"] == 17
    assert whole.headers["cf-ai-neurons"] == "0.073359"
    streamed = await client.post(f"{V1}/{route}", json={**BODIES[route], "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    assert streamed.text.count("[DONE]") == 1
    assert streamed.text.endswith("\n\ndata: [DONE]\n\n")
    assert [(record.trigger, record.model, record.status) for record in meter.records] == [
        ("openai", STAND_IN, "ok")
    ] * 2


@pytest.mark.parametrize("model", [CHAT_MODEL, STAND_IN])
@pytest.mark.slow
async def test_langchain_finds_the_usage_of_a_stream_once(model: str) -> None:
    """It adds up what it finds, and leaves chunks without choices unread."""
    pytest.importorskip("langchain_cloudflare")
    gate = Gate(ScriptedPool(*answer("1", "2")), catalogue(stand_ins={model: MODEL}), ListMeter())
    async with serving(Starlette(routes=routes(gate, tokens={"dev": "dev"}))) as url:
        command = [sys.executable, "-W", "ignore", "-c", LANGCHAIN, url, model]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "12 17\n", ran.stderr


@pytest.mark.parametrize("route", BODIES)
async def test_errors_are_openai_s_and_the_envelope_s(client: httpx.AsyncClient, route: str) -> None:
    for change, status, param in (({"temperature": "hot"}, 400, "temperature"), ({"model": "gpt-4"}, 404, "model")):
        for is_stream in (False, True):
            response = await client.post(f"{V1}/{route}", json={**BODIES[route], **change, "stream": is_stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
            assert response.json()["errors"][0]["message"] == error["message"]


@pytest.mark.parametrize(
    ("route", "kind"),
    [("chat/completions", "chat.completion.input_tokens"), ("responses", "response.input_tokens")],
)
async def test_tokens_are_counted_for_nothing(
    client: httpx.AsyncClient, meter: ListMeter, route: str, kind: str
) -> None:
    response = await client.post(f"{V1}/{route}/input_tokens", json=BODIES[route])
    assert (response.status_code, response.json()["object"], response.json()["input_tokens"]) == (200, kind, 2)
    assert "cf-ai-neurons" not in response.headers
    assert meter.records == []
    assert (await client.post(f"{V1}/{route}/input_tokens", json={})).status_code == 400


async def test_a_model_s_schema_is_that_of_its_dialect() -> None:
    gate = make_gate(ScriptedPool())
    gate.catalogue.update([gate.catalogue.resolve(MODEL).manifest], {"@cf/openai/gpt-oss-20b": MODEL})
    app = Starlette(routes=routes(gate, tokens={"dev": "dev"}))
    headers = {"authorization": "Bearer dev"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node", headers=headers) as client:
        url = "/client/v4/accounts/dev/ai/models/schema"
        schema = (await client.get(url, params={"model": "@cf/openai/gpt-oss-20b"})).json()["result"]["input"]
    assert [form["title"] for form in schema["oneOf"]] == ["Prompt", "Messages", "Responses"]
    assert [form["required"] for form in schema["oneOf"]] == [["prompt"], ["messages"], ["input"]]
