"""FastAPI and Starlette applications in real handler processes."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edge.errors import HandlerFailed
from edge.isolates import isolate

from .conftest import until

APP = """
import asyncio
from contextlib import asynccontextmanager

import asgi
from fastapi import BackgroundTasks, Depends, FastAPI, Request, UploadFile, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from workers import WorkerEntrypoint

starts = []

@asynccontextmanager
async def lifespan(app):
    starts.append(1)
    yield {"pool": "connected"}
    print("shut down")

app = FastAPI(lifespan=lifespan)

class Item(BaseModel):
    name: str
    price: float

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request.js_object, self.env)
"""


async def deploy(worker, routes: str, **options: Any) -> None:
    source = APP.replace("class Default", textwrap.dedent(routes) + "\nclass Default")
    await worker.deploy(source, indented=False, **options)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_json_in_and_out_with_env_and_state(worker) -> None:
    await deploy(
        worker,
        """
        @app.post("/items/{id}")
        async def add(id: int, item: Item, request: Request, limit: int = 3, env=asgi.env):
            scope = request.scope
            return {
                "id": id, "item": item, "limit": limit, "message": env.MESSAGE, "same": scope["env"].MESSAGE,
                "pool": request.state.pool, "starts": len(starts), "client": request.client.host,
                "server": scope["server"], "path": scope["raw_path"].decode(),
            }
        """,
        vars={"MESSAGE": "hi"},
    )
    for _ in range(2):
        body = pieces(b'{"name": "a', b'", "price": 2.5}')
        headers = [("content-type", "application/json"), ("cf-connecting-ip", "1.2.3.4")]
        answer = json.loads(await worker.get("/items/7?limit=4", method="POST", body=body, headers=headers))
        assert answer == {
            "id": 7,
            "item": {"name": "a", "price": 2.5},
            "limit": 4,
            "message": "hi",
            "same": "hi",
            "pool": "connected",
            "starts": 1,
            "client": "1.2.3.4",
            "server": ["test", 80],
            "path": "/items/7",
        }
    response = await worker.open("/items/x", method="POST")
    assert response.status == 422


async def test_events_arrive_one_by_one(worker) -> None:
    await deploy(
        worker,
        """
        gates = [asyncio.Event(), asyncio.Event()]

        @app.get("/events")
        async def events():
            async def stream():
                for number, gate in enumerate(gates):
                    await gate.wait()
                    yield f"data: {number}\\n\\n"
            return StreamingResponse(stream(), media_type="text/event-stream")

        @app.get("/open/{n}")
        async def open(n: int):
            gates[n].set()
        """,
    )
    response = await worker.open("/events")
    assert response.status == 200, "the head is here before the first event"
    assert ("content-type", "text/event-stream; charset=utf-8") in response.headers
    for number in range(2):
        await worker.get(f"/open/{number}")
        assert await anext(response.body) == f"data: {number}\n\n".encode()
    assert [chunk async for chunk in response.body] == []


async def test_a_client_that_hangs_up_stops_the_stream(worker) -> None:
    await deploy(
        worker,
        """
        @app.get("/")
        async def endless():
            async def stream():
                try:
                    while True:
                        yield "x" * 1000
                        await asyncio.sleep(0.01)
                finally:
                    print("stopped")
            return StreamingResponse(stream())
        """,
    )
    response = await worker.open("/")
    await anext(response.body)
    await response.body.aclose()
    await worker.log_text("stopped")


async def test_an_upload_is_read_while_it_arrives(worker) -> None:
    await deploy(
        worker,
        """
        @app.post("/count")
        async def count(request: Request):
            async def stream():
                async for chunk in request.stream():
                    if chunk:
                        yield f"{len(chunk)} "
            return StreamingResponse(stream())

        @app.post("/form")
        async def form(file: UploadFile):
            return {"name": file.filename, "size": len(await file.read())}
        """,
    )
    gate = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"
        await gate.wait()
        yield b"de"

    response = await worker.open("/count", method="POST", body=body())
    assert await anext(response.body) == b"3 "
    gate.set()
    assert await anext(response.body) == b"2 "
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhello\r\n--b--\r\n'
    headers = [("content-type", "multipart/form-data; boundary=b"), ("content-length", str(len(form)))]
    answer = await worker.get("/form", method="POST", body=pieces(form[:40], form[40:]), headers=headers)
    assert json.loads(answer) == {"name": "a.txt", "size": 5}


async def test_background_tasks_run_after_the_response(worker) -> None:
    await deploy(
        worker,
        """
        released = asyncio.Event()

        async def work():
            await released.wait()
            print("background work", len(starts))

        @app.get("/")
        async def start(tasks: BackgroundTasks):
            tasks.add_task(work)
            return "answered"

        @app.get("/release")
        def release():
            released.set()
        """,
    )
    assert await worker.get("/") == '"answered"'
    assert not any("background" in entry[2] for entry in worker.logs)
    await worker.get("/release")
    invocation, _, text = await worker.log_text("background")
    assert text == "background work 1"
    assert invocation != 0, "it belongs to the request that started it"


async def test_sync_endpoints_can_wait_for_bindings(worker) -> None:
    await deploy(
        worker,
        """
        from pyodide.ffi import run_sync

        @app.get("/{how}")
        def ask(how: str, env=asgi.env):
            return run_sync(env.AI.run("m", {"prompt": how}))[1]

        @app.get("/async/x")
        async def ask_async(env=asgi.env):
            return run_sync(env.AI.run("m", {"prompt": "async"}))[1]
        """,
    )
    assert await worker.get("/thread") == '{"prompt":"thread"}'
    assert await worker.get("/async/x") == '{"prompt":"async"}'


async def test_errors(worker) -> None:
    await deploy(
        worker,
        """
        async def bare(scope, receive, send):
            match scope["path"]:
                case "/early":
                    raise ValueError("before")
                case "/none":
                    return
                case "/late":
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    await send({"type": "http.response.body", "body": b"some", "more_body": True})
                    raise ValueError("after")
                case "/wrong":
                    await send({"type": "http.response.body", "body": b"some"})
                case "/204":
                    await send({"type": "http.response.start", "status": 204, "headers": [(b"x-a", b"1")]})
                    await send({"type": "http.response.body", "body": b""})

        app = bare
        """,
    )
    with pytest.raises(HandlerFailed, match="before"):
        await worker.get("/early")
    with pytest.raises(HandlerFailed, match="The application did not generate a response"):
        await worker.get("/none")
    with pytest.raises(HandlerFailed, match=r"unexpected ASGI message 'http.response.body'"):
        await worker.get("/wrong")
    with pytest.raises(HandlerFailed, match="broke off"):
        await worker.get("/late")
    _, level, _ = await worker.log_text("after its response had begun")
    assert level == "error"
    assert (await worker.log_text("ValueError: after"))[1] == "error"
    empty = await worker.open("/204")
    assert (empty.status, empty.headers, empty.body) == (204, [("x-a", "1")], None)


async def test_a_failed_startup_is_tried_again(worker) -> None:
    await deploy(
        worker,
        """
        @asynccontextmanager
        async def lifespan(app):
            starts.append(1)
            if len(starts) == 1:
                raise RuntimeError("no database")
            yield

        app = FastAPI(lifespan=lifespan)

        @app.get("/")
        def count():
            return len(starts)
        """,
    )
    with pytest.raises(HandlerFailed, match=r"(?s)startup failed.*no database"):
        await worker.get("/")
    assert await worker.get("/") == "2"
    assert await worker.get("/") == "2"


async def test_the_lifespan_starts_once_for_requests_at_the_same_time(worker) -> None:
    await deploy(
        worker,
        """
        @asynccontextmanager
        async def lifespan(app):
            starts.append(1)
            await asyncio.sleep(0.05)
            yield

        app = FastAPI(lifespan=lifespan)

        @app.get("/")
        def count():
            return len(starts)
        """,
    )
    assert await asyncio.gather(*[worker.get("/") for _ in range(5)]) == ["1"] * 5


async def test_one_line_is_an_entrypoint(worker) -> None:
    await worker.deploy(
        """
        from starlette.applications import Starlette
        from starlette.responses import PlainTextResponse
        from starlette.routing import Route
        from workers import asgi

        async def hello(request):
            return PlainTextResponse(request.query_params["name"])

        Default = asgi.entrypoint(Starlette(routes=[Route("/", hello)]))
        """,
        indented=False,
    )
    assert await worker.get("/?name=%C3%A4") == "ä"


async def test_the_shutdown_runs_when_a_process_is_not_needed_any_more(worker, monkeypatch) -> None:
    endings = []
    describe = isolate._describe_exit
    monkeypatch.setattr(isolate, "_describe_exit", lambda exit_code: endings.append(describe(exit_code)) or endings[-1])
    await deploy(
        worker,
        """
        import os

        @asynccontextmanager
        async def lifespan(app):
            yield
            os._exit(7)  # what a process does at its end is not logged any more, but its status is seen

        app = FastAPI(lifespan=lifespan)
        """,
    )
    assert (await worker.open("/")).status == 404
    await worker.deploy("async def fetch(self, request): return Response('newer')")
    await until(lambda: endings)
    assert endings == ["it exited with status 7"]
