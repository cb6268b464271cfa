"""The calls that the handlers of one process have open: to models, to other bindings, and to the outside.

Everything in them comes from untrusted code: how many may be open, and how many an invocation may make, is bounded.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from edge.errors import EdgeError, OutOfCapacity, TooManySubrequests
from edge.isolates.base import Bindings, Bundle, JsonAnswer, StreamAnswer
from edge.isolates.egress import Egress
from workers._channel import Channel, Incoming
from workers._wire import Abort, AiRun, Call, CallFailed, FrameError, Result, ResultHead, Subrequest

MAX_CALLS = 1000
"""Calls that the handlers of one isolate may have open at once."""
MAX_HELD_BYTES = 64 << 20
"""Of their arguments; bodies wait in the isolate."""

logger = logging.getLogger(__name__)

Request = AiRun | Call | Subrequest


class Calls:
    """Calls of one process.

    Args:
        count: called with the invocation of each call; returns how many calls that one has made by now.
        context_of: called likewise; returns the context to answer the call in.
    """

    def __init__(
        self,
        channel: Channel,
        bundle: Bundle,
        bindings: Bindings,
        egress: Egress,
        count: Callable[[int], int],
        context_of: Callable[[int], contextvars.Context],
    ) -> None:
        self._channel = channel
        self._bundle = bundle
        self._bindings = bindings
        self._egress = egress
        self._count = count
        self._context_of = context_of
        self._open: dict[int, _Call] = {}
        self._held_bytes = 0

    def start(self, frame: Request) -> None:
        """Begin to answer `frame`, which has just arrived."""
        id = frame.id
        if id % 2 == 0 or id in self._open:
            self._channel.fail(FrameError(f"call id {id} is even or in use"))
            return
        size = _size_of(frame)
        limit = self._bundle.limits.subrequests
        num_made = self._count(frame.invocation)
        if num_made > limit:
            self._refuse(
                id,
                TooManySubrequests(
                    f"Too many subrequests: this invocation has made {num_made}; limits.subrequests is {limit}, "
                    "which the configuration can raise"
                ),
            )
        elif len(self._open) >= MAX_CALLS:
            self._refuse(id, OutOfCapacity(f"this worker has {MAX_CALLS} calls open already; await some of them first"))
        elif self._held_bytes + size > MAX_HELD_BYTES:
            self._refuse(
                id,
                OutOfCapacity(
                    f"the calls that this worker has open would hold {self._held_bytes + size >> 20} MB of arguments "
                    f"with this one, and may hold {MAX_HELD_BYTES >> 20}; await some of them first, or send bodies"
                ),
            )
        else:
            has_body = not isinstance(frame, AiRun) and frame.has_body
            body = self._channel.receive_body(id) if has_body else None
            task = asyncio.get_running_loop().create_task(
                self._answer(frame, body), context=self._context_of(frame.invocation)
            )
            self._open[id] = _Call(frame.invocation, task, size)
            self._held_bytes += size
            task.add_done_callback(lambda _: self._end(id))

    def cancel(self, id: int) -> None:
        """The handler does not want the answer any more."""
        if id in self._open:
            self._open[id].cancel()

    def cancel_all_of(self, invocation: int) -> None:
        """`invocation` is over."""
        for call in self._open.values():
            if call.invocation == invocation:
                call.cancel()

    def cancel_all(self) -> None:
        """The process is gone."""
        for call in list(self._open.values()):
            call.cancel()

    def _end(self, id: int) -> None:
        self._held_bytes -= self._open.pop(id).size
        self._channel.forget_body(id)

    async def _answer(self, frame: Request, body: Incoming | None) -> None:
        has_head = False
        try:
            answer, url = await self._ask(frame, body)
            if isinstance(answer, JsonAnswer):
                self._channel.send(Result(frame.id, answer.value, answer.info))
                return
            try:
                self._channel.send(ResultHead(frame.id, answer.status, answer.headers, True, url, answer.info))
                has_head = True
                await self._channel.send_body(frame.id, answer.body)
            finally:
                await _close(answer.body)
        except Exception as error:
            if not self._channel.lost:
                self._tell(frame.id, error, has_head)
        finally:
            if body is not None:
                await body.aclose()

    async def _ask(self, frame: Request, body: Incoming | None) -> tuple[JsonAnswer | StreamAnswer, str]:
        """The answer, and the URL that it came from."""
        match frame:
            case AiRun():
                return await self._bindings.ai_run(self._bundle, frame.model, frame.inputs, frame.options), ""
            case Call():
                return await self._bindings.call(self._bundle, frame.binding, frame.method, frame.args, body), ""
            case Subrequest():
                if frame.is_websocket:
                    return await self._egress.websocket(self._bundle, frame.url, frame.headers, body)
                return await self._egress.fetch(
                    self._bundle, frame.method, frame.url, frame.headers, body, frame.redirect
                )

    def _tell(self, id: int, error: Exception, has_head: bool) -> None:
        """Tell the handler what a call raised: before the head as a failure, after it by breaking off the body."""
        if isinstance(error, FrameError):
            error = EdgeError(f"the answer cannot be handed to the handler: {error}")
        if not isinstance(error, EdgeError):  # a bug of ours must not leave the handler waiting
            logger.error("a handler's call failed", exc_info=error)
            error = EdgeError(f"internal error: {type(error).__name__}")
        if has_head:
            self._channel.send(Abort(id, error.message))
        else:
            self._refuse(id, error)

    def _refuse(self, id: int, error: EdgeError) -> None:
        self._channel.send(CallFailed(id, error.name, error.code, error.message, error.status))


class _Call:
    def __init__(self, invocation: int, task: asyncio.Task[None], size: int) -> None:
        self.invocation = invocation
        self.size = size
        self._task = task

    def cancel(self) -> None:
        """Stop it, once: a second time would break off the closing of its connection."""
        if not self._task.cancelling():
            self._task.cancel()


def _size_of(frame: Request) -> int:
    """About how many bytes the node holds for `frame` until it is answered."""
    match frame:
        case AiRun():
            return _size(frame.inputs) + _size(frame.options)
        case Call():
            return _size(frame.args)
        case Subrequest():
            return len(frame.url) + _size(frame.headers)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(key) + _size(item) + 16 for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_size(item) + 8 for item in value)
    return 8


async def _close(body: AsyncIterator[bytes]) -> None:
    close = getattr(body, "aclose", None)
    if close is not None:
        await close()
