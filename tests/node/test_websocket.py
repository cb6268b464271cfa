"""WebSockets over real sockets, through uvicorn and the ingress, to a real handler process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from zygotes import shared_spawner

from edge.config import IsolatesConfig, LimitsConfig
from edge.isolates.base import Bundle
from edge.isolates.dispatch import Isolates
from edge.node.ingress import Ingress
from edge.node.protocol import LimitedHttp
from workers._websocket import MAX_MESSAGE_BYTES

HANG_S = 30
WORKER = """
import asyncio, asgi, js
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from workers import Response, WorkerEntrypoint

app = FastAPI()

@app.websocket("/asgi/echo")
async def echo(socket: WebSocket):
    await socket.accept(subprotocol="chat" if "chat" in socket.scope["subprotocols"] else None)
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                print("disconnect", message["code"])
                return
            await (socket.send_text(message["text"]) if message.get("text") is not None
                   else socket.send_bytes(message["bytes"]))
    finally:
        print("left")

@app.websocket("/asgi/refuse")
async def refuse(socket: WebSocket):
    await socket.close()

@app.websocket("/asgi/flood")
async def flood(socket: WebSocket):
    await socket.accept()
    try:
        while True:
            await socket.send_bytes(b"x" * 100_000)
    except (OSError, WebSocketDisconnect):
        print("flood is over")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.split("/", 3)[3]
        if path.startswith("asgi"):
            return await asgi.fetch(app, request, self.env)
        if path == "denied":
            return Response("not you", status=401, headers={"x-why": "no token"})
        if path == "raise":
            raise ValueError("no socket")
        if path == "plain":
            client, server = js.WebSocketPair.new().object_values()
            return Response(None, status=101, web_socket=client)
        client, server = js.WebSocketPair.new().object_values()
        server.accept()

        async def on_message(event):
            if event.data == "close":
                server.close(3000, "as you wish")
            elif event.data == "die":
                import os
                os._exit(3)
            else:
                server.send(f"{type(event.data).__name__}: {len(event.data)}")

        server.addEventListener("message", on_message)
        server.addEventListener("close", lambda event: print("closed", event.code, event.reason, event.wasClean))
        server.send(f"welcome {request.method} {request.headers.get('upgrade')}")
        return Response(None, status=101, web_socket=client, headers={"x-greeting": "hello"})
"""


class Site:
    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.printed: list[str] = []
        self.errors: list[str] = []

    def connect(self, path: str, **options) -> connect:
        return connect(f"ws://{self.address}/{path}", open_timeout=HANG_S, max_size=None, **options)

    async def wait_printed(self, text: str) -> None:
        async with asyncio.timeout(HANG_S):
            while text not in self.printed:  # noqa: ASYNC110 - the handler prints when it likes
                await asyncio.sleep(0.01)


@pytest.fixture
async def site(tmp_path: Path, shared_zygotes: None) -> AsyncIterator[Site]:
    (tmp_path / "main.py").write_text(WORKER)
    listener = socket.create_server(("127.0.0.1", 0))
    site = Site(listener.getsockname()[1])
    isolates = Isolates(
        object(), lambda _bundle, _id, _level, text: site.printed.append(text), spawner=shared_spawner()
    )
    ingress = Ingress(isolates, lambda _: ("dev", "site"), show_tracebacks=True, error_log=site.errors.append)
    config = uvicorn.Config(
        ingress,
        lifespan="off",
        log_config=None,
        http=LimitedHttp,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    try:
        await isolates.start()
        await isolates.deploy(Bundle("site", "v1", str(tmp_path), "main.py"))
        serving = asyncio.create_task(server.serve([listener]))
        yield site
        server.should_exit = True
        await serving
    finally:
        await isolates.close()
        listener.close()


async def test_a_pair_and_its_listeners(site: Site) -> None:
    async with site.connect("pair") as client:
        assert client.response.headers["x-greeting"] == "hello"
        assert await client.recv() == "welcome GET websocket"
        await client.send("héllo")
        assert await client.recv() == "str: 5"
        await client.send(b"\x00\x01")
        assert await client.recv() == "JsBytes: 2"
        await client.close(4001, "bye")
    await site.wait_printed("closed 4001 bye True")


async def test_the_worker_closes(site: Site) -> None:
    async with site.connect("pair") as client:
        await client.recv()
        await client.send("close")
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert (client.close_code, client.close_reason) == (3000, "as you wish")
    await site.wait_printed("closed 3000 as you wish True")


async def test_fastapi_echoes(site: Site) -> None:
    async with site.connect("asgi/echo", subprotocols=["other", "chat"]) as client:
        assert client.subprotocol == "chat"
        for message in ("text", b"bytes", "", "x" * 500_000, b"y" * MAX_MESSAGE_BYTES):
            await client.send(message)
            assert await client.recv() == message
        await asyncio.gather(*[client.send(str(n)) for n in range(200)])
        assert [await client.recv() for _ in range(200)] == [str(n) for n in range(200)]
    await site.wait_printed("disconnect 1000")
    await site.wait_printed("left")


async def test_open_sockets_take_no_request_its_place(site: Site) -> None:
    num_slots = LimitsConfig().concurrency * IsolatesConfig().max_per_worker
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(num_slots + 2):
            client = await stack.enter_async_context(site.connect("pair"))
            await client.recv()
        async with httpx.AsyncClient(timeout=HANG_S) as http:
            assert (await http.get(f"http://{site.address}/denied")).status_code == 401


async def test_a_client_that_vanishes(site: Site) -> None:
    client = await site.connect("pair")
    await client.recv()
    client.transport.abort()
    await site.wait_printed("closed 1005  True")


@pytest.mark.parametrize(
    ("path", "status", "text"), [("denied", 401, b"not you"), ("asgi/refuse", 403, b""), ("raise", 500, b"no socket")]
)
async def test_refusals_are_http_responses(site: Site, path: str, status: int, text: bytes) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await site.connect(path)
    assert caught.value.response.status_code == status
    assert text in caught.value.response.body
    if path == "denied":
        assert caught.value.response.headers["x-why"] == "no token"


async def test_a_message_over_the_limit_closes_with_1009(site: Site) -> None:
    async with site.connect("asgi/echo") as client:
        await client.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1009
    await site.wait_printed("left")


async def test_a_client_that_does_not_read_stops_the_sender(site: Site) -> None:
    client = await site.connect("asgi/flood", max_queue=1)
    await client.recv()
    await asyncio.sleep(0.3)  # long enough to send far more than the buffers on the way hold
    client.transport.abort()
    await site.wait_printed("flood is over")


async def test_a_process_that_dies_closes_with_1011(site: Site) -> None:
    async with site.connect("pair") as client:
        await client.recv()
        await client.send("die")
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1011
    assert any("WebSocket /pair was cut short" in line for line in site.errors)
    async with site.connect("pair") as client:
        assert await client.recv() == "welcome GET websocket"


async def test_a_plain_request_cannot_be_answered_with_a_websocket(site: Site) -> None:
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    writer.write(b"GET /plain HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(HANG_S):
        assert b"is the answer to WebSocket requests only" in await reader.readuntil(b"none")
    writer.close()
    await writer.wait_closed()
