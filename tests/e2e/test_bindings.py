"""Bindings as their users meet them: `edge dev` with two workers in a process of its own, called over HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import wait_for

pytestmark = pytest.mark.slow

HANG_S = 120

FRONT = """
from urllib.parse import parse_qs, urlsplit
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        url = urlsplit(request.url)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match url.path:
            case "/send":
                await self.env.JOBS.send({"name": query["name"], "kind": query.get("kind", "")})
                return Response("sent", status=202)
            case "/seen":
                return Response.json(await self.env.BACK.seen(query["name"]))
            case "/back":
                return await self.env.BACK.fetch(request)
            case "/runs":
                return Response(await self.env.STORE.get("run") or "never")
            case "/secret":
                return Response(f"{self.env.SECRET} {self.env.PLAIN}")
            case "/version":
                return Response(self.env.META.id)
        return Response("GREETING")

    async def scheduled(self, controller, env, ctx):
        await env.STORE.put("run", f"{controller.cron} at {controller.scheduledTime}")
"""
FRONT_CONFIG = """
name = "front"
main = "src/worker.py"
[vars]
PLAIN = "plain"
SECRET = "not this"
[[kv_namespaces]]
binding = "STORE"
id = "shared"
[[queues.producers]]
binding = "JOBS"
queue = "jobs"
[[services]]
binding = "BACK"
service = "back"
[[services]]
binding = "NOBODY"
service = "nobody"
[triggers]
crons = ["0 3 * * *"]
[version_metadata]
binding = "META"
[assets]
directory = "public"
run_worker_first = ["/private/*"]
"""
BACK = """
import os, signal
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(f"back: {request.url}")

    async def seen(self, name):
        return await self.env.STORE.get(name, "json")

    async def queue(self, batch, env, ctx):
        for message in batch.messages:
            name = message.body["name"]
            if message.body["kind"] == "kill" and message.attempts == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if message.body["kind"] == "poison":
                raise ValueError(f"cannot do {name}")
            await env.STORE.put(name, f'{{"attempts": {message.attempts}, "queue": "{batch.queue}"}}')
