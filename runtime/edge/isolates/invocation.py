"""One event that a handler process works on, as the node sees it, and the body of its response."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from edge.errors import EdgeError, HandlerFailed
from edge.isolates.base import Outcome
from workers._channel import BodyAborted, Incoming


class Invocation:
    """State of one event. `answer` is the `ResponseHead` of a request or the value of another event.

    Args:
        now: seconds, as all times here, of the loop's clock.
        begun_cpu_us: what the process's clock said at its start.
    """

    __slots__ = (
        "answer", "begun_cpu_us", "cold_start_us", "context", "deadline", "entrypoint", "finish_by", "id", "incoming",
        "is_in_doubt", "is_over", "is_socket", "kill_at", "kind", "num_calls", "outcome", "request_id", "started",
        "status", "upload",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        kind: str,
        entrypoint: str,
        request_id: str,
        answer: asyncio.Future[Any],
        now: float,
        timeout_s: float,
        begun_cpu_us: int,
    ) -> None:
        self.id = id
        self.kind = kind
        self.entrypoint = entrypoint
        self.request_id = request_id
        self.answer = answer
        self.started = now
        self.deadline = now + timeout_s
        """When an answer has to be there."""
        self.begun_cpu_us = begun_cpu_us
        self.cold_start_us = 0
        self.context = contextvars.copy_context()
        """Of whoever asked for it. Its calls are answered there, so that chains of workers can be counted."""
        self.outcome: Outcome = "ok"
        self.status = 0
        self.num_calls = 0
        self.incoming: Incoming | None = None
        self.upload: asyncio.Task[None] | None = None
        self.is_over = False
        """Nothing more will come of the response; `waitUntil` work may still go on."""
        self.kill_at: float | None = None
        """When a process that has not stopped this, although told to, is taken for wedged."""
        self.is_socket = False
        self.is_in_doubt = False
        """Whether its process gets no other requests until it is over."""
        self.finish_by: float | None = None
        """When `waitUntil` work has to be over."""

    def fail(self, error: EdgeError, outcome: Outcome) -> None:
        """Nobody gets more of it than `error`. The first failure counts."""
        if self.outcome == "ok":
            self.outcome = outcome
        if not self.answer.done():
            self.answer.set_exception(error)

    def end_body(self, error: Exception) -> None:
        """The response's body, if it is not complete, ends with `error`."""
        if self.incoming is not None:
            self.incoming.end(error)


class WholeBody(AsyncGenerator[bytes, None]):
    """The body of a response that was complete when its head came. `content` may be taken instead of iterating."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._is_over = False

    async def asend(self, value: None) -> bytes:
        """All of it, once."""
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True
        return self.content

    async def athrow(self, kind: Any, value: Any = None, traceback: Any = None) -> bytes:
        """Raise what is given."""
        self._is_over = True
        raise kind if value is None else value

    async def aclose(self) -> None:
        """There is nothing to stop."""
        self._is_over = True


class ResponseBody(AsyncGenerator[bytes, None]):
    """A response's body. An object and not a generator, because closing one that never ran would cancel nothing.

    Args:
        cancel: called when it is closed before its end.
        lost: the error for a connection that broke off.
    """

    def __init__(
        self, incoming: Incoming, cancel: Callable[[], None], lost: Callable[[], Awaitable[EdgeError]]
    ) -> None:
        self._incoming = incoming
        self._cancel = cancel
        self._lost = lost

    async def __anext__(self) -> bytes:
        try:
            return await self._incoming.__anext__()
        except BodyAborted as error:
            raise HandlerFailed(f"the response's body broke off: {error}") from error
        except ConnectionError as error:
            raise await self._lost() from error

    async def asend(self, value: None) -> bytes:
        """As `__anext__`."""
        return await self.__anext__()

    async def athrow(self, kind: Any, value: Any = None, traceback: Any = None) -> bytes:
        """Close this and raise."""
        await self.aclose()
        raise kind if value is None else value

    async def aclose(self) -> None:
        """Leave the rest; harmless after the end."""
        if not self._incoming.ended:
            await self._incoming.aclose()
            self._cancel()
