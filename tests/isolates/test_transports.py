"""HTTP libraries in real isolates, against a local server."""

from __future__ import annotations

import asyncio
import json
import textwrap

import pytest
from local_server import make_certificate, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from edge.config import EgressConfig, IsolatesConfig

from .conftest import running

METHODS = ["GET", "POST", "PUT", "HEAD", "DELETE"]


class Api:
    """A server that streams in steps: `go` lets it send the next piece."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.num_under_way = 0
        self.both_there = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/echo", self.echo, methods=METHODS),
                Route("/redirect", self.redirect),
                Route("/steps", self.steps),
                Route("/status/{status:int}", self.status),
                Route("/large", self.large),
                Route("/pair", self.pair),
                Route("/silent", self.silent),
                Route("/broken", self.broken),
            ]
        )

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        seen = {
            "method": request.method,
            "headers": dict(request.headers),
            "body": body.decode(),
            "url": str(request.url),
        }
        return JSONResponse(seen, headers={"x-answer": "yes"})

    async def redirect(self, request: Request) -> Response:
        response = RedirectResponse("/echo?after=1")
        response.set_cookie("seen", "1")
        return response

    async def status(self, request: Request) -> Response:
        return PlainTextResponse("teapot", request.path_params["status"])

    async def steps(self, request: Request) -> Response:
        async def blocks():
            for number in range(3):
                await self.go.acquire()
                yield f"{number}\n"

        return StreamingResponse(blocks())

    async def large(self, request: Request) -> Response:
        return Response(b"0123456789" * 300_000)

    async def pair(self, request: Request) -> Response:
        """Answers once two requests are there at the same time."""
        self.num_under_way += 1
        if self.num_under_way == 2:
            self.both_there.set()
        await asyncio.wait_for(self.both_there.wait(), 20)
        return PlainTextResponse("both")

    async def silent(self, request: Request) -> Response:
        await asyncio.sleep(3600)
        return Response()

    async def broken(self, request: Request) -> Response:
        return StreamingResponse(self._broken())

    async def _broken(self):
        yield b"a"
        raise ConnectionResetError


@pytest.fixture
async def api():
    api = Api()
    async with serving(api.app) as api.url:
        yield api


@pytest.fixture
def deploy(worker, api):
    """Deploys a worker whose `fetch` is the given source, with `url` as the server's address."""
    worker.egress = EgressConfig(allow=["127.0.0.1"])

    async def deploy(source: str):
        body = textwrap.indent(textwrap.dedent(source).strip(), "    ")
        await worker.deploy(f"async def fetch(self, request):\n    url = self.env.URL\n{body}\n", vars={"URL": api.url})
        return worker

    return deploy


HTTPX = ("httpx", "httpx async")
GET_AND_POST = {
    "requests": """
        import requests
        session = requests.Session()
        first = session.get(url + "/redirect", params={"a": "b c"}, headers={"X-A": "1"}, timeout=10)
        second = session.post(url + "/echo", json={"n": 1})
        third = requests.put(url + "/echo", data=iter([b"in ", b"pieces"]))
        return Response.json([
            [first.status_code, first.url, first.history[0].status_code, session.cookies["seen"], first.json()],
            [second.status_code, second.headers["X-Answer"], second.json()],
            third.json(),
        ])
    """,
    "httpx": """
        import httpx
        with httpx.Client(follow_redirects=True) as client:
            first = client.get(url + "/redirect", params={"a": "b c"}, headers={"X-A": "1"}, timeout=10)
            second = client.post(url + "/echo", json={"n": 1})
            third = client.put(url + "/echo", content=iter([b"in ", b"pieces"]))
        return Response.json([
            [first.status_code, str(first.url), first.history[0].status_code, client.cookies["seen"], first.json()],
            [second.status_code, second.headers["X-Answer"], second.json()],
            third.json(),
        ])
    """,
    "httpx async": """
        import httpx
        async def pieces():
            yield b"in "
            yield b"pieces"
        async with httpx.AsyncClient(follow_redirects=True) as client:
            first = await client.get(url + "/redirect", params={"a": "b c"}, headers={"X-A": "1"}, timeout=10)
            second = await client.post(url + "/echo", json={"n": 1})
            third = await client.put(url + "/echo", content=pieces())
        return Response.json([
            [first.status_code, str(first.url), first.history[0].status_code, client.cookies["seen"], first.json()],
            [second.status_code, second.headers["X-Answer"], second.json()],
            third.json(),
        ])
    """,
    "aiohttp": """
        import aiohttp
        async def pieces():
            yield b"in "
            yield b"pieces"
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            async with client.get(url + "/redirect", params={"a": "b c"}, headers={"X-A": "1"}) as first:
                first_json = await first.json()
            async with client.post(url + "/echo", json={"n": 1}) as second:
                second_json = await second.json()
            async with client.put(url + "/echo", data=pieces()) as third:
                third_json = await third.json()
            (cookie,) = client.cookie_jar
        return Response.json([
            [first.status, str(first.url), first.history[0].status, cookie.value, first_json],
            [second.status, second.headers["X-Answer"], second_json],
            third_json,
        ])
    """,
}


