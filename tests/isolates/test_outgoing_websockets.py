"""WebSockets that handlers open, to a real server, through the node's egress."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import ssl
from pathlib import Path

import pytest
from local_server import make_certificate
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from edge.config import EgressConfig
from edge.errors import SubrequestFailed
from edge.isolates.base import Bundle
from edge.isolates.egress import Egress
from workers._websocket import MAX_MESSAGE_BYTES, Close, MessageDecoder, encode

from .conftest import until

LOCAL = EgressConfig(allow=["*", "127.0.0.1"])


class Server:
    """Echoes, and does what some messages say. `seen` are the requests' headers, `closes` how connections ended."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[dict[str, str]] = []
        self.closes: list[tuple[int | None, str | None]] = []
        self.open: set[ServerConnection] = set()

    async def serve(self, connection: ServerConnection) -> None:
        self.open.add(connection)
        try:
            async for message in connection:
                match message:
                    case "close":
                        await connection.close(4001, "as asked")
                    case "drop":
                        connection.transport.abort()
                    case "long":
                        await connection.send("x" * (MAX_MESSAGE_BYTES + 1))
                    case _:
                        await connection.send(message)
        except ConnectionClosed:
            pass
        finally:
            self.open.discard(connection)
            self.closes.append((connection.close_code, connection.close_reason))

    def look(self, connection: ServerConnection, request):
        self.seen.append(dict(request.headers.raw_items()))
        if request.path == "/refused":
            return connection.respond(403, "not you")
        if request.path == "/redirect":
            response = connection.respond(302, "")
            response.headers["location"] = "ws://10.0.0.1/"
            return response
        return None


def choose(_connection, offered):
    return offered[0] if offered else None


@contextlib.asynccontextmanager
async def running_server(tls: ssl.SSLContext | None = None):
    server = Server()
    async with serve(
        server.serve, "127.0.0.1", 0, ssl=tls, process_request=server.look, select_subprotocol=choose
    ) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


@pytest.fixture
async def server():
    async with running_server() as one:
        yield one


HANDLER = """
async def fetch(self, request):
    from workers import fetch

    async def talk(ws, *messages):
        got, over = [], asyncio.Event()
        ws.addEventListener("message", lambda event: got.append(event.data))
        ws.addEventListener("close", lambda event: (got.append([event.code, event.reason, event.wasClean]), over.set()))
        ws.accept()
        for message in messages:
            ws.send(message)
        return got, over

    async def open(url, **headers):
        return await fetch(url, headers={"Upgrade": "websocket", **headers})

    BODY
"""


def handler(body: str, port: int = 0) -> str:
    lines = body.replace("PORT", str(port)).strip().splitlines()
    return HANDLER.replace("BODY", "\n    ".join(lines))


@pytest.fixture
def worker(worker):
    worker.egress = LOCAL
    return worker


async def test_messages_in_both_directions(worker, server):
    await worker.deploy(
        handler(
            """
response = await open("http://127.0.0.1:PORT/path?q=1", **{"Authorization": "x", "Sec-WebSocket-Protocol": "b, c"})
assert response.status == 101 and response.webSocket is response.web_socket
assert response.headers["sec-websocket-protocol"] == "b"
got, over = await talk(response.web_socket, "text", b"bytes", "")
while len(got) < 3:
    await asyncio.sleep(0.01)
assert got == ["text", b"bytes", ""], got
response.web_socket.close(4000, "enough")
await over.wait()
return Response.json(got[3])
""",
            server.port,
        )
    )
    assert await worker.get() == '[4000, "enough", true]'
    await until(lambda: server.closes)
    assert server.closes == [(4000, "enough")]
    assert {name.lower(): value for name, value in server.seen[0].items()}["authorization"] == "x"
    assert worker.isolates._egress.traffic(worker.key).received_bytes > 0


