from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from doubles import MODEL, STAND_IN, ListMeter, ScriptedPool, Step, answer, catalogue
from helpers import sse_events
from starlette.applications import Starlette

from edge.ai.gate import Event, Gate, Principal
from edge.ai.native import run_binding
from edge.ai.rate_limits import RateLimits
from edge.billing.meter import Trigger
from edge.config import ApiConfig
from edge.errors import EngineLost, TooManyRequests
from edge.frames import Delta, Generate, Started, Usage
from edge.node import api
from edge.node.api import MAX_URL_BYTES, routes
from edge.node.api.bodies import MAX_ACCOUNT_HELD_BYTES
from edge.node.protocol import MAX_HEAD_BYTES, LimitedHttp
from edge.pool.base import OnUsage

BASE = "/client/v4/accounts/dev/ai"
AUTH = {"authorization": "Bearer dev"}
PROMPT = {"prompt": "hi"}
CHAT = {"model": STAND_IN, "messages": [{"role": "user", "content": "hi"}]}
HANG_S = 30
"""No test waits for longer than that; only one that fails waits for as long."""


def make_app(
    *script: Step,
    pool: Any = None,
    meter: ListMeter | None = None,
    models: tuple[str, ...] = (MODEL,),
    per_minute: dict[str, int] | None = None,
    config: ApiConfig | None = None,
) -> Starlette:
    config = config or ApiConfig()
    gate = Gate(
        pool or ScriptedPool(*(script or answer("1", "2"))),
        catalogue(*models),
        meter or ListMeter(),
        rate_limits=RateLimits(per_minute or {}),
        call_timeout_s=config.call_timeout_s,
    )
    tokens = {"dev": "dev", "t2": "other"}
    app = Starlette(routes=routes(gate, tokens=tokens, config=config))
    app.router.redirect_slashes = False
    return app


