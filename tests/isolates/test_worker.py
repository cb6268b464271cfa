"""How many processes a worker has, which of them gets a request, and what else than requests they are asked for."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from edge.config import IsolatesConfig
from edge.errors import (
    HandlerFailed,
    HandlerTimeout,
    InvalidInput,
    IsolateLost,
    TooManyRequests,
    UnknownWorker,
    WorkerStartFailed,
)
from edge.isolates import isolate
from edge.isolates import worker as worker_module
from edge.isolates.base import Binding
from edge.isolates.dispatch import JsonAnswer, StreamAnswer

from .conftest import is_alive, running, until

GATED = """
gates = {}
async def fetch(self, request):
    import os
    name = request.url.rpartition("/")[2]
    if name.startswith("open-"):
        self.gates[name.removeprefix("open-")].set()
    elif name:
        gate = self.gates[name] = asyncio.Event()
        print("in", name)
        await gate.wait()
    return Response(str(os.getpid()))
"""


# -- many workers ------------------------------------------------------------------------------------------


async def test_workers_are_served_by_processes_of_their_own(worker):
    await worker.deploy("def fetch(self): return Response('one')")
    await worker.deploy("def fetch(self): return Response('two')", worker="other")
    assert worker.isolates.workers() == [("dev", "test"), ("dev", "other")]
    assert await asyncio.gather(worker.get(), worker.get(worker="other")) == ["one", "two"]
    await worker.isolates.remove(("dev", "other"))
    with pytest.raises(UnknownWorker) as caught:
        await worker.get(worker="other")
    assert caught.value.status == 404
    with pytest.raises(UnknownWorker):
        await worker.isolates.remove(("dev", "other"))
    assert await worker.get() == "one"
    await until(lambda: worker.children() == worker.pids)


async def test_remove_lets_requests_in_flight_finish(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            print("in")
            return Response(await request.text())
        """
    )
    go_on = asyncio.Event()

    async def body():
        await go_on.wait()
        yield b"sent"

    request = asyncio.create_task(worker.get("/", method="POST", body=body()))
    await worker.log_text("in")
    pid = worker.pid
    removing = asyncio.create_task(worker.isolates.remove(worker.key))
    await asyncio.wait([removing], timeout=0.1)
    assert not removing.done()
    with pytest.raises(UnknownWorker):
        await worker.get()
    go_on.set()
    assert await request == "sent"
    await removing
    assert not is_alive(pid)


# -- scaling -----------------------------------------------------------------------------------------------


async def test_processes_are_forked_as_slots_run_out(tmp_path):
    config = IsolatesConfig(max_per_worker=2)
    async with running(tmp_path, isolates=config, concurrency=2) as worker:
        await worker.deploy(GATED)
        first = [asyncio.create_task(worker.get(f"/{name}")) for name in "ab"]
        await worker.log_text("in b")
        assert len(worker.pids) == 1
        more = [asyncio.create_task(worker.get(f"/{name}")) for name in "cdef"]
        await worker.log_text("in d")
        assert (len(worker.pids), worker.status.in_flight, worker.status.waiting) == (2, 4, 2)
        for each in (*first, *more):
            each.cancel()
        await asyncio.gather(*first, *more, return_exceptions=True)
        await until(lambda: worker.status.in_flight == 0)
        assert worker.status.waiting == 0
        assert int(await worker.get()) in worker.pids


async def test_the_least_loaded_process_is_chosen(tmp_path):
    async with running(tmp_path, concurrency=2) as worker:
        await worker.deploy(GATED)
        held = [asyncio.create_task(worker.get(f"/{name}")) for name in "abc"]
        await worker.log_text("in c")
        assert len(worker.pids) == 2
        assert int(await worker.get()) == worker.pids[1]
        for each in held:
            each.cancel()


async def test_too_many_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_WAITING", 2)
    async with running(tmp_path, timeout_s=1.0, isolates=IsolatesConfig(max_per_worker=1), concurrency=1) as worker:
        await worker.deploy(GATED)
        held = asyncio.create_task(worker.get("/a"))
        await worker.log_text("in a")
        waiting = [asyncio.create_task(worker.get("/")) for _ in range(2)]
        await until(lambda: worker.status.waiting == 2)
        with pytest.raises(
            TooManyRequests, match=r"2 requests wait already.*1 processes \(isolates\.max_per_worker\), 1 req"
        ) as caught:
            await worker.get("/")
        assert (caught.value.code, caught.value.status, caught.value.retry_after_s) == (1015, 429, 1)
        results = await asyncio.gather(held, *waiting, return_exceptions=True)
        assert isinstance(results[0], HandlerTimeout)
        assert worker.status.waiting == 0