@pytest.mark.parametrize(
    ("message", "close"),
    [("close", '[4001, "as asked", true]'), ("drop", '[1006, "", false]'), ("long", "1009")],
)
async def test_the_other_side_ends_it(worker, server, message, close):
    await worker.deploy(
        handler(
            f"""
response = await open("ws://127.0.0.1:PORT/")
got, over = await talk(response.web_socket, "{message}")
await over.wait()
return Response.json(got[-1])
""",
            server.port,
        )
    )
    assert close in await worker.get()


async def test_a_refusal_is_a_response_like_any_other(worker, server):
    await worker.deploy(
        handler(
            """
response = await open("http://127.0.0.1:PORT/" + request.url.rpartition("/")[2])
assert response.web_socket is None
return Response(await response.text(), response.status)
""",
            server.port,
        )
    )
    response = await worker.open("/refused")
    assert response.status == 403
    assert b"".join([chunk async for chunk in response.body]) == b"not you"
    assert (await worker.open("/redirect")).status == 302  # which is not followed


async def test_what_a_handler_leaves_open_is_closed_with_it(worker, server):
    await worker.deploy(
        handler(
            """
response = await open("http://127.0.0.1:PORT/")
got, over = await talk(response.web_socket, "x")
while not got:
    await asyncio.sleep(0.01)
return Response("left")
""",
            server.port,
        )
    )
    assert await worker.get() == "left"
    await until(lambda: server.closes)
    assert server.closes == [(1001, "")]


async def test_websockets_of_javascript(worker, server):
    await worker.deploy(
        handler(
            """
from js import WebSocket
from pyodide.ffi import create_proxy
ws = WebSocket.new("ws://127.0.0.1:PORT/", ["a"])
assert ws.readyState == WebSocket.CONNECTING
got, over = [], asyncio.Event()
ws.addEventListener("open", create_proxy(lambda event: ws.send("hello")))
ws.addEventListener("message", create_proxy(lambda event: (got.append(event.data), ws.close())))
ws.addEventListener("close", create_proxy(lambda event: over.set()))
await over.wait()
assert ws.readyState == WebSocket.CLOSED

failed, events = asyncio.Event(), []
refused = WebSocket.new("ws://127.0.0.1:PORT/refused")
refused.onerror = lambda event: events.append(event.message)
refused.onclose = lambda event: (events.append(event.code), failed.set())
await failed.wait()

early, kinds = asyncio.Event(), []
hasty = WebSocket.new("ws://127.0.0.1:PORT/")
for kind in ("open", "error", "close"):
    hasty.addEventListener(kind, create_proxy(lambda event: kinds.append(event.type)))
hasty.addEventListener("close", create_proxy(lambda event: early.set()))
hasty.close()
await early.wait()
return Response.json([got, events, kinds])
""",
            server.port,
        )
    )
    assert await worker.get() == '[["hello"], ["the server answered with status 403", 1006], ["error", "close"]]'


async def test_rules_apply(worker, server):
    worker.egress = EgressConfig()
    await worker.deploy(
        handler(
            """
try:
    await open("http://127.0.0.1:PORT/")
except OSError as error:
    return Response(str(error))
""",
            server.port,
        )
    )
    text = await worker.get()
    assert "127.0.0.1" in text
    assert "a loopback" in text
    assert server.seen == []


async def test_the_example_of_the_documentation(worker, server):
    text = (Path(__file__).parents[2] / "docs" / "workers.md").read_text()
    (example,) = re.findall(
        r"^```python\n(.*?)^```$", text.partition("## WebSockets\n")[2].partition("\n## ")[0], re.M | re.S
    )
    await worker.deploy(example.replace("https://ws.example.com", f"http://127.0.0.1:{server.port}"), indented=False)
    assert await worker.get() == "hello"


# -- without a handler -------------------------------------------------------------------------------------


class Client:
    def __init__(self, rules: EgressConfig, address: str = "127.0.0.1") -> None:
        async def resolve(_host, _port):
            return [ipaddress.ip_address(address)]

        self.egress = Egress(resolve)
        self.bundle = Bundle("test", "v1", "/", "main.py", egress=rules)

    async def open(self, url, messages, headers=()):
        answer, _ = await self.egress.websocket(self.bundle, url, list(headers), messages)
        return answer


