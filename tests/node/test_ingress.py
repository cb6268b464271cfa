"""HTTP over a real socket, through uvicorn and the ingress, to a real handler process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from zygotes import shared_spawner

from edge.errors import HandlerFailed
from edge.isolates.base import Bundle
from edge.isolates.dispatch import Isolates
from edge.node.access import Access, AccessLogged
from edge.node.direct import Direct
from edge.node.ingress import Ingress
from edge.node.protocol import LimitedHttp
from edge.node.translation import MAX_HEADER_BYTES, checked_headers

pytestmark = pytest.mark.usefixtures("shared_zygotes")

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
            case "length":
                return Response("hello", headers={"content-length": "3", "x-seen": "yes"})
            case "status":
                status = int(request.url.partition("?")[2])
                return Response(None, status, headers={"content-length": "9"})
            case "client":
                return Response(request.headers.get("cf-connecting-ip"))
            case "long":
                return Response("x" * 60_000)
            case "broken-head":
                return Response(self.forever(), headers={"x-long": "x" * 200_000})
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


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - others bring it about when they like
            await asyncio.sleep(0.01)


class Site:
    """A served worker: its URL, and what it and the ingress have logged."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.isolates: Isolates
        self.server: uvicorn.Server
        self.printed: list[str] = []
        self.errors: list[str] = []
        self.accesses: list[Access] = []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=HANG_S)

    async def wait_printed(self, text: str) -> None:
        await until(lambda: text in self.printed)


