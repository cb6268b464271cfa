"""The fixture `worker`: requests and events for the worker under test, and how it answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import urljoin

import httpx
import msgspec

from edge.bindings.queue_store import Message
from edge.config import QueueConsumerConfig
from edge.isolates.base import InboundEvent, InboundRequest, OutboundResponse
from edge.node.cron import Cron
from edge.node.translation import checked_headers
from edge.testing.clock import seconds_of
from edge.testing.env import unpacked
from workers import _rpc

T = TypeVar("T")

BASE_URL = "http://localhost/"
_CF = {"httpProtocol": "HTTP/1.1", "colo": "DEV", "country": "XX"}


class Response:
    """What a handler answered.

    Attributes:
        status: the HTTP status.
        headers: by name, whose case does not matter; `get_list(name)` for several of one name.
        content: the whole body.
        chunks: the body in the pieces in which it came; where it streams, these are those of the handler.
    """

    def __init__(self, status: int, headers: httpx.Headers, chunks: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.chunks = chunks
        self.content = b"".join(chunks)

    @property
    def ok(self) -> bool:
        """Whether the status is one of success, 200 to 299."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as text, in UTF-8."""
        return self.content.decode()

    def json(self) -> Any:
        """The value of a body that is JSON. Raises ValueError if it is none."""
        try:
            return msgspec.json.decode(self.content)
        except msgspec.DecodeError as error:
            raise ValueError(f"the response is no JSON ({error}): {self.content[:200]!r}") from error

    def events(self) -> list[Any]:
        """The `data` of each server-sent event in the body, those that are JSON as values; `[DONE]` is left out."""
        found = [line[5:].strip() for line in self.text.splitlines() if line.startswith("data:")]
        return [_json_or_text(data) for data in found if data != "[DONE]"]

    def __repr__(self) -> str:
        return f"<Response {self.status} {self.content[:60]!r}>"


class Scheduled(NamedTuple):
    """How a `scheduled` event ended."""

    no_retry: bool
    """Whether the handler has asked not to be run again."""


State = Literal["done", "retry", "dead"]


class Settled(NamedTuple):
    """What became of a message."""

    id: str
    body: Any
    state: State
    """`dead`: there is no retry left; it goes to the dead letter queue, if the consumer has one."""
    delay_s: float
    """After how long it is to be delivered again."""


class Batch(Sequence[Settled]):
    """What became of the messages of one batch: a sequence in their order.

    Attributes:
        error: the exception that the handler raised; None: it returned.
    """

    def __init__(self, messages: list[Settled], error: BaseException | None) -> None:
        self._messages = messages
        self.error = error

    @property
    def done(self) -> list[Any]:
        """The bodies of messages that will not be delivered again."""
        return [message.body for message in self if message.state == "done"]

    @property
    def retried(self) -> list[Any]:
        """The bodies of messages that will be delivered again."""
        return [message.body for message in self if message.state == "retry"]

    @property
    def dead(self) -> list[Any]:
        """The bodies of messages that were given up."""
        return [message.body for message in self if message.state == "dead"]

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, index: Any) -> Any:
        return self._messages[index]

    def __repr__(self) -> str:
        return f"<Batch {self._messages!r}>"


class Raised(NamedTuple):
    """What a call is to raise in the test's own thread, where its traceback is short."""

    error: BaseException


class Host(Protocol):
    """What runs the worker of a test; see `edge.testing.harness.Harness`."""

    @property
    def consumers(self) -> list[QueueConsumerConfig]:
        """The queues that the worker consumes."""

    @property
    def crons(self) -> list[str]:
        """When its `scheduled` handler runs."""

    @property
    def now_ms(self) -> int:
        """The test's time."""

    @property
    def module(self) -> ModuleType:
        """The worker's main module."""

    def call(self, work: Coroutine[Any, Any, T]) -> T | Raised:
        """The result of `work`, which runs in the loop of the worker; `Raised` if it raises."""

    async def acall(self, work: Coroutine[Any, Any, T]) -> T | Raised:
        """The same for another event loop."""

    async def fetch(self, request: InboundRequest, entrypoint: str, props: dict[str, Any]) -> OutboundResponse:
        """The worker's response."""

    async def event(self, event: InboundEvent) -> Any:
        """What the worker makes of an event."""

    async def settled(self, messages: list[Message], config: QueueConsumerConfig) -> Batch:
        """What becomes of messages that the handler is given."""

    async def deliver(self, config: QueueConsumerConfig) -> Batch:
        """Take a batch from a queue, give it to the handler and do what that says."""

    async def waiting(self, queue: str) -> list[Any]:
        """The bodies of the messages that wait in a queue."""