async def test_a_process_is_ended_when_idle_and_forked_again(tmp_path):
    async with running(tmp_path, isolates=IsolatesConfig(idle_s=0.2)) as worker:
        await worker.deploy("def fetch(self):\n    import os\n    return Response(str(os.getpid()))")
        pid = int(await worker.get())
        await until(lambda: not is_alive(pid) and worker.pids == [])
        assert int(await worker.get()) != pid
        await until(lambda: len(worker.usage) >= 2)
        first, second = [each for each in worker.usage if each.kind == "fetch"]
        assert not first.is_cold
        assert second.is_cold
        assert worker.status.losses == 0


async def test_a_process_is_replaced_after_its_share_of_requests(tmp_path):
    async with running(tmp_path, isolates=IsolatesConfig(max_requests=3)) as worker:
        await worker.deploy("def fetch(self):\n    import os\n    return Response(str(os.getpid()))")
        pids = [int(await worker.get()) for _ in range(7)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]
        assert worker.status.invocations == 7
        await until(lambda: worker.children() == worker.pids)


async def test_a_process_is_replaced_after_a_memory_error(worker):
    await worker.deploy(
        """
        def fetch(self, request):
            import os
            if "hog" in request.url:
                raise MemoryError()
            return Response(str(os.getpid()))
        """
    )
    pid = int(await worker.get())
    with pytest.raises(HandlerFailed):
        await worker.get("/hog")
    assert int(await worker.get()) != pid
    await until(lambda: not is_alive(pid))


@pytest.mark.parametrize("wedge", ["while True: pass", "import time; time.sleep(60)"])
async def test_other_requests_pass_by_a_process_that_is_wedged(worker, wedge):
    await worker.deploy(
        f"""
        async def fetch(self, request):
            if "wedge" in request.url:
                print("in")
                {wedge}
            import os
            return Response(str(os.getpid()))
        """
    )
    pid = worker.pid
    wedged = asyncio.create_task(worker.get("/wedge"))
    await worker.log_text("in")
    await until(lambda: worker.status.blocked == 1)
    async with asyncio.timeout(10):  # a fork, and not the time limit of 20 s
        assert int(await worker.get()) != pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(IsolateLost):
        await wedged


async def test_a_process_that_was_busy_is_used_again(tmp_path):
    async with running(tmp_path, isolates=IsolatesConfig(max_per_worker=1)) as worker:
        await worker.deploy(
            """
            async def fetch(self, request):
                if "busy" in request.url:
                    import time
                    print("in")
                    time.sleep(2)
                return Response("ok")
            """
        )
        pid = worker.pid
        busy = asyncio.create_task(worker.get("/busy"))
        await worker.log_text("in")
        await until(lambda: worker.status.blocked == 1)
        assert await worker.get() == "ok"
        assert await busy == "ok"
        assert worker.pids == [pid]


# -- deploying ---------------------------------------------------------------------------------------------


async def test_requests_are_held_during_the_first_deployment(worker):
    deploying = asyncio.create_task(worker.deploy("def fetch(self): return Response('ok')"))
    await until(lambda: worker.isolates.workers())
    assert await worker.get() == "ok"
    await deploying


async def test_requests_held_during_a_deployment_that_fails(worker):
    deploying = asyncio.create_task(worker.deploy("1/0", indented=False))
    await until(lambda: worker.isolates.workers())
    with pytest.raises(WorkerStartFailed, match="ZeroDivisionError"):
        await worker.get()
    with pytest.raises(WorkerStartFailed):
        await deploying


async def test_requests_that_wait_get_the_version_that_took_over(tmp_path):
    async with running(tmp_path, isolates=IsolatesConfig(max_per_worker=1), concurrency=1) as worker:
        await worker.deploy(GATED)
        held = asyncio.create_task(worker.get("/a"))
        await worker.log_text("in a")
        waiting = asyncio.create_task(worker.get("/"))
        await until(lambda: worker.status.waiting == 1)
        await worker.deploy("def fetch(self): return Response('new')")
        assert await waiting == "new"
        held.cancel()


