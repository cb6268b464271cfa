"""The gate: the one door to the pool. Whatever passes it is metered, and nothing reaches an engine without it.

A call's usage record is durable before its last event is handed on; a call that fails or is cancelled is
recorded too, with what it had used by then. This module knows nothing about dialects, HTTP or SQL.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec

from edge.ai.catalogue import TEXT_GENERATION, Catalogue, Model
from edge.ai.schemas import TextGeneration
from edge.billing.meter import Meter, Status, Trigger, UsageRecord, new_id
from edge.billing.times import now_us
from edge.errors import EdgeError, EngineLost, MeteringUnavailable
from edge.frames import Delta, Done, Generate, Started, Usage
from edge.pool.base import Pool

Event = Started | Delta | Done

_CLOSE_TIMEOUT_S = 5.0
_CREDIT_DELTAS = 32
"""How far an engine may run ahead of a slow reader."""

_log = logging.getLogger(__name__)


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """On whose account a call is made, and how it came in."""

    account: str
    trigger: Trigger
    request_id: str
    worker: str | None = None
    version: str | None = None
    priority: int = 0
    """Higher calls are served first."""
    sandbox: int = 0
    """As in `UsageRecord`."""


class Gate:
    """Runs model calls on `pool` and has each recorded by `meter`."""

    def __init__(self, pool: Pool, catalogue: Catalogue, meter: Meter) -> None:
        self.catalogue = catalogue
        self.sharing: frozenset[str] = frozenset()
        """Accounts that let each other's prompts be found in the KV cache."""
        self._pool = pool
        self._meter = meter
        self._endings: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, principal: Principal, model: Model, request: TextGeneration) -> AsyncGenerator[Event, None]:
        """The events of one call: `Started`, `Delta`s, `Done`. Closing the generator cancels the call.

        Raises:
            MeteringUnavailable: the usage record could not be made durable; raised instead of yielding `Done`.
            EdgeError: as the pool refused or lost the call.
        """
        call = _Call(principal, model, self.catalogue.prices.id)
        # No account has an empty name.
        cache_of = "" if principal.account in self.sharing else principal.account
        events = self._pool.generate(_generate(principal, cache_of, model, request), call.use)
        is_recorded = False
        self._num_running += 1
        self._idle.clear()
        try:
            async for event in events:
                if type(event) is Done:
                    call.end(event)
                    is_recorded = True
                    await asyncio.shield(self._record(call))
                yield event
            if not is_recorded:
                raise EngineLost("the engine ended the answer before it was complete: try again", retry_after_s=1)
        except EdgeError as error:
            call.error_code = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            call.status, call.error_code = "cancelled", None
            raise
        finally:
            ending = None if is_recorded else self._record(call, stop=events)
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()
            if ending is not None:
                with suppress(MeteringUnavailable):  # the caller gets the first error; this one is in the log
                    await asyncio.shield(ending)

    def _record(self, call: _Call, *, stop: AsyncGenerator[Event, None] | None = None) -> asyncio.Task[None]:
        """A task of its own that cannot be lost with the caller's: it stops the work, then writes the record."""

        async def end() -> None:
            try:
                if stop is not None:
                    await stop.aclose()
            finally:
                await self._meter.record(call.record())

        def log_failure(ending: asyncio.Task[None]) -> None:
            self._endings.discard(ending)
            if not ending.cancelled() and (failure := ending.exception()) is not None:
                _log.error("usage record lost: %s: %s", failure, msgspec.json.encode(call.record()).decode())

        ending = asyncio.create_task(end())
        self._endings.add(ending)
        ending.add_done_callback(log_failure)
        return ending

    async def close(self) -> None:
        """Return once the calls are over and all records are written, also those that nobody waits for.

        The pool is closed before, which ends its calls; one whose reader does not notice is given up.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _CLOSE_TIMEOUT_S)
        await asyncio.gather(*self._endings, return_exceptions=True)


class _Call:
    """What is known of a call while it runs. Until something better is known, it has failed."""

    def __init__(self, principal: Principal, model: Model, price_version: str) -> None:
        self.status: Status = "error"
        self.error_code: int | None = EdgeError.code
        self._id = new_id()
        self._principal = principal
        self._model = model
        self._price_version = price_version
        self._usage = Usage()
        self._started_at_us = now_us()
        self._started_ns = time.monotonic_ns()

    def use(self, usage: Usage) -> None:
        """Note what has been used by now."""
        self._usage = usage

    def end(self, done: Done) -> None:
        """Take over the outcome."""
        self.status, self.error_code = ("cancelled" if done.finish_reason == "cancelled" else "ok"), None

    def record(self) -> UsageRecord:
        """The usage record as of now."""
        wall_us = (time.monotonic_ns() - self._started_ns) // 1000  # a clock that is set back bills no time
        return UsageRecord(
            id=self._id,
            request_id=self._principal.request_id,
            started_at=self._started_at_us,
            ended_at=self._started_at_us + wall_us,
            account=self._principal.account,
            worker=self._principal.worker,
            version=self._principal.version,
            model=self._model.id,
            served_by=self._model.manifest.name,
            task=TEXT_GENERATION,
            trigger=self._principal.trigger,
            status=self.status,
            error_code=self.error_code,
            input_tokens=self._usage.input_tokens,
            cached_input_tokens=self._usage.cached_input_tokens,
            output_tokens=self._usage.output_tokens,
            compute_us=self._usage.compute_us,
            wall_us=wall_us,
            price_version=self._price_version,
            sandbox=self._principal.sandbox,
        )


def _generate(principal: Principal, cache_of: str, model: Model, request: TextGeneration) -> Generate:
    return Generate(
        id=0,  # the pool mints its own
        model=model.manifest.name,
        messages=request.messages,
        prompt=request.prompt,
        raw=request.raw,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop=request.stop,
        credit=_CREDIT_DELTAS,
        account=cache_of,
        priority=principal.priority,
        json_schema=request.json_schema,
        adapter=request.adapter,
        tools=request.tools,
    )