GET_AND_POST |= {name.replace("httpx", "httpx2"): GET_AND_POST[name].replace("httpx", "httpx2") for name in HTTPX}


@pytest.mark.parametrize("library", GET_AND_POST)
async def test_redirects_cookies_headers_and_bodies(deploy, api, library):
    pytest.importorskip(library.split()[0])
    worker = await deploy(GET_AND_POST[library])
    first, second, third = json.loads(await worker.get())
    assert first[:4] == [200, f"{api.url}/echo?after=1", 307, "1"]
    assert (first[4]["method"], first[4]["headers"]["x-a"], first[4]["headers"]["cookie"]) == ("GET", "1", "seen=1")
    assert second[:2] == [200, "yes"]
    assert json.loads(second[2]["body"]) == {"n": 1}
    assert second[2]["headers"]["content-type"] == "application/json"
    assert (third["method"], third["body"]) == ("PUT", "in pieces")


async def test_the_standard_library(deploy, api):
    worker = await deploy(
        """
        import http.client, urllib.error, urllib.request
        with urllib.request.urlopen(url + "/redirect") as response:
            first = [response.status, response.url]
        with urllib.request.urlopen(urllib.request.Request(url + "/echo", data=b"hi", method="PUT")) as response:
            second = response.read().decode()
        try:
            urllib.request.urlopen(url + "/status/418")
        except urllib.error.HTTPError as error:
            third = [error.code, error.read().decode()]
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        fourth = []
        for _ in range(2):
            connection.request("HEAD", "/echo")
            response = connection.getresponse()
            fourth.append([response.status, response.read().decode(), response.headers["x-answer"]])
        return Response.json([first, second, third, fourth])
        """
    )
    first, second, third, fourth = json.loads(await worker.get())
    assert first == [200, f"{api.url}/echo?after=1"]
    assert json.loads(second)["body"] == "hi"
    assert third == [418, "teapot"]
    assert fourth == [[200, "", "yes"]] * 2


STREAMS = {
    "requests": """
        import requests
        with requests.get(url + "/steps", stream=True) as response:
            for line in response.iter_lines(chunk_size=1):
                print("line", line.decode())
        return Response("done")
    """,
    "urllib3": """
        import urllib3
        response = urllib3.PoolManager().request("GET", url + "/steps", preload_content=False)
        while chunk := response.read1() if hasattr(response, "read1") else response.read(2):
            print("line", chunk.decode())
        return Response("done")
    """,
    "urllib": """
        import urllib.request
        with urllib.request.urlopen(url + "/steps") as response:
            for line in response:
                print("line", line.decode())
        return Response("done")
    """,
    "httpx": """
        import httpx
        with httpx.stream("GET", url + "/steps") as response:
            for line in response.iter_lines():
                print("line", line)
        return Response("done")
    """,
    "httpx async": """
        import httpx
        async with httpx.AsyncClient() as client, client.stream("GET", url + "/steps") as response:
            async for line in response.aiter_lines():
                print("line", line)
        return Response("done")
    """,
    "aiohttp": """
        import aiohttp
        async with aiohttp.ClientSession() as client, client.get(url + "/steps") as response:
            async for line in response.content:
                print("line", line.decode())
        return Response("done")
    """,
}


@pytest.mark.parametrize("library", STREAMS)
async def test_responses_stream(deploy, api, library):
    pytest.importorskip(library.split()[0])
    worker = await deploy(STREAMS[library])
    answer = asyncio.create_task(worker.get())
    for number in range(3):
        assert not answer.done()
        api.go.release()
        await worker.log_text(f"line {number}")
    assert await answer == "done"


async def test_two_sync_requests_wait_at_the_same_time(deploy):
    """One in each of two invocations of one process: neither would be answered before the other is there."""
    worker = await deploy("import requests\nreturn Response(requests.get(url + '/pair').text)")
    assert await asyncio.gather(worker.get(), worker.get()) == ["both", "both"]


async def test_threads(deploy):
    worker = await deploy(
        """
        import asyncio, requests
        from concurrent.futures import ThreadPoolExecutor
        def ask(_):
            return requests.get(url + "/pair").text
        with ThreadPoolExecutor(2) as pool:
            first = await asyncio.gather(asyncio.to_thread(ask, 1), asyncio.to_thread(ask, 2))
        return Response.json(first)
        """
    )
    assert json.loads(await worker.get()) == ["both", "both"]


async def test_large_bodies(deploy):
    worker = await deploy(
        """
        import httpx, requests
        sizes = [len(requests.get(url + "/large").content), len(httpx.get(url + "/large").content)]
        text = "x" * 300_000
        sizes.append(len(requests.post(url + "/echo", data=text).json()["body"]))
        sizes.append(len(httpx.post(url + "/echo", content=text).json()["body"]))
        return Response.json(sizes)
        """
    )
    assert json.loads(await worker.get()) == [3_000_000, 3_000_000, 300_000, 300_000]


