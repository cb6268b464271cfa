"""Queues: `env.QUEUE.send` on one side, the `queue` handlers of workers on the other.

Delivery is at least once: a message is removed only when the handler's answer says so, and what was in flight when a
node or a handler process died is delivered again. Order is that of sending as long as nothing is delayed or retried.
One worker consumes a queue, in one node of those that share a state folder.

Calls of the binding: `send` with a list of messages, each {body: bytes, delay_s: seconds or None, content_type}; the
answer, None, comes when all of them are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from edge.bindings.base import parse
from edge.bindings.queue_store import Message, QueueStore, Retry
from edge.bindings.storage import folder_name, folder_of
from edge.config import QueueConsumerConfig
from edge.errors import ConfigError, EdgeError, InvalidInput, OutOfCapacity, UnknownWorker, WorkerStartFailed
from edge.isolates.base import Binding, Bundle, InboundEvent, JsonAnswer, WorkerKey

MAX_MESSAGE_BYTES = 128 << 10
MAX_BATCH_BYTES = 256 << 10
MAX_BATCH_MESSAGES = 100
MAX_DELAY_S = 43_200
POLL_S = 1.0
"""How often a consumer looks for what another process has sent, and for the lock that another process holds."""
EXPIRY_INTERVAL_S = 3600.0
MAX_BACKOFF_S = 60.0
_UNDELIVERABLE = (WorkerStartFailed, OutOfCapacity, UnknownWorker)
"""What a handler is not to blame for: it has not seen the messages."""

_log = logging.getLogger(__name__)

Deliver = Callable[[WorkerKey, InboundEvent], Awaitable[Any]]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)]


class _Outgoing(msgspec.Struct):
    body: bytes
    delay_s: _Seconds | None = None
    content_type: Literal["json", "text", "bytes", "v8"] = "json"


class Outcome(msgspec.Struct):
    """What a handler says of a batch; see `workers._wire.Event`."""

    acks: list[str] = []
    retries: list[tuple[str, _Seconds | None]] = []
    error: dict[str, str] | None = None


class Queues:
    """All queues of a node.

    Args:
        state_dir: of the node.
        deliver: gives an event to a worker.
        say: where a line for the operator goes.
        clock: gives seconds since 1970: when messages were sent, and when those that nobody consumes are too old.
    """

    def __init__(
        self,
        state_dir: Path,
        deliver: Deliver,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._state_dir = state_dir
        self._deliver = deliver
        self._say = say
        self._stores: dict[str, QueueStore] = {}
        self._consumers: dict[tuple[str, str], _Consumer] = {}
        """By account and queue."""
        self._expiring: asyncio.Task[None] | None = None

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer:
        """`send` of the binding; see above."""
        if method != "send" or len(args) != 1:
            raise InvalidInput(
                f"a queue has no method {method[:40]!r} with {len(args)} arguments; it has send(messages)"
            )
        name = str(binding.props["queue"])
        messages = _checked(args[0])
        now_ms = self._now_ms()
        default_s = binding.props.get("delay_s", 0)
        delays = [default_s if each.delay_s is None else each.delay_s for each in messages]
        bodies = [(each.body, now_ms + int(delay * 1000)) for each, delay in zip(messages, delays, strict=True)]
        await self.store(caller.account).send(name, bodies, now_ms)
        if consumer := self._consumers.get((caller.account, name)):
            consumer.wake()
        return JsonAnswer(None)

    def check(
        self, key: WorkerKey, configs: Iterable[QueueConsumerConfig], *, instead_of: WorkerKey | None = None
    ) -> None:
        """Whether the worker `key` may consume what `configs` say, once `instead_of` consumes nothing any more.

        Raises:
            ConfigError: another worker consumes one of these queues, or it is named twice.
        """
        seen: set[str] = set()
        for config in configs:
            consumer = self._consumers.get((key[0], config.queue))
            whom = "this worker" if config.queue in seen else "another worker, " + consumer.key[1] if consumer else ""
            if config.queue in seen or (consumer is not None and consumer.key not in (key, instead_of)):
                raise ConfigError(f"the queue {config.queue!r} is consumed by {whom} already; a queue has one consumer")
            seen.add(config.queue)

    def consume(self, key: WorkerKey, configs: Iterable[QueueConsumerConfig]) -> None:
        """Have the worker `key` consume what `configs` say, and nothing else. What is in flight is finished.

        Raises:
            ConfigError: as `check`.
        """
        wanted = {(key[0], config.queue): config for config in configs}
        self.check(key, wanted.values())
        for place, consumer in list(self._consumers.items()):
            if consumer.key == key and wanted.get(place) != consumer.config:
                self._consumers.pop(place).stop()
        for place, config in wanted.items():
            if place not in self._consumers:
                lock = self._folder(key[0]) / f"{folder_name(config.queue)}.lock"
                self._consumers[place] = _Consumer(key, config, self.store(key[0]), lock, self._deliver, self._say)

    async def stop(self) -> None:
        """Consume no more. What is in flight is delivered again by whoever consumes next: that handlers end because the
        node does must not count as their failure."""
        await asyncio.gather(*(consumer.close() for consumer in self._consumers.values()))
        self._consumers.clear()

    async def close(self) -> None:
        """Stop, and close the files."""
        await self.stop()
        if self._expiring is not None:
            self._expiring.cancel()
        for store in self._stores.values():
            await store.close()
        self._stores.clear()

    def store(self, account: str) -> QueueStore:
        """The messages of one account."""
        if account not in self._stores:
            self._stores[account] = QueueStore(self._folder(account))
            self._expiring = self._expiring or asyncio.create_task(self._expire())
        return self._stores[account]

    def _folder(self, account: str) -> Path:
        return folder_of(self._state_dir, "queues", account, "all")

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def _expire(self) -> None:
        while True:
            for account, store in list(self._stores.items()):
                with contextlib.suppress(EdgeError):  # whoever uses the file next is told
                    if num_expired := await store.remove_expired(self._now_ms()):
                        self._say(f"warning: {num_expired} messages of the account {account} expired unconsumed")
            await asyncio.sleep(EXPIRY_INTERVAL_S)


class _Consumer:
    """A worker that consumes one queue, from here on until it is stopped."""

    def __init__(
        self,
        key: WorkerKey,
        config: QueueConsumerConfig,
        store: QueueStore,
        lock: Path,
        deliver: Deliver,
        say: Callable[[str], None],
    ) -> None:
        self.key = key
        self.config = config
        self._store = store
        self._lock = lock
        self._deliver = deliver
        self._say = say
        self._wake = asyncio.Event()
        self._deliveries: set[asyncio.Task[None]] = set()
        self._backoff_s = 0.0
        self._stopped = asyncio.Event()
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._on_ended)

    def wake(self) -> None:
        """Something was sent."""
        self._wake.set()

    def stop(self) -> None:
        """Take no more; what is in flight is finished."""
        self._stopped.set()
        self._wake.set()

    async def close(self) -> None:
        """Stop, and give up what is in flight."""
        for task in (self._running, *self._deliveries):
            task.cancel()
        await asyncio.gather(self._running, *self._deliveries, return_exceptions=True)

    async def _run(self) -> None:
        async with self._held_lock():
            while not self._stopped.is_set():
                try:
                    await self._store.release(self.config.queue)
                    await self._consume()
                except EdgeError as error:  # the disk is full, for example
                    self._say(f"error: queue {self.config.queue}: {error.message}")
                    await self._pause(MAX_BACKOFF_S)
                finally:
                    await asyncio.gather(*self._deliveries, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    @asynccontextmanager
    async def _held_lock(self) -> AsyncIterator[None]:
        """The lock of the queue, which the system frees when its holder dies: what is in flight is then nobody's."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _is_locked(fd):  # noqa: ASYNC110 - another process has it
                await asyncio.sleep(POLL_S)
            yield
        finally:
            os.close(fd)

    async def _consume(self) -> None:
        while True:
            while len(self._deliveries) >= self.config.max_concurrency:
                await asyncio.wait(self._deliveries, return_when=asyncio.FIRST_COMPLETED)
            messages = await self._next_batch()
            if not messages:
                return
            task = asyncio.create_task(self._deliver_and_settle(messages))
            self._deliveries.add(task)
            task.add_done_callback(self._on_delivered)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"error: queue {self.config.queue} is not consumed any more: {error}")

    def _on_delivered(self, task: asyncio.Task[None]) -> None:
        self._deliveries.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a batch of queue %s is in flight until the node restarts", self.config.queue, exc_info=error)

    async def _next_batch(self) -> list[Message]:
        """A full batch, or what has come when the oldest message has waited long enough; nothing once stopped."""
        config = self.config
        while not self._stopped.is_set():
            self._wake.clear()
            if self._backoff_s:
                await self._pause(self._backoff_s)
            now_ms = _now_ms()
            backlog = await self._store.look(config.queue, config.max_batch_size, now_ms)
            times_ms = [now_ms + POLL_S * 1000]
            if backlog.oldest_visible_ms is not None:
                due_ms = backlog.oldest_visible_ms + config.max_batch_timeout * 1000
                if backlog.num_visible >= config.max_batch_size or now_ms >= due_ms:
                    return await self._store.take(config.queue, config.max_batch_size, now_ms)
                times_ms.append(due_ms)
            if backlog.next_visible_ms is not None:
                times_ms.append(backlog.next_visible_ms)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, (min(times_ms) - now_ms) / 1000)):
                    await self._wake.wait()
        return []

    async def _deliver_and_settle(self, messages: list[Message]) -> None:
        config = self.config
        done: list[int] = []
        dead: list[int] = []
        retries: list[Retry] = []
        try:
            outcome = await self._outcome_of(messages)
            self._backoff_s = 0.0
        except _UNDELIVERABLE as error:
            self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2 or 1.0)
            self._say(f"queue {config.queue}: {error.message}; trying again in {self._backoff_s:g} s")
            retries = [Retry(message.seq, _now_ms(), is_counted=False) for message in messages]
        else:
            done, dead, retries = settlement(config, messages, outcome, _now_ms())
        try:
            await self._store.settle(done, retries, dead, config.dead_letter_queue, _now_ms())
        except EdgeError as error:
            self._say(f"error: queue {config.queue}: {error.message}; its messages will be delivered again")
        if dead:
            whereto = f"are in {config.dead_letter_queue!r}" if config.dead_letter_queue else "were dropped"
            self._say(f"queue {config.queue}: {len(dead)} messages {whereto} after {config.max_retries} retries")
        self._wake.set()

    async def _outcome_of(self, messages: list[Message]) -> Outcome:
        """What the handler says of `messages`; that it failed if it says nothing that makes sense."""
        event = batch_event(self.config.queue, messages)
        started = time.perf_counter()
        try:
            outcome = msgspec.convert(await self._deliver(self.key, event), Outcome)
        except _UNDELIVERABLE:
            raise
        except EdgeError as error:
            details = {"type": getattr(error, "type", ""), "traceback": getattr(error, "traceback", "")}
            outcome = Outcome(error={"message": error.message, **details})
        except msgspec.ValidationError as error:
            outcome = Outcome(error={"message": f"the handler's process answered in a way it must not: {error}"})
        elapsed_ms = (time.perf_counter() - started) * 1000
        retried = f", to be retried: {len(outcome.retries)}" if outcome.retries else ""
        state = "failed: " + _text(outcome.error) if outcome.error else f"ok{retried}"
        self._say(f"QUEUE {self.config.queue} ({len(messages)} messages) {state} ({elapsed_ms:.0f} ms)")
        return outcome