def client_of(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node", headers=AUTH)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app()) as client:
        yield client


def failure(response: httpx.Response) -> tuple[int, int]:
    """Status and code of an error."""
    assert response.headers["content-type"] == "application/json"
    assert (response.json()["success"], response.json()["result"]) == (False, None)
    return response.status_code, response.json()["errors"][0]["code"]


# -- what heads tell ---------------------------------------------------------------------------------------


async def test_an_answer_tells_what_it_cost_and_how_long_each_part_took(client: httpx.AsyncClient) -> None:
    for path, body in (
        (f"{BASE}/run/{MODEL}", PROMPT),
        (f"{BASE}/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT),
    ):
        headers = (await client.post(path, json=body)).headers
        assert headers["cf-ai-neurons"] == "0.073359"
        assert headers["x-edge-cost-usd"] == "0.000000806949"
        times = dict(each.split(";dur=") for each in headers["server-timing"].split(", "))
        assert list(times) == ["queue", "prefill", "decode"]
        assert all(0 <= float(duration_ms) < 60_000 for duration_ms in times.values())
        assert "x-ratelimit-limit-requests" not in headers


async def test_the_choices_of_a_call_are_paid_together(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "n": 3})
    assert len(response.json()["choices"]) == 3
    assert response.headers["cf-ai-neurons"] == "0.220077"
    assert response.json()["usage"]["neurons"] == 0.220077


async def test_what_has_no_price_has_no_cost() -> None:
    async with client_of(make_app(models=("mine",))) as client:
        response = await client.post(f"{BASE}/run/mine", json=PROMPT)
    assert response.status_code == 200
    assert response.headers.keys().isdisjoint({"cf-ai-neurons", "x-edge-cost-usd"})


async def test_the_head_of_a_stream_tells_what_is_known_by_then(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{BASE}/run/{MODEL}", json={**PROMPT, "stream": True})
    assert response.headers["server-timing"].startswith("queue;dur=")
    assert "," not in response.headers["server-timing"]
    assert response.headers.keys().isdisjoint({"cf-ai-neurons", "x-edge-cost-usd"})
    assert sse_events(response.text)[-2]["usage"]["neurons"] == 0.073359


async def test_a_request_has_our_id_whatever_the_client_calls_it(client: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine", "cf-ai-req-id": "mine"}
    for response in (
        await client.post(f"{BASE}/run/{MODEL}", json=PROMPT, headers=headers),
        await client.get("/client/v4/none", headers=headers),
    ):
        assert response.headers["x-request-id"] == response.headers["cf-ai-req-id"] != "mine"


# -- rate limits -------------------------------------------------------------------------------------------


async def test_an_account_has_so_many_calls_a_minute() -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("1"))
    async with client_of(make_app(pool=pool, meter=meter, per_minute={"text-generation": 2})) as client:
        first = await client.post(f"{BASE}/run/{MODEL}", json=PROMPT)
        second = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "stream": True})
        assert [response.status_code for response in (first, second)] == [200, 200]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 < float(second.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        for path, body in ((f"run/{MODEL}", PROMPT), ("v1/chat/completions", CHAT)):
            for stream in (False, True):
                refused = await client.post(f"{BASE}/{path}", json={**body, "stream": stream})
                assert failure(refused) == (429, 1015)
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                assert refused.headers["x-should-retry"] == "true"
                assert refused.headers["x-ratelimit-remaining-requests"] == "0"
                assert "cf-ai-neurons" not in refused.headers
        other = await client.post(
            f"/client/v4/accounts/other/ai/run/{MODEL}", json=PROMPT, headers={"authorization": "Bearer t2"}
        )
        assert other.status_code == 200
        assert (await client.get(f"{BASE}/models/search")).status_code == 200
    assert len(pool.requests) == len(meter.records) == 3  # what is refused is neither run nor recorded


async def test_the_calls_of_workers_count_and_those_of_batches_do_not() -> None:
    limits = RateLimits({"text-generation": 2})
    gate = Gate(ScriptedPool(*answer("1")), catalogue(MODEL), ListMeter(), rate_limits=limits)

    async def run(trigger: Trigger) -> None:
        principal = Principal(account="dev", trigger=trigger, request_id="r")
        await run_binding(gate, principal, MODEL, PROMPT, {})

    for trigger in ("binding", "batch", "rest", "batch", "batch"):
        await run(trigger)
    for trigger in ("binding", "rest", "openai"):
        with pytest.raises(TooManyRequests):
            await run(trigger)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {**CHAT, "n": 4}),
        ("completions", {"model": MODEL, "prompt": ["a", "b"], "n": 2}),
        ("completions", {"model": MODEL, "prompt": ["a", "b", "c", "d"]}),
    ],
)
async def test_each_choice_of_each_prompt_is_a_call(route: str, body: dict[str, Any]) -> None:
    pool = ScriptedPool(*answer("1"))
    async with client_of(make_app(pool=pool, per_minute={"text-generation": 9})) as client:
        responses = [await client.post(f"{BASE}/v1/{route}", json=body) for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 429]
        assert [response.headers["x-ratelimit-remaining-requests"] for response in responses] == ["5", "1", "1"]
        assert len(pool.requests) == 8
        assert (await client.post(f"{BASE}/run/{MODEL}", json=PROMPT)).status_code == 200  # there was room for one
    async with client_of(make_app(per_minute={"text-generation": 3})) as client:  # no waiting helps
        assert (await client.post(f"{BASE}/v1/{route}", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("route", "body"), [("chat/completions", CHAT), ("responses", {"model": MODEL, "input": "hi"})]
)
async def test_counting_tokens_counts_as_a_call(route: str, body: dict[str, Any]) -> None:
    async with client_of(make_app(per_minute={"text-generation": 2})) as client:
        path = f"{BASE}/v1/{route}/input_tokens"
        assert [(await client.post(path, json=body)).status_code for _ in range(3)] == [200, 200, 429]


# -- time limits -------------------------------------------------------------------------------------------


async def test_a_call_that_takes_too_long_ends_with_408() -> None:
    meter = ListMeter()
    pool = ScriptedPool(*answer("1", "2")[:2], asyncio.Event())
    async with client_of(make_app(pool=pool, meter=meter, config=ApiConfig(call_timeout_s=0.05))) as client:
        response = await client.post(f"{BASE}/run/{MODEL}", json=PROMPT)
        assert failure(response) == (408, 3007)
        assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
        streamed = await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "stream": True})
    *_, last = sse_events(streamed.text)
    assert (last["error"]["code"], last["error"]["type"]) == ("3007", "timeout_error")
    assert pool.num_cancelled == 2
    assert [(record.status, record.error_code, record.output_tokens) for record in meter.records] == [
        ("error", 3007, 1)
    ] * 2


async def test_errors_say_whether_to_try_again() -> None:
    async with client_of(make_app(EngineLost("died"))) as client:
        lost = await client.post(f"{BASE}/run/{MODEL}", json=PROMPT)
        wrong = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": 5})
    assert (lost.status_code, lost.headers["x-should-retry"], lost.headers["retry-after"]) == (503, "true", "1")
    assert (wrong.status_code, wrong.headers["x-should-retry"]) == (400, "false")
    assert "retry-after" not in wrong.headers