ERRORS = {
    "requests": (
        "requests",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.ReadTimeout",
        "requests.exceptions.ChunkedEncodingError",
    ),
    "httpx": ("httpx", "httpx.ConnectError", "httpx.ReadTimeout", "httpx.ReadError"),
    "urllib.request": ("urllib.request", "urllib.error.URLError", "TimeoutError", "OSError"),
}


@pytest.mark.parametrize("library", ERRORS)
async def test_errors_are_the_librarys_own(deploy, library):
    module, refused, timed_out, broken = ERRORS[library]
    get = "urlopen(target, timeout=timeout).read()" if library.startswith("urllib") else "get(target, timeout=timeout)"
    worker = await deploy(
        f"""
        import {module}, urllib.error
        found = []
        for target, timeout, expected in (
            ("http://127.0.0.1:1/", 10, {refused}),
            ("http://10.0.0.1/", 10, {refused}),
            (url + "/silent", 0.1, {timed_out}),
            (url + "/broken", 10, {broken}),
        ):
            try:
                {module}.{get}
                found.append("no error")
            except expected as error:
                found.append(str(error))
        return Response.json(found)
        """
    )
    refused_text, denied_text, _, broken_text = json.loads(await worker.get())
    assert "failed" in refused_text
    assert "egress.allow" in denied_text
    assert broken_text != "no error"


async def test_hanging_up_early_frees_the_connection(deploy, api):
    worker = await deploy(
        """
        import httpx, requests
        requests.get(url + "/large", stream=True).close()
        with httpx.stream("GET", url + "/large"):
            pass
        async with httpx.AsyncClient() as client, client.stream("GET", url + "/large"):
            pass
        return Response(requests.get(url + "/status/200").text)
        """
    )
    for _ in range(3):
        assert await worker.get() == "teapot"


async def test_a_body_that_waits_for_the_server_s_word(deploy):
    """As boto3 sends it: the head, then `poll` for the answer, and the body only after that."""
    worker = await deploy(
        """
        import http.client, select
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.putrequest("PUT", "/echo")
        connection.putheader("Expect", "100-continue")
        connection.putheader("Content-Length", "4")
        connection.endheaders()
        poll = select.poll()
        poll.register(connection.sock)
        assert poll.poll(10_000)
        with connection.sock.makefile("rb", 0) as answer:
            assert answer.read() == b"HTTP/1.1 100 Continue\\r\\n\\r\\n"
        connection.send(b"body")
        return Response(connection.getresponse().read())
        """
    )
    assert json.loads(await worker.get())["body"] == "body"


async def test_what_is_refused(deploy):
    worker = await deploy(
        """
        import httpx, requests
        found = []
        for attempt in (
            lambda: requests.get(url, proxies={"http": "http://127.0.0.1:1"}),
            lambda: requests.get("https://127.0.0.1:1", proxies={"https": "http://127.0.0.1:1"}),
            lambda: httpx.get(url, proxy="http://127.0.0.1:1"),
        ):
            try:
                attempt()
            except Exception as error:
                found.append(str(error))
        return Response.json(found)
        """
    )
    found = json.loads(await worker.get())
    assert ["proxies cannot be used" in text for text in found] == [True, True, True]


async def test_requests_at_import(worker, api):
    worker.egress = EgressConfig(allow=["127.0.0.1"])
    source = f"""
    import requests
    from workers import Response
    found = requests.get("{api.url}/status/200").text
    def on_fetch(request):
        return Response(found)
    """
    await worker.deploy(source, indented=False)
    assert await worker.get() == "teapot"


async def test_tls_is_the_node_s(worker, api, tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    worker.egress = EgressConfig(allow=["127.0.0.1"])
    async with serving(api.app, certificate) as url:
        source = f"""
        async def fetch(self, request):
            import aiohttp, httpx, requests, urllib.request
            url = "{url}/status/200"
            async with aiohttp.ClientSession() as client, client.get(url) as response:
                found = [await response.text()]
            found += [requests.get(url).text, httpx.get(url).text, urllib.request.urlopen(url).read().decode()]
            try:
                requests.get(url, cert="/nonexistent.pem")
            except OSError as error:
                found.append(str(error))
            return Response.json(found)
        """
        await worker.deploy(source)
        found = json.loads(await worker.get())
    assert found[:4] == ["teapot"] * 4
    assert "certificate" in found[4]


async def test_libraries_that_the_zygote_has_imported(tmp_path, api):
    async with running(tmp_path, isolates=IsolatesConfig(preload=["httpx", "requests"])) as harness:
        harness.egress = EgressConfig(allow=["127.0.0.1"])
        source = """
        async def fetch(self, request):
            import sys
            url = self.env.URL
            return Response(sys.modules["httpx"].get(url).text + sys.modules["requests"].get(url).text)
        """
        await harness.deploy(source, vars={"URL": f"{api.url}/status/200"})
        assert await harness.get() == "teapotteapot"