async def said(*messages):
    for message in messages:
        yield message


async def forever(*messages):
    for message in messages:
        yield message
    await asyncio.sleep(3600)


async def received(answer):
    decoder = MessageDecoder()
    messages = []
    async for data in answer.body:
        messages += decoder.feed(data)
    await answer.body.aclose()
    return messages


async def test_a_name_that_hides_a_private_address():
    client = Client(EgressConfig(), "10.0.0.7")
    with pytest.raises(SubrequestFailed, match="a private"):
        await client.open("wss://public.example/", said())


@pytest.mark.parametrize("url", ["ftp://a/", "http:///", "nonsense"])
async def test_urls_that_are_none(url):
    with pytest.raises(SubrequestFailed):
        await Client(LOCAL).open(url, said())


@pytest.mark.parametrize(
    ("forged", "code"),
    [(b"z\0\0\0\0", 1002), (b"t\xff\xff\xff\xff", 1009), (encode(Close(1006)), 1011), (encode(Close(1)), 1011)],
)
async def test_bytes_that_are_no_messages_end_it(server, forged, code):
    answer = await Client(LOCAL).open(f"ws://127.0.0.1:{server.port}/", forever(forged))
    assert [message.code for message in await received(answer)] == [code]


@pytest.mark.parametrize("header", [("x: 1\r\n\r\nGET /other HTTP/1.1\r\ny", "z"), ("x", "1\r\ny: z"), ("", "x")])
async def test_headers_that_are_none_are_refused(server, header):
    client = Client(LOCAL)
    with pytest.raises(SubrequestFailed, match="cannot be sent"):
        await client.open(f"ws://127.0.0.1:{server.port}/", said(), [header])
    assert server.seen == []


async def test_rules_know_a_name_by_its_ascii_form():
    denied = EgressConfig(allow=LOCAL.allow, deny=["xn--bcher-kva.example"])
    with pytest.raises(SubrequestFailed, match="egress"):
        await Client(denied).open("ws://xn--bcher-kva.example:1/", said())


async def test_a_reason_that_is_too_long_is_cut(server):
    close = Close(4000, "ä" * 200)
    answer = await Client(LOCAL).open(f"ws://127.0.0.1:{server.port}/", forever(encode(close)))
    assert await received(answer) == [Close(4000, "ä" * 61)]


async def test_a_body_that_ends_without_a_close(server):
    answer = await Client(LOCAL).open(f"ws://127.0.0.1:{server.port}/", said(encode("x")))
    assert (await received(answer))[-1].code == 1001


async def test_over_tls(tmp_path):
    certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with running_server(context) as server:
        client = Client(LOCAL)
        with pytest.raises(SubrequestFailed, match="certificate"):
            await client.open(f"wss://127.0.0.1:{server.port}/", said())
        client.egress._clients.clear()
        client.egress._tls = ssl.create_default_context(cafile=certificate)
        answer = await client.open(f"https://127.0.0.1:{server.port}/", forever(encode("x"), encode("close")))
        assert await received(answer) == ["x", Close(4001, "as asked")]


async def test_failures_leave_no_slots_taken(server, monkeypatch):
    monkeypatch.setattr("edge.isolates.egress.MAX_CONNECTIONS", 1)
    client = Client(LOCAL)
    url = f"ws://127.0.0.1:{server.port}/"
    for path in ("refused", "redirect"):
        assert (await client.open(url + path, said())).status in (302, 403)
    with pytest.raises(SubrequestFailed):
        await client.open("ws://127.0.0.1:1/", said())
    answer = await client.open(url, forever())
    with pytest.raises(SubrequestFailed, match="1 WebSockets of this worker are open already"):
        await client.open(url, said())
    await answer.body.aclose()
    answer = await client.open(url, forever())
    await answer.body.aclose()
