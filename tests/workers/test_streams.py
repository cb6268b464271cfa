from __future__ import annotations

import asyncio

import pytest

from workers.streams import ReadableStream


async def source(*chunks, closed=None):
    try:
        for chunk in chunks:
            yield chunk
    finally:
        if closed is not None:
            closed.append(True)


async def test_iterates_as_bytes_with_to_bytes():
    stream = ReadableStream(source("ä", b"b", bytearray(b"c"), memoryview(b"d")))
    assert not stream.disturbed
    assert [chunk.to_bytes() async for chunk in stream] == ["ä".encode(), b"b", b"c", b"d"]
    assert stream.disturbed


async def test_sync_iterators_are_sources_and_give_other_tasks_a_turn():
    turns = []

    async def other():
        turns.append(True)

    task = asyncio.create_task(other())
    stream = ReadableStream(iter(["a", "b"]))
    assert await anext(stream) == b"a"
    assert await anext(stream) == b"b"
    assert turns == [True]
    await task


async def test_reader_protocol():
    stream = ReadableStream(source("a"))
    reader = stream.getReader()
    assert stream.locked
    first, last = await reader.read(), await reader.read()
    assert (first.done, first.value.to_bytes()) == (False, b"a")
    assert (last.done, last.value) == (True, None)


async def test_one_reader_at_a_time():
    stream = ReadableStream(source("a"))
    reader = stream.getReader()
    with pytest.raises(TypeError, match="locked"):
        stream.getReader()
    reader.releaseLock()
    assert not stream.locked
    with pytest.raises(TypeError, match="released"):
        await reader.read()
    assert (await stream.getReader().read()).value == b"a"


async def test_cancel_closes_the_source():
    closed = []
    stream = ReadableStream(source("a", "b", closed=closed))
    reader = stream.getReader()
    await reader.read()
    await reader.cancel("no more")
    assert closed == [True]


async def test_other_chunks_are_refused():
    with pytest.raises(TypeError, match="Unsupported type in stream: int"):
        await anext(ReadableStream(source(5)))


async def test_tee_gives_both_branches_everything():
    left, right = ReadableStream(source("a", "b", "c")).tee()
    assert await anext(left) == b"a"
    assert [bytes(chunk) async for chunk in right] == [b"a", b"b", b"c"]
    assert [bytes(chunk) async for chunk in left] == [b"b", b"c"]


async def test_tee_gives_both_branches_the_error():
    async def broken():
        yield "a"
        raise OSError("gone")

    for branch in ReadableStream(broken()).tee():
        assert await anext(branch) == b"a"
        with pytest.raises(OSError, match="gone"):
            await anext(branch)
