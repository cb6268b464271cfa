from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from edge.ai.deadlines import InTime
from edge.errors import CallTimeout

NOW_S = 0.001


class Events:
    """Three numbers, then a wait for `go_on`, then one more; notes how it ended."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.end: type[BaseException] | None = None
        self.is_closed = False

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(3):
                yield number
            await self.go_on.wait()
            yield 3
        except BaseException as error:
            self.end = type(error)
            raise
        finally:
            await asyncio.sleep(0)  # a pool hears its engine out
            self.is_closed = True


@pytest.mark.parametrize("timeout_s", [0, 60.0])
async def test_what_is_in_time_passes(timeout_s: float) -> None:
    events = Events()
    events.go_on.set()
    assert [each async for each in InTime(events(), timeout_s)] == [0, 1, 2, 3]
    assert events.is_closed


async def test_what_takes_too_long_is_stopped_and_heard_out() -> None:
    events = Events()
    limited = InTime(events(), NOW_S)
    assert [await anext(limited) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(CallTimeout, match=r"after 0.001 s, the limit of this node \(call_timeout_s") as failure:
        await anext(limited)
    assert (events.end, events.is_closed, failure.value.retry_after_s) == (asyncio.CancelledError, True, 1)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_reader_is_not_disturbed_between_two_events() -> None:
    events = Events()
    async with aclosing(InTime(events(), NOW_S)) as limited:
        assert await anext(limited) == 0
        await asyncio.sleep(20 * NOW_S)
        with pytest.raises(CallTimeout):
            await anext(limited)
    assert events.is_closed


async def test_a_cancellation_from_outside_stays_one() -> None:
    events = Events()

    async def read() -> None:
        async for _ in InTime(events(), 3600):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert events.is_closed


async def test_closing_early_closes_what_is_behind() -> None:
    events = Events()
    async with aclosing(InTime(events(), 3600)) as limited:
        assert await anext(limited) == 0
    assert (events.end, events.is_closed) == (GeneratorExit, True)
