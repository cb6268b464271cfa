"""`python -m edge.isolates.probe POLICY`: forks handler processes as a node does, and prints as JSON what they report.

For `edge doctor`: a process of its own, because the zygote's sandbox cannot be left again.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any

from edge.isolates.sandbox import layers
from edge.isolates.spawner import ForkSpec, Spawner
from workers._channel import Channel
from workers._wire import Sandboxed, ToNode

NUM_FORKS = 7


async def examine(policy: str) -> dict[str, Any]:
    """Layers that are on, those that are off and why, what the self-test got away with, and the median time of a start.

    Raises:
        IsolateLost: no process could be had.
        ChildProcessError: it ended before it reported.
    """
    spawner = Spawner(policy)
    times_ms = []
    try:
        await spawner.start()
        for _ in range(NUM_FORKS):
            report, took_ms = await _fork(spawner)
            times_ms.append(took_ms)
    finally:
        await spawner.close()
    return {
        "layers": report.layers,
        "missing": report.missing,
        "escapes": report.escapes,
        "bitmask": layers.bitmask(report.layers),
        "spawn_ms": round(statistics.median(times_ms), 1),
    }


async def _fork(spawner: Spawner) -> tuple[Sandboxed, float]:
    start = time.perf_counter()
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Sandboxed] = loop.create_future()
    exited: asyncio.Future[int] = loop.create_future()
    _, sock = await spawner.fork(ForkSpec(), exited.set_result)
    channel = await Channel.open(sock, ToNode, answer.set_result, lambda _: None)
    waiting: list[asyncio.Future[Any]] = [answer, exited]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    took_ms = (time.perf_counter() - start) * 1000
    channel.close()
    if not answer.done():
        raise ChildProcessError(f"the process ended with {exited.result()}; what it printed is above")
    await exited
    return answer.result(), took_ms


if __name__ == "__main__":
    print(json.dumps(asyncio.run(examine(sys.argv[1]))))
