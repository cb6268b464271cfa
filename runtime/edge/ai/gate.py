"""The gate: the one door to the pool. Whatever passes it is metered, and nothing reaches an engine without it.

A call's usage record is durable before its last event is handed on; a call that fails or is cancelled is
recorded too, with what it had used by then. This module knows nothing about dialects, HTTP or SQL.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from edge.ai.call_report import CallReport
from edge.ai.catalogue import Catalogue, Model
from edge.ai.deadlines import InTime
from edge.ai.finetunes import Finetunes
from edge.ai.rate_limits import RateLimits
from edge.ai.schemas import TextGeneration
from edge.billing.meter import Meter, Status, Trigger, UsageRecord, new_id
from edge.billing.times import now_us
from edge.errors import EdgeError, EngineLost, MeteringUnavailable
from edge.frames import Delta, Done, Encode, Encoded, Generate, Pooling, Started, Usage
from edge.pool.base import Pool

if TYPE_CHECKING:
    from edge.ai.batch import Batches

Event = Started | Delta | Done
E = TypeVar("E", Started | Delta | Done, Started | Delta | Encoded)

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
    reject_if_busy: bool = False
    """Have the call refused rather than wait for others to end."""
    sandbox: int = 0
    """As in `UsageRecord`."""
    report: CallReport = msgspec.field(default_factory=CallReport)
    """Filled while the calls of this request run."""
    mint: Callable[[], str] = new_id
    """Gives the id of each usage record."""
    recorded: Callable[[UsageRecord], None] = lambda record: None
    """Called with each usage record once it is durable."""
    hold: Callable[[int], None] = lambda num_bytes: None
    """Called with the size of a large answer before it is made; raises OutOfCapacity if too much is under way."""

    @property
    def is_batch(self) -> bool:
        """Whether nobody waits for the answer: neither rate limits nor the time limit of calls concern it."""
        return self.trigger == "batch"


class Embeddings(msgspec.Struct, frozen=True):
    """The vectors of some texts, in order; each has `dimensions` float32 numbers."""

    vectors: list[array[float]]
    dimensions: int
    pooling: Pooling | None
    """How they were made."""
    usage: Usage


class Classifications(msgspec.Struct, frozen=True):
    """For each of some texts, in order, each label of the model and its score from 0 to 1."""

    scores: list[list[tuple[str, float]]]
    usage: Usage


class Gate:
    """Runs model calls on `pool` and has each recorded by `meter`."""

    def __init__(
        self,
        pool: Pool,
        catalogue: Catalogue,
        meter: Meter,
        *,
        rate_limits: RateLimits | None = None,
        call_timeout_s: float = 0,
    ) -> None:
        """Calls are counted by `rate_limits` (None: there are none) and stopped after `call_timeout_s` (0: never)."""
        self.catalogue = catalogue
        self.sharing: frozenset[str] = frozenset()
        """Accounts that let each other's prompts be found in the KV cache."""
        self.finetunes: Finetunes | None = None
        """Where adapters are that accounts have uploaded; without it, there are those of the models alone."""
        self._pool = pool
        self._meter = meter
        self._rate_limits = rate_limits or RateLimits({})
        self._call_timeout_s = call_timeout_s
        self.batches: Batches | None = None
        """Keeps calls that are to be made when there is nothing else to do, and makes them through this gate."""
        self._endings: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self.num_interactive = 0
        """Calls under way that somebody waits for."""
        self._idle = asyncio.Event()
        self._idle.set()

    def run(
        self, principal: Principal, model: Model, request: TextGeneration, *, num_calls: int = 1
    ) -> AsyncGenerator[Event, None]:
        """The events of one call: `Started`, `Delta`s, `Done`. Closing the generator cancels the call.

        `num_calls`: as how many the rate limit counts it. The first choice of a request is counted for all of them, so
        that they are refused together; the others as none.

        Raises:
            TooManyRequests: the account has made too many calls; this one leaves no record.
            CallTimeout: it took too long.
            MeteringUnavailable: the usage record could not be made durable; raised instead of yielding `Done`.
            EdgeError: as the pool refused or lost the call.
        """
        if num_calls:
            self._admit(principal, model, num_calls)
        adapter_folder = self._adapter_folder(principal.account, model, request.adapter)
        call = _Call(principal, model, self.catalogue.prices.id)
        # No account has an empty name.
        cache_of = "" if principal.account in self.sharing else principal.account
        generate = _generate(principal, cache_of, model, request, adapter_folder)
        return self._metered(principal, model, call, self._pool.generate(generate, call.use))

    async def embed(
        self,
        principal: Principal,
        model: Model,
        texts: list[str],
        pooling: Pooling | None = None,
        *,
        truncate: bool = True,
        max_total_tokens: int | None = None,
    ) -> Embeddings:
        """The vectors of `texts`, made with `pooling` or as the model wants it.

        Of a text that is longer than the model reads, the rest is not looked at, if `truncate`; else it is refused, as
        are texts of more than `max_total_tokens` together.

        Raises:
            TextTooLong: as just said.
            EdgeError: as `run`.
        """
        encoded = await self._encoded(principal, model, texts, pooling, truncate, max_total_tokens)
        return Embeddings(_rows(encoded), encoded.width, encoded.pooling, encoded.usage)

    async def classify(self, principal: Principal, model: Model, texts: list[str]) -> Classifications:
        """How much each label of the model fits each of `texts`.

        Raises:
            EdgeError: as `run`.
        """
        encoded = await self._encoded(principal, model, texts)
        scores = [list(zip(encoded.labels, row, strict=True)) for row in _rows(encoded)]
        return Classifications(scores, encoded.usage)

    async def _encoded(
        self,
        principal: Principal,
        model: Model,
        texts: list[str],
        pooling: Pooling | None = None,
        truncate: bool = True,
        max_total_tokens: int | None = None,
    ) -> Encoded:
        self._admit(principal, model)
        request = Encode(
            id=0,  # the pool mints its own
            model=model.manifest.name,
            texts=texts,
            pooling=pooling,
            truncate=truncate,
            max_total_tokens=max_total_tokens,
            reject_if_busy=principal.reject_if_busy,
            priority=principal.priority,
        )
        call = _Call(principal, model, self.catalogue.prices.id)
        replies = self._metered(principal, model, call, self._pool.encode(request, call.use))
        async with aclosing(replies):
            async for reply in replies:
                if type(reply) is Encoded:
                    return reply
        raise AssertionError("what ends without an answer has raised")

    async def _metered(
        self, principal: Principal, model: Model, call: _Call, replies: AsyncGenerator[E, None]
    ) -> AsyncGenerator[E, None]:
        """`replies` of the pool, of which the last one is handed on once the record of `call` is durable."""
        events = InTime(replies, 0 if principal.is_batch else self._call_timeout_s)
        is_recorded = False
        self._num_running += 1
        self.num_interactive += not principal.is_batch
        self._idle.clear()
        try:
            async for event in events:
                if isinstance(event, Done | Encoded):
                    call.end(event)
                    is_recorded = True
                    await asyncio.shield(self._record(call))
                    self._charge(principal, model, event.usage)
                principal.report.see(event)
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
            events.stop_clock()
            ending = None if is_recorded else self._record(call, stop=events)
            self._num_running -= 1
            self.num_interactive -= not principal.is_batch
            if self._num_running == 0:
                self._idle.set()
            if ending is not None:
                with suppress(MeteringUnavailable):  # the caller gets the first error; this one is in the log
                    await asyncio.shield(ending)

    def _adapter_folder(self, account: str, model: Model, name: str | None) -> str | None:
        """Where the adapter `name` is; None: there is no name, or it is one of the model's own."""
        if name is None or self.finetunes is None:
            return None
        folder = self.finetunes.folder_for(account, model, name)
        return None if folder is None else str(folder)

    def _admit(self, principal: Principal, model: Model, num_calls: int = 1) -> None:
        if not principal.is_batch:
            self._rate_limits.admit(principal.account, model.manifest.task, model.id, principal.report, num_calls)
        principal.report.begin()

    def _charge(self, principal: Principal, model: Model, usage: Usage) -> None:
        if model.price is not None:
            price = self.catalogue.prices.in_batch(model.price) if principal.is_batch else model.price
            micro_neurons = price.micro_neurons(
                input_tokens=usage.input_tokens,
                cached_input_tokens=usage.cached_input_tokens,
                output_tokens=usage.output_tokens,
            )
            principal.report.charge(micro_neurons, self.catalogue.prices.pico_dollars_per_micro_neuron)

    async def count_tokens(self, principal: Principal, model: Model, request: TextGeneration) -> int:
        """How many tokens the prompt of `request` has, with its tools and through the chat template; free of charge.

        The rate limit counts it, since it is work for the engine all the same.

        Raises:
            TooManyRequests: the account has made too many calls.
            EdgeError: as the pool refused or lost the call.
        """
        self._admit(principal, model)
        return await self._pool.count_tokens(_generate(principal, principal.account, model, request))

    def _record(self, call: _Call, *, stop: InTime[E] | None = None) -> asyncio.Task[None]:
        """A task of its own that cannot be lost with the caller's: it stops the work, then writes the record."""

        async def end() -> None:
            try:
                if stop is not None:
                    await stop.aclose()
            finally:
                record = call.record()
                await self._meter.record(record)
                call.principal.recorded(record)

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
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._idle.wait()
        await asyncio.gather(*self._endings, return_exceptions=True)