class Worker:
    """The worker of the project's configuration.

    Each call returns once all of the invocation is over, `waitUntil` work included. What the handler raises is raised
    here: the exception itself in in-process mode, `edge.errors.HandlerFailed` in subprocess mode.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def module(self) -> ModuleType:
        """The worker's main module as handlers have it, in in-process mode: for its classes and `monkeypatch`.

        Raises:
            RuntimeError: in subprocess mode it is in another process.
        """
        return self._host.module

    def fetch(self, url: str = "/", *, entrypoint: str = "", **request: Any) -> Response:
        """The response to a request.

        Args:
            url: a path, or a URL.
            entrypoint: a named entrypoint class; default: `Default`.
            request: `method` (default: POST with a body, else GET), `headers`, `params`, `json`, `data`, `files` as of
                httpx, and `body`: str, bytes, or chunks of bytes that are sent one by one.
        """
        __tracebackhide__ = True
        return self._done(self._host.call(self._fetch(url, entrypoint, request)))

    async def afetch(self, url: str = "/", *, entrypoint: str = "", **request: Any) -> Response:
        """The same for tests that are coroutines, on asyncio: several requests can be under way at once."""
        __tracebackhide__ = True
        return self._done(await self._host.acall(self._fetch(url, entrypoint, request)))

    def scheduled(self, cron: str | None = None, *, time: datetime | str | float | None = None) -> Scheduled:
        """Run the `scheduled` handler.

        Args:
            cron: which cron is due; default: the one that the configuration has.
            time: when it was due, as `clock.freeze` takes it; default: the clock's time.

        Raises:
            ConfigError: that is no cron expression.
            ValueError: `cron` is missing, and the configuration has none or several.
        """
        __tracebackhide__ = True
        return self._done(self._host.call(self._scheduled(cron, time)))

    def queue(
        self, messages: Iterable[Any], *, queue: str | None = None, attempts: int = 1, raises: bool = True
    ) -> Batch:
        """Give the `queue` handler a batch of messages with these bodies, and say what is to become of each.

        Args:
            queue: the queue that they come from; default: the one that the worker consumes.
            attempts: the how many-th delivery this is.
            raises: whether what the handler raises is raised here; otherwise it is `error` of the result.
        """
        __tracebackhide__ = True
        batch = self._done(self._host.call(self._queue(list(messages), queue, attempts)))
        if batch.error is not None and raises:
            raise batch.error
        return batch

    def deliver(self, queue: str | None = None) -> Batch:
        """Deliver what waits in a queue and is due by the clock, one batch of it: messages that handlers and the test
        have sent. Retries and dead letters stay in the queues, as on a node. An exception of the handler is `error` of
        the result; where nothing is due, the result is empty.

        Args:
            queue: default: the one that the worker consumes.
        """
        __tracebackhide__ = True
        return self._done(self._host.call(self._deliver(queue)))

    def messages(self, queue: str) -> list[Any]:
        """The bodies of the messages that wait in a queue, also delayed ones."""
        __tracebackhide__ = True
        return self._done(self._host.call(self._host.waiting(queue)))

    def rpc(self, method: str, *args: Any, entrypoint: str = "", props: Mapping[str, Any] | None = None) -> Any:
        """What a method of an entrypoint returns, called as through a service binding.

        Args:
            args: keyword arguments travel as one dict, the last argument.
            props: `ctx.props`.
        """
        __tracebackhide__ = True
        return self._done(self._host.call(self._rpc(method, args, entrypoint, dict(props or {}))))

    def _done(self, outcome: T | Raised) -> T:
        __tracebackhide__ = True
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    # -- in the loop of the worker -------------------------------------------------------------------------

    async def _fetch(self, url: str, entrypoint: str, request: dict[str, Any]) -> Response:
        props = dict(request.pop("props", None) or {})
        answer = await self._host.fetch(_inbound(url, **request), entrypoint, props)
        try:
            headers = httpx.Headers(checked_headers(answer.status, answer.headers))
            chunks = [chunk async for chunk in answer.body] if answer.body is not None else []
        finally:
            if answer.body is not None:
                await answer.body.aclose()
        return Response(answer.status, headers, chunks)

    async def _scheduled(self, cron: str | None, time: datetime | str | float | None) -> Scheduled:
        crons = self._host.crons
        if cron is None:
            if len(crons) != 1:
                raise ValueError(f"say which cron is due: the configuration has {', '.join(crons) or 'none'}")
            cron = crons[0]
        Cron(cron)
        at_ms = self._host.now_ms if time is None else round(seconds_of(time) * 1000)
        value = await self._host.event(InboundEvent("scheduled", {"cron": cron, "scheduledTime": at_ms}))
        return Scheduled(value["noRetry"])

    async def _queue(self, bodies: list[Any], queue: str | None, attempts: int) -> Batch:
        messages = [
            Message(number, str(number), self._host.now_ms, attempts, _rpc.pack(body))
            for number, body in enumerate(bodies, 1)
        ]
        return await self._host.settled(messages, self._consumer(queue))

    async def _deliver(self, queue: str | None) -> Batch:
        return await self._host.deliver(self._consumer(queue))

    def _consumer(self, queue: str | None) -> QueueConsumerConfig:
        consumers = {consumer.queue: consumer for consumer in self._host.consumers}
        if queue is not None:
            return consumers.get(queue) or QueueConsumerConfig(queue)
        if len(consumers) != 1:
            raise ValueError(f"say which queue: the worker consumes {', '.join(consumers) or 'none'}")
        return next(iter(consumers.values()))

    async def _rpc(self, method: str, args: tuple[Any, ...], entrypoint: str, props: dict[str, Any]) -> Any:
        packed = _rpc.pack(await _rpc.buffered(list(args)))
        event = InboundEvent("rpc", {"method": method, "args": packed}, entrypoint, props)
        return unpacked(await self._host.event(event))


def _inbound(url: str, *, method: str | None = None, body: Any = None, **request: Any) -> InboundRequest:
    """The request as a node would have it of an HTTP client."""
    has_body = any(part is not None for part in (body, *map(request.get, ("json", "data", "files"))))
    made = httpx.Request(method or ("POST" if has_body else "GET"), urljoin(BASE_URL, url), content=body, **request)
    return InboundRequest(
        method=made.method,
        url=str(made.url),
        headers=[(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in made.headers.raw],
        body=_chunks(made.stream) if has_body else None,  # type: ignore[arg-type]
        cf=_CF,
    )


async def _chunks(stream: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in stream:
        yield chunk
        await asyncio.sleep(0)


def _json_or_text(data: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data