async def test_an_account_with_large_bodies_under_way_keeps_out_no_other() -> None:
    sent, go_on = asyncio.Queue[None](), asyncio.Event()

    async def body(num_bytes: int) -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"x" * num_bytes
        await sent.put(None)
        await go_on.wait()
        yield b'"}'

    url, num_bodies = f"/client/v4/accounts/{{}}/ai/run/{MODEL}", 4
    async with client_of(make_app()) as client, asyncio.timeout(HANG_S):
        large = [
            asyncio.create_task(
                client.post(url.format("dev"), content=body(MAX_ACCOUNT_HELD_BYTES // num_bodies - 100))
            )
            for _ in range(num_bodies)
        ]
        for _ in large:
            await sent.get()
        refused = await client.post(url.format("dev"), json={"prompt": "y" * 1000})
        assert failure(refused) == (429, 3040)
        assert "of the account" in refused.text
        theirs = {"authorization": "Bearer t2"}
        assert (await client.post(url.format("other"), json=PROMPT, headers=theirs)).status_code == 200
        go_on.set()
        assert {response.status_code for response in await asyncio.gather(*large)} <= {200, 400, 413}
        assert (await client.post(url.format("dev"), json=PROMPT)).status_code == 200  # all is given back


# -- paths and methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        f"{BASE}/run/{STAND_IN}",
        f"{BASE}/run/{STAND_IN}/",
        f"{BASE}//run//{STAND_IN}",
        f"{BASE}/run/%40cf%2Fmeta%2Fllama-3.2-1b-instruct",
        f"{BASE}/run/@cf%2fmeta/llama-3.2-1b-instruct/",
    ],
)
async def test_paths_that_mean_the_same(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json=PROMPT)).status_code == 200


async def test_paths_of_openai_s_clients(client: httpx.AsyncClient) -> None:
    for path in (f"{BASE}/v1//chat/completions", f"{BASE}/v1/chat/completions/", "/v1//chat/completions"):
        assert (await client.post(path, json=CHAT)).status_code == 200


async def test_errors_have_the_form_of_the_family_whose_route_it_is(client: httpx.AsyncClient) -> None:
    for path in (f"{BASE}/v1", f"{BASE}/v1/", f"{BASE}/v1/none", "/v1/", "/v1/none"):
        assert (await client.get(path)).json()["error"]["code"] == "7000"
    for path in ("/client/v4/", BASE, f"{BASE}/v2/none"):
        assert "error" not in (await client.get(path)).json()


@pytest.mark.parametrize("model", ["@cf/meta", "@cf/meta/", "@cf/a/b/c", "@zz/a/b", "a b", "@", "%20"])
async def test_an_id_that_no_model_can_have_is_not_found(client: httpx.AsyncClient, model: str) -> None:
    assert failure(await client.post(f"{BASE}/run/{model}", json=PROMPT)) == (404, 3042)


async def test_an_unknown_model_is_a_bad_request_and_not_found_for_openai(client: httpx.AsyncClient) -> None:
    for model in ("gpt-4", "@cf/meta/none", "openai/gpt-4"):
        assert failure(await client.post(f"{BASE}/run/{model}", json=PROMPT)) == (400, 5007)
        assert failure(await client.post(f"{BASE}/v1/chat/completions", json={**CHAT, "model": model})) == (404, 5007)


async def test_a_wrong_method_is_told_all_that_there_are(client: httpx.AsyncClient) -> None:
    response = await client.put(f"{BASE}/v1/batches", json={})
    assert failure(response) == (405, 7001)
    assert response.headers["allow"] == "GET, HEAD, POST"
    assert response.json()["error"]["code"] == "7001"
    for method in ("OPTIONS", "TRACE", "HEAD", "BREW"):
        response = await client.request(method, f"{BASE}/run/{MODEL}")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert (await client.head(f"{BASE}/models/search")).status_code == 200
    for method in ("OPTIONS", "GET", "POST"):
        assert failure(await client.request(method, "/client/v4/none")) == (404, 7000)


