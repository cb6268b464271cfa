from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from edge.errors import ExceededCpu, HandlerFailed, UnknownWorker
from edge.isolates.base import InboundEvent, WorkerKey
from edge.node.cron import Cron
from edge.node.triggers import Triggers, routes

KEY = ("acme", "shop")
MINUTE_MS = 1_796_083_200_000  # 2026-12-01T00:00Z, a Tuesday


class Workers:
    """Takes events; `answer` is what they come to, or an error to raise."""

    def __init__(self) -> None:
        self.events: list[tuple[WorkerKey, str, Any]] = []
        self.said: list[str] = []
        self.answer: Any = {"noRetry": False}
        self.triggers = Triggers(self.deliver, self.said.append)

    async def deliver(self, key: WorkerKey, event: InboundEvent) -> Any:
        self.events.append((key, event.kind, event.payload))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def client(workers: Workers) -> httpx.AsyncClient:
    app = Starlette(routes=routes(workers.triggers, lambda name: KEY if name in ("", "shop") else None))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8787")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - polled, as it changes in other tasks
            await asyncio.sleep(0.005)


async def test_what_is_due_is_fired_and_nothing_else(workers: Workers) -> None:
    workers.triggers.use(KEY, [Cron("0 0 * * *"), Cron("1 0 * * *"), Cron("0 0 * * tue")])
    workers.triggers.use(("acme", "other"), [Cron("* * * * *")])
    workers.triggers.use(("acme", "gone"), [Cron("* * * * *")])
    workers.triggers.remove(("acme", "gone"))
    workers.triggers.fire(MINUTE_MS)
    await until(lambda: len(workers.said) == 3)
    assert workers.events == [
        (KEY, "scheduled", {"cron": "0 0 * * *", "scheduledTime": MINUTE_MS}),
        (KEY, "scheduled", {"cron": "0 0 * * tue", "scheduledTime": MINUTE_MS}),
        (("acme", "other"), "scheduled", {"cron": "* * * * *", "scheduledTime": MINUTE_MS}),
    ]
    assert workers.said[0].startswith('CRON "0 0 * * *" shop ok (')
    assert workers.triggers.first() == (KEY, "0 0 * * *")


async def test_a_cron_whose_last_run_goes_on_is_left_out(workers: Workers) -> None:
    ended = asyncio.Event()
    answers = workers.deliver

    async def deliver(key: WorkerKey, event: InboundEvent) -> Any:
        answer = await answers(key, event)
        await ended.wait()
        return answer

    workers.triggers = triggers = Triggers(deliver, workers.said.append)
    triggers.use(KEY, [Cron("* * * * *"), Cron("1 0 * * *")])
    triggers.fire(MINUTE_MS)
    await until(lambda: len(workers.events) == 1)
    triggers.fire(MINUTE_MS + 60_000)
    await until(lambda: len(workers.events) == 2)
    assert [payload["cron"] for _, _, payload in workers.events] == ["* * * * *", "1 0 * * *"]
    assert workers.said == ['CRON "* * * * *" shop left out at 00:01 UTC: the run before still goes on']
    ended.set()
    await until(lambda: len(workers.said) == 3)
    triggers.fire(MINUTE_MS + 120_000)
    await until(lambda: len(workers.said) == 4)
    assert workers.events[-1][2] == {"cron": "* * * * *", "scheduledTime": MINUTE_MS + 120_000}


async def test_it_fires_at_the_full_minute(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = MINUTE_MS / 1000 - 0.02
    started = asyncio.get_running_loop().time()

    def clock() -> float:
        return now_s + asyncio.get_running_loop().time() - started

    monkeypatch.setattr("edge.node.triggers.time.time", clock)
    workers.triggers.use(KEY, [Cron("* * * * *")])
    workers.triggers.start()
    await until(lambda: bool(workers.events))
    await workers.triggers.close()
    assert workers.events == [(KEY, "scheduled", {"cron": "* * * * *", "scheduledTime": MINUTE_MS})]


@pytest.mark.parametrize(
    ("answer", "status", "text", "json"),
    [
        ({"noRetry": False}, 200, "ok", {"outcome": "ok", "noRetry": False}),
        ({"noRetry": True}, 200, "ok", {"outcome": "ok", "noRetry": True}),
        ("nonsense", 200, "ok", {"outcome": "ok", "noRetry": False}),
        (
            HandlerFailed("no", type="ValueError", traceback="line 1"),
            500,
            "exception",
            {"outcome": "exception", "noRetry": False},
        ),
        (ExceededCpu("too much"), 500, "exceededCpu", {"outcome": "exceededCpu", "noRetry": False}),
    ],
)
async def test_a_run_by_hand(
    workers: Workers, client: httpx.AsyncClient, answer: Any, status: int, text: str, json: Any
) -> None:
    workers.answer = answer
    query = {"cron": "*/5 * * * *", "time": "1700000000000"}
    for path in ("/cdn-cgi/local/scheduled", "/cdn-cgi/handler/scheduled", "/cdn-cgi/mf/scheduled"):
        response = await client.get(path, params=query)
        assert (response.status_code, response.text) == (status, text)
    response = await client.post("/cdn-cgi/local/scheduled", params={**query, "format": "json", "worker": "shop"})
    assert (response.status_code, response.json()) == (status, json)
    assert workers.events == [(KEY, "scheduled", {"cron": "*/5 * * * *", "scheduledTime": 1_700_000_000_000})] * 4
    old = await client.get("/__scheduled", params=query)
    assert (old.status_code, old.text) == (status, "Ran scheduled event" if status == 200 else text)
    if isinstance(answer, HandlerFailed):
        assert "ValueError: no\nline 1" in workers.said[0]


async def test_requests_that_make_no_sense(workers: Workers, client: httpx.AsyncClient) -> None:
    for time in ("soon", "-1", "1.5", "9" * 400, "0" * 20 + "9" * 5000, str((1 << 53) + 1), "٣"):
        assert (await client.get("/cdn-cgi/local/scheduled", params={"time": time})).status_code == 400
    assert (await client.get("/cdn-cgi/local/scheduled", params={"worker": "other"})).status_code == 404
    assert (await client.get("/cdn-cgi/local/unheard")).status_code == 404
    assert workers.events == []
    workers.answer = UnknownWorker("no worker")
    assert (await client.get("/cdn-cgi/local/scheduled")).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost"}, 200),
        ({"host": "127.0.0.1:8787"}, 200),
        ({"host": "[::1]:8787"}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "attacker.example"}, 403),
        ({"host": "localhost.attacker.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:x["}, 403),
        ({"origin": "https://attacker.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_only_local_requests_are_obeyed(
    workers: Workers, client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    for path in ("/cdn-cgi/local/scheduled", "/__scheduled"):
        assert (await client.get(path, headers=headers)).status_code == status
    assert len(workers.events) == (2 if status == 200 else 0)
