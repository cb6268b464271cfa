"""Small workers of the kinds that people begin with, on a whole node, over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import tiny_models
from helpers import EDGE

import edge.config.file
from edge.billing.ledger import FILE_NAME, latest_records
from edge.isolates.sandbox.layers import names_of
from edge.node.app import Node
from edge.weights.store import ModelStore

pytestmark = pytest.mark.slow

HANG_S = 60
Example = Callable[..., "asyncio.Future[httpx.AsyncClient]"]


@pytest.fixture
async def example(tmp_path: Path) -> AsyncIterator[Example]:
    """Writes a worker with its configuration and starts a node with it; gives an HTTP client of that."""
    async with AsyncExitStack() as stack:

        async def start(config: str, **files: str) -> httpx.AsyncClient:
            for name, text in {"edge.toml": config, **files}.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
            loaded = edge.config.file.load(tmp_path / "edge.toml", tmp_path)
            options = {"tokens": {}, "show_tracebacks": True, "say": print, "access_log": lambda access: None}
            node = await stack.enter_async_context(Node(loaded, local_triggers=True, **options))
            await node.deploy(loaded)
            transport = httpx.ASGITransport(node.app)
            client = httpx.AsyncClient(transport=transport, base_url="http://localhost:8787", timeout=HANG_S)
            return await stack.enter_async_context(client)

        yield start


def config(more: str = "", main: str = "worker.py") -> str:
    return f'name = "example"\nmain = "{main}"\ncompatibility_date = "2026-11-30"\n{more}'


async def test_hello(example: Example) -> None:
    worker = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("Hello world!")
"""
    answer = await (await example(config(), **{"worker.py": worker})).get("/")
    assert (answer.status_code, answer.text) == (200, "Hello world!")
    assert answer.headers["content-type"].lower().replace(" ", "") == "text/plain;charset=utf-8"


async def test_a_kv_binding(example: Example) -> None:
    worker = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        await self.env.FOO.put("bar", "baz")
        return Response(await self.env.FOO.get("bar"))
"""
    client = await example(config('[[kv_namespaces]]\nbinding = "FOO"\nid = "any"\n'), **{"worker.py": worker})
    assert (await client.get("/")).text == "baz"


async def test_a_d1_query(example: Example, tmp_path: Path) -> None:
    worker = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        query = "SELECT quote, author FROM qtable ORDER BY author LIMIT 1;"
        results = await self.env.DB.prepare(query).all()
        return Response.json(results.results[0])
"""
    (tmp_path / "quotes.sql").write_text(
        "CREATE TABLE qtable (quote TEXT, author TEXT);"
        "INSERT INTO qtable VALUES ('Nothing is so painful', 'Shelley'), ('Know thyself', 'Aeschylus');"
    )
    client = await example(
        config('[[d1_databases]]\nbinding = "DB"\ndatabase_name = "quotes"\n'), **{"worker.py": worker}
    )
    await run_edge(tmp_path, "d1", "execute", "quotes", "--file", "quotes.sql")
    answer = await client.get("/")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"quote": "Know thyself", "author": "Aeschylus"}


async def test_assets_before_and_through_the_worker(example: Example) -> None:
    worker = """
from urllib.parse import urlsplit
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = urlsplit(request.url).path
        if path == "/message":
            return Response("from the worker")
        if path == "/logo":
            return await self.env.ASSETS.fetch("http://any/image.svg")
        return await self.env.ASSETS.fetch(request)
"""
    client = await example(
        config('[assets]\ndirectory = "public"\nbinding = "ASSETS"\n', main="src/worker.py"),
        **{"src/worker.py": worker, "public/index.html": "<h1>home</h1>", "public/image.svg": "<svg/>"},
    )
    home = await client.get("/")
    assert (home.text, home.headers["content-type"]) == ("<h1>home</h1>", "text/html; charset=utf-8")
    assert (await client.head("/")).headers["content-length"] == "13"
    assert (await client.get("/message")).text == "from the worker"
    logo = await client.get("/logo")
    assert (logo.text, logo.headers["content-type"]) == ("<svg/>", "image/svg+xml; charset=utf-8")
    assert (await client.get("/nothing")).status_code == 404
    assert (await client.get("/../src/worker.py")).status_code == 404


async def test_a_cron(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    worker = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self):
        return Response("Cron Triggers")

    async def scheduled(self, controller, env, ctx):
        print("scheduled", controller.cron, controller.scheduledTime, controller.type, ctx is self.ctx)
        controller.noRetry()
"""
    client = await example(config('[triggers]\ncrons = ["*/3 * * * *"]\n'), **{"worker.py": worker})
    assert (await client.get("/")).text == "Cron Triggers"
    query = {"cron": "*/3 * * * *", "time": "1700000000000", "format": "json"}
    fired = await client.get("/cdn-cgi/local/scheduled", params=query)
    assert fired.json() == {"outcome": "ok", "noRetry": True}
    assert "scheduled */3 * * * * 1700000000000 scheduled True\n" in capsys.readouterr().out


async def test_a_model(example: Example, tmp_path: Path) -> None:
    worker = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        inputs = {"prompt": "hello", "raw": True, "max_tokens": 4, "temperature": 0}
        result = await self.env.AI.run("@cf/some/model", inputs)
        return Response.json({"response": result.response, "tokens": result["usage"]["completion_tokens"]})
"""
    ModelStore.in_state_dir(tmp_path / ".edge").add(str(tiny_models.save_folder(tmp_path / "tiny")))
    client = await example(
        config('[ai]\nbinding = "AI"\n[ai.models]\n"@cf/some/model" = "tiny"\n[engine]\nnum_threads = 1\n'),
        **{"worker.py": worker},
    )
    answer = (await client.get("/")).json()
    assert (answer["tokens"], bool(answer["response"])) == (4, True)
    (record,) = latest_records(tmp_path / ".edge" / FILE_NAME, limit=9)
    assert (record.worker, record.trigger, record.model) == ("example", "binding", "@cf/some/model")
    assert {"no-new-privileges", "closed-descriptors"} <= set(names_of(record.sandbox))


