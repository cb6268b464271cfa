"""The limits of the protocol, over real sockets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from edge.node.protocol import MAX_HEAD_BYTES, LimitedHttp

HANG_S = 30
HELLO = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
UPLOAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    if scope["path"] in ("/stream", "/nothing"):
        is_stream = scope["path"] == "/stream"
        await send({"type": "http.response.start", "status": 200 if is_stream else 204})
        for number in range(3 if is_stream else 0):
            await send({"type": "http.response.body", "body": b"%d." % number, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
        return
    answer = f"{len(body)} bytes".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[Callable[..., Awaitable[bytes]]]:
    """A function that sends bytes and returns what comes back until `until` is in it or the server hangs up."""
    server = uvicorn.Server(uvicorn.Config(echo, port=0, lifespan="off", log_config=None, http=LimitedHttp, **options))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()[:2])

    async def exchange(*parts: bytes, until: bytes = b"\0") -> bytes:
        got = b""
        async with asyncio.timeout(HANG_S):
            for part in parts:
                try:
                    writer.write(part)
                    await writer.drain()
                except ConnectionError:
                    break
            try:
                while until not in got and (data := await reader.read(1 << 16)):
                    got += data
            except ConnectionError:
                pass
        return got

    try:
        yield exchange
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def test_a_head_that_never_ends_is_refused() -> None:
    for start in (b"GET / HTTP/1.1\r\nx: ", b"GET /"):
        async with connected() as exchange:
            got = await exchange(start, *[b"a" * 10_000] * 100)
            assert got.startswith(b"HTTP/1.1 431 ")
            assert got.endswith(b"The request's head is over the limit of 65536 bytes.")


async def test_a_client_that_goes_on_sending_gets_to_read_why_it_is_refused() -> None:
    async with connected() as exchange:
        got = await exchange(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (4 << 20))
        assert got.startswith(b"HTTP/1.1 431 ")
        assert got.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: [::1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a:b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: \xff\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"not http\r\n\r\n",
    ],
)
async def test_a_request_without_a_valid_host_is_refused_once(head: bytes) -> None:
    async with connected() as exchange:
        got = await exchange(head + HELLO)
        assert got.startswith(b"HTTP/1.1 400 ")
        assert got.count(b"HTTP/1.1 ") == 1 + got.count(b"request of HTTP/1.1 ")


async def test_hosts_of_all_kinds_are_served() -> None:
    for host in (b"x", b"x:80", b"[::1]", b"[::1]:8787", b"127.0.0.1:1", b"a_b-c.example", b""):
        async with connected() as exchange:
            got = await exchange(HELLO.replace(b"host: x", b"host: " + host), until=b"bytes")
            assert got.startswith(b"HTTP/1.1 200 "), host
    async with connected() as exchange:
        assert (await exchange(b"GET / HTTP/1.0\r\n\r\n", until=b"bytes")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("flood", [b"x-trailer: y\r\n", b"a" * 1000])
async def test_what_follows_a_body_without_end_is_refused(flood: bytes) -> None:
    async with connected() as exchange:
        got = await exchange(UPLOAD + b"3\r\nabc\r\n0\r\n", *[flood * (10_000 // len(flood))] * 100)
        assert b" 200 " not in got


async def test_requests_within_the_limits_are_served_on_one_connection() -> None:
    async with connected() as exchange:
        for _ in range(3):
            assert (await exchange(HELLO, until=b"bytes")).endswith(b"0 bytes")
        large = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
        assert (await exchange(large[:9000], large[9000:], until=b"bytes")).endswith(b"0 bytes")
        body = [b"1000\r\n" + b"x" * 0x1000 + b"\r\n"] * 100
        got = await exchange(UPLOAD, *body, b"0\r\nx-trailer: y\r\n\r\n", until=b"bytes")
        assert got.endswith(f"{0x1000 * 100} bytes".encode())
        assert (await exchange(HELLO * 3, until=b"0 bytesHTTP")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("request_line", "body"),
    [
        ("GET /stream HTTP/1.0", b"0.1.2."),
        ("GET /nothing HTTP/1.0", b""),
        ("HEAD /stream HTTP/1.0", b""),
        ("GET / HTTP/1.0", b"0 bytes"),
    ],
)
async def test_http_1_0_gets_no_chunks(request_line: str, body: bytes) -> None:
    async with connected() as exchange:
        answer = await exchange(f"{request_line}\r\nhost: x\r\n\r\n".encode())
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert rest == body


async def test_http_1_1_gets_chunks() -> None:
    async with connected() as exchange:
        answer = await exchange(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n", until=b"0\r\n\r\n")
    assert b"transfer-encoding: chunked" in answer
    assert b"2\r\n0.\r\n2\r\n1.\r\n" in answer


@pytest.mark.parametrize("nonsense", [b"\0\0\r\n\r\n", b"GET / HTTP/1.1\r\nhost\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_nonsense_behind_a_request_does_not_take_its_answer(nonsense: bytes) -> None:
    async with connected() as exchange:
        answer = await exchange(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + nonsense)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\n\r\n0 bytesHTTP/1.1 400 " in answer


@pytest.mark.parametrize("size", [b"-1", b"FFFFFFFFFFFFFFFFFF", b"x"])
async def test_a_body_that_is_no_body_is_refused(size: bytes) -> None:
    async with connected() as exchange:
        answer = await exchange(UPLOAD, size + b"\r\nabc\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_star_is_a_path_of_options_alone() -> None:
    async with connected() as exchange:
        answer = await exchange(b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", b"GET * HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " in answer
    assert answer.endswith(b"is for OPTIONS alone.")


async def test_a_connection_without_a_head_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.node.protocol.HEAD_TIMEOUT_S", 0.2)
    for start in (b"", b"GET / HTTP/1.1\r\nhos"):
        async with connected() as exchange:
            assert await exchange(start) == b""
    async with connected() as exchange:
        slow = HELLO.replace(b" / ", b" /slow ")
        assert (await exchange(slow + b"GET / HTT", until=b"bytes")).endswith(b"0 bytes")
        assert (await exchange(b"P/1.1\r\nhost: x\r\n\r\n", until=b"bytes")).endswith(b"0 bytes")


@pytest.mark.parametrize("rest", [b"", b"x"])
async def test_a_short_body_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, rest: bytes) -> None:
    monkeypatch.setattr("edge.node.protocol.HEAD_TIMEOUT_S", 0.2)

    class Nothing:
        def start(self, *_: object) -> None:
            raise AssertionError("the body is not here")

    monkeypatch.setattr(LimitedHttp, "__init__", functools.partialmethod(LimitedHttp.__init__, direct=Nothing()))
    async with connected() as exchange:
        assert await exchange(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n" + rest) == b""


async def test_a_connection_that_stays_idle_is_closed_and_a_busy_one_is_not() -> None:
    async with connected(timeout_keep_alive=0.3) as exchange:
        for _ in range(3):
            assert (await exchange(HELLO.replace(b" / ", b" /slow "), until=b"bytes")).endswith(b"0 bytes")
            await asyncio.sleep(0.2)
        assert await exchange() == b""
