"""Limits of invocations and what they used, as the node measures it from outside: CPU time, memory, calls, bodies."""

from __future__ import annotations

import asyncio

import pytest

from edge.config import IsolatesConfig
from edge.errors import (
    ExceededCpu,
    ExceededMemory,
    HandlerFailed,
    HandlerTimeout,
    IsolateLost,
    RequestTooLarge,
    WorkerStartFailed,
)
from edge.isolates.dispatch import JsonAnswer

from .conftest import running, until

BURN = """
def burned(ms):
    from time import thread_time
    end = thread_time() + ms / 1000
    while thread_time() < end:
        sum(range(1000))
"""

BURNER = f"""
import asyncio
from workers import Response
{BURN}
gate = asyncio.Event()

async def on_fetch(request):
    query = dict(pair.split("=") for pair in request.url.partition("?")[2].split("&") if pair)
    for _ in range(int(query.get("times", 1))):
        burned(int(query.get("ms", 0)))
        await asyncio.sleep(0)
    if "hold" in query:
        print("held")
        await gate.wait()
    gate.set()
    return Response("ok")
"""


def usage_of(worker, kind="fetch"):
    return [each for each in worker.usage if each.kind == kind]


# -- CPU time ----------------------------------------------------------------------------------------------


async def test_cpu_time_of_one_invocation(worker):
    await worker.deploy(BURNER, indented=False)
    await worker.get("/")  # imports and caches
    for ms in (50, 200):
        await worker.get(f"/?ms={ms}")
    await until(lambda: len(usage_of(worker)) == 3)
    assert [each.cpu_us for each in usage_of(worker)[1:]] == pytest.approx([50_000, 200_000], rel=0.05)


async def test_cpu_time_of_interleaved_invocations(worker):
    await worker.deploy(BURNER, indented=False)
    await worker.get("/")
    idle = asyncio.create_task(worker.get("/?hold=1"))
    await worker.log_text("held")
    await asyncio.gather(*(worker.get(f"/?ms=10&times={times}") for times in (5, 10, 20)), idle)
    await until(lambda: len(usage_of(worker)) == 5)
    used = sorted(each.cpu_us for each in usage_of(worker)[1:])
    assert used[0] < 5_000
    assert used[1:] == pytest.approx([50_000, 100_000, 200_000], rel=0.05)
    assert worker.status.forks == 1


async def test_claims_from_inside_do_not_change_the_sum(worker):
    """A handler that says it used nothing, while others run, only moves its time to them."""
    await worker.deploy(
        BURNER.replace(
            "gate.set()", "import workers._cpu as c\n    c.CpuTime.us = property(lambda self: 0)\n    gate.set()"
        ),
        indented=False,
    )
    await worker.get("/")
    await asyncio.gather(*(worker.get("/?ms=10&times=10") for _ in range(3)))
    await until(lambda: len(usage_of(worker)) == 4)
    assert sum(each.cpu_us for each in usage_of(worker)[1:]) == pytest.approx(300_000, rel=0.05)


@pytest.mark.parametrize("query", ["ms=100000", "ms=10&times=100000"])
async def test_over_the_cpu_limit(tmp_path, query):
    async with running(tmp_path, cpu_ms=300) as worker:
        await worker.deploy(BURNER, indented=False)
        with pytest.raises(ExceededCpu, match=r"used \d{3} ms of limits\.cpu_ms 300") as caught:
            await worker.get(f"/?{query}")
        assert (caught.value.code, caught.value.status) == (1102, 503)
        assert await worker.get("/") == "ok"
        await until(lambda: len(usage_of(worker)) == 2)
        outcomes = {each.outcome: each for each in usage_of(worker)}
        assert set(outcomes) == {"exceededCpu", "ok"}
        assert 300_000 < outcomes["exceededCpu"].cpu_us < 1_000_000


async def test_only_the_culprit_is_stopped_where_it_lets_others_run(tmp_path):
    async with running(tmp_path, cpu_ms=300, isolates=IsolatesConfig(max_per_worker=1)) as worker:
        await worker.deploy(BURNER, indented=False)
        pid = worker.pid
        neighbour = asyncio.create_task(worker.get("/?hold=1"))
        await worker.log_text("held")
        with pytest.raises(ExceededCpu):
            await worker.get("/?ms=10&times=100000")
        assert await worker.get("/") == "ok"
        assert worker.pid == pid
        assert await neighbour == "ok"


async def test_neighbours_of_a_culprit_that_blocks_can_be_tried_again(tmp_path):
    async with running(tmp_path, cpu_ms=300) as worker:
        await worker.deploy(BURNER, indented=False)
        neighbour = asyncio.create_task(worker.get("/?hold=1"))
        await worker.log_text("held")
        with pytest.raises(ExceededCpu):
            await worker.get("/?ms=100000")
        with pytest.raises(IsolateLost, match="another request in it ran over its limits") as caught:
            await neighbour
        assert caught.value.retryable
        await until(lambda: len(usage_of(worker)) == 2)
        by_outcome = {each.outcome: each.cpu_us for each in usage_of(worker)}
        assert by_outcome["lost"] < 10_000
        assert by_outcome["exceededCpu"] > 300_000


async def test_cpu_time_between_requests_is_counted(tmp_path):
    async with running(tmp_path, cpu_ms=300) as worker:
        await worker.deploy(
            BURN
            + """
import threading
from workers import Response
def on_fetch(request):
    ms = int(request.url.rpartition("/")[2])
    threading.Thread(target=lambda: (__import__("time").sleep(0.05), burned(ms), print("burned"))).start()
    return Response("ok")
""",
            indented=False,
        )
        await worker.get("/50")
        await until(lambda: usage_of(worker))
        pid = worker.pid
        await worker.log_text("burned")
        await worker.get("/100000")
        assert usage_of(worker, "background")[0].cpu_us == pytest.approx(50_000, rel=0.2)
        await until(lambda: worker.pid != pid)  # that thread would go on for ever
        await until(lambda: len(usage_of(worker, "background")) == 2)
        assert usage_of(worker, "background")[1].cpu_us > 300_000