async def test_a_url_has_a_limit(client: httpx.AsyncClient) -> None:
    assert (await client.get(f"{BASE}/models/search?search={'x' * 30_000}")).status_code == 200
    assert failure(await client.get(f"{BASE}/models/search?search={'x' * MAX_URL_BYTES}")) == (414, 3006)
    assert failure(await client.post(f"{BASE}/run/{'x' * MAX_URL_BYTES}", json=PROMPT)) == (414, 3006)


async def test_a_body_of_many_small_values_is_refused_before_it_is_decoded(client: httpx.AsyncClient) -> None:
    for unit in (b"[],", b"{},", b'{"a":[]},'):
        body = b'{"prompt": "x", "tools": [' + unit * 200_000 + b"1]}"
        assert failure(await client.post(f"{BASE}/run/{MODEL}", content=body)) == (413, 3006)


# -- pages of other origins --------------------------------------------------------------------------------

PREFLIGHT = {
    "origin": "https://app.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_pages_of_other_origins_are_not_let_in_unless_that_is_configured(client: httpx.AsyncClient) -> None:
    response = await client.options(f"{BASE}/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 405
    response = await client.post(f"{BASE}/v1/chat/completions", json=CHAT, headers={"origin": PREFLIGHT["origin"]})
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("origins", [["https://app.example.com"], ["*"]])
async def test_pages_of_configured_origins_can_call(origins: list[str]) -> None:
    async with client_of(make_app(config=ApiConfig(cors_origins=origins))) as client:
        for path in (f"{BASE}/v1/chat/completions", "/v1/chat/completions"):
            del client.headers["authorization"]
            preflight = await client.options(path, headers=PREFLIGHT)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] in ("*", PREFLIGHT["origin"])
            assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
            client.headers.update(AUTH)
            for body in (CHAT, {**CHAT, "temperature": "hot"}):
                answered = await client.post(path, json=body, headers={"origin": PREFLIGHT["origin"]})
                assert answered.headers["access-control-allow-origin"] in ("*", PREFLIGHT["origin"])
                assert "cf-ai-req-id" in answered.headers["access-control-expose-headers"]
        stranger = await client.options(path, headers={**PREFLIGHT, "origin": "https://evil.example.com"})
        assert (stranger.status_code == 200) == (origins == ["*"])


# -- over a real socket ------------------------------------------------------------------------------------


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Starlette], Any]]:
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(app: Starlette) -> int:
        config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, http=LimitedHttp)
        server = uvicorn.Server(config)
        servers.append((server, asyncio.create_task(server.serve())))
        async with asyncio.timeout(HANG_S):
            while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.005)
        return int(server.servers[0].sockets[0].getsockname()[1])

    yield start
    for server, task in servers:
        server.should_exit = True
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_silence_is_filled_with_comments_between_events(serve: Any) -> None:
    go_on = asyncio.Event()
    events = answer("1", "2")
    port = await serve(make_app(*events[:2], go_on, *events[2:], config=ApiConfig(keep_alive_s=0.02)))
    received = ""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=AUTH) as client,
        client.stream("POST", f"{BASE}/run/{MODEL}", json={**PROMPT, "stream": True}) as response,
    ):
        async for text in response.aiter_text():
            received += text
            if received.count(": keep-alive\n\n") == 3:
                go_on.set()
    assert received.startswith("data: ")
    *parts, last = received.split("\n\n")
    assert last == ""
    assert all(part == ": keep-alive" or part.startswith("data: ") for part in parts)
    shown = [json.loads(part[6:])["response"] for part in parts if part.startswith("data: {")]
    assert (shown, parts[-1]) == (["1", "2", ""], "data: [DONE]")


async def test_without_silence_there_are_no_comments(serve: Any) -> None:
    port = await serve(make_app(*answer(*"123456789")))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=AUTH) as client:
        response = await client.post(f"{BASE}/run/{MODEL}", json={**PROMPT, "stream": True})
    assert "keep-alive" not in response.text


class Endless:
    """A pool that has pieces of 4 KB for as long as somebody takes them."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.is_closed = False

    async def generate(self, request: Generate, on_usage: OnUsage) -> AsyncGenerator[Event, None]:
        usage = Usage(input_tokens=1, output_tokens=1)
        try:
            yield Started(0, 1)
            while True:
                self.num_taken += 1
                on_usage(usage)
                yield Delta(0, "x" * 4096, usage)
                await asyncio.sleep(0)
        finally:
            self.is_closed = True


def head_of(num_bytes: int) -> bytes:
    lines = [f"POST {BASE}/run/{MODEL} HTTP/1.1", "host: a", "authorization: Bearer dev"]
    return "\r\n".join([*lines, f"content-length: {num_bytes}", "", ""]).encode()


async def stream_to_nobody(port: int) -> socket.socket:
    """A connection on which an answer streams that is not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, head_of(len(body)) + body)
    return sock


