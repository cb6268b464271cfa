"""The codec of WebSocket messages, and pairs of WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import Response
from workers._js.buffers import Uint8Array
from workers._websocket import MAX_MESSAGE_BYTES, Close, MessageDecoder, WebSocketError, encode
from workers._websocket_pair import INBOX_BYTES, WebSocket, WebSocketPair

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = TEXT | st.binary() | st.builds(Close, st.integers(0, 65535), TEXT.filter(lambda text: len(text) < 30))


@given(st.lists(MESSAGES), st.integers(1, 20))
def test_messages_come_out_as_they_went_in(messages, size: int) -> None:
    data = b"".join(map(encode, messages))
    decoder = MessageDecoder()
    out = [message for at in range(0, len(data), size) for message in decoder.feed(data[at : at + size])]
    assert out == messages
    assert [type(message) for message in out] == [type(message) for message in messages]


@given(st.binary())
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    with contextlib.suppress(WebSocketError):
        MessageDecoder().feed(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"x\0\0\0\0", 1002),
        (b"c\0\0\0\x01x", 1002),
        (b"t\0\0\0\x01\xff", 1007),
        (b"b" + (MAX_MESSAGE_BYTES + 1).to_bytes(4), 1009),
    ],
)
def test_what_is_no_message_says_which_code_to_close_with(data: bytes, code: int) -> None:
    with pytest.raises(WebSocketError) as caught:
        MessageDecoder().feed(data)
    assert caught.value.code == code


def test_a_message_over_the_limit_is_not_sent() -> None:
    assert len(encode(b"x" * MAX_MESSAGE_BYTES)) == MAX_MESSAGE_BYTES + 5
    with pytest.raises(WebSocketError, match="over the limit of 1048576"):
        encode(b"x" * (MAX_MESSAGE_BYTES + 1))


def test_a_long_reason_is_cut_between_characters() -> None:
    (close,) = MessageDecoder().feed(encode(Close(1000, "ä" * 100)))
    assert close == Close(1000, "ä" * 61)


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_listeners_get_what_the_other_end_sends() -> None:
    client, server = WebSocketPair().object_values()
    events: list[object] = []

    async def on_message(event) -> None:
        events.append(event.data)

    server.addEventListener("message", on_message)
    server.onclose = lambda event: events.append((event.code, event.reason, event.wasClean))
    client.send("before accept")
    server.accept()
    client.send(b"\x01")
    client.send(Uint8Array([2]))
    client.close(3001, "bye")
    await until(lambda: len(events) == 4)
    assert events == ["before accept", b"\x01", b"\x02", (3001, "bye", True)]
    assert (client.readyState, server.readyState) == (WebSocket.CLOSING, WebSocket.CLOSED)
    assert await client.receive() == Close(3001, "bye")
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        server.send("late")


async def test_a_failing_listener_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    client, server = WebSocketPair()
    events: list[str] = []
    server.addEventListener("message", lambda event: 1 / 0)
    server.addEventListener("message", lambda event: events.append(event.data))
    removed = events.append
    server.addEventListener("message", removed)
    server.removeEventListener("message", removed)
    server.accept()
    client.send("a")
    await until(lambda: events)
    assert events == ["a"]
    assert "ZeroDivisionError" in caplog.text


async def test_wrong_use() -> None:
    client, server = WebSocketPair()[0], WebSocketPair()["1"]
    with pytest.raises(TypeError, match="not dict"):
        client.send({})
    with pytest.raises(TypeError, match="needs a function"):
        server.addEventListener("message", "nothing")
    with pytest.raises(ValueError, match="1000 and 3000 to 4999, not 1001"):
        client.close(1001)
    with pytest.raises(WebSocketError, match="over the limit"):
        client.send("x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(TypeError, match=r"one end of a js\.WebSocketPair, not str"):
        Response(None, status=101, web_socket="x")
    with pytest.raises(ValueError, match="must have the status 101, not None"):
        Response(web_socket=client)


class Wire:
    """What comes from the node, one piece at a time."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.num_taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self.pieces.get()) is not None:
            self.num_taken += 1
            yield piece


async def test_the_relay_connects_an_end_to_the_node() -> None:
    client, server = WebSocketPair()
    wire = Wire()
    outgoing = client.relay(aiter(wire))
    server.send("hello")
    assert MessageDecoder().feed(await anext(outgoing)) == ["hello"]
    wire.pieces.put_nowait(encode("from client")[:4])
    wire.pieces.put_nowait(encode("from client")[4:])
    assert await server.receive() == "from client"
    server.close(4000, "enough")
    assert MessageDecoder().feed(await anext(outgoing)) == [Close(4000, "enough")]
    wire.pieces.put_nowait(encode(Close(4000, "enough")))
    assert [piece async for piece in outgoing] == []
    assert await server.receive() == Close(4000, "enough")


@pytest.mark.parametrize(("piece", "code"), [(encode(Close(1001, "away")), 1001), (None, 1006), (b"x\0\0\0\0", 1002)])
async def test_the_end_of_the_client_reaches_the_handler(piece: bytes | None, code: int) -> None:
    client, server = WebSocketPair()
    wire = Wire()
    wire.pieces.put_nowait(piece)
    outgoing = client.relay(aiter(wire))
    (answer,) = [MessageDecoder().feed(data)[0] async for data in outgoing]
    received = await server.receive()
    assert isinstance(received, Close)
    assert isinstance(answer, Close)
    assert received.code == answer.code == code


async def test_a_client_is_slowed_down_by_a_handler_that_does_not_read() -> None:
    client, server = WebSocketPair()
    wire = Wire()
    for _ in range(100):
        wire.pieces.put_nowait(encode(b"x" * (INBOX_BYTES // 10)))
    outgoing = client.relay(aiter(wire))
    reading = asyncio.ensure_future(anext(outgoing))
    await until(lambda: wire.num_taken >= 10)
    for _ in range(100):
        await asyncio.sleep(0)
    assert wire.num_taken <= 11
    for _ in range(20):
        await server.receive()
    await until(lambda: wire.num_taken > 25)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_relay_that_is_given_up_closes_the_handlers_end() -> None:
    client, server = WebSocketPair()
    outgoing = client.relay(aiter(Wire()))
    server.send("x")
    await anext(outgoing)
    await outgoing.aclose()
    assert (await server.receive()).code == 1006
