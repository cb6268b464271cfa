"""One test's worker: bindings with state of their own, and the calls of the fixtures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from edge.billing.meter import new_id
from edge.billing.prices import PriceBook
from edge.bindings.assets import Assets, Site
from edge.bindings.base import Provider
from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.queue_store import Message
from edge.bindings.queues import Outcome, Queues, batch_event, settlement
from edge.bindings.r2 import R2
from edge.bindings.ratelimit import RateLimits
from edge.bindings.service import Services
from edge.config import Config, QueueConsumerConfig
from edge.errors import (
    EdgeError,
    HandlerFailed,
    InvalidInput,
    IsolateLost,
    OutOfCapacity,
    UnknownWorker,
    WorkerStartFailed,
)
from edge.isolates.base import Bundle, InboundEvent, InboundRequest, InvocationUsage, OutboundResponse, WorkerKey
from edge.isolates.dispatch import Isolates
from edge.node.hub import Hub
from edge.testing.ai import Ai
from edge.testing.clock import Clock
from edge.testing.env import unpacked
from edge.testing.inprocess import InProcessSpawner
from edge.testing.loop import LoopThread
from edge.testing.records import Logs, Usage
from edge.testing.worker import Batch, Raised, Settled, State
from workers import _runtime
from workers.values import wrap


class Project(Protocol):
    """What the tests of one configuration share; see `edge.testing.session.Project`."""

    config: Config
    prices: PriceBook
    bundle: Bundle
    isolates: Isolates
    spawner: InProcessSpawner | None
    harness: Harness | None


T = TypeVar("T")

_NOT_BEGUN = (WorkerStartFailed, OutOfCapacity, UnknownWorker, IsolateLost)
"""After these there may be no invocation whose end could be waited for."""
_CLOSE_TIMEOUT_S = 10.0

_begun: ContextVar[list[str]] = ContextVar("begun")
"""Ids of the invocations that the call of a fixture has begun."""


class Harness:
    """The worker of `project` for one test, whose state is in `folder`. To be made in the loop."""

    def __init__(self, project: Project, ai: Ai, folder: Path, loop: LoopThread) -> None:
        self.project = project
        self.folder = folder
        self.ai = ai
        self.clock = Clock()
        self.logs = Logs()
        self.usage = Usage(project.prices, has_cpu_times=project.spawner is None)
        self.bundle = project.bundle
        self.overrides: dict[str, Any] = {}
        self._loop = loop
        self._queues = Queues(folder, _Neighbours(project).event, print, self.clock)
        self.hub = Hub(ai, self._providers())
        self._deploying = asyncio.Lock()
        self._deployed: Bundle | None = None
        self._endings: dict[str, asyncio.Future[None]] = {}

    def _providers(self) -> dict[str, Provider]:
        assets, neighbours = Assets(), _Neighbours(self.project)
        if self.project.config.assets is not None:
            assets.sites[self.bundle.key] = Site(self.project.config.assets)
        return {
            "kv": Kv(self.folder, self.clock),
            "d1": D1(self.folder),
            "r2": R2(self.folder, self.clock),
            "queue": self._queues,
            "service": Services(neighbours),
            "ratelimit": RateLimits(self.clock),
            "assets": assets,
        }

    # -- for the test's thread -----------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs in the loop. Raises what it raises."""
        return self._loop.run(work)

    def call(self, work: Coroutine[Any, Any, T]) -> T | Raised:
        """The same for calls of the worker, whose output is captured; `Raised` if it raises."""
        __tracebackhide__ = True
        with self._captured():
            return self._loop.run(self._outcome(work))

    async def acall(self, work: Coroutine[Any, Any, T]) -> T | Raised:
        """The same for another event loop."""
        with self._captured():
            return await asyncio.wrap_future(self._loop.submit(self._outcome(work)))

    def override(self, values: Mapping[str, Any]) -> None:
        """Let `env` have these values instead of others, from the next call of the worker on.

        Raises:
            TypeError: see `Env.override`.
        """
        if self.project.spawner is None:
            for name, value in values.items():
                try:
                    msgspec.json.encode(value)
                except TypeError as error:
                    raise TypeError(
                        f"env.override({name}=…): {error}; in subprocess mode handlers are in another process, which "
                        "only JSON values can get into. Mark the test: @pytest.mark.edge(mode='inprocess')"
                    ) from error
        self.overrides = dict(values)
        kept = {name: each for name, each in self.project.bundle.bindings.items() if name not in values}
        if self.project.spawner is None:
            self.bundle = replace(self.project.bundle, vars=self.project.bundle.vars | self.overrides, bindings=kept)
        else:
            _runtime.env_patches.clear()
            _runtime.env_patches.update({name: wrap(value) for name, value in values.items()})

    def _captured(self) -> contextlib.AbstractContextManager[None]:
        spawner = self.project.spawner
        return contextlib.nullcontext() if spawner is None else spawner.output.captured()

    # -- what the fixtures ask -----------------------------------------------------------------------------

    @property
    def consumers(self) -> list[QueueConsumerConfig]:
        """The queues that the worker consumes."""
        return self.project.config.queues.consumers

    @property
    def crons(self) -> list[str]:
        """When its `scheduled` handler runs."""
        return self.project.config.triggers.crons

    @property
    def now_ms(self) -> int:
        """The test's time."""
        return self.clock.now_ms

    @property
    def module(self) -> ModuleType:
        """The worker's main module. Raises RuntimeError in subprocess mode, and whatever its import raises."""
        spawner = self.project.spawner
        if spawner is None:
            raise RuntimeError(
                "worker.module: in subprocess mode the module is in another process; mark the test: "
                "@pytest.mark.edge(mode='inprocess')"
            )
        outcome = self.call(self._deploy())
        if isinstance(outcome, Raised):
            raise outcome.error
        return spawner.module

    # -- in the loop ---------------------------------------------------------------------------------------

    async def fetch(self, request: InboundRequest, entrypoint: str, props: dict[str, Any]) -> OutboundResponse:
        """The worker's response."""
        await self._deploy()
        request.request_id = self._begin()
        return await self.project.isolates.fetch(self.bundle.key, request, entrypoint=entrypoint, props=props)

    async def event(self, event: InboundEvent) -> Any:
        """What the worker makes of `event`."""
        await self._deploy()
        event.request_id = self._begin()
        return await self.project.isolates.event(self.bundle.key, event)

    async def settled(self, messages: list[Message], config: QueueConsumerConfig) -> Batch:
        """What becomes of `messages`, which the handler is given."""
        batch, _ = await self._serve_batch(messages, config)
        return batch

    async def deliver(self, config: QueueConsumerConfig) -> Batch:
        """Take a batch from a queue, give it to the handler and do what that says."""
        store = self._queues.store(self.bundle.account)
        messages = await store.take(config.queue, config.max_batch_size, self.now_ms)
        if not messages:
            return Batch([], None)
        try:
            batch, (done, dead, retries) = await self._serve_batch(messages, config)
        except BaseException:
            await store.release(config.queue)
            raise
        await store.settle(done, retries, dead, config.dead_letter_queue, self.now_ms)
        return batch

    async def waiting(self, queue: str) -> list[Any]:
        """The bodies of the messages that wait in a queue."""
        return [unpacked(message.body) for message in await self._queues.store(self.bundle.account).waiting(queue)]

    def on_invocation(self, usage: InvocationUsage) -> None:
        """All of an invocation is over."""
        if usage.kind != "background":
            self.usage.invocations.append(usage)
        ending = self._endings.get(usage.request_id)
        if ending is not None and not ending.done():
            ending.set_result(None)

    async def close(self) -> None:
        """End the worker and let go of its state."""
        try:
            if self._deployed is not None:
                with contextlib.suppress(TimeoutError):  # what does not end in time ends with the session
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await self.project.isolates.remove(self._deployed.key)
        finally:
            _runtime.env_patches.clear()
            await self.hub.close()

    async def _serve_batch(self, messages: list[Message], config: QueueConsumerConfig) -> tuple[Batch, Any]:
        outcome = msgspec.convert(await self.event(batch_event(config.queue, messages)), Outcome)
        now_ms = self.now_ms
        settled = settlement(config, messages, outcome, now_ms)
        done, dead, retries = settled
        delays_ms = {retry.seq: retry.visible_ms - now_ms for retry in retries}
        results = []
        for each in messages:
            state: State = "done" if each.seq in done else "dead" if each.seq in dead else "retry"
            results.append(Settled(each.id, unpacked(each.body), state, delays_ms.get(each.seq, 0) / 1000))
        error = None
        if outcome.error is not None:
            error = self._original(HandlerFailed(**outcome.error))
        return Batch(results, error), settled

    async def _outcome(self, work: Coroutine[Any, Any, T]) -> T | Raised:
        """The result of `work` once the invocations that it began are over; `Raised` if it raises."""
        begun: list[str] = []
        _begun.set(begun)
        try:
            outcome: T | Raised = await work
        except Exception as error:
            outcome = Raised(self._original(error))
            if isinstance(error, _NOT_BEGUN):
                return outcome
        # A node ends what goes on for too long, `waitUntil` work too, so that this does not wait for ever.
        await asyncio.gather(*(self._endings[id] for id in begun))
        return outcome

    async def _deploy(self) -> None:
        """Have the worker up, as `env.override` wants it to be."""
        async with self._deploying:
            if self._deployed is not self.bundle:
                await self.project.isolates.deploy(self.bundle)
                self._deployed = self.bundle

    def _begin(self) -> str:
        """An id for an invocation that begins now."""
        id = new_id()
        self._endings[id] = asyncio.get_running_loop().create_future()
        _begun.get().append(id)
        return id

    def _original(self, error: BaseException) -> BaseException:
        spawner = self.project.spawner
        return error if spawner is None or not isinstance(error, EdgeError) else spawner.original(error)


class _Neighbours:
    """What service bindings reach: the worker itself, for there is no other one."""

    def __init__(self, project: Project) -> None:
        self._project = project

    async def fetch(
        self, key: WorkerKey, request: InboundRequest, *, entrypoint: str = "", props: dict[str, Any] | None = None
    ) -> OutboundResponse:
        """See `edge.bindings.service.Workers`."""
        self._check(key)
        return await self._project.isolates.fetch(key, request, entrypoint=entrypoint, props=props)

    async def event(self, key: WorkerKey, event: InboundEvent) -> Any:
        """See `edge.bindings.service.Workers`."""
        self._check(key)
        return await self._project.isolates.event(key, event)

    def _check(self, key: WorkerKey) -> None:
        if key != self._project.bundle.key:
            raise InvalidInput(
                f"the worker {key[1]!r} does not run in tests of {self._project.bundle.worker!r}; give the test an "
                "object in its place: env.override(BINDING=…)"
            )
