import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from doubles import MODEL, STAND_IN, ListMeter, ScriptedPool, answer, make_gate
from helpers import sse_events
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from edge.errors import EngineLost, OutOfCapacity, PromptTooLong
from edge.node.api import routes
from edge.node.api.bodies import MAX_BODY_BYTES

BASE = "/client/v4/accounts/dev/ai"
AUTH = {"authorization": "Bearer dev"}
CHAT = {"model": STAND_IN, "messages": [{"role": "user", "content": "hi"}]}


def make_app(pool: ScriptedPool | None = None, meter: ListMeter | None = None) -> Starlette:
    gate = make_gate(pool or ScriptedPool(*answer("1", "2")), meter)
    return Starlette(routes=routes(gate, tokens={"dev": "dev", "t2": "other"}, health=lambda: {"engine": "ready"}))


def client_of(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node", headers=AUTH)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app()) as client:
        yield client


def failure(response: httpx.Response) -> tuple[int, int, str]:
    """Status, code and message of an enveloped error."""
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert (body["success"], body["result"], body["messages"]) == (False, None, [])
    (error,) = body["errors"]
    return response.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    "model", [STAND_IN, STAND_IN.replace("/", "%2F"), "%40cf%2fmeta%2fllama-3.2-1b-instruct", MODEL]
)
async def test_run(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post(f"{BASE}/run/{model}", json={"prompt": "hi"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cf-ai-neurons"] == "0.073359"
    assert uuid.UUID(response.headers["cf-ai-req-id"]).version == 7
    assert response.headers["x-request-id"] == response.headers["cf-ai-req-id"]
    body = response.json()
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    assert body["result"]["response"] == "12"
    assert body["result"]["usage"]["total_tokens"] == 17
    assert b'"neurons":0.073359' in response.content


async def test_run_streams(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert "content-length" not in response.headers
    assert "cf-ai-neurons" not in response.headers
    *events, done = sse_events(response.text)
    assert [event["response"] for event in events] == ["1", "2", ""]
    assert done == "[DONE]"


async def test_chat_completions_are_bare(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{BASE}/v1/chat/completions", json=CHAT)
    assert response.json()["choices"][0]["message"]["content"] == "12"
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert "success" not in response.json()
    response = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.endswith("data: [DONE]\n\n")


async def test_calls_are_recorded_for_the_account_of_the_token() -> None:
    meter = ListMeter()
    async with client_of(make_app(meter=meter)) as client:
        native = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi"})
        await client.post(
            "/client/v4/accounts/other/ai/v1/chat/completions", json=CHAT, headers={"authorization": "bearer t2"}
        )
    first, second = meter.records
    assert (first.account, first.trigger, first.model, first.worker) == ("dev", "rest", MODEL, None)
    assert first.request_id == native.headers["cf-ai-req-id"]
    assert (second.account, second.trigger, second.model, second.served_by) == ("other", "openai", STAND_IN, MODEL)


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get(f"{BASE}/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == [STAND_IN, MODEL]
    encoded = STAND_IN.replace("/", "%2F")
    assert (await client.get(f"{BASE}/v1/models/{encoded}")).json() == listed[0]
    assert (await client.get(f"{BASE}/v1/models/none")).status_code == 404


async def test_search(client: httpx.AsyncClient) -> None:
    async def search(**query: Any) -> Any:
        return (await client.get(f"{BASE}/models/search", params=query)).json()

    everything = await search()
    assert everything["success"] is True
    assert [item["name"] for item in everything["result"]] == [STAND_IN, MODEL]
    assert everything["result_info"] == {"page": 1, "per_page": 100, "count": 2, "total_count": 2, "total_pages": 1}
    assert everything["result"][0]["properties"][1]["value"][0]["price"] == 0.027027
    second = await search(page=2, per_page=1, hide_experimental="false")
    assert [item["name"] for item in second["result"]] == [MODEL]
    past = await search(page=3, per_page=1)
    assert (past["result"], past["result_info"]["count"], past["result_info"]["total_pages"]) == ([], 0, 2)
    assert [item["name"] for item in (await search(search="llama"))["result"]] == [STAND_IN]
    assert (await search(task="Text Embeddings"))["result"] == []
    assert [item["name"] for item in (await search(author="meta", task="Text Generation"))["result"]] == [STAND_IN]
    for wrong in ({"page": "0"}, {"page": "x"}, {"per_page": "1001"}, {"page": "²"}, {"format": "xml"}):
        response = await client.get(f"{BASE}/models/search", params=wrong)
        assert failure(response)[:2] == (400, 5006)


async def test_health_needs_no_token() -> None:
    async with client_of(make_app()) as client:
        response = await client.get("/healthz", headers={"authorization": ""})
    assert (response.status_code, response.json()) == (200, {"status": "ok", "engine": "ready"})


@pytest.mark.parametrize(
    ("authorization", "account", "status", "code"),
    [
        ("", "dev", 401, 10000),
        ("Bearer", "dev", 401, 10000),
        ("Bearer wrong", "dev", 401, 10000),
        ("Bearer dé", "dev", 401, 10000),
        ("Basic dev", "dev", 401, 10000),
        ("Bearer dev", "other", 404, 7003),
        ("Bearer t2", "dev", 404, 7003),
        ("Bearer dev", "nobody", 404, 7003),
    ],
)
async def test_tokens_and_accounts(
    client: httpx.AsyncClient, authorization: str, account: str, status: int, code: int
) -> None:
    headers = {"authorization": authorization.encode("latin-1")}
    for path in (f"run/{MODEL}", "v1/chat/completions"):
        response = await client.post(f"/client/v4/accounts/{account}/ai/{path}", json=CHAT, headers=headers)
        assert failure_of_any_kind(response) == (status, code)
    response = await client.get(f"/client/v4/accounts/{account}/ai/models/search", headers=headers)
    assert failure(response)[:2] == (status, code)


def failure_of_any_kind(response: httpx.Response) -> tuple[int, int]:
    return response.status_code, response.json()["errors"][0]["code"]


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    assert failure(await client.get("/client/v4/no/such")) == (404, 7000, "no route for GET /client/v4/no/such")
    assert failure(await client.post(f"{BASE}/run"))[:2] == (404, 7000)
    response = await client.get(f"{BASE}/run/{MODEL}")
    assert failure(response)[:2] == (405, 7001)
    assert response.headers["allow"] == "POST"
    assert "use POST" in failure(response)[2]
    assert "error" in (await client.get(f"{BASE}/v1/none")).json()


async def test_errors_name_reason_and_request(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{BASE}/run/nope", json={"prompt": "hi"})
    status, code, message = failure(response)
    assert (status, code) == (400, 5007)
    assert message.startswith("AiError: no model 'nope'; there are ")
    assert message.endswith(f"({response.headers['cf-ai-req-id']})")
    assert "cf-ai-neurons" not in response.headers


async def test_openai_errors_are_readable_by_both_families(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "temperature": "hot"})
    body = response.json()
    assert failure(response)[:2] == (400, 5006)
    assert body["error"] == {
        "message": body["errors"][0]["message"],
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "5006",
    }
    response = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "model": "gpt-4", "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 3003),
        (b"{", 3003),
        (b"[]", 3003),
        (b"null", 3003),
        (b'{"prompt": NaN}', 3003),
        (b"\xff\xfe", 3003),
        (b'{"prompt": "\\ud800"}', 3003),
        (b"[" * 100_000, 3003),
        (b'{"a":' * 100_000, 3003),
        (b'{"prompt": 5}', 5006),
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, body: bytes, code: int) -> None:
    for path in (f"run/{MODEL}", "v1/chat/completions"):
        assert failure_of_any_kind(await client.post(f"{BASE}/{path}", content=body)) == (400, code)


async def test_the_body_limit_holds_while_reading(client: httpx.AsyncClient) -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1 << 20
            yield b" " * (1 << 20)

    response = await client.post(f"{BASE}/run/{MODEL}", content=endless())
    assert failure(response)[:2] == (413, 3006)
    assert num_sent <= MAX_BODY_BYTES + (2 << 20)
    prompt = json.dumps({"prompt": "x" * (MAX_BODY_BYTES - 20)})
    assert (await client.post(f"{BASE}/run/{MODEL}", content=prompt)).status_code == 200


async def test_large_bodies_under_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.node.api.bodies.MAX_HELD_BYTES", 3000)
    answers = asyncio.Event()
    pool = ScriptedPool(answers, *answer("1"))
    async with client_of(make_app(pool)) as client:
        held = [asyncio.create_task(client.post(f"{BASE}/run/{MODEL}", json={"prompt": "x" * 1200})) for _ in range(2)]
        await until_called(pool, 2)
        refused = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "padding": "x" * 1200})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "too many large requests" in refused.json()["error"]["message"]
        small = asyncio.create_task(client.post(f"{BASE}/run/{MODEL}", json={"prompt": "x"}))
        await until_called(pool, 3)
        answers.set()
        assert [response.status_code for response in await asyncio.gather(*held, small)] == [200] * 3
        again = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "x" * 2900})
        assert again.status_code == 200


async def until_called(pool: ScriptedPool, num_calls: int) -> None:
    async with asyncio.timeout(30):
        while len(pool.requests) < num_calls:
            pool.is_called.clear()
            await pool.is_called.wait()


async def test_batches_are_refused_wherever_they_are_asked_for_where_there_are_none(client: httpx.AsyncClient) -> None:
    for query, extra in (
        ("?queueRequest=true", {}),
        ("", {"options": {"queueRequest": True}}),
        ("", {"requests": [{}]}),
    ):
        response = await client.post(f"{BASE}/run/{MODEL}{query}", json={"prompt": "hi", **extra})
        assert failure(response)[:2] == (400, 1008)
    for query in ("queueRequest=false&tags=a", "queueRequest=False", "queueRequest=0&websocket=false", "queueRequest="):
        response = await client.post(f"{BASE}/run/{MODEL}?{query}", json={"prompt": "hi"})
        assert response.status_code == 200, query
    for query in ("queueRequest=maybe", "websocket=true", "websocket=1", "rejectIfBusy=perhaps"):
        response = await client.post(f"{BASE}/run/{MODEL}?{query}", json={"prompt": "hi"})
        assert failure(response)[:2] == (400, 5006), query


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (OutOfCapacity("full", retry_after_s=7), 429, "7"),
        (EngineLost("died"), 503, "1"),
        (PromptTooLong("9000 tokens do not fit"), 413, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_engine(error: Exception, status: int, retry_after: str | None, stream: bool) -> None:
    async with client_of(make_app(ScriptedPool(error))) as client:
        response = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi", "stream": stream})
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)


async def test_an_unwritten_record_is_a_503() -> None:
    async with client_of(make_app(meter=ListMeter(fails=True))) as client:
        response = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi"})
    assert failure(response)[:2] == (503, 3044)
    assert response.headers["retry-after"] == "5"


async def test_a_bug_is_a_500_with_an_id_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(make_app(ScriptedPool(KeyError("secret")))) as client:
        response = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi"})
    assert failure(response)[:2] == (500, 1000)
    assert "secret" not in response.text
    assert f"request {response.headers['cf-ai-req-id']} failed" in caplog.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(
    st.sampled_from(
        [
            *("prompt", "messages", "model", "max_tokens", "stop", "stream", "stream_options", "options", "tools"),
            *("tool_choice", "response_format", "guided_json", "logprobs", "top_logprobs", "logit_bias", "n", "lora"),
        ]
    ),
    json_values,
)


@given(bodies | json_values, st.sampled_from([f"run/{MODEL}", "v1/chat/completions"]), st.booleans())
def test_no_body_gives_a_5xx(body: Any, path: str, is_valid_otherwise: bool) -> None:
    async def post() -> int:
        async with client_of(make_app()) as client:
            extra = CHAT if is_valid_otherwise and isinstance(body, dict) else {}
            content = json.dumps({**extra, **body} if isinstance(body, dict) else body).encode()
            return (await client.post(f"{BASE}/{path}", content=content)).status_code

    assert asyncio.run(post()) in (200, 400, 404)


@pytest.mark.parametrize("levels", [70, 400, 800, 50_000])
@pytest.mark.parametrize("opening", ['{"a":', "["])
@pytest.mark.parametrize(
    "place",
    [
        '"metadata": %s',
        '"tools": [{"name": "f", "parameters": {"properties": {"a": %s}}}], "tool_choice": "required"',
        '"guided_json": {"not": %s}',
        '"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": %s}}}',
        '"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": %s}}]}]',
        '"messages": [{"role": "user", "content": %s}]',
        '"logit_bias": {"1": %s}',
        '"stop": %s',
    ],
)
async def test_deep_json_is_refused_or_does_nothing(levels: int, opening: str, place: str) -> None:
    value = opening * levels + "1" + {"{": "}", "[": "]"}[opening[0]] * levels
    async with client_of(make_app()) as client:
        for path in (f"run/{MODEL}", "v1/chat/completions"):
            messages = "" if "messages" in place else '"messages": [{"role": "user", "content": "hi"}], '
            content = f'{{"model": "{MODEL}", {messages}{place % value}}}'
            response = await client.post(f"{BASE}/{path}", content=content)
            is_harmless = "metadata" in place and levels < 1000
            assert response.status_code == (200 if is_harmless else 400), response.text[:300]


@given(st.binary(max_size=200))
def test_no_bytes_give_a_5xx(content: bytes) -> None:
    async def post() -> int:
        async with client_of(make_app()) as client:
            return (await client.post(f"{BASE}/run/{MODEL}", content=content)).status_code

    assert asyncio.run(post()) in (200, 400)


# -- over a real socket ------------------------------------------------------------------------------------


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Starlette], Any]]:
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(app: Starlette) -> httpx.AsyncClient:
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
        servers.append((server, asyncio.create_task(server.serve())))
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=AUTH)

    yield start
    for server, task in servers:
        server.should_exit = True
        await task


@pytest.mark.parametrize("path", [f"run/{MODEL}", "v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_call(serve: Any, path: str, stream: bool) -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("1", "2")[:2], asyncio.Event())
    async with await serve(make_app(pool, meter)) as client:
        call = asyncio.create_task(client.post(f"{BASE}/{path}", json={**CHAT, "stream": stream}))
        await pool.is_called.wait()
        await asyncio.sleep(0.02)
        assert meter.records == []
        call.cancel()
        async with asyncio.timeout(10):
            await meter.is_waiting.wait()
    assert pool.num_cancelled == 1
    assert [(record.status, record.output_tokens) for record in meter.records] == [("cancelled", 1)]


async def test_tokens_arrive_as_they_come(serve: Any) -> None:
    go_on = asyncio.Event()
    events = answer("1", "2")
    async with (
        await serve(make_app(ScriptedPool(*events[:2], go_on, *events[2:]))) as client,
        client.stream("POST", f"{BASE}/run/{MODEL}", json={"prompt": "hi", "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert json.loads((await anext(lines))[6:])["response"] == "1"
        go_on.set()
        rest = [line async for line in lines if line]
    assert json.loads(rest[0][6:])["response"] == "2"
    assert rest[-1] == "data: [DONE]"