def batch_event(queue: str, messages: Iterable[Message]) -> InboundEvent:
    """The event that gives `messages` of `queue` to a handler, whose answer is an `Outcome`."""
    listed = [
        {"id": each.id, "timestamp": each.sent_ms, "body": each.body, "attempts": each.attempts} for each in messages
    ]
    return InboundEvent("queue", {"queue": queue, "messages": listed})


def settlement(
    config: QueueConsumerConfig, messages: Iterable[Message], outcome: Outcome, now_ms: int
) -> tuple[list[int], list[int], list[Retry]]:
    """What becomes of `messages`, by `seq`, after a handler has seen them: done, dead, to be delivered again."""
    acks, delays = set(outcome.acks), dict(outcome.retries)
    done: list[int] = []
    dead: list[int] = []
    retries: list[Retry] = []
    for message in messages:
        if message.id not in delays and (message.id in acks or outcome.error is None):
            done.append(message.seq)
        elif message.attempts > config.max_retries:
            dead.append(message.seq)
        else:
            delay_s = delays.get(message.id)
            delay_ms = int((config.retry_delay if delay_s is None else delay_s) * 1000)
            retries.append(Retry(message.seq, now_ms + delay_ms))
    return done, dead, retries


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _text(error: dict[str, str]) -> str:
    headline = ": ".join(filter(None, (error.get("type"), error.get("message"))))
    return "\n".join(filter(None, (headline, error.get("traceback", "").rstrip())))


def _checked(value: Any) -> list[_Outgoing]:
    messages: list[_Outgoing] = parse("send(messages)", value, list[_Outgoing])
    if not 1 <= len(messages) <= MAX_BATCH_MESSAGES:
        raise InvalidInput(f"{len(messages)} messages were sent at once; it must be 1 to {MAX_BATCH_MESSAGES}")
    sizes = [len(message.body) for message in messages]
    if max(sizes) > MAX_MESSAGE_BYTES:
        raise InvalidInput(f"a message of {max(sizes)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if sum(sizes) > MAX_BATCH_BYTES:
        raise InvalidInput(f"messages of {sum(sizes)} bytes were sent at once; the limit is {MAX_BATCH_BYTES}")
    return messages


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
