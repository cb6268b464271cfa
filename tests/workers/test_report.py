from __future__ import annotations

import asyncio

import pytest

from workers import Response
from workers._channel import HIGH_WATER_BYTES
from workers._report import MAX_TEXT, Reporter, message_text, sendable, traceback_text


class SlowChannel:
    """What a reporter needs of a channel whose peer reads when `room` is set."""

    def __init__(self):
        self.num_unsent_bytes = 0
        self.frames = []
        self.room = asyncio.Event()

    def send(self, frame):
        self.frames.append(frame)

    async def writable(self):
        await self.room.wait()


def test_tracebacks_show_the_users_frames_only():
    def handler():
        Response({})

    try:
        handler()
    except TypeError as error:
        text = traceback_text(error)
    assert "in handler" in text
    assert "response.py" not in text
    assert "TypeError: Unsupported type in Response: dict" in text
    assert "Response.json(value)" in text


def test_causes_are_cleaned_too():
    try:
        try:
            Response(5)
        except TypeError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        text = traceback_text(error)
    assert "direct cause" in text
    assert "response.py" not in text


def test_exceptions_that_cannot_be_shown():
    class Broken(Exception):
        def __str__(self):
            return 1 / 0

    assert "cannot be shown" in message_text(Broken())
    assert "Broken" in traceback_text(Broken())


async def test_output_that_nobody_reads_is_dropped_and_counted():
    channel = SlowChannel()
    reporter = Reporter(channel)
    reporter.log("log", "one")
    channel.num_unsent_bytes = HIGH_WATER_BYTES + 1
    reporter.log("log", "two")
    reporter.log("log", "three")
    channel.num_unsent_bytes = 0
    reporter.log("log", "four")
    channel.room.set()
    await asyncio.sleep(0)
    assert [frame.text[:30] for frame in channel.frames] == ["one", "2 lines of output were dropped", "four"]


async def test_dropped_lines_are_told_of_without_another_line():
    channel = SlowChannel()
    channel.num_unsent_bytes = HIGH_WATER_BYTES + 1
    reporter = Reporter(channel)
    reporter.log("log", "lost")
    await asyncio.sleep(0)
    assert channel.frames == []
    channel.num_unsent_bytes = 0
    channel.room.set()
    async with asyncio.timeout(10):
        while not channel.frames:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0)
    assert [frame.text[:30] for frame in channel.frames] == ["1 lines of output were dropped"]


def test_texts_can_always_be_sent():
    assert sendable("a\ud800") == "a\\ud800"
    assert message_text(ValueError("\ud800")) == "\\ud800"


def test_long_tracebacks_are_cut_in_the_middle():
    text = traceback_text(ValueError("x" * 1_000_000 + "end"))
    assert len(text) < MAX_TEXT + 100
    assert "characters left out" in text
    assert text.endswith("end\n")


def test_endless_recursion():
    def recurse():
        recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    assert f"RecursionError: {caught.value}" in traceback_text(caught.value)