async def connect(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = site.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


class NoBindings:
    async def ai_run(self, *args: Any) -> Any:
        raise AssertionError("no model is called here")


@contextlib.asynccontextmanager
async def served(folder: Path, *, show_tracebacks: bool, direct: bool = True) -> AsyncIterator[Site]:
    """A site behind the node's own protocol; with `direct`, simple requests take the short way."""
    (folder / "main.py").write_text(WORKER)
    listener = socket.create_server(("127.0.0.1", 0))
    site = Site(f"http://127.0.0.1:{listener.getsockname()[1]}")
    isolates = Isolates(
        NoBindings(), lambda _bundle, _id, _level, text: site.printed.append(text), spawner=shared_spawner()
    )
    site.isolates = isolates
    ingress = Ingress(
        isolates,
        lambda _: ("dev", "site"),
        show_tracebacks=show_tracebacks,
        error_log=site.errors.append,
    )
    app = AccessLogged(ingress, site.accesses.append)
    short_way = Direct(isolates, lambda _: ("dev", "site"), ingress, site.accesses.append) if direct else None
    http = cast(Any, functools.partial(LimitedHttp, direct=short_way))
    config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    site.server = server = uvicorn.Server(config)
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


@pytest.fixture(params=["direct", "asgi"])
async def site(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async with served(tmp_path, show_tracebacks=True, direct=request.param == "direct") as site:
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


async def test_a_response_with_too_long_headers_is_an_error(site: Site) -> None:
    async with site.client() as client:
        answer = await client.get("/broken-head")
    assert answer.status_code == 500
    assert "at most 128 KiB can be sent" in answer.text


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


@pytest.mark.parametrize(
    "headers", [[("a", "x" * MAX_HEADER_BYTES)], [("set-cookie", "")] * (MAX_HEADER_BYTES // 14 + 1)]
)
def test_headers_are_limited_together(headers: list[tuple[str, str]]) -> None:
    assert len(checked_headers(200, [("a", "x" * (MAX_HEADER_BYTES - 5))])) == 1
    with pytest.raises(HandlerFailed, match="128 KiB can be sent"):
        checked_headers(200, headers)


def test_a_long_header_that_is_not_valid_is_not_shown_whole() -> None:
    with pytest.raises(HandlerFailed) as caught:
        checked_headers(200, [("a", "x" * 100_000 + "\n")])
    assert len(caught.value.message) < 300


async def exchange(site: Site, request: bytes, until: bytes, rest: bytes = b"") -> bytes:
    """What comes back on one connection until `until` is in it or the server hangs up."""
    reader, writer = await connect(site)
    writer.write(request)
    await writer.drain()
    if rest:
        async with site.client() as client:  # so that the server has seen the first part when the rest comes
            await client.get("/length")
        writer.write(rest)
    got = b""
    async with asyncio.timeout(HANG_S):
        while until not in got and (data := await reader.read(1 << 16)):
            got += data
    writer.close()
    return got


async def test_requests_that_come_at_once_are_answered_in_turn(site: Site) -> None:
    head = b" HTTP/1.1\r\nhost: x\r\n\r\n"
    requests = [b"GET /echo?1", b"GET /forever", b"GET /echo?2"]
    got = await exchange(site, b"".join(each + head for each in requests[:1] * 2 + requests[2:]), b"/echo?2")
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.index(b"echo?1") < got.rindex(b"echo?1") < got.index(b"echo?2")
    upload = b"POST /echo?3 HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"
    got = await exchange(site, requests[0] + head + upload + requests[2] + head, b"/echo?2")
    assert got.index(b"echo?1") < got.index(b"echo?3") < got.index(b"echo?2")


@pytest.mark.parametrize("size", [0, 2, 0xFFFF, 0x10000, 0x10001])
async def test_a_body_is_the_same_however_it_comes(site: Site, size: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
    body = b"x" * size
    for cut in (size, size // 2):
        got = await exchange(site, head + body[:cut], b"}", body[cut:])
        assert json.loads(got.partition(b"\r\n\r\n")[2])["body"] == body.decode()


async def test_a_client_that_never_sends_its_body_starts_nothing(site: Site) -> None:
    reader, writer = await connect(site)
    writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhi")
    await writer.drain()
    writer.close()
    async with site.client() as client:
        assert (await client.post("/echo", content=b"x")).json()["body"] == "x"
    del reader


async def test_answers_have_the_length_that_they_have(site: Site) -> None:
    async with site.client() as client:
        response = await client.get("/length")
        assert (response.text, response.headers["content-length"]) == ("hello", "5")
        head = await client.head("/length")
        assert (head.content, head.headers["x-seen"]) == (b"", "yes")
        assert (await client.get("/length")).text == "hello"


async def test_a_head_that_is_refused_stops_the_handler(site: Site) -> None:
    async with site.client() as client:
        response = await client.get("/broken-head")
        assert response.status_code == 500
        await site.wait_printed("forever was cancelled")
        assert (await client.get("/length")).text == "hello"


async def test_what_still_runs_at_the_end_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path, show_tracebacks=True) as site:
        running = asyncio.create_task(exchange(site, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n\r\n"))
        await site.wait_printed("slow began")
        await site.isolates.close()
        assert (await running).startswith(b"HTTP/1.1 50")


@pytest.mark.parametrize("status", [200, 204, 205, 304])
async def test_the_next_answer_on_the_connection_is_the_next_request_s(site: Site, status: int) -> None:
    head = b" HTTP/1.1\r\nhost: x\r\n\r\n"
    got = await exchange(site, b"GET /status?%d" % status + head + b"GET /length" + head, b"hello")
    first, second = got.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"%d " % status)
    assert first.endswith(b"\r\n\r\n")
    lengths = {200: b"0", 205: b"0"}
    assert [line[16:] for line in first.split(b"\r\n") if line.startswith(b"content-length: ")] == (
        [lengths[status]] if status in lengths else []
    )
    assert second.endswith(b"\r\n\r\nhello")


async def test_a_client_cannot_say_where_it_is(site: Site) -> None:
    async with site.client() as client:
        response = await client.get("/client", headers={"cf-connecting-ip": "1.2.3.4", "CF-Connecting-IP": "1.2.3.5"})
    assert response.text == "127.0.0.1"


async def test_a_client_that_reads_nothing_is_not_answered_for_ever(site: Site) -> None:
    reader, writer = await connect(site)
    num_sent = 0
    async with site.client() as client:
        while num_sent < 1000:
            writer.write(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
            num_sent += 50
            before = len(site.accesses)
            await client.get("/length")
            if num_sent > 500 and len(site.accesses) == before + 1:
                break
    assert len([access for access in site.accesses if access.path == "/long"]) < 500
    writer.close()
    del reader


async def test_connections_are_closed_when_the_server_ends(tmp_path: Path) -> None:
    async with served(tmp_path, show_tracebacks=True) as site:
        reader, writer = await connect(site)
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await site.wait_printed("slow began")
        site.server.should_exit = True
        await until(lambda: not site.server.servers[0].is_serving())  # by then it has told the connections
        await site.isolates.close()
        async with asyncio.timeout(2):  # less than the time for which an idle connection is kept
            got = await reader.read()
        assert b"\r\nconnection: close\r\n" in got
        writer.close()
