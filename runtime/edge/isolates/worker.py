"""The processes of one worker: how many there are, which one gets a request, and who takes over after a deployment.

It knows nothing about what is in a request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from edge.errors import EdgeError, IsolateLost, TooManyRequests, UnknownWorker, WorkerStartFailed
from edge.isolates.base import Bundle, WorkerKey, WorkerStatus
from edge.isolates.isolate import Home, Isolate

DRAIN_S = 900.0
"""How long a replaced version may go on with what it has in flight."""
MAX_WAITING = 1000
"""Requests of one worker that may wait for a process."""
FREE_FAILURES = 3
"""Failed starts in a row after which the next one is put off."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0

StartIsolate = Callable[[Bundle, Home], Awaitable[Isolate]]
"""Starts a process for a bundle; the second argument is who hears of it."""


class Worker:
    """One worker, of which one version serves.

    Args:
        max_isolates: processes of one version at most.
    """

    def __init__(self, key: WorkerKey, start_isolate: StartIsolate, max_isolates: int) -> None:
        self.key = key
        self._start_isolate = start_isolate
        self._max_isolates = max_isolates
        self._version: _Version | None = None
        self._failure: EdgeError = WorkerStartFailed("no version of this worker could be imported yet")
        self._deploying = asyncio.Lock()
        self._num_deploying = 0
        self._is_removed = False
        self._waiting: deque[asyncio.Future[Isolate]] = deque()
        self._isolates: set[Isolate] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_forks = 0
        self._num_losses = 0
        self._num_served = 0

    # -- versions ------------------------------------------------------------------------------------------

    async def deploy(self, bundle: Bundle) -> None:
        """Import `bundle` in a new process and let it take over. Requests in flight finish where they are.

        Raises:
            WorkerStartFailed: it cannot be imported; what served before goes on serving.
            IsolateLost: no process could be had; likewise.
        """
        self._num_deploying += 1
        try:
            async with self._deploying:
                isolate = await self._fork(bundle)
                if self._is_removed:
                    isolate.retire()
                    raise self._unknown()
                version = _Version(bundle)
                replaced, self._version = self._version, version
        except EdgeError as error:
            self._failure = error
            raise
        finally:
            self._num_deploying -= 1
            if self._version is None and not self._num_deploying:
                self._fail_waiting(self._failure)
        isolate.cold_start_us = 0  # no request has waited for it
        self._adopt(version, isolate)
        if replaced is not None:
            self._retire(replaced)

    async def remove(self) -> None:
        """Take no more requests, let those in flight finish, and return once no process is left."""
        self._is_removed = True
        self._fail_waiting(self._unknown())
        async with self._deploying:
            version, self._version = self._version, None
        if version is not None:
            self._retire(version)
        await self._emptied()

    async def close(self) -> None:
        """End every process now; requests in flight fail."""
        self._is_removed = True
        self._fail_waiting(IsolateLost("the node is stopping"))
        self._version = None
        for task in self._tasks:
            task.cancel()
        for isolate in self._isolates:
            isolate.kill("the node is stopping")
        await self._emptied()

    def status(self) -> WorkerStatus:
        """Counts and processes of now."""
        isolates = self._version.isolates if self._version is not None else []
        serving = [isolate for isolate in isolates if isolate.is_serving]
        return WorkerStatus(
            account=self.key[0],
            worker=self.key[1],
            version=self._version.bundle.version if self._version is not None else "",
            pids=[isolate.pid for isolate in serving],
            in_flight=sum(isolate.load for isolate in self._isolates),
            waiting=len(self._waiting),
            blocked=sum(isolate.is_blocked for isolate in serving),
            handlers=list(serving[0].handlers) if serving else [],
            layers=list(serving[0].layers) if serving else [],
            missing_layers=dict(serving[0].sandbox.missing) if serving else {},
            invocations=self._num_served + sum(isolate.num_served for isolate in self._isolates),
            forks=self._num_forks,
            losses=self._num_losses,
        )

    # -- requests ------------------------------------------------------------------------------------------

    def take(self) -> Isolate | None:
        """A slot in the process that has the least to do, or None if none has one free."""
        if self._waiting or (isolate := self._least_loaded()) is None:
            return None
        isolate.take()
        return isolate

    async def wait(self) -> Isolate:
        """A slot, once there is one.

        Raises:
            WorkerStartFailed: no version could be imported so far, or the current one cannot be any more.
            TooManyRequests: too many wait already, or this one did for too long.
            IsolateLost: no process could be had.
        """
        while True:
            if self._is_removed:
                raise self._unknown()
            if self._version is None and not self._num_deploying:
                raise self._failure
            if len(self._waiting) >= MAX_WAITING:
                raise self._full(f"{MAX_WAITING} requests wait already")
            timeout_s = self._version.bundle.limits.timeout_s if self._version is not None else None
            waiter: asyncio.Future[Isolate] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._fork_for_waiting()
            try:
                async with asyncio.timeout(timeout_s):
                    isolate = await waiter
            except BaseException as error:
                self._leave(waiter)
                if isinstance(error, TimeoutError):
                    raise self._full(f"it waited for {timeout_s:g} s (limits.timeout_s)") from None
                raise
            if isolate.is_serving:
                return isolate
            isolate.release()  # it has died since it was chosen

    def _leave(self, waiter: asyncio.Future[Isolate]) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            waiter.result().release()

    def on_room(self) -> None:
        """A process may have a free slot."""
        if self._waiting:
            self._serve_waiting()

    def on_worn(self) -> None:
        """A process takes no more requests: have the next one there before it is asked for."""
        version = self._version
        if version is not None and not version.num_serving and not version.num_forking and not version.is_put_off():
            version.num_forking += 1
            self._spawn(self._fork_for(version))

    def _least_loaded(self) -> Isolate | None:
        if self._version is None:
            return None
        best, least = None, self._version.bundle.limits.concurrency
        for isolate in self._version.isolates:
            num_requests = isolate.load - isolate.num_sockets
            if num_requests < least and isolate.accepts:
                best, least = isolate, num_requests
        return best

    def _serve_waiting(self) -> None:
        while self._waiting:
            isolate = self._least_loaded()
            if isolate is None:
                self._fork_for_waiting()
                return
            waiter = self._waiting.popleft()
            if not waiter.done():
                isolate.take()
                waiter.set_result(isolate)

    def _fail_waiting(self, error: EdgeError) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    def _full(self, why: str) -> TooManyRequests:
        limits = self._version.bundle.limits if self._version is not None else None
        concurrency = f", {limits.concurrency} requests each (limits.concurrency)" if limits is not None else ""
        return TooManyRequests(
            f"worker {self.key[1]} has no room for another request: {why}; it may have {self._max_isolates} processes "
            f"(isolates.max_per_worker){concurrency}",
            retry_after_s=1,
        )

    def _unknown(self) -> UnknownWorker:
        return UnknownWorker(f"no worker {self.key[1]!r} is deployed")

    # -- processes -----------------------------------------------------------------------------------------

    def _fork_for_waiting(self) -> None:
        """Start as many processes as those who wait can fill, if there may be that many."""
        version = self._version
        if version is None or self._is_removed or not self._waiting:
            return
        if version.is_put_off():
            if not version.num_serving and not version.num_forking:
                self._fail_waiting(version.failure)
            return
        num_wanted = -(-len(self._waiting) // version.bundle.limits.concurrency)
        num_free = self._max_isolates - version.num_serving
        while version.num_forking < min(num_wanted, num_free):
            version.num_forking += 1
            self._spawn(self._fork_for(version))

    async def _fork_for(self, version: _Version) -> None:
        try:
            isolate = await self._fork(version.bundle)
        except (EdgeError, OSError) as raised:
            error = raised if isinstance(raised, EdgeError) else IsolateLost(f"no process could be had: {raised}")
            version.num_forking -= 1
            version.put_off(error)
            if version is self._version and not version.num_serving and not version.num_forking:
                self._fail_waiting(error)
        else:
            version.num_forking -= 1
            version.num_failures = 0
            if not self._waiting:
                isolate.cold_start_us = 0
            self._adopt(version, isolate)

    async def _fork(self, bundle: Bundle) -> Isolate:
        isolate = await self._start_isolate(bundle, self)
        self._num_forks += 1
        self._isolates.add(isolate)
        isolate.gone.add_done_callback(lambda _: self._isolates.discard(isolate))
        return isolate

    def _adopt(self, version: _Version, isolate: Isolate) -> None:
        """Let `isolate` serve, or, if `version` was replaced meanwhile, end it."""
        if version is not self._version or self._is_removed:
            isolate.retire()
            return
        version.isolates.append(isolate)
        isolate.gone.add_done_callback(lambda _: self._on_gone(version, isolate))
        self._serve_waiting()

    def _on_gone(self, version: _Version, isolate: Isolate) -> None:
        version.isolates.remove(isolate)
        self._num_served += isolate.num_served
        self._num_losses += not isolate.was_ordered
        if version is self._version:
            self._serve_waiting()

    async def _emptied(self) -> None:
        """Return once there is no process and nothing that could start one."""
        while self._tasks or self._isolates:
            ends: list[asyncio.Future[Any]] = [*self._tasks, *(isolate.gone for isolate in self._isolates)]
            await asyncio.wait(ends)
            await asyncio.sleep(0)  # those who are gone are forgotten in callbacks

    def _retire(self, version: _Version) -> None:
        for isolate in version.isolates:
            isolate.retire()
            self._spawn(_drain(isolate))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Version:
    """A deployed version and its processes."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.isolates: list[Isolate] = []
        self.num_forking = 0
        self.num_failures = 0
        self.failure = EdgeError("")
        self._not_before = 0.0

    @property
    def num_serving(self) -> int:
        return sum(isolate.is_serving for isolate in self.isolates)

    def put_off(self, error: EdgeError) -> None:
        """A start failed with `error`. After some in a row the next one has to wait, twice as long each time."""
        self.num_failures += 1
        self.failure = error
        if self.num_failures >= FREE_FAILURES:
            wait_s = min(FIRST_BACKOFF_S * 2 ** (self.num_failures - FREE_FAILURES), MAX_BACKOFF_S)
            self._not_before = asyncio.get_running_loop().time() + wait_s

    def is_put_off(self) -> bool:
        """Whether no start is to be tried now."""
        return self.num_failures >= FREE_FAILURES and asyncio.get_running_loop().time() < self._not_before


async def _drain(isolate: Isolate) -> None:
    await asyncio.wait([isolate.gone], timeout=DRAIN_S)
    isolate.kill(f"another version took over {DRAIN_S:g} s ago")
