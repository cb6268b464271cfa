"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio

import pytest

from edge.node.connection import HangUp


async def test_work_is_done_where_it_is_asked_for():
    tasks = []

    async def work() -> None:
        tasks.append(asyncio.current_task())

    await HangUp().end(work())
    assert tasks == [asyncio.current_task()]


async def test_it_ends_when_the_client_goes_away():
    hang_up = HangUp()
    ended = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    asyncio.get_running_loop().call_soon(hang_up.happen)
    await hang_up.end(work())
    assert ended == [True]
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_who_is_cancelled_for_another_reason_hears_of_it():
    task = asyncio.create_task(HangUp().end(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_is_over_is_left_alone():
    hang_up = HangUp()
    await hang_up.end(asyncio.sleep(0))
    hang_up.happen()
    await asyncio.sleep(0)


async def test_its_error_is_passed_on():
    async def work() -> None:
        raise ValueError("wanted")

    with pytest.raises(ValueError, match="wanted"):
        await HangUp().end(work())
