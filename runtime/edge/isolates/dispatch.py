"""Brings requests and events to the handler processes of all workers on the node.

It knows nothing about HTTP servers, models or money.
"""

from __future__ import annotations

import os
from typing import Any

from edge.config import IsolatesConfig
from edge.errors import IsolateLost, UnknownWorker, WorkerStartFailed
from edge.isolates.base import (
    Bindings,
    Bundle,
    InboundEvent,
    InboundRequest,
    InvocationUsage,
    JsonAnswer,
    OnInvocation,
    OnLog,
    OutboundResponse,
    StreamAnswer,
    WorkerKey,
    WorkerStatus,
)
from edge.isolates.egress import Egress
from edge.isolates.isolate import Home, Isolate, Owner
from edge.isolates.sandbox.layers import ForkSpec
from edge.isolates.spawner import Spawner
from edge.isolates.watch import Watch
from edge.isolates.worker import Worker

__all__ = [
    "Bindings",
    "Bundle",
    "InboundEvent",
    "InboundRequest",
    "InvocationUsage",
    "Isolates",
    "JsonAnswer",
    "OutboundResponse",
    "StreamAnswer",
    "WorkerStartFailed",
    "WorkerStatus",
]


class Isolates:
    """The handler processes of every worker on the node. To be made where an event loop runs.

    Args:
        bindings: what `env` calls.
        on_log: called with bundle, invocation (0: outside of any), level and text of what handlers print and log.
        config: how many processes there may be, under which sandbox.
        on_invocation: called with what each invocation used, once it is over.
        hidden_paths: files and folders of the node that no handler may see.
        spawner: what makes the processes; default: a zygote of this node's.
    """

    def __init__(
        self,
        bindings: Bindings,
        on_log: OnLog,
        config: IsolatesConfig | None = None,
        *,
        on_invocation: OnInvocation = lambda _: None,
        hidden_paths: tuple[str, ...] = (),
        spawner: Spawner | None = None,
    ) -> None:
        self._config = config = config or IsolatesConfig()
        self._hidden_paths = tuple(map(os.path.realpath, hidden_paths))  # as the roots of bundles are
        policy = config.sandbox or "best-effort"
        self._spawner = spawner or Spawner(policy, config.preload)
        self._egress = Egress()
        self._owner = Owner(
            spawner=self._spawner,
            policy=policy,
            bindings=bindings,
            egress=self._egress,
            watch=Watch(config.idle_s / 2),
            on_log=on_log,
            on_invocation=on_invocation,
            idle_s=config.idle_s,
            max_requests=config.max_requests,
        )
        self._workers: dict[WorkerKey, Worker] = {}
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
        if self._is_closed:
            raise IsolateLost("the node is stopping")
        worker = self._workers.get(bundle.key)
        if worker is None:
            worker = self._workers[bundle.key] = Worker(bundle.key, self._start_isolate, self._config.max_per_worker)
        await worker.deploy(bundle)

    async def remove(self, key: WorkerKey) -> None:
        """Serve a worker no more; return once all that it has in flight is finished.

        Raises:
            UnknownWorker: there is none of that name.
        """
        worker = self._worker(key)
        del self._workers[key]
        await worker.remove()
        if key not in self._workers:
            await self._egress.forget(key)

    async def fetch(
        self, key: WorkerKey, request: InboundRequest, *, entrypoint: str = "", props: dict[str, Any] | None = None
    ) -> OutboundResponse:
        """The worker's response to `request`. Closing its body before its end cancels the invocation.

        Raises:
            UnknownWorker: it is not deployed.
            HandlerFailed: the handler raised (`type`, `message`, `traceback`).
            ExceededResources: no response's head within limits.timeout_s, or it was over another limit.
            RequestTooLarge: the request's body is over limits.request_body_mb.
            TooManyRequests: too many others wait for a process.
            IsolateLost: the process died meanwhile.
            WorkerStartFailed: no version could be imported so far, or the current one cannot be any more.
        """
        worker = self._worker(key)
        isolate = worker.take() or await worker.wait()
        return await isolate.fetch(request, entrypoint, props or {})

    def take(self, key: WorkerKey) -> Isolate | None:
        """A slot in a process of the worker for one request, if there is one now: `start_fetch` follows at once."""
        worker = self._workers.get(key)
        return worker.take() if worker is not None and not self._is_closed else None

    async def event(self, key: WorkerKey, event: InboundEvent) -> Any:
        """What the worker made of `event`: see `workers._wire.Event`.

        Raises:
            As `fetch`.
        """
        worker = self._worker(key)
        isolate = worker.take() or await worker.wait()
        return await isolate.event(event)

    def workers(self) -> list[WorkerKey]:
        """All workers, oldest first."""
        return list(self._workers)

    def status(self, key: WorkerKey) -> WorkerStatus:
        """Processes and counts of one worker. Raises UnknownWorker."""
        if key not in self._workers:
            raise self._unknown(key)
        return self._workers[key].status()

    async def close(self) -> None:
        """Stop everything; no process is left when this returns. Requests in flight fail with IsolateLost."""
        self._is_closed = True
        workers = list(self._workers.values())
        for worker in workers:
            await worker.close()
        await self._spawner.close()
        await self._egress.close()

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks, or None."""
        return self._spawner.pid

    @property
    def spare_pid(self) -> int | None:
        """The process that waits for the next worker that needs one, or None."""
        return self._spawner.spare_pid

    def _worker(self, key: WorkerKey) -> Worker:
        worker = self._workers.get(key)
        if self._is_closed:
            raise IsolateLost("the node is stopping")
        if worker is None:
            raise self._unknown(key)
        return worker

    def _unknown(self, key: WorkerKey) -> UnknownWorker:
        return UnknownWorker(f"no worker {key[1]!r} is deployed in account {key[0]!r}")

    async def _start_isolate(self, bundle: Bundle, home: Home) -> Isolate:
        spec = ForkSpec(
            memory_mb=bundle.limits.memory_mb,
            root=bundle.root,
            search_paths=bundle.search_paths,
            hidden_paths=self._hidden_paths,
        )
        return await Isolate.start(self._owner, bundle, spec, home, bundle.limits.timeout_s)
