"""HTTP over a real socket, through uvicorn and the ingress, to a real handler process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from edge.errors import HandlerFailed
from edge.isolates.base import Bundle
from edge.isolates.dispatch import Isolates
from edge.node.access import Access, AccessLogged
from edge.node.ingress import Ingress
from edge.node.translation import checked_headers

HANG_S = 30
WORKER = """
import asyncio
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        match request.url.split("/", 3)[3].partition("?")[0]:
            case "echo":
                body = await request.text()
                seen = {"method": request.method, "url": request.url, "body": body, "x": request.headers.get_all("x-a")}
                return Response.json(seen, headers={"x-seen": "yes"})
            case "upload":
                return Response(self.upper(request), headers={"content-type": "text/plain"})
            case "cookies":
                return Response("", headers=[("set-cookie", "a=1"), ("set-cookie", "b=2"), ("connection", "close")])
            case "empty":
                return Response(None, status=204)
            case "redirect":
                return Response.redirect("http://example.com/")
            case "raise":
                raise ValueError("<b>secret</b>")
            case "break":
                return Response(self.breaks())
            case "forever":
                return Response(self.forever())
            case "slow":
                print("slow began")
                try:
                    await asyncio.sleep(600)
                finally:
                    print("slow was cancelled")

    async def upper(self, request):
        async for chunk in request.body:
            yield chunk.to_bytes().upper()

    async def breaks(self):
        yield b"some"
        raise RuntimeError("half-way")

    async def forever(self):
        try:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0.01)
        finally:
            print("forever was cancelled")
"""


class Site:
    """A served worker: its URL, and what it and the ingress have logged."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.printed: list[str] = []
        self.errors: list[str] = []
        self.accesses: list[Access] = []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=HANG_S)

    async def wait_printed(self, text: str) -> None:
        async with asyncio.timeout(HANG_S):
            while text not in self.printed:  # noqa: ASYNC110 - the handler prints when it likes
                await asyncio.sleep(0.01)


async def connect(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = site.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


class NoBindings:
    async def ai_run(self, *args: Any) -> Any:
        raise AssertionError("no model is called here")


@contextlib.asynccontextmanager
async def served(folder: Path, *, show_tracebacks: bool) -> AsyncIterator[Site]:
    (folder / "main.py").write_text(WORKER)
    listener = socket.create_server(("127.0.0.1", 0))
    site = Site(f"http://127.0.0.1:{listener.getsockname()[1]}")
    isolates = Isolates(NoBindings(), lambda _bundle, _id, _level, text: site.printed.append(text))
    ingress = Ingress(
        isolates,
        lambda _: ("dev", "site"),
        show_tracebacks=show_tracebacks,
        error_log=site.errors.append,
    )
    app = AccessLogged(ingress, site.accesses.append)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    try:
        await isolates.start()
        await isolates.deploy(Bundle("site", "v1", str(folder), "main.py"))
        serving = asyncio.create_task(server.serve([listener]))
        yield site
        server.should_exit = True
        await serving
    finally:
        await isolates.close()
        listener.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with served(tmp_path, show_tracebacks=True) as site:
        yield site


async def test_a_request_arrives_as_it_was_sent(site: Site) -> None:
    async with site.client() as client:
        headers = [("x-a", "1"), ("x-a", "2")]
        response = await client.put("/echo?q=%20a&q=b", content=b"hi", headers=headers)
    assert response.json() == {"method": "PUT", "url": f"{site.url}/echo?q=%20a&q=b", "body": "hi", "x": ["1, 2"]}
    assert response.headers["x-seen"] == "yes"
    assert response.headers["content-type"] == "application/json"
    (access,) = site.accesses
    assert (access.method, access.path, access.status, access.is_complete) == ("PUT", "/echo", 200, True)


async def test_bodies_stream_both_ways(site: Site) -> None:
    reader, writer = await connect(site)
    writer.write(b"POST /upload HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
    async with asyncio.timeout(HANG_S):
        await reader.readuntil(b"\r\n3\r\nONE\r\n")  # before the second part is sent
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\nTWO\r\n0\r\n\r\n"
    writer.close()
    await writer.wait_closed()


async def test_headers_that_belong_to_the_connection_are_ours(site: Site) -> None:
    async with site.client() as client:
        response = await client.get("/cookies")
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "connection" not in response.headers


async def test_responses_without_a_body(site: Site) -> None:
    async with site.client() as client:
        assert (await client.get("/empty")).status_code == 204
        redirect = await client.get("/redirect")
        assert (redirect.status_code, redirect.headers["content-length"]) == (302, "0")
        head = await client.head("/echo")
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.get("/echo")).json()["method"] == "GET", "the connection is still in step"


async def test_the_developer_sees_the_traceback(site: Site) -> None:
    async with site.client() as client:
        plain = await client.get("/raise")
        page = await client.get("/raise", headers={"accept": "text/html,*/*"})
    assert plain.status_code == page.status_code == 500
    assert 'raise ValueError("<b>secret</b>")' in plain.text
    assert "<h1>ValueError: &lt;b&gt;secret&lt;/b&gt;</h1>" in page.text
    assert "<b>" not in page.text


async def test_a_visitor_sees_an_id_that_the_log_explains(tmp_path: Path) -> None:
    async with served(tmp_path, show_tracebacks=False) as site, site.client() as client:
        plain = await client.get("/raise")
        page = await client.get("/raise", headers={"accept": "text/html"})
    for answer in (plain, page):
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.headers["x-edge-error-id"] in answer.text
    (first, _second) = site.errors
    assert plain.headers["x-edge-error-id"] in first
    assert "ValueError: <b>secret</b>" in first


async def test_a_body_that_breaks_off_does_not_look_complete(site: Site) -> None:
    async with site.client() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/break")
    assert any("cut short" in line and "half-way" in line for line in site.errors)
    assert [(access.status, access.is_complete) for access in site.accesses] == [(200, False)]


@pytest.mark.parametrize("path", ["/forever", "/slow"])
async def test_a_client_that_hangs_up_cancels_the_handler(site: Site, path: str) -> None:
    reader, writer = await connect(site)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
    if path == "/forever":
        assert await reader.read(10)
    else:
        await site.wait_printed("slow began")
    writer.close()
    await writer.wait_closed()
    await site.wait_printed(f"{path[1:]} was cancelled")
    (access,) = site.accesses
    assert (access.path, access.is_complete) == (path, False)
    assert access.status == (200 if path == "/forever" else None)


@pytest.mark.parametrize(
    ("status", "header"),
    [
        (99, ("a", "b")),
        (600, ("a", "b")),
        (200, ("a\r\nset-cookie", "b")),
        (200, ("a", "b\r\nset-cookie: c")),
        (200, ("a", "b\0")),
        (200, ("", "b")),
        (200, ("a b", "c")),
    ],
)
def test_an_isolate_cannot_break_out_of_its_response(status: int, header: tuple[str, str]) -> None:
    with pytest.raises(HandlerFailed):
        checked_headers(status, [header])
