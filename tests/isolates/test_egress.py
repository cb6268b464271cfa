"""Handlers' `fetch` against a local HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from edge.errors import SubrequestFailed
from edge.isolates.egress import MAX_REDIRECTS, REPLAYABLE_BYTES, Egress

METHODS = ["GET", "POST", "PUT", "HEAD", "PROPFIND"]


async def echo(request: Request) -> Response:
    body = await request.body()
    headers = dict(request.headers)
    return JSONResponse({"method": request.method, "headers": headers, "body": body.decode(), "size": len(body)}, 201)


async def redirect(request: Request) -> Response:
    return RedirectResponse(request.query_params["to"], int(request.query_params.get("status", 302)))


async def loop(request: Request) -> Response:
    return RedirectResponse("/loop")


async def cookie(request: Request) -> Response:
    response = PlainTextResponse(request.headers.get("cookie", "no cookie"))
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    return response


async def zipped(request: Request) -> Response:
    return Response(gzip.compress(b"plain"), headers={"content-encoding": "gzip"})


class Endless:
    """A stream that knows how far its client let it get, and whether that client went away."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.closed = asyncio.Event()

    async def serve(self, request: Request) -> Response:
        return StreamingResponse(self._blocks())

    async def _blocks(self):
        try:
            while True:
                yield bytes(65536)
                self.num_sent += 65536
                await asyncio.sleep(0)  # uvicorn's send does not wait once the client is gone
        finally:
            self.closed.set()


async def broken(request: Request) -> Response:
    async def blocks():
        yield b"a"
        raise ConnectionResetError

    return StreamingResponse(blocks())


class Server:
    def __init__(self, url: str, endless: Endless) -> None:
        self.url = url
        self.endless = endless


