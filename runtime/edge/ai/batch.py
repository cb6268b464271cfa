"""Asynchronous batches: calls that are made when there is nothing else to do, and whose answers are kept.

A request is started under a usage id that is on disk before; its answer is on disk before it counts as answered. So
whatever dies in between, each request has one answer, and at most one usage record that is charged for it: one whose
answer was lost is made again under the same id, and the ledger takes an id once.

Calls of batches have the lowest priority in the engine, and while others are under way only one of them is begun at a
time. Accounts take turns. Batches are validated and closed beside that, and one with which something is wrong keeps no
other from its turn. What is kept is in `batch_store`, what a request is in `batch_calls`; the two dialects in
which batches are made and shown are `batch_native` and `batch_openai`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

from edge.ai import batch_native, batch_openai
from edge.ai.batch_calls import decoded, encoded, make
from edge.ai.batch_rows import NATIVE, Batch, Item, State, Status
from edge.ai.batch_store import BatchStore
from edge.ai.gate import Gate, Principal
from edge.billing.meter import UsageRecord
from edge.errors import EdgeError, EngineLost, RequestTooLarge

PRIORITY = -100
MAX_ATTEMPTS = 3
"""How often a request may be under way when its engine or node dies: it may well be what kills it."""
POLL_S = 1.0
"""How often the runner looks whether the node is idle, and for what another process has stored."""
SWEEP_INTERVAL_S = 3600.0
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the next request is started, after so many failures in a row that were not the requests' own."""
_CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Batches:
    """The batches of a node: `store` keeps them, and calls go through `gate`.

    Args:
        concurrency: how many requests are under way at a time while nobody else makes calls.
        retention_days: after which batches that ended, and files, are removed.
        clock: gives seconds since the epoch.
    """

    def __init__(
        self,
        store: BatchStore,
        gate: Gate,
        *,
        concurrency: int = 8,
        retention_days: int = 7,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.gate = gate
        self.retention_s = retention_days * 86_400
        self._concurrency = concurrency
        self._clock = clock
        self._waiting = asyncio.Event()
        """There may be something to start."""
        self._unsettled = asyncio.Event()
        """There may be something to validate or to close."""
        self._running: dict[asyncio.Task[None], Item] = {}
        self._turns: dict[str, int] = {}
        """When each account last had its turn."""
        self._turn = count(1)
        self._num_failures = 0
        self._paused_until = 0.0
        self._next_sweep = 0.0
        self._settle_at: dict[str, float] = {}
        """When batches that could not be validated or closed have their next turn, on the monotonic clock."""
        self._stopping = False
        self._runners: list[asyncio.Task[None]] = []

    @property
    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._clock())

    def start(self) -> None:
        """Begin to run what is stored."""
        self._runners = [
            asyncio.create_task(self._run(self._start_waiting, self._waiting)),
            asyncio.create_task(self._run(self._settle, self._unsettled)),
        ]

    async def stop(self) -> None:
        """Start nothing more. What is under way goes on until it ends, or until its engine does."""
        self._stopping = True
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)

    async def close(self) -> None:
        """Stop, wait for what is under way, and close the store. The pool is closed before, which ends its calls."""
        await self.stop()
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_TIMEOUT_S)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.store.close()

    def wake(self) -> None:
        """There is something new to do."""
        self._waiting.set()
        self._unsettled.set()

    async def answer(self, principal: Principal, model: str, inputs: Any) -> dict[str, Any]:
        """What a native call gets that makes a batch (`requests`, or anything that is to be queued) or asks for one
        (`request_id`).

        Raises:
            UnknownModel, InvalidInput, InvalidJson, RequestTooLarge: what it asks for is wrong.
            UnknownBatch: the account has no such batch.
            DiskFull: it could not be stored.
        """
        return await batch_native.answer(self, principal, model, inputs)

    # -- running -------------------------------------------------------------------------------------------

    async def _run(self, step: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
        while not self._stopping:
            wake.clear()
            try:
                if await self.store.become_runner():
                    await step()
            except EdgeError as error:
                _log.error("batches do not move: %s", error.message)
                self._pause()
            except Exception:  # without this task nothing would ever move again
                _log.exception("batches do not move")
                self._pause()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):  # `wait_for` can lose a cancellation that comes with its event
                    await wake.wait()

    async def _settle(self) -> None:
        for batch in await self.store.in_status("validating"):
            await self._try(batch, batch_openai.validate(self, batch))
            self._waiting.set()
        await self.store.give_up(self.now)
        for batch in await self.store.finished():
            await self._try(batch, self._end(batch))
        if (now := self.now) >= self._next_sweep:
            await self.store.remove_older(now - self.retention_s, now)
            self._next_sweep = now + SWEEP_INTERVAL_S

    async def _try(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` on a batch. If the node cannot do it now, its next turn is later; if it fails, so has the batch."""
        if time.monotonic() < self._settle_at.get(batch.id, 0):
            work.close()
            return
        self._settle_at.pop(batch.id, None)
        try:
            await work
        except EdgeError as error:
            _log.error("batch %s waits: %s", batch.id, error.message)
            self._settle_at[batch.id] = time.monotonic() + PAUSES_S[-1]
        except Exception:
            _log.exception("batch %s failed", batch.id)
            failure = EdgeError("internal error; the node's log has the reason under the batch's id")
            errors = [batch_openai.problem_object(failure, None)]
            await self.store.enter(
                batch.id,
                "failed",
                self.now,
                only_from=("validating", "in_progress", "finalizing", "cancelling"),
                errors=errors,
            )

    async def _start_waiting(self) -> None:
        await self.store.give_up(self.now)
        while self._has_room() and (item := await self.store.start(self._ranks())) is not None:
            self._turns[item.account] = next(self._turn)
            task = asyncio.create_task(self._answer(item))
            self._running[task] = item
            task.add_done_callback(self._forget)

    def _has_room(self) -> bool:
        limit = 1 if self.gate.num_interactive else self._concurrency
        return len(self._running) < limit and time.monotonic() >= self._paused_until

    def _ranks(self) -> Callable[[str], tuple[int, int]]:
        """Accounts with the fewest requests under way go first; among them, the one whose turn was longest ago.

        It is as of now: the store calls it on a thread of its own.
        """
        num_running, turns = Counter(item.account for item in self._running.values()), dict(self._turns)
        return lambda account: (num_running[account], turns.get(account, 0))

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.wake()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + PAUSES_S[min(self._num_failures, len(PAUSES_S) - 1)]
        self._num_failures += 1

    async def _answer(self, item: Item) -> None:
        """Make the call of a request and keep what came of it."""
        ids = _Ids(item)
        principal = Principal(
            account=item.account,
            trigger="batch",
            request_id=item.usage_id,
            worker=item.worker,
            priority=PRIORITY,
            mint=ids.next,
            recorded=ids.see,
        )
        try:
            _check(item)
            result = await make(self.gate, principal, item.endpoint, item.model or "", decoded(item.body))
            answer = encoded(result)
        except EdgeError as error:
            if self._is_passing(error, item):
                self._pause()
                counts = isinstance(error, EngineLost) and not self._stopping
                await self._insist(item, lambda: self.store.put_back(item, failures=ids.failures, counts=counts))
                return
            await self._keep(item, error, _error_json(item, error))
        except Exception:
            _log.exception("request %d of batch %s failed", item.number, item.batch)
            failure = EdgeError("internal error; the node's log has the reason under this id")
            await self._keep(item, failure, _error_json(item, failure))
        else:
            self._num_failures = 0
            await self._keep(item, None, answer)

    def _is_passing(self, error: EdgeError, item: Item) -> bool:
        """Whether the request can be made again, since the error says nothing about it."""
        if isinstance(error, EngineLost) and not self._stopping:
            return item.attempts < MAX_ATTEMPTS
        return error.retryable

    async def _keep(self, item: Item, error: EdgeError | None, answer: bytes) -> None:
        state: State = "ok" if error is None else "error"
        status_code = 200 if error is None else error.status
        await self._insist(item, lambda: self.store.finish(item, state, status_code, answer))

    async def _insist(self, item: Item, write: Callable[[], Awaitable[None]]) -> None:
        """Have it on disk, however long that takes: the call is paid for. If the node ends before, the next one finds
        the request started, and makes it again."""
        while True:
            try:
                await write()
                return
            except EdgeError as failure:
                _log.error("request %d of batch %s waits: %s", item.number, item.batch, failure.message)
                self._pause()
                await asyncio.sleep(PAUSES_S[0])

    async def _end(self, batch: Batch) -> None:
        """Close a batch whose requests are all over."""
        status = batch.status
        last: Status = "completed"
        if status == "cancelling":
            last = "cancelled"
        elif await self.store.has_dropped(batch.id):
            last = "expired"
        if batch.endpoint == NATIVE:
            await self.store.enter(batch.id, last, self.now, only_from=(status,))
            return
        if status == "in_progress":
            await self.store.enter(batch.id, "finalizing", self.now, only_from=(status,))
            status = "finalizing"
        files = await batch_openai.write_files(self, batch.id)
        await self.store.enter(batch.id, last, self.now, only_from=(status,), files=files)


def _check(item: Item) -> None:
    if item.attempts > MAX_ATTEMPTS:
        raise EdgeError(f"the request was given up: the node died {item.attempts - 1} times while it was under way")
    if item.is_over_limit:
        raise RequestTooLarge("there is no room left for this request's answer: batches and files hold too much")


def _error_json(item: Item, error: EdgeError) -> bytes:
    form = batch_native if item.endpoint == NATIVE else batch_openai
    return encoded(form.error_answer(error, item.usage_id))


class _Ids:
    """The ids of the usage records of one request: of several choices each has its own.

    An id is the same in each attempt, so that what was charged is not charged again; only after a record that says that
    the call failed the next attempt needs another one, or its own record would be lost. If nobody knows whether a
    record was written, the same id makes that harmless.
    """

    def __init__(self, item: Item) -> None:
        self.failures = dict(item.failures)
        """As in `Item`, with those that were seen."""
        self._first = item.usage_id
        self._numbers: dict[str, int] = {}

    def next(self) -> str:
        """The id of the next record."""
        number = len(self._numbers)
        id = self._first if number == 0 else f"{self._first}.{number}"
        if failures := self.failures.get(number):
            id += f"-{failures}"
        self._numbers[id] = number
        return id

    def see(self, record: UsageRecord) -> None:
        """A record is durable."""
        if record.status == "error":
            number = self._numbers[record.id]
            self.failures[number] = self.failures.get(number, 0) + 1