class Upstream(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"upstream {self.path}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


async def test_sync_http_clients(example: Example, tmp_path: Path) -> None:
    worker = """
import httpx
import requests
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        base = self.env.UPSTREAM
        async with httpx.AsyncClient() as client:
            third = await client.get(f"{base}/3")
        texts = [requests.get(f"{base}/1").text, httpx.get(f"{base}/2").text, third.text]
        return Response.json(texts)
"""
    for package in (
        "requests",
        "urllib3",
        "certifi",
        "idna",
        "charset_normalizer",
        "httpx",
        "httpcore",
        "h11",
        "anyio",
    ):
        copy_package(package, tmp_path / "python_modules")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    Thread(target=server.serve_forever).start()
    try:
        url = f"127.0.0.1:{server.server_port}"
        settings = f'[vars]\nUPSTREAM = "http://{url}"\n[egress]\nallow = ["{url}"]\n'
        client = await example(config(settings, main="src/worker.py"), **{"src/worker.py": worker})
        answer = await client.get("/")
        assert (answer.status_code, answer.text) == (200, '["upstream /1", "upstream /2", "upstream /3"]')
    finally:
        server.shutdown()
        server.server_close()


def copy_package(name: str, folder: Path) -> None:
    """Put an installed package where a worker finds it, as if it had been vendored."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / name)


TODO = """
from urllib.parse import urlsplit
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        parts = urlsplit(request.url).path.strip("/").split("/")[1:]
        db = self.env.DB
        match request.method, parts:
            case "GET", ["todos"]:
                found = await db.prepare("SELECT id, title, done FROM todos ORDER BY id").all()
                return Response.json([{**row, "done": bool(row["done"])} for row in found.results])
            case "POST", ["todos"]:
                title = (await request.json())["title"].strip()
                if not title:
                    return Response.json({"error": "a title is needed"}, status=400)
                insert = db.prepare("INSERT INTO todos (title) VALUES (?) RETURNING id")
                return Response.json({"id": await insert.bind(title).first("id")}, status=201)
            case "PUT", ["todos", id]:
                done = (await request.json())["done"]
                result = await db.prepare("UPDATE todos SET done = ? WHERE id = ?").bind(int(done), int(id)).run()
                return Response(None, status=204 if result.meta.changes else 404)
            case "DELETE", ["todos", id]:
                await db.batch([db.prepare("DELETE FROM todos WHERE id = ?").bind(int(id))])
                return Response(None, status=204)
        return Response("no such route", status=404)
"""


async def test_a_todo_list_in_d1_with_a_page_of_its_own(example: Example, tmp_path: Path) -> None:
    client = await example(
        config(
            '[[d1_databases]]\nbinding = "DB"\ndatabase_name = "todos"\n'
            '[assets]\ndirectory = "public"\nnot_found_handling = "single-page-application"\n'
            'run_worker_first = ["/api/*"]\n',
            main="src/worker.py",
        ),
        **{
            "src/worker.py": TODO,
            "public/index.html": "<h1>Todo</h1>",
            "migrations/0001_init.sql": "CREATE TABLE todos (id INTEGER PRIMARY KEY, title TEXT NOT NULL);",
            "migrations/0002_done.sql": "ALTER TABLE todos ADD COLUMN done INTEGER NOT NULL DEFAULT 0;",
        },
    )
    await run_edge(tmp_path, "d1", "migrations", "apply", "todos")
    assert (await client.get("/")).text == "<h1>Todo</h1>"
    assert (await client.get("/any/page", headers={"sec-fetch-mode": "navigate"})).text == "<h1>Todo</h1>"
    assert (await client.get("/api/other", headers={"sec-fetch-mode": "navigate"})).status_code == 404
    first = await client.post("/api/todos", json={"title": "buy milk"})
    assert (first.status_code, first.json()) == (201, {"id": 1})
    assert (await client.post("/api/todos", json={"title": "Robert'); DROP TABLE todos; --"})).json() == {"id": 2}
    assert (await client.post("/api/todos", json={"title": " "})).status_code == 400
    assert (await client.put("/api/todos/1", json={"done": True})).status_code == 204
    assert (await client.put("/api/todos/9", json={"done": True})).status_code == 404
    assert (await client.delete("/api/todos/2")).status_code == 204
    assert (await client.get("/api/todos")).json() == [{"id": 1, "title": "buy milk", "done": True}]


async def run_edge(folder: Path, *arguments: str) -> None:
    command = asyncio.to_thread(
        subprocess.run, [*EDGE, *arguments], cwd=folder, capture_output=True, text=True, timeout=HANG_S
    )
    done = await command
    assert done.returncode == 0, done.stderr