"""
BACK_CONFIG = """
name = "back"
main = "worker.py"
[[kv_namespaces]]
binding = "STORE"
id = "shared"
[[queues.consumers]]
queue = "jobs"
max_batch_timeout = 0
max_retries = 1
dead_letter_queue = "dead"
[[queues.consumers]]
queue = "dead"
max_batch_timeout = 0
"""
EdgeDev = Callable[..., tuple[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "front" / "src").mkdir(parents=True)
    (tmp_path / "front" / "public" / "private").mkdir(parents=True)
    (tmp_path / "front" / "public" / "page.html").write_text("<p>page</p>")
    (tmp_path / "front" / "public" / "private" / "page.html").write_text("<p>private</p>")
    (tmp_path / "back").mkdir()
    write_front(tmp_path, "hello")
    (tmp_path / "front" / "edge.toml").write_text(FRONT_CONFIG)
    (tmp_path / "front" / ".dev.vars").write_text("SECRET=first")
    (tmp_path / "back" / "edge.toml").write_text(BACK_CONFIG)
    (tmp_path / "back" / "worker.py").write_text(BACK)
    return tmp_path


def write_front(folder: Path, greeting: str) -> None:
    (folder / "front" / "src" / "worker.py").write_text(FRONT.replace("GREETING", greeting))


def seen(client: httpx.Client, name: str) -> Any:
    """What the consumer has noted of a message; the process that is asked may just have been killed by one."""
    response = client.get("/seen", params={"name": name})
    return response.json() if response.status_code == 200 else None


def test_two_workers_with_all_that_a_node_does_for_them(folder: Path, edge_dev: EdgeDev) -> None:
    url, server = edge_dev(folder, "-c", "front/edge.toml", "-c", "back/edge.toml")
    with httpx.Client(base_url=url, timeout=HANG_S) as client:
        # What is said at the start.
        assert "warning: front: env.NOBODY is the worker 'nobody', which is not on this node" in server.output
        for line in (
            "KV        env.STORE  (shared)",
            "Queue     env.JOBS  (sends to jobs)",
            "Queue     consumes jobs",
            "Service   env.BACK  (back)",
            "Secret    env.SECRET",
            "Variable  env.PLAIN",
            f"Cron      0 3 * * *  (UTC; now: curl '{url}/cdn-cgi/local/scheduled?cron=0+3+*+*+*')",
        ):
            assert line in server.lines or f"{line}\n" in server.lines
        assert "first" not in server.output

        # A method and a request of the other worker; a queue between them; values that both keep.
        assert client.get("/back?x=1").text == f"back: {url}/back?x=1"
        assert client.get("/send", params={"name": "job"}).status_code == 202
        assert wait_for(lambda: seen(client, "job")) == {"attempts": 1, "queue": "jobs"}
        # A consumer that dies gets its message again. One that cannot be served goes to the dead letter queue, which is
        # consumed as well: there it fails again, and is dropped after its retries.
        client.get("/send", params={"name": "deadly", "kind": "kill"})
        assert wait_for(lambda: seen(client, "deadly")) == {"attempts": 2, "queue": "jobs"}
        client.get("/send", params={"name": "bad", "kind": "poison"})
        wait_for(lambda: "queue jobs: 1 messages are in 'dead' after 1 retries" in server.output)
        wait_for(lambda: "queue dead: 1 messages were dropped after 3 retries" in server.output)
        assert "ValueError: cannot do bad" in server.output

        # A cron, by hand.
        assert client.get("/runs").text == "never"
        fired = client.get("/cdn-cgi/local/scheduled", params={"cron": "0 3 * * *", "time": "1700000000000"})
        assert (fired.status_code, fired.text) == (200, "ok")
        assert client.get("/runs").text == "0 3 * * * at 1700000000000"
        assert client.get("/cdn-cgi/local/scheduled", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/cdn-cgi/local/scheduled", params={"worker": "back"}).text == "exception"

        # Files go before the worker, except where the configuration says otherwise.
        page = client.get("/page")
        assert (page.text, page.headers["content-type"]) == ("<p>page</p>", "text/html; charset=utf-8")
        assert client.get("/page", headers={"if-none-match": page.headers["etag"]}).status_code == 304
        assert client.get("/page.html").headers["location"] == "/page"
        assert client.get("/private/page").text == "hello"

        # Saves of code, of secrets and of the configuration's file are taken over, each by the worker that they are of.
        assert client.get("/secret").text == "first plain"
        version = client.get("/version").text
        (folder / "front" / ".dev.vars").write_text("SECRET=second")
        wait_for(lambda: client.get("/secret").text == "second plain")
        assert client.get("/version").text != version
        write_front(folder, "edited")
        wait_for(lambda: client.get("/").text == "edited")
        (folder / "back" / "worker.py").write_text(BACK.replace('f"back: ', 'f"new back: '))
        wait_for(lambda: client.get("/back").text.startswith("new back"))
        (folder / "back" / "edge.toml").write_text(BACK_CONFIG.replace("[[queues", "[[queue"))
        wait_for(lambda: "queue" in server.output and "did you mean" in server.output)
        (folder / "front" / "edge.toml").write_text(FRONT_CONFIG.replace("0 3 *", "61 3 *"))
        wait_for(lambda: "'61' is no value of the minute" in server.output)
        assert client.get("/").text == "edited"


def test_a_message_that_was_in_flight_when_the_node_was_killed_is_delivered_again(
    folder: Path, edge_dev: EdgeDev
) -> None:
    slow = BACK.replace("await env.STORE.put(name", "await __import__('asyncio').sleep(600); await env.STORE.put(name")
    (folder / "back" / "worker.py").write_text(slow.replace("for message", 'print("took it")\n        for message'))
    arguments = ("-c", "front/edge.toml", "-c", "back/edge.toml")
    url, server = edge_dev(folder, *arguments)
    assert httpx.get(f"{url}/send?name=job", timeout=HANG_S).status_code == 202
    wait_for(lambda: "took it" in server.output)
    server.expected_code = -signal.SIGKILL
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    (folder / "back" / "worker.py").write_text(BACK)
    url, _ = edge_dev(folder, *arguments)
    with httpx.Client(base_url=url, timeout=HANG_S) as client:
        assert wait_for(lambda: seen(client, "job")) == {"attempts": 2, "queue": "jobs"}