@pytest.fixture
async def server():
    endless = Endless()
    app = Starlette(
        routes=[
            Route("/echo", echo, methods=METHODS),
            Route("/redirect", redirect, methods=METHODS),
            Route("/loop", loop),
            Route("/cookie", cookie),
            Route("/zipped", zipped),
            Route("/endless", endless.serve),
            Route("/broken", broken),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    running.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(running.serve([listener]))
    yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", endless)
    running.should_exit = True
    await task


@pytest.fixture
async def egress():
    egress = Egress()
    yield egress
    await egress.close()


async def read(answer) -> bytes:
    return b"".join([chunk async for chunk in answer.body])


# -- through a handler -------------------------------------------------------------------------------------


async def test_fetch_in_a_handler(worker, server):
    await worker.deploy(
        """
        async def fetch(self, request):
            from workers import Request, fetch
            url = self.env.URL
            first = await fetch(url + "/echo", method="POST", headers={"X-A": "1"}, body="hi")
            second = await fetch(Request(url + "/redirect?to=/echo"))
            third = await fetch(url + "/redirect?to=/echo", redirect="manual")
            return Response.json([
                [first.status, first.ok, first.redirected, first.url, await first.json()],
                [second.redirected, second.url],
                [third.status, third.headers["location"]],
            ])
        """,
        vars={"URL": server.url},
    )
    first, second, third = json.loads(await worker.get())
    assert first[:4] == [201, True, False, f"{server.url}/echo"]
    assert first[4]["method"] == "POST"
    assert first[4]["body"] == "hi"
    assert first[4]["headers"]["x-a"] == "1"
    assert first[4]["headers"]["content-length"] == "2"
    assert first[4]["headers"]["content-type"] == "text/plain;charset=UTF-8"
    assert second == [True, f"{server.url}/echo"]
    assert third == [302, "/echo"]


async def test_bodies_stream_in_both_directions(worker, server):
    await worker.deploy(
        """
        async def fetch(self, request):
            from workers import fetch
            async def blocks():
                for _ in range(100):
                    yield bytes(65536).replace(b"\\0", b"x")
            response = await fetch(self.env.URL + "/echo", method="PUT", body=blocks())
            return Response(str((await response.json()).size))
        """,
        vars={"URL": server.url},
    )
    assert await worker.get() == str(100 * 65536)


async def test_a_fetched_response_can_be_returned_and_hung_up_on(worker, server):
    await worker.deploy(
        """
        async def fetch(self, request):
            from workers import fetch
            return await fetch(self.env.URL + "/endless")
        """,
        vars={"URL": server.url},
    )
    response = await worker.open()
    await anext(response.body)
    await asyncio.sleep(0.3)
    assert server.endless.num_sent < 32 << 20  # kernel and HTTP buffers, but no more
    await response.body.aclose()
    await asyncio.wait_for(server.endless.closed.wait(), 10)


async def test_network_errors_are_oserrors(worker, server):
    await worker.deploy(
        """
        async def fetch(self, request):
            from workers import fetch
            found = []
            for url, options in (
                ("http://127.0.0.1:1/", {}),
                ("http://host.invalid/", {}),
                ("ftp://127.0.0.1/", {}),
                (self.env.URL + "/redirect?to=/echo", {"redirect": "error"}),
                (self.env.URL + "/redirect?to=ftp://127.0.0.1/", {}),
                (self.env.URL + "/redirect?to=/redirect%3Fto=/", {}),
            ):
                try:
                    found.append((await fetch(url, **options)).status)
                except OSError as error:
                    found.append(str(error))
            try:
                await (await fetch(self.env.URL + "/broken")).text()
            except OSError as error:
                found.append(str(error))
            return Response.json(found)
        """,
        vars={"URL": server.url},
    )
    refused, unknown, scheme, redirect_error, redirect_scheme, not_found, cut = json.loads(await worker.get())
    assert refused.startswith("fetch GET http://127.0.0.1:1/ failed: ")
    assert unknown.startswith("fetch GET http://host.invalid/ failed: ")
    assert scheme == "fetch ftp://127.0.0.1/ failed: only http:// and https:// URLs can be fetched"
    assert "the option redirect is 'error'" in redirect_error
    assert "protocol" in redirect_scheme
    assert not_found == 404
    assert f"fetch GET {server.url}/broken failed" in cut


# -- alone -------------------------------------------------------------------------------------------------


async def test_no_cookies_are_kept(egress, server):
    first, _ = await egress.fetch("GET", f"{server.url}/cookie", [], None, "follow")
    assert [value[:3] for name, value in first.headers if name == "set-cookie"] == ["a=1", "b=2"]
    await read(first)
    second, _ = await egress.fetch("GET", f"{server.url}/cookie", [], None, "follow")
    assert await read(second) == b"no cookie"


async def test_encoded_bodies_arrive_decoded(egress, server):
    answer, _ = await egress.fetch("GET", f"{server.url}/zipped", [], None, "follow")
    assert await read(answer) == b"plain"
    assert {"content-encoding", "content-length"}.isdisjoint(name for name, _ in answer.headers)


async def test_other_methods_and_what_is_not_sent(egress, server):
    headers = [
        ("Host", "evil.example"),
        ("Connection", "close"),
        ("Transfer-Encoding", "chunked"),
        ("User-Agent", "mine"),
    ]
    answer, _ = await egress.fetch("PROPFIND", f"{server.url}/echo", headers, None, "follow")
    seen = json.loads(await read(answer))
    assert (seen["method"], seen["headers"]["host"]) == ("PROPFIND", server.url.removeprefix("http://"))
    assert seen["headers"]["user-agent"] == "mine"
    assert "transfer-encoding" not in seen["headers"]


async def blocks(*data: bytes):
    for block in data:
        yield block


async def test_small_bodies_are_sent_again_after_a_redirect(egress, server):
    url = f"{server.url}/redirect?status=307&to=/echo"
    answer, _ = await egress.fetch("POST", url, [("content-length", "2")], blocks(b"a", b"b"), "follow")
    assert json.loads(await read(answer))["body"] == "ab"
    with pytest.raises(SubrequestFailed, match="asks for the body again, which was a stream"):
        await egress.fetch("POST", url, [], blocks(b"a", b"b"), "follow")


async def test_bodies_longer_than_they_say(egress, server):
    with pytest.raises(SubrequestFailed, match="longer than its content-length"):
        await egress.fetch("POST", f"{server.url}/echo", [("content-length", "1")], blocks(b"ab"), "follow")
    size = REPLAYABLE_BYTES + 1
    for body, message in ((blocks(bytes(size), b"x"), "is longer than"), (blocks(b"x"), "has 1 bytes, but")):
        with pytest.raises(SubrequestFailed, match=message):
            await egress.fetch("POST", f"{server.url}/echo", [("content-length", str(size))], body, "follow")


async def test_redirects_end(egress, server):
    with pytest.raises(SubrequestFailed, match=f"more than {MAX_REDIRECTS} redirects"):
        await egress.fetch("GET", f"{server.url}/loop", [], None, "follow")


@pytest.mark.parametrize("url", ["", "nope", "http://", "http://a b/", "file:///etc/passwd", "http://[::1"])
async def test_urls_that_are_none(egress, url):
    with pytest.raises(SubrequestFailed, match="failed"):
        await egress.fetch("GET", url, [], None, "follow")