class _Call:
    """What is known of a call while it runs. Until something better is known, it has failed."""

    def __init__(self, principal: Principal, model: Model, price_version: str) -> None:
        self.status: Status = "error"
        self.error_code: int | None = EdgeError.code
        self._id = principal.mint()
        self.principal = principal
        self._model = model
        self._price_version = price_version
        self._usage = Usage()
        self._started_at_us = now_us()
        self._started_ns = time.monotonic_ns()

    def use(self, usage: Usage) -> None:
        """Note what has been used by now."""
        self._usage = usage

    def end(self, last: Done | Encoded) -> None:
        """Take over the outcome."""
        is_cancelled = isinstance(last, Done) and last.finish_reason == "cancelled"
        self.status, self.error_code = ("cancelled" if is_cancelled else "ok"), None

    def record(self) -> UsageRecord:
        """The usage record as of now."""
        wall_us = (time.monotonic_ns() - self._started_ns) // 1000  # a clock that is set back bills no time
        return UsageRecord(
            id=self._id,
            request_id=self.principal.request_id,
            started_at=self._started_at_us,
            ended_at=self._started_at_us + wall_us,
            account=self.principal.account,
            worker=self.principal.worker,
            version=self.principal.version,
            model=self._model.id,
            served_by=self._model.manifest.name,
            task=self._model.manifest.task,
            trigger=self.principal.trigger,
            status=self.status,
            error_code=self.error_code,
            input_tokens=self._usage.input_tokens,
            cached_input_tokens=self._usage.cached_input_tokens,
            output_tokens=self._usage.output_tokens,
            compute_us=self._usage.compute_us,
            wall_us=wall_us,
            price_version=self._price_version,
            sandbox=self.principal.sandbox,
        )


def _rows(encoded: Encoded) -> list[array[float]]:
    """The rows, float32 in the byte order of this machine."""
    values = array("f", encoded.rows)
    if sys.byteorder == "big":
        values.byteswap()
    return [values[at : at + encoded.width] for at in range(0, len(values), encoded.width)]


def _generate(
    principal: Principal, cache_of: str, model: Model, request: TextGeneration, adapter_folder: str | None = None
) -> Generate:
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
        adapter_folder=adapter_folder,
        reject_if_busy=principal.reject_if_busy,
        tools=request.tools,
        template_options=request.template_options,
    )
