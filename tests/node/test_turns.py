from __future__ import annotations

import asyncio

from edge.node.turns import PER_TURN, PER_TURN_BESIDE_STREAMS, Turns

NUM_REQUESTS = 5 * PER_TURN


async def begun_by_turn(turns: Turns, num_requests: int = NUM_REQUESTS) -> list[list[int]]:
    """Which of so many requests begin in each turn of the event loop."""
    begun: list[int] = []
    by_turn: list[list[int]] = []

    async def begin(number: int) -> None:
        await turns.wait()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(num_requests)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        by_turn.append(begun.copy())
        begun.clear()
    return [numbers for numbers in by_turn if numbers]


async def test_a_burst_begins_in_order_and_few_at_a_time() -> None:
    by_turn = await begun_by_turn(Turns())
    assert [number for numbers in by_turn for number in numbers] == list(range(NUM_REQUESTS))
    assert max(map(len, by_turn)) == PER_TURN


async def test_beside_streams_fewer_begin() -> None:
    turns = Turns()
    with turns.streaming():
        by_turn = await begun_by_turn(turns)
        assert [number for numbers in by_turn for number in numbers] == list(range(NUM_REQUESTS))
        assert max(map(len, by_turn)) == PER_TURN_BESIDE_STREAMS
    assert len((await begun_by_turn(turns, PER_TURN))[0]) == PER_TURN


async def test_a_request_that_is_cancelled_takes_no_turn() -> None:
    turns = Turns()
    waiting = [asyncio.create_task(turns.wait()) for _ in range(2 * PER_TURN)]
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True] * PER_TURN + [False] * PER_TURN
    for task in waiting[PER_TURN:-1]:
        task.cancel()
    await asyncio.wait_for(waiting[-1], 10)
    assert await asyncio.gather(*waiting, return_exceptions=True) != []
    assert len((await begun_by_turn(turns, PER_TURN))[0]) == PER_TURN  # and nothing is left over
