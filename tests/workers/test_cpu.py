from __future__ import annotations

import asyncio
import contextvars
import time

import pytest

from workers import _runtime
from workers._cpu import CpuTime, MeteredLoop
from workers.entrypoints import Context


def burn(ms: float) -> None:
    """Use CPU time of this thread."""
    end_ns = time.thread_time_ns() + int(ms * 1e6)
    while time.thread_time_ns() < end_ns:
        pass


@pytest.fixture
def loop():
    loop = MeteredLoop()
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def measured(loop, *functions) -> list[float]:
    """Run each function as an invocation of its own, all at once; what each used, in ms."""

    async def main():
        owners, tasks = [], []
        for function in functions:
            owner = Context(1)
            context = contextvars.copy_context()
            context.run(_runtime.context.set, owner)
            owners.append(owner)
            tasks.append(loop.create_task(function(), context=context))
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        return [owner._cpu.us / 1000 for owner in owners]

    return loop.run_until_complete(main())


def test_turns_are_told_apart(loop):
    async def often(ms):
        for _ in range(20):
            burn(ms / 20)
            await asyncio.sleep(0)

    used = measured(loop, lambda: often(20), lambda: often(60), lambda: often(0))
    assert used[0] == pytest.approx(20, rel=0.2)
    assert used[1] == pytest.approx(60, rel=0.1)
    assert used[2] < 8


def test_waiting_costs_nothing(loop):
    async def wait():
        await asyncio.sleep(0.05)
        time.sleep(0.05)  # noqa: ASYNC251 - blocking is not CPU time either

    assert measured(loop, wait)[0] < 20


def test_what_an_invocation_starts_is_its_own(loop):
    async def start():
        running = asyncio.get_running_loop()
        timer_done, soon_done, from_thread = asyncio.Event(), asyncio.Event(), asyncio.Event()
        running.call_later(0.001, lambda: (burn(10), timer_done.set()))
        running.call_soon(lambda: (burn(10), soon_done.set()))
        running.call_soon_threadsafe(lambda: (burn(10), from_thread.set()))
        await asyncio.gather(asyncio.create_task(asyncio.to_thread(burn, 10)), asyncio.to_thread(burn, 10))
        for event in (timer_done, soon_done, from_thread):
            await event.wait()

    async def idle():
        await asyncio.sleep(0.05)

    used = measured(loop, start, idle)
    assert used[0] == pytest.approx(50, rel=0.3)
    assert used[1] < 10


def test_the_running_turn_counts():
    cpu = CpuTime()
    seen = []
    cpu.run(lambda: (burn(5), seen.append(cpu.us)))
    assert seen[0] >= 5000
    assert cpu.us >= seen[0]


def test_a_turn_that_raises_counts():
    cpu = CpuTime()
    with pytest.raises(ZeroDivisionError):
        cpu.run(lambda: (burn(2), 1 / 0))
    assert cpu.us >= 2000


def test_a_task_can_be_started_at_once(loop):
    order: list[object] = []

    async def work():
        order.append(asyncio.current_task())
        burn(10)
        await asyncio.sleep(0)
        order.append("second step")
        burn(10)
        return "done"

    def start():
        owner = Context(1)
        context = contextvars.copy_context()
        context.run(_runtime.context.set, owner)
        task = loop.start_task(work(), context, owner._cpu)
        order.append("started")
        started.set_result((owner, task))

    async def main():
        loop.call_soon(start)
        owner, task = await started
        assert await task == "done"
        assert order == [task, "started", "second step"]
        assert owner._cpu.us / 1000 == pytest.approx(20, rel=0.2)

    started = loop.create_future()
    loop.run_until_complete(main())


def test_a_task_that_is_started_at_once_can_be_done_at_once(loop):
    async def work():
        raise ValueError("wanted")

    def start():
        task = loop.start_task(work(), contextvars.copy_context(), CpuTime())
        started.set_result(task.done() and str(task.exception()))

    started = loop.create_future()
    loop.call_soon(start)
    assert loop.run_until_complete(started) == "wanted"
