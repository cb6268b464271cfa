"""Thousands of requests with deployments, crashes and clients that hang up among them: nothing may be left over."""

from __future__ import annotations

import asyncio
import gc
import os
import random

import pytest

from edge.config import IsolatesConfig
from edge.errors import EdgeError

from .conftest import running, until

SOURCE = """
async def fetch(self, request):
    import os
    kind = request.url.rpartition("/")[2]
    if kind == "slow":
        await asyncio.sleep(0.05)
    elif kind == "stream":
        async def chunks():
            for _ in range(20):
                yield "x" * 5000
                await asyncio.sleep(0)
        return Response(chunks())
    elif kind == "ai":
        return Response.json(await self.env.AI.run("m", {}))
    elif kind == "raise":
        raise ValueError("wanted")
    elif kind == "die":
        os._exit(1)
    elif kind == "post":
        return Response(str(len(await request.bytes())))
    elif kind == "later":
        self.ctx.waitUntil(asyncio.sleep(0.01))
    return Response("ok")
"""
KINDS = ["", "", "", "slow", "stream", "leave", "ai", "raise", "post", "later", "cancel"]
NUM_REQUESTS = 3000


@pytest.mark.slow
async def test_nothing_is_left_over(tmp_path):
    config = IsolatesConfig(max_per_worker=3, max_requests=400)
    async with running(tmp_path, isolates=config, concurrency=8) as worker:
        await worker.deploy(SOURCE)
        await asyncio.gather(*(ask(worker, kind) for kind in KINDS))
        await settled(worker)
        before = counts()
        chance = random.Random(7)
        for number in range(NUM_REQUESTS // 20):
            kinds = [chance.choice(KINDS) for _ in range(20)]
            if number % 10 == 5:
                kinds.append("die")
            deploying = asyncio.create_task(worker.deploy(SOURCE)) if number % 25 == 10 else None
            await asyncio.gather(*(ask(worker, kind) for kind in kinds))
            if deploying is not None:
                await deploying
        await settled(worker)
        await until(lambda: counts()["isolates"] <= before["isolates"] + 2)
        after = counts()
        assert after["tasks"] <= before["tasks"]
        assert after["descriptors"] <= before["descriptors"] + 2  # one socket for each of up to two more processes
        assert after["invocations"] == 0
        assert len(worker.usage) >= NUM_REQUESTS
        assert worker.status.losses >= NUM_REQUESTS // 400  # one that was being replaced is not missed


async def ask(worker, kind: str) -> None:
    """One request; only errors that it is meant to meet are passed over."""

    async def body():
        for _ in range(10):
            yield bytes(10_000)

    try:
        if kind == "cancel":
            request = asyncio.create_task(worker.get("/slow"))
            await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        elif kind == "leave":
            response = await worker.open("/stream")
            await anext(response.body)
            await response.body.aclose()
        elif kind == "post":
            assert await worker.get("/post", method="POST", body=body()) == "100000"
        else:
            await worker.get(f"/{kind}")
    except EdgeError as error:
        if error.name not in ("WorkerThrewException", "WorkerCrashed"):
            raise


async def settled(worker) -> None:
    """Return once no request is under way and all replaced processes are gone."""
    await until(lambda: worker.status.in_flight == 0 and worker.status.waiting == 0)
    await until(lambda: worker.children() == sorted(worker.pids))
    await asyncio.sleep(0)


def counts() -> dict[str, int]:
    from edge.isolates.invocation import Invocation
    from edge.isolates.isolate import Isolate

    gc.collect()
    objects = gc.get_objects()
    return {
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "isolates": sum(type(each) is Isolate for each in objects),
        "invocations": sum(type(each) is Invocation for each in objects),
    }
