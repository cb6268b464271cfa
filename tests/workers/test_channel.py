"""Two channels on one socket pair: what one sends, the other has, and nobody buffers without bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from workers._channel import MAX_HELD_FRAMES, BodyAborted, Channel
from workers._wire import WINDOW_BYTES, Abort, Cancel, Chunk, Credit, End, FrameError, Log, Result, ToIsolate, ToNode


class Peer:
    """One end; `bodies` names the ids for which a frame announces a body."""

    def __init__(self) -> None:
        self.frames = []
        self.lost = asyncio.get_running_loop().create_future()
        self.channel: Channel

    async def open(self, sock, frames, **options):
        self.channel = await Channel.open(sock, frames, self.frames.append, self.lost.set_result, **options)
        return self


@contextlib.asynccontextmanager
async def pair(**node_options):
    left, right = socket.socketpair()
    node = await Peer().open(left, ToNode, **node_options)
    isolate = await Peer().open(right, ToIsolate)
    try:
        yield node, isolate
    finally:
        node.channel.close()
        isolate.channel.close()
        await asyncio.gather(node.lost, isolate.lost)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is about another object's state
            await asyncio.sleep(0.001)


async def blocks(num, size):
    for number in range(num):
        yield number.to_bytes(4) * (size // 4)


async def test_frames_arrive_in_order():
    async with pair() as (node, isolate):
        isolate.channel.send(Log(0, "log", "a"), Log(0, "log", "b"))
        isolate.channel.send(Log(0, "log", "c"))
        await until(lambda: len(node.frames) == 3)
        assert [frame.text for frame in node.frames] == ["a", "b", "c"]


async def test_a_body_of_many_megabytes():
    async with pair() as (node, isolate):
        body = node.channel.receive_body(2)
        sending = asyncio.create_task(isolate.channel.send_body(2, blocks(100, 200_000)))
        received = b"".join([chunk async for chunk in body])
        await sending
        assert received == b"".join([block async for block in blocks(100, 200_000)])
        assert node.frames == [End(2)]


async def test_a_reader_that_stands_still_stops_only_its_own_sender():
    async with pair() as (node, isolate):
        slow, fast = node.channel.receive_body(2), node.channel.receive_body(4)
        num_taken = 0

        async def counted():
            nonlocal num_taken
            async for block in blocks(1000, 32 << 10):
                num_taken += 1
                yield block

        sending = asyncio.create_task(isolate.channel.send_body(2, counted()))
        await until(lambda: num_taken >= WINDOW_BYTES // (32 << 10))
        other = asyncio.create_task(isolate.channel.send_body(4, blocks(100, 32 << 10)))
        assert len(b"".join([chunk async for chunk in fast])) == 100 * (32 << 10)
        await other
        assert num_taken == WINDOW_BYTES // (32 << 10) + 1
        await anext(slow)
        await anext(slow)
        await until(lambda: num_taken > WINDOW_BYTES // (32 << 10) + 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_an_aborted_body_gives_what_there_was_and_then_the_reason():
    async with pair() as (node, isolate):
        body = node.channel.receive_body(2)
        isolate.channel.send(Chunk(2, b"a"), Abort(2, "why"))
        assert await anext(body) == b"a"
        with pytest.raises(BodyAborted, match="why"):
            await anext(body)
        assert node.frames == [Abort(2, "why")]


async def test_a_broken_connection_ends_bodies_on_both_sides():
    async with pair() as (node, isolate):
        body = node.channel.receive_body(2)
        sending = asyncio.create_task(isolate.channel.send_body(2, blocks(1000, 64 << 10)))
        await anext(body)
        isolate.channel.fail(ConnectionResetError("test"))
        with pytest.raises(ConnectionError):
            _ = [chunk async for chunk in body]
        with pytest.raises(ConnectionError):
            await sending
        isolate.channel.send(Cancel(2))  # harmless
        assert isinstance(await isolate.lost, ConnectionResetError)


async def test_a_sender_without_credit_is_cut_off():
    async with pair() as (node, isolate):
        node.channel.receive_body(2)
        isolate.channel.send(*[Chunk(2, bytes(64 << 10))] * 5)
        assert "exceeds its window" in str(await node.lost)


async def test_garbage_is_cut_off():
    async with pair() as (node, isolate):
        isolate.channel._transport.write(b"\0\0\0\1\xc1")
        assert isinstance(await node.lost, FrameError)


async def test_frames_for_unknown_ids_are_harmless():
    async with pair() as (node, isolate):
        isolate.channel.send(Chunk(8, b"x"), Credit(8, 5), Credit(8, -5), Log(0, "log", "still here"))
        await until(lambda: node.frames)
        assert node.frames == [Log(0, "log", "still here")]


async def test_a_forgotten_body_is_dropped():
    async with pair() as (node, isolate):
        body = node.channel.receive_body(2)
        await body.aclose()
        isolate.channel.send(*[Chunk(2, bytes(64 << 10))] * 10)
        isolate.channel.send(End(2))
        await until(lambda: node.frames)
        with pytest.raises(StopAsyncIteration):
            await anext(body)


async def test_only_one_task_may_read_a_body():
    async with pair() as (node, _):
        body = node.channel.receive_body(2)
        first = asyncio.create_task(anext(body))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(body)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_values_that_no_frame_can_carry_are_refused():
    async with pair() as (_, isolate):
        for value in ("\ud800", 2**70, object()):
            with pytest.raises(FrameError, match="cannot be sent"):
                isolate.channel.send(Log(0, "log", value))


async def test_a_peer_that_does_not_read_is_not_read_from():
    left, right = socket.socketpair()
    node = await Peer().open(left, ToNode, wait_for_reader=True)
    right.setblocking(False)
    node.channel.send(*[Chunk(2, bytes(64 << 10))] * 40)
    right.send(b"\0\0\0\1\xc1")  # would end the connection if it were read
    await asyncio.sleep(0.05)
    assert not node.lost.done()
    while not node.lost.done():
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            right.recv(1 << 20)
        await asyncio.sleep(0.001)
    assert isinstance(await node.lost, FrameError)
    right.close()


class CountedWrites:
    """A transport that counts."""

    def __init__(self, channel: Channel) -> None:
        self.num = 0
        self._transport = channel._transport
        channel._transport = self  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        self.num += 1
        self._transport.write(data)

    def __getattr__(self, name):
        return getattr(self._transport, name)


async def test_what_is_sent_in_one_turn_can_go_out_in_one_write():
    async with pair(gathers=True) as (node, isolate):
        writes = CountedWrites(node.channel)
        for id in (1, 3, 5):
            node.channel.send(Cancel(id))
        assert writes.num == 0
        assert node.channel.num_unsent_bytes > 0
        await until(lambda: len(isolate.frames) == 3)
        assert writes.num == 1
        node.channel.send(Cancel(7))
        await until(lambda: len(isolate.frames) == 4)
        assert [frame.id for frame in isolate.frames] == [1, 3, 5, 7]


async def test_answers_to_frames_that_came_together_go_out_together():
    async with pair() as (node, isolate):
        isolate.channel._on_frame = lambda frame: isolate.channel.send(Log(frame.id, "log", "heard"))
        writes = CountedWrites(isolate.channel)
        node.channel.send(Cancel(2), Cancel(4), Cancel(6))
        await until(lambda: len(node.frames) == 3)
        assert [frame.invocation for frame in node.frames] == [2, 4, 6]
        assert writes.num == 1


async def test_what_is_held_goes_out_before_the_end():
    async with pair(gathers=True) as (node, isolate):
        node.channel.send(Cancel(1))
        node.channel.close()
        await isolate.lost
        assert [frame.id for frame in isolate.frames] == [1]


async def test_not_much_is_held():
    async with pair(gathers=True) as (node, _isolate):
        writes = CountedWrites(node.channel)
        for _ in range(5 * MAX_HELD_FRAMES):
            node.channel.send(Chunk(1, b"x"))
        assert writes.num == 5
        for _ in range(2):
            node.channel.send(Result(1, "x" * 600_000))
        assert writes.num == 6
        node.channel.fail(ConnectionResetError("enough"))