async def test_starts_that_keep_failing_are_put_off(worker, monkeypatch):
    await worker.deploy("def fetch(self): return Response('ok')")
    (worker.root / "worker_main.py").write_text("print('tried')\n1/0\n")
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: worker.pid is None)
    for _ in range(10):
        with pytest.raises(WorkerStartFailed, match="ZeroDivisionError"):
            await worker.get()
    num_tried = sum(entry[2] == "tried" for entry in worker.logs)
    assert worker_module.FREE_FAILURES <= num_tried < 10
    (worker.root / "worker_main.py").write_text(
        "from workers import Response\ndef on_fetch(): return Response('again')\n"
    )
    async with asyncio.timeout(20):
        while True:
            try:
                assert await worker.get() == "again"
                break
            except WorkerStartFailed:
                await asyncio.sleep(0.05)


# -- entrypoints, events, calls ----------------------------------------------------------------------------


async def test_entrypoint_and_props(worker):
    await worker.deploy(
        """
        from workers import Response, WorkerEntrypoint
        class Default(WorkerEntrypoint):
            def fetch(self): return Response("default")
        class Admin(WorkerEntrypoint):
            def fetch(self): return Response(f"admin {self.ctx.props.role}")
        """,
        indented=False,
    )
    assert await worker.get() == "default"
    assert await worker.get(entrypoint="Admin", props={"role": "boss"}) == "admin boss"


async def test_events(worker):
    await worker.deploy(
        """
        async def scheduled(self, controller):
            print("cron", controller.cron)
        async def queue(self, batch):
            raise ValueError("no queue")
        """
    )
    result = await worker.event("scheduled", {"cron": "* * * * *", "scheduledTime": 0})
    assert result == {"noRetry": False}
    await worker.log_text("cron * * * * *")
    await until(lambda: worker.usage)
    assert (worker.usage[0].kind, worker.usage[0].outcome) == ("scheduled", "ok")


async def test_an_event_that_takes_too_long(worker, monkeypatch):
    monkeypatch.setattr(isolate, "BACKGROUND_S", 0.2)
    await worker.deploy("async def scheduled(self, controller):\n    await asyncio.sleep(60)")
    with pytest.raises(HandlerTimeout, match=r"the scheduled handler did not end within 0\.2 s"):
        await worker.event("scheduled", {"cron": "", "scheduledTime": 0})
    await until(lambda: worker.usage)
    assert worker.usage[0].outcome == "exceededTime"


CALLER = """
async def fetch(self, request):
    from workers.bindings._calls import BindingCalls
    calls = BindingCalls("KV")
    try:
        if "stream" in request.url:
            head, body = await calls.stream("get", "k")
            return Response(body, head.status)
        body = b"v" * 200_000 if "body" in request.url else None
        return Response.json(await calls.call("put", "k", 1, None, body=body))
    except Exception as error:
        return Response(f"{type(error).__name__} {error}")
"""


async def test_calls_of_bindings(worker):
    await worker.deploy(CALLER, bindings={"KV": Binding("kv")})
    assert json.loads(await worker.get()) == ["KV", "put", ["k", 1, None], None]


async def test_calls_with_a_body(worker):
    async def length(binding, method, args, body):
        return JsonAnswer([len(chunk) async for chunk in body])

    worker.bindings.answer_call = length
    await worker.deploy(CALLER, bindings={"KV": Binding("kv")})
    assert sum(map(int, (await worker.get("/body")).strip("[]").split(","))) == 200_000


async def test_calls_that_are_answered_with_a_stream(worker):
    closed = asyncio.Event()

    async def stream():
        try:
            for _ in range(10):
                yield b"x" * 100_000
        finally:
            closed.set()

    async def answer(*_):
        return StreamAnswer(203, [], stream())

    worker.bindings.answer_call = answer
    await worker.deploy(CALLER, bindings={"KV": Binding("kv")})
    assert len(await worker.get("/stream")) == 1_000_000
    await asyncio.wait_for(closed.wait(), 10)


async def test_calls_that_fail(worker):
    async def refuse(*_):
        raise InvalidInput("no such key")

    worker.bindings.answer_call = refuse
    await worker.deploy(CALLER, bindings={"KV": Binding("kv")})
    assert "no such key" in await worker.get()
