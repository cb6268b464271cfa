"""Handlers' `fetch` against a local HTTP server."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import zlib

import pytest
from local_server import make_certificate, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from edge.config import EgressConfig
from edge.errors import SubrequestFailed
from edge.isolates.base import Bundle
from edge.isolates.egress import MAX_REDIRECTS, REPLAYABLE_BYTES, Egress

LOCAL = EgressConfig(allow=["*", "127.0.0.1"])

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


async def encoded(request: Request) -> Response:
    """The body of the request, under the encoding that the query names."""
    return Response(await request.body(), headers={"content-encoding": request.query_params["as"]})


async def silent(request: Request) -> Response:
    await asyncio.sleep(3600)
    return Response()


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
        self.port = int(url.rpartition(":")[2])
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
            Route("/encoded", encoded, methods=METHODS),
            Route("/silent", silent),
            Route("/endless", endless.serve),
            Route("/broken", broken),
        ]
    )
    async with serving(app) as url:
        yield Server(url, endless)


class Client:
    """Egress for one worker; names have the addresses in `names`, or those that the system knows."""

    def __init__(self, rules: EgressConfig) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.egress = Egress(self._resolve)
        self.use(rules)

    def use(self, rules: EgressConfig) -> None:
        self.bundle = Bundle("test", "v1", "/", "main.py", egress=rules)

    async def fetch(self, method, url, headers, body, redirect):
        return await self.egress.fetch(self.bundle, method, url, headers, body, redirect)

    async def get(self, url: str, headers=()) -> bytes:
        answer, _ = await self.fetch("GET", url, list(headers), None, "follow")
        return await read(answer)

    async def _resolve(self, host: str, port: int):
        self.asked.append(host)
        if host in self.names:
            return [ipaddress.ip_address(each) for each in self.names[host]]
        return await self.egress._look_up(host, port)


@pytest.fixture
async def egress():
    client = Client(LOCAL)
    yield client
    await client.egress.close()


@pytest.fixture
def worker(worker):
    worker.egress = LOCAL
    return worker


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
    assert scheme == "fetch GET ftp://127.0.0.1/ failed: only http:// and https:// URLs can be fetched"
    assert "the option redirect is 'error'" in redirect_error
    assert "only http:// and https:// URLs" in redirect_scheme
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


async def test_only_so_many_bodies_are_held_at_once(egress, server, monkeypatch):
    monkeypatch.setattr("edge.isolates.egress.MAX_HELD_BYTES", 2)
    url = f"{server.url}/redirect?status=307&to=/echo"
    may_end = asyncio.Event()

    async def slow():
        yield b"a"
        await may_end.wait()
        yield b"b"

    held = asyncio.ensure_future(egress.fetch("POST", url, [("content-length", "2")], slow(), "follow"))
    await asyncio.sleep(0)
    with pytest.raises(SubrequestFailed, match="asks for the body again, which was a stream"):
        await egress.fetch("POST", url, [("content-length", "1")], blocks(b"x"), "follow")
    may_end.set()
    assert json.loads(await read((await held)[0]))["body"] == "ab"
    answer, _ = await egress.fetch("POST", url, [("content-length", "1")], blocks(b"x"), "follow")
    assert json.loads(await read(answer))["body"] == "x"


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


@pytest.mark.parametrize("method", ["CONNECT", "trace", "TRACK"])
async def test_methods_that_fetch_may_not_use(egress, server, method):
    with pytest.raises(SubrequestFailed, match=f"the method {method.upper()} cannot be fetched"):
        await egress.fetch(method, f"{server.url}/echo", [], None, "follow")


# -- where requests may go ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "localhost", "[::1]", "[::ffff:127.0.0.1]"],
)
async def test_loopback_is_closed_unless_listed(egress, server, host):
    egress.use(EgressConfig())
    url = f"http://{host}:{server.port}/echo"
    with pytest.raises(SubrequestFailed, match="reach those only where they are listed") as failure:
        await egress.get(url)
    assert f'{server.port}"]' in failure.value.message


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.1", "100.64.0.1", "fd00::1", "64:ff9b::a00:1"])
async def test_names_of_private_addresses(egress, address):
    egress.use(EgressConfig())
    egress.names["innocent.example"] = [address]
    with pytest.raises(SubrequestFailed, match="listed") as failure:
        await egress.get("http://innocent.example/")
    assert f"innocent.example is {address}, a" in failure.value.message
    assert '[egress] allow = ["*", "innocent.example:80"]' in failure.value.message


async def test_a_listed_name_reaches_its_private_address_and_is_looked_up_once(egress, server):
    egress.use(EgressConfig(allow=[f"api.example:{server.port}"]))
    egress.names["api.example"] = ["127.0.0.1"]
    seen = json.loads(await egress.get(f"http://api.example:{server.port}/echo"))
    assert seen["headers"]["host"] == f"api.example:{server.port}"
    assert egress.asked == ["api.example"]


async def test_only_permitted_ones_of_several_addresses_are_used(egress, server):
    egress.names["both.example"] = ["169.254.169.254", "127.0.0.1"]
    assert b"GET" in await egress.get(f"http://both.example:{server.port}/echo")


async def test_addresses_that_do_not_answer_are_passed_over(egress, server):
    egress.use(EgressConfig(allow=["127.0.0.0/8"]))
    egress.names["both.example"] = ["127.0.0.2", "127.0.0.1"]  # nobody listens at the first
    assert b"GET" in await egress.get(f"http://both.example:{server.port}/echo")


async def test_redirects_are_checked(egress, server):
    egress.use(EgressConfig(allow=[f"127.0.0.1:{server.port}"]))
    egress.names["evil.example"] = ["93.184.215.14"]
    for target in ("http://169.254.169.254/latest", "http://evil.example/", f"http://localhost:{server.port + 1}/"):
        with pytest.raises(SubrequestFailed, match=r"no entry of egress\.allow permits"):
            await egress.get(f"{server.url}/redirect?to={target}")
    egress.use(EgressConfig(allow=["*", f"127.0.0.1:{server.port}"]))
    with pytest.raises(SubrequestFailed, match=r"169\.254\.169\.254 is a link-local address"):
        await egress.get(f"{server.url}/redirect?to=http://169.254.169.254/latest")


async def test_names_that_no_rule_permits_are_not_looked_up(egress):
    egress.use(EgressConfig(allow=["*.example.com"], deny=["secret.example.com"]))
    for host in ("leak.evil.example", "secret.example.com", "example.com"):
        with pytest.raises(SubrequestFailed, match=r"egress\."):
            await egress.get(f"http://{host}/")
    assert egress.asked == []


async def test_proxies_and_netrc_of_the_node_are_not_used(egress, server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert "authorization" not in json.loads(await egress.get(f"{server.url}/echo"))["headers"]


async def test_workers_are_counted_apart(egress, server):
    other = Bundle("other", "v1", "/", "main.py", egress=LOCAL)
    await egress.get(f"{server.url}/echo")
    traffic = egress.egress.traffic(egress.bundle.key)
    assert traffic.sent_bytes > 20
    assert traffic.received_bytes > 100
    assert egress.egress.traffic(other.key).sent_bytes == 0
    await egress.egress.forget(egress.bundle.key)
    assert egress.egress.traffic(egress.bundle.key).sent_bytes == 0


async def test_connections_under_old_rules_are_closed_when_nothing_uses_them(egress, server):
    await egress.get(f"{server.url}/echo")
    endless, _ = await egress.fetch("GET", f"{server.url}/endless", [], None, "follow")
    egress.use(EgressConfig(allow=["127.0.0.0/8"]))
    await egress.get(f"{server.url}/echo")
    assert len(egress.egress._clients) == 2
    await endless.body.aclose()
    egress.use(EgressConfig(allow=["127.0.0.0/16"]))
    await egress.get(f"{server.url}/echo")
    assert len(egress.egress._clients) == 1


# -- redirects ---------------------------------------------------------------------------------------------


async def test_credentials_do_not_follow_to_another_origin(egress, server):
    egress.use(EgressConfig(allow=["*.test", "one.test", "two.test"]))
    egress.names |= {"one.test": ["127.0.0.1"], "two.test": ["127.0.0.1"]}
    headers = [("Authorization", "Bearer x"), ("Cookie", "a=1"), ("X-Mine", "1")]
    one, two = (f"http://{name}.test:{server.port}" for name in ("one", "two"))
    same = json.loads(await egress.get(f"{one}/redirect?to={one}/echo", headers))["headers"]
    assert (same["authorization"], same["cookie"], same["x-mine"]) == ("Bearer x", "a=1", "1")
    other = json.loads(await egress.get(f"{one}/redirect?to={two}/echo", headers))["headers"]
    assert (other.get("authorization"), other.get("cookie"), other["x-mine"]) == (None, None, "1")
    assert other["host"] == f"two.test:{server.port}"


@pytest.mark.parametrize(
    ("status", "method", "becomes"),
    [
        *(
            (301, "POST", "GET"),
            (302, "POST", "GET"),
            (303, "POST", "GET"),
            (307, "POST", "POST"),
            (308, "POST", "POST"),
        ),
        *((301, "PUT", "PUT"), (302, "PUT", "PUT"), (303, "PUT", "GET"), (303, "GET", "GET")),
    ],
)
async def test_methods_after_redirects(egress, server, status, method, becomes):
    headers = [("content-length", "2"), ("content-type", "text/x")]
    url = f"{server.url}/redirect?status={status}&to=/echo"
    answer, final_url = await egress.fetch(method, url, headers, blocks(b"hi"), "follow")
    seen = json.loads(await read(answer))
    assert (final_url, seen["method"]) == (f"{server.url}/echo", becomes)
    is_dropped = becomes != method
    assert (seen["body"], "content-type" in seen["headers"]) == ("" if is_dropped else "hi", not is_dropped)


async def test_a_redirect_that_leads_nowhere_is_returned_when_asked_for(egress, server):
    answer, _ = await egress.fetch("GET", f"{server.url}/redirect?to=http://[", [], None, "manual")
    assert answer.status == 302
    await answer.body.aclose()
    with pytest.raises(SubrequestFailed):
        await egress.fetch("GET", f"{server.url}/redirect?to=http://[", [], None, "follow")


# -- bodies ------------------------------------------------------------------------------------------------


async def encoded_as(egress, server, name: str, data: bytes) -> bytes:
    headers = [("content-length", str(len(data)))]
    answer, _ = await egress.fetch("POST", f"{server.url}/encoded?as={name}", headers, blocks(data), "follow")
    return await read(answer)


async def test_encodings(egress, server):
    text = b"plain " * 50_000
    raw = zlib.compressobj(wbits=-15)
    for name, data, expected in (
        ("gzip", gzip.compress(text), text),
        ("GZIP", gzip.compress(text[:10]) + gzip.compress(text[10:]), text),
        ("gzip", gzip.compress(text) + b"\0\0", text),
        ("deflate", zlib.compress(text), text),
        ("deflate", raw.compress(text) + raw.flush(), text),
        ("br", b"not ours to decode", b"not ours to decode"),
        ("gzip", b"", b""),
    ):
        assert await encoded_as(egress, server, name, data) == expected
    for data in (gzip.compress(text)[:-4], b"no gzip", gzip.compress(text)[:50] + b"\xff" * 50):
        with pytest.raises(SubrequestFailed):
            await encoded_as(egress, server, "gzip", data)


async def test_a_bomb_is_decoded_in_small_pieces_and_cut_off(egress, server):
    egress.use(EgressConfig(allow=["127.0.0.1"], max_response_mb=2))
    bomb = gzip.compress(bytes(100 << 20))
    headers = [("content-length", str(len(bomb)))]
    answer, _ = await egress.fetch("POST", f"{server.url}/encoded?as=gzip", headers, blocks(bomb), "follow")
    sizes = []

    async def measure() -> None:
        async for piece in answer.body:
            sizes.append(len(piece))

    with pytest.raises(SubrequestFailed, match=r"longer than 2 MB; raise egress\.max_response_mb"):
        await measure()
    assert max(sizes) <= 65536
    assert sum(sizes) <= 2 << 20


async def test_endless_responses_are_cut_off(egress, server):
    egress.use(EgressConfig(allow=["127.0.0.1"], max_response_mb=1))
    with pytest.raises(SubrequestFailed, match="longer than 1 MB"):
        await egress.get(f"{server.url}/endless")
    await asyncio.wait_for(server.endless.closed.wait(), 10)


async def test_silence_ends_with_the_setting(egress, server):
    egress.use(EgressConfig(allow=["127.0.0.1"], timeout_s=0.1))
    with pytest.raises(SubrequestFailed, match=r"nothing was received for 0.1 s \(egress.timeout_s\)"):
        await egress.get(f"{server.url}/silent")


# -- TLS and rubbish ---------------------------------------------------------------------------------------


async def test_certificates_are_checked_against_the_name(egress, tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path)
    egress.names |= {"secure.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
    egress.use(EgressConfig(allow=["secure.test", "other.test"]))
    async with serving(Starlette(routes=[Route("/echo", echo)]), certificate) as url:
        port = url.rpartition(":")[2]
        with pytest.raises(SubrequestFailed, match="certificate verify failed"):
            await egress.get(f"https://secure.test:{port}/echo")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        egress.egress = Egress(egress._resolve)
        assert b"secure.test" in await egress.get(f"https://secure.test:{port}/echo")
        with pytest.raises(SubrequestFailed, match="certificate verify failed"):
            await egress.get(f"https://other.test:{port}/echo")


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET / HTTP/1.1\r\nx: y\r\n\r\nGET", []),
        ("", []),
        ("GET", [("a\r\nb", "c")]),
        ("GET", [("a", "b\r\nc: d")]),
        ("GET", [("", "b")]),
    ],
)
async def test_requests_cannot_be_smuggled(egress, server, method, headers):
    with pytest.raises(SubrequestFailed):
        await egress.fetch(method, f"{server.url}/echo", headers, None, "follow")


async def test_header_values_of_any_language(egress, server):
    seen = json.loads(await egress.get(f"{server.url}/echo", [("a", "caf\u00e9"), ("b", "\u4e2d")]))["headers"]
    assert (seen["a"], seen["b"]) == ("caf\u00e9", "\u4e2d".encode().decode("latin-1"))
