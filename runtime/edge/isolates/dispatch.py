"""Brings requests to handler processes: one deployed version serves, its successor takes over once it has imported.

It knows nothing about HTTP servers, models or money.
"""

from __future__ import annotations

import asyncio

from edge.config import LimitsConfig
from edge.errors import IsolateLost, WorkerStartFailed
from edge.isolates.base import Bindings, Bundle, InboundRequest, JsonAnswer, OnLog, OutboundResponse, StreamAnswer
from edge.isolates.egress import Egress
from edge.isolates.isolate import Isolate
from edge.isolates.spawner import Spawner

__all__ = [
    "Bindings",
    "Bundle",
    "InboundRequest",
    "Isolates",
    "JsonAnswer",
    "OutboundResponse",
    "StreamAnswer",
    "WorkerStartFailed",
]

DRAIN_S = 300.0
"""How long a replaced version may go on with the requests that it has in flight."""


class Isolates:
    """The handler processes of one worker.

    Args:
        bindings: what `env` calls.
        limits: of each invocation, and of the import of the code.
        on_log: called with bundle, invocation (0: outside of any), level and text of what handlers print and log.
    """

    def __init__(self, bindings: Bindings, limits: LimitsConfig, on_log: OnLog) -> None:
        self._bindings = bindings
        self._limits = limits
        self._on_log = on_log
        self._spawner = Spawner()
        self._egress = Egress()
        self._current: _Generation | None = None
        self._isolates: set[Isolate] = set()
        self._retired: set[asyncio.Task[None]] = set()
        self._deploying = asyncio.Lock()
        self._failure = WorkerStartFailed("no worker is deployed")
        self._is_closed = False

    async def start(self) -> None:
        """Start the zygote, so that the first deployment finds it warm. Raises IsolateLost if it does not come up."""
        await self._spawner.start()

    async def deploy(self, bundle: Bundle) -> None:
        """Import `bundle` in a new process and let it take over. Requests in flight finish where they are.

        Raises:
            WorkerStartFailed: it cannot be imported; what served before goes on serving.
            IsolateLost: no process could be had; likewise.
        """
        async with self._deploying:
            try:
                generation = _Generation(await self._fork(bundle))
            except WorkerStartFailed as error:
                self._failure = error
                raise
            replaced, self._current = self._current, generation
        if replaced is not None:
            self._retire(replaced)

    async def fetch(self, request: InboundRequest) -> OutboundResponse:
        """The worker's response to `request`. Closing its body before its end cancels the invocation.

        Raises:
            HandlerFailed: the handler raised (`type`, `message`, `traceback`).
            HandlerTimeout: no response's head within limits.timeout_s.
            IsolateLost: the process died meanwhile.
            WorkerStartFailed: no version could be imported so far, or the current one cannot be any more.
        """
        isolate = await self._ready_isolate()
        return await isolate.fetch(request, self._limits.timeout_s)

    async def close(self) -> None:
        """Stop everything; no process is left when this returns. Requests in flight fail with IsolateLost."""
        self._is_closed = True
        for isolate in self._isolates:
            isolate.kill("the node is stopping")
        await self._spawner.close()
        await asyncio.gather(*(isolate.gone for isolate in self._isolates), *self._retired)
        await self._egress.close()

    @property
    def pid(self) -> int | None:
        """The process that serves now, or None."""
        isolate = self._current.isolate if self._current is not None else None
        return isolate.pid if isolate is not None and isolate.accepts else None

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks, or None."""
        return self._spawner.pid

    @property
    def layers(self) -> list[str]:
        """The sandbox layers that the serving process is under."""
        return self._current.isolate.layers if self._current is not None else []

    async def _ready_isolate(self) -> Isolate:
        while True:
            if self._is_closed:
                raise IsolateLost("the node is stopping")
            generation = self._current
            if generation is None:
                raise self._failure
            isolate = generation.isolate
            await isolate.settled()
            if isolate.accepts:
                return isolate
            async with generation.forking:
                if generation is self._current and not generation.isolate.accepts:
                    generation.isolate = await self._fork(generation.isolate.bundle)

    async def _fork(self, bundle: Bundle) -> Isolate:
        isolate = await Isolate.start(
            self._spawner, bundle, self._bindings, self._egress, self._on_log, self._limits.timeout_s
        )
        self._isolates.add(isolate)
        isolate.gone.add_done_callback(lambda _: self._isolates.discard(isolate))
        return isolate

    def _retire(self, generation: _Generation) -> None:
        task = asyncio.create_task(self._drain(generation))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    async def _drain(self, generation: _Generation) -> None:
        async with generation.forking:  # a process that is being forked for it has to go as well
            isolate = generation.isolate
        isolate.retire()
        try:
            async with asyncio.timeout(DRAIN_S):
                await asyncio.shield(isolate.gone)
        except TimeoutError:
            isolate.kill(f"a newer version took over {DRAIN_S:g} s ago")


class _Generation:
    """A deployed version and the process that serves it, which may be replaced when it dies."""

    def __init__(self, isolate: Isolate) -> None:
        self.isolate = isolate
        self.forking = asyncio.Lock()