# -- memory ------------------------------------------------------------------------------------------------


async def test_over_the_memory_limit(tmp_path):
    async with running(tmp_path, memory_mb=64) as worker:
        await worker.deploy(
            """
            held = []
            async def fetch(self, request):
                while "hog" in request.url:
                    self.held.append(bytearray(b"x" * (1 << 20)))
                    await asyncio.sleep(0.002)
                return Response("ok")
            """
        )
        with pytest.raises(ExceededMemory, match=r"its process held \d+ MB of limits\.memory_mb 64") as caught:
            await worker.get("/hog")
        assert (caught.value.code, caught.value.status) == (1102, 503)
        assert await worker.get() == "ok"
        await until(lambda: len(usage_of(worker)) == 2)
        assert [each.outcome for each in usage_of(worker)] == ["exceededMemory", "ok"]


async def test_an_import_over_the_memory_limit(tmp_path):
    async with running(tmp_path, memory_mb=64) as worker:
        with pytest.raises(WorkerStartFailed, match=r"held \d+ MB of limits\.memory_mb 64|MemoryError"):
            await worker.deploy("held = [bytearray(b'x' * (1 << 20)) for _ in range(4000)]", indented=False)


# -- calls and bodies --------------------------------------------------------------------------------------


async def test_over_the_limit_of_subrequests(tmp_path):
    async with running(tmp_path, subrequests=3) as worker:
        await worker.deploy(
            """
            async def fetch(self, request):
                found = []
                for _ in range(5):
                    try:
                        found.append(len(await self.env.AI.run("m", {})))
                    except Exception as error:
                        found.append(str(error))
                return Response.json(found)
            """
        )
        for _ in range(2):  # each invocation has its own
            assert '[3,3,3,"1102: Too many subrequests: this invocation has made 4; limits.subrequests is 3' in (
                await worker.get()
            ).replace(", ", ",")
        await until(lambda: len(usage_of(worker)) == 2)
        assert [each.subrequests for each in usage_of(worker)] == [5, 5]


async def test_calls_outside_of_any_invocation_are_bounded_too(tmp_path):
    async with running(tmp_path, subrequests=3) as worker:
        num_asked = 0

        def answer(*_):
            nonlocal num_asked
            num_asked += 1
            return JsonAnswer("x")

        worker.bindings.answer = answer
        await worker.deploy(
            """
            async def fetch(self, request):
                import contextvars
                task = contextvars.Context().run(asyncio.create_task, self.flood(self.env))
                return Response(str(await task))
            async def flood(self, env):
                from workers import _runtime
                for number in range(100):
                    try:
                        await env.AI.run("m", {})
                    except Exception as error:
                        return number
            """
        )
        assert await worker.get() == "3"
        assert num_asked == 3


@pytest.mark.parametrize("reads", [True, False])
async def test_a_request_body_over_the_limit(tmp_path, reads):
    async with running(tmp_path, request_body_mb=1) as worker:
        await worker.deploy(
            f"""
            async def fetch(self, request):
                if request.method == "POST":
                    {"await request.bytes()" if reads else "await asyncio.sleep(60)"}
                return Response("ok")
            """
        )
        pid = worker.pid

        async def body():
            for _ in range(3 if reads else 1):
                yield bytes(600_000 if reads else 3 << 20)

        with pytest.raises(RequestTooLarge, match=r"over 1 MB; raise limits\.request_body_mb \(now 1\)") as caught:
            await worker.get("/", method="POST", body=body())
        assert caught.value.status == 413
        assert await worker.get() == "ok"
        assert worker.pid == pid


# -- outcomes ----------------------------------------------------------------------------------------------


async def test_what_usage_says(tmp_path):
    async with running(tmp_path, timeout_s=1.0, isolates=IsolatesConfig(max_per_worker=1)) as hasty:
        await hasty.deploy(
            """
            async def fetch(self, request):
                match request.url.rpartition("/")[2]:
                    case "raise":
                        1 / 0
                    case "slow":
                        await asyncio.sleep(60)
                    case "die":
                        import os
                        os._exit(1)
                    case "break":
                        async def broken():
                            yield "a"
                            raise ValueError()
                        return Response(broken())
                return Response("ok", 201)
            """,
            version="v7",
        )
        assert await hasty.get() == "ok"
        for path, error in (
            ("/raise", HandlerFailed),
            ("/break", HandlerFailed),
            ("/slow", HandlerTimeout),
            ("/die", IsolateLost),
        ):
            with pytest.raises(error):
                await hasty.get(path)
        request = asyncio.create_task(hasty.get("/slow"))
        await until(lambda: hasty.status.in_flight == 1)
        request.cancel()
        await until(lambda: len(usage_of(hasty)) == 6)
        outcomes = [(each.outcome, each.status) for each in usage_of(hasty)]
        assert outcomes == [
            ("ok", 201), ("exception", 0), ("exception", 200), ("exceededTime", 0), ("lost", 0), ("canceled", 0),
        ]  # fmt: skip
        first, slow, last = usage_of(hasty)[0], usage_of(hasty)[3], usage_of(hasty)[5]
        assert (first.bundle.version, first.is_cold, first.cpu_us > 0) == ("v7", False, True)
        assert 900_000 < slow.wall_us < 3_000_000
        assert last.is_cold  # the process before it had died
        assert len({each.request_id for each in hasty.usage}) == len(hasty.usage)
        assert "no-new-privileges" in first.layers