async def read_all(sock: socket.socket) -> bytes:
    """What comes until the connection ends."""
    received = b""
    while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        received += data
    return received


async def until_held_up(pool: Endless) -> int:
    """How many pieces were taken when no more are."""
    async with asyncio.timeout(HANG_S):
        before = -1
        while pool.num_taken == 0 or pool.num_taken != before:
            before = pool.num_taken
            await asyncio.sleep(0.2)
    return before


async def test_a_reader_that_reads_nothing_holds_a_bounded_amount(serve: Any) -> None:
    pool, meter = Endless(), ListMeter()
    port = await serve(make_app(pool=pool, meter=meter, config=ApiConfig(read_timeout_s=0, keep_alive_s=0.02)))
    sock = await stream_to_nobody(port)
    num_taken = await until_held_up(pool)
    assert num_taken * 4096 < 16 << 20  # what the kernel's buffers hold, and some KB of ours
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANG_S):
        while pool.num_taken < num_taken + 100:  # it goes on as soon as it reads
            assert await loop.sock_recv(sock, 1 << 16)
    assert not meter.records
    sock.close()
    await until(lambda: bool(meter.records))
    assert (pool.is_closed, meter.records[0].status) == (True, "cancelled")


async def test_a_reader_that_reads_nothing_for_too_long_is_disconnected(serve: Any) -> None:
    pool, meter = Endless(), ListMeter()
    port = await serve(make_app(pool=pool, meter=meter, config=ApiConfig(read_timeout_s=0.3)))
    sock = await stream_to_nobody(port)
    await until(lambda: bool(meter.records))
    assert (pool.is_closed, meter.records[0].status) == (True, "cancelled")
    received = await asyncio.wait_for(read_all(sock), HANG_S)
    sock.close()
    assert received.startswith(b"HTTP/1.1 200 ")
    assert not received.endswith(b"0\r\n\r\n")  # nobody takes it for complete


async def test_a_silent_call_is_no_slow_reader(serve: Any) -> None:
    go_on, events = asyncio.Event(), answer("1", "2")
    port = await serve(
        make_app(*events[:2], go_on, *events[2:], config=ApiConfig(read_timeout_s=0.05, keep_alive_s=0.2))
    )
    received = ""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=AUTH) as client,
        client.stream("POST", f"{BASE}/run/{MODEL}", json={**PROMPT, "stream": True}) as response,
    ):
        async for text in response.aiter_text():
            received += text
            if "keep-alive" in received:
                go_on.set()
    assert received.endswith("data: [DONE]\n\n")


async def test_a_body_that_stops_coming_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "BODY_TIMEOUT_S", 0.05)
    pool = ScriptedPool(*answer("1"))
    port = await serve(make_app(pool=pool))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head_of(100) + b'{"prompt": ')
    async with asyncio.timeout(HANG_S):
        answered = await reader.read()  # to the end of the connection
    writer.close()
    assert answered.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answered
    body = json.loads(answered.partition(b"\r\n\r\n")[2])
    assert body["errors"][0]["code"] == 3008
    assert not pool.requests


async def test_a_body_that_comes_too_slowly_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ScriptedPool(*answer("1"))
    port = await serve(make_app(pool=pool))
    # Each piece comes within the time for silence, and all of them together take longer than they may.
    monkeypatch.setattr(api, "BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(api, "MIN_BODY_BYTES_PER_S", 1 << 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head_of(1 << 16))
    answering = asyncio.create_task(reader.read())
    async with asyncio.timeout(HANG_S):
        while not answering.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
    writer.close()
    assert answering.result().startswith(b"HTTP/1.1 408 ")
    error = json.loads(answering.result().partition(b"\r\n\r\n")[2])["errors"][0]
    assert (error["code"], "and it is not complete" in error["message"]) == (3008, True)
    assert not pool.requests


async def test_a_head_that_is_too_large_is_refused_on_routes_of_the_api(serve: Any) -> None:
    port = await serve(make_app())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=AUTH) as client:
        large = {"x-large": "x" * (MAX_HEAD_BYTES + (1 << 20))}
        assert (await client.get(f"{BASE}/models/search", headers=large)).status_code == 431
        assert (await client.get(f"{BASE}/models/search")).status_code == 200
