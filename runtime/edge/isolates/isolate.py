"""One handler process as the node sees it: its invocations, the calls that they make, and its end.

Nothing that comes from the process is trusted: frames that break the rules end it, unknown ids are ignored, and what it
can make the node hold is bounded. It knows nothing about versions or about when to start another process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

from edge.errors import EdgeError, HandlerFailed, HandlerTimeout, IsolateLost, OutOfCapacity, WorkerStartFailed
from edge.isolates.base import Bindings, Bundle, InboundRequest, JsonAnswer, OnLog, OutboundResponse, StreamAnswer
from edge.isolates.egress import Egress
from edge.isolates.spawner import Spawner
from workers._channel import BodyAborted, Channel, Incoming
from workers._wire import (
    Abort,
    AiRun,
    CallFailed,
    Cancel,
    End,
    Fetch,
    Finished,
    FrameError,
    Init,
    Log,
    Ready,
    ResponseHead,
    Result,
    ResultHead,
    Sandboxed,
    StartFailed,
    Subrequest,
    Threw,
    ToNode,
)

CANCEL_GRACE_S = 1.0
"""How long an isolate has to stop an invocation that ran out of time, before it is taken for wedged."""
EXIT_GRACE_S = 1.0
MAX_LOG_TEXT = 64 << 10
MAX_CALLS = 1000
"""Calls that the handlers of one isolate may have open at once."""

logger = logging.getLogger(__name__)


class Isolate:
    """A handler process that has imported its worker."""

    def __init__(self, spawner: Spawner, bundle: Bundle, bindings: Bindings, egress: Egress, on_log: OnLog) -> None:
        self.bundle = bundle
        self._spawner = spawner
        self._bindings = bindings
        self._egress = egress
        self._on_log = on_log
        self._ids = itertools.count(2, 2)
        self._invocations: dict[int, _Invocation] = {}
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._doubts: set[asyncio.Task[None]] = set()
        self._is_retiring = False
        self._why_killed = ""
        loop = asyncio.get_running_loop()
        self._sandboxed: asyncio.Future[None] = loop.create_future()
        self._started: asyncio.Future[Ready | StartFailed] = loop.create_future()
        self._exit_code: asyncio.Future[int] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        """Resolved with the reason once the process is no more."""
        self._channel: Channel
        self.pid = 0
        self.layers: list[str] = []
        """The sandbox layers that the process is under."""

    @classmethod
    async def start(
        cls,
        spawner: Spawner,
        bundle: Bundle,
        bindings: Bindings,
        egress: Egress,
        on_log: OnLog,
        start_timeout_s: float,
    ) -> Isolate:
        """Fork a process and import `bundle` in it.

        Raises:
            WorkerStartFailed: the code could not be imported, or not in time.
            IsolateLost: no process could be had.
        """
        isolate = cls(spawner, bundle, bindings, egress, on_log)
        isolate.pid, sock = await spawner.fork(isolate._on_exit)
        isolate._channel = await Channel.open(sock, ToNode, isolate._on_frame, isolate._on_lost, wait_for_reader=True)
        isolate._exit_code.add_done_callback(isolate._after_exit)
        try:
            await isolate._import(start_timeout_s)
        except BaseException:
            isolate.kill("it could not be started")
            await isolate.gone
            raise
        return isolate

    @property
    def accepts(self) -> bool:
        """Whether this can take another request."""
        return not self._channel.lost and not self._is_retiring and not self._why_killed

    async def settled(self) -> None:
        """Wait until it is known whether an isolate that let a request time out still works; at most a second."""
        if self._doubts:
            await asyncio.wait(self._doubts)

    async def fetch(self, request: InboundRequest, timeout_s: float) -> OutboundResponse:
        """Have the worker answer `request`. Cancelling this, or closing the response's body, cancels the invocation.

        Raises:
            HandlerFailed: the handler raised.
            HandlerTimeout: no response's head within `timeout_s`.
            IsolateLost: the process died.
        """
        invocation = _Invocation(next(self._ids))
        frame = Fetch(invocation.id, request.method, request.url, request.headers, request.body is not None, request.cf)
        try:
            self._channel.send(frame)
        except FrameError as error:
            raise HandlerFailed(f"the request cannot be handed to the handler: {error}") from error
        self._invocations[invocation.id] = invocation
        if request.body is not None:
            invocation.upload = self._spawn(self._upload(invocation.id, request.body))
        try:
            async with asyncio.timeout(timeout_s):
                head = await invocation.head
        except TimeoutError:
            self._doubts.add(doubt := self._cancel(invocation, CANCEL_GRACE_S))
            doubt.add_done_callback(self._doubts.discard)
            raise HandlerTimeout(
                f"the handler did not begin to answer within {timeout_s:g} s and was stopped; "
                f"raise limits.timeout_s (now {timeout_s:g}) in the configuration if it needs longer"
            ) from None
        except asyncio.CancelledError:
            self._cancel(invocation, timeout_s)
            raise
        body = _ResponseBody(self, invocation, timeout_s) if invocation.incoming is not None else None
        return OutboundResponse(head.status, head.headers, body)

    def retire(self) -> None:
        """Take no more requests; end once those in flight are finished."""
        self._is_retiring = True
        if not self._invocations:
            self._channel.close()

    def kill(self, why: str) -> None:
        """End the process now; requests in flight fail with `why`."""
        if not self.gone.done():
            self._why_killed = self._why_killed or why
            self._spawner.kill(self.pid)
            self._channel.fail(ConnectionResetError(why))

    # -- start ---------------------------------------------------------------------------------------------

    async def _import(self, timeout_s: float) -> None:
        bundle = self.bundle
        try:
            async with asyncio.timeout(timeout_s):
                await self._or_gone(self._sandboxed)
                self._channel.send(_init(bundle))
                started = await self._or_gone(self._started)
        except TimeoutError:
            raise WorkerStartFailed(
                f"{bundle.main} was not imported within {timeout_s:g} s (limits.timeout_s); "
                "does it compute or wait at module level?"
            ) from None
        except FrameError as error:
            raise WorkerStartFailed(f"the variables of {bundle.worker} cannot be handed to it: {error}") from error
        if isinstance(started, StartFailed):
            text = f"{bundle.main} could not be imported: {started.type}: {started.message}"
            raise WorkerStartFailed(text, traceback=started.traceback)

    async def _or_gone(self, future: asyncio.Future[Any]) -> Any:
        await asyncio.wait([future, self.gone], return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        raise WorkerStartFailed(f"the process died while it imported {self.bundle.main}: {self.gone.result()}")

    # -- frames --------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Any) -> None:
        match frame:
            case ResponseHead(id) | Threw(id) | Finished(id) | End(id) | Abort(id) if id in self._invocations:
                self._on_invocation_frame(self._invocations[id], frame)
            case AiRun():
                self._start_call(frame, self._run_ai(frame))
            case Subrequest():
                body = self._channel.receive_body(frame.id) if frame.has_body and _is_new(frame, self._calls) else None
                self._start_call(frame, self._fetch_outside(frame, body))
            case Cancel(id):
                if id in self._calls:
                    self._calls[id].cancel()
            case Log(invocation, level, text):
                self._on_log(self.bundle, invocation, level, text[:MAX_LOG_TEXT])
            case Sandboxed(layers) if not self._sandboxed.done():
                self.layers = layers
                self._sandboxed.set_result(None)
            case Ready() | StartFailed() if not self._started.done():
                self._started.set_result(frame)

    def _on_invocation_frame(self, invocation: _Invocation, frame: Any) -> None:
        match frame:
            case ResponseHead():
                if not frame.has_body:
                    invocation.set_over()
                if not invocation.head.done():
                    if frame.has_body:
                        invocation.incoming = self._channel.receive_body(frame.id)
                    invocation.head.set_result(frame)
            case Threw(_, type, message, traceback):
                invocation.fail(HandlerFailed(message, type=type, traceback=traceback))
            case End() | Abort():
                invocation.set_over()
            case Finished(id):
                del self._invocations[id]
                self._end_invocation(invocation, HandlerFailed("the handler ended without a response"))
                if self._is_retiring and not self._invocations:
                    self._channel.close()

    def _end_invocation(self, invocation: _Invocation, error: EdgeError) -> None:
        """`invocation` is over; `error` is for whoever still waits for its response."""
        invocation.fail(error)
        if invocation.incoming is not None:
            self._channel.forget_body(invocation.id)
            invocation.incoming.end(BodyAborted(error.message))
        if invocation.upload is not None:
            invocation.upload.cancel()
        for call in self._calls.values():
            if call.invocation == invocation.id:
                call.cancel()

    # -- invocations ---------------------------------------------------------------------------------------

    def _cancel(self, invocation: _Invocation, grace_s: float) -> asyncio.Task[None]:
        """Stop `invocation`; a process that does not confirm that within `grace_s` is wedged and is killed."""
        self._channel.send(Cancel(invocation.id))
        return self._spawn(self._confirm_cancel(invocation, grace_s))

    async def _confirm_cancel(self, invocation: _Invocation, grace_s: float) -> None:
        await asyncio.wait([invocation.over], timeout=grace_s)
        if not invocation.over.done():
            self.kill("it did not react to the end of a request's time and was killed")

    async def _upload(self, id: int, body: AsyncIterator[bytes]) -> None:
        """Send a request's body to the handler."""
        try:
            await self._channel.send_body(id, body)
        except (OSError, EdgeError) as error:
            self._channel.send(Abort(id, f"the request's body broke off: {error}"))

    # -- calls ---------------------------------------------------------------------------------------------

    def _start_call(self, frame: AiRun | Subrequest, work: Coroutine[Any, Any, None]) -> None:
        if not _is_new(frame, self._calls):
            work.close()
            self._channel.fail(FrameError(f"call id {frame.id} is even or in use"))
        elif len(self._calls) >= MAX_CALLS:
            work.close()
            self._channel.forget_body(frame.id)
            error = OutOfCapacity(f"this worker has {MAX_CALLS} calls open already; await some of them first")
            self._fail_call(frame.id, error)
        else:
            task = self._spawn(work)
            self._calls[frame.id] = _Call(frame.invocation, task)
            task.add_done_callback(lambda _: self._end_call(frame.id))

    def _end_call(self, id: int) -> None:
        del self._calls[id]
        self._channel.forget_body(id)

    async def _run_ai(self, frame: AiRun) -> None:
        with _Failures(self, frame.id) as failures:
            answer = await self._bindings.ai_run(self.bundle, frame.model, frame.inputs, frame.options)
            if isinstance(answer, JsonAnswer):
                self._channel.send(Result(frame.id, answer.value, answer.info))
            else:
                await self._stream_answer(frame.id, answer, "", failures)

    async def _fetch_outside(self, frame: Subrequest, body: Incoming | None) -> None:
        with _Failures(self, frame.id) as failures:
            try:
                answer, url = await self._egress.fetch(frame.method, frame.url, frame.headers, body, frame.redirect)
                await self._stream_answer(frame.id, answer, url, failures)
            finally:
                if body is not None:
                    await body.aclose()

    async def _stream_answer(self, id: int, answer: StreamAnswer, url: str, failures: _Failures) -> None:
        try:
            self._channel.send(ResultHead(id, answer.status, answer.headers, True, url, answer.info))
            failures.has_head = True
            await self._channel.send_body(id, answer.body)
        finally:
            close = getattr(answer.body, "aclose", None)
            if close is not None:
                await close()

    def _fail_call(self, id: int, error: EdgeError) -> None:
        self._channel.send(CallFailed(id, error.name, error.code, error.message, error.status))

    # -- the end -------------------------------------------------------------------------------------------

    def _on_exit(self, exit_code: int) -> None:
        self._exit_code.set_result(exit_code)

    def _after_exit(self, _: asyncio.Future[int]) -> None:
        """The end of the connection follows, after the last frames, unless another process holds it open."""
        error = ConnectionResetError("the process ended")
        asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._channel.fail, error)

    def _on_lost(self, error: Exception | None) -> None:
        if isinstance(error, FrameError):
            self._why_killed = self._why_killed or f"it broke the rules of the connection and was killed: {error}"
        self._spawner.kill(self.pid)
        self._spawn(self._settle_loss())

    async def _settle_loss(self) -> None:
        """Tell everybody who waits for this process how it ended."""
        await asyncio.wait([self._exit_code], timeout=EXIT_GRACE_S)
        reason = self._why_killed or _describe_exit(self._exit_code)
        self.gone.set_result(reason)
        lost = IsolateLost(f"the handler process died: {reason}; the next request gets a new one")
        for invocation in list(self._invocations.values()):
            self._end_invocation(invocation, lost)
        self._invocations.clear()
        for call in list(self._calls.values()):
            call.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Invocation:
    """A request that the handler process works on."""

    def __init__(self, id: int) -> None:
        loop = asyncio.get_running_loop()
        self.id = id
        self.head: asyncio.Future[ResponseHead] = loop.create_future()
        self.incoming: Incoming | None = None
        self.upload: asyncio.Task[None] | None = None
        self.over: asyncio.Future[None] = loop.create_future()
        """Resolved once nothing more will come of the response."""

    def fail(self, error: EdgeError) -> None:
        if not self.head.done():
            self.head.set_exception(error)
        self.set_over()

    def set_over(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class _Call:
    def __init__(self, invocation: int, task: asyncio.Task[None]) -> None:
        self.invocation = invocation
        self._task = task

    def cancel(self) -> None:
        """Stop it, once: a second time would break off the closing of its connection."""
        if not self._task.cancelling():
            self._task.cancel()


class _Failures:
    """Turns what a call raises into the frame that tells the handler: before the head a failure, after it an abort."""

    def __init__(self, isolate: Isolate, id: int) -> None:
        self._isolate = isolate
        self._id = id
        self.has_head = False

    def __enter__(self) -> _Failures:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        if error is None or isinstance(error, asyncio.CancelledError):
            return False
        if not isinstance(error, Exception):
            return False
        if not self._isolate._channel.lost:
            self._tell(error)
        return True

    def _tell(self, error: Exception) -> None:
        if isinstance(error, FrameError):
            error = EdgeError(f"the answer cannot be handed to the handler: {error}")
        if not isinstance(error, EdgeError):  # a bug of ours must not leave the handler waiting
            logger.error("a handler's call failed", exc_info=error)
            error = EdgeError(f"internal error: {type(error).__name__}")
        if self.has_head:
            self._isolate._channel.send(Abort(self._id, error.message))
        else:
            self._isolate._fail_call(self._id, error)


class _ResponseBody(AsyncGenerator[bytes, None]):
    """A response's body. An object and not a generator, because closing one that never ran would cancel nothing."""

    def __init__(self, isolate: Isolate, invocation: _Invocation, grace_s: float) -> None:
        assert invocation.incoming is not None
        self._isolate = isolate
        self._invocation = invocation
        self._incoming = invocation.incoming
        self._grace_s = grace_s

    async def asend(self, value: None) -> bytes:
        try:
            return await anext(self._incoming)
        except BodyAborted as error:
            raise HandlerFailed(f"the response's body broke off: {error}") from error
        except ConnectionError as error:
            raise IsolateLost(f"the handler process died: {await self._isolate.gone}") from error

    async def athrow(self, kind: Any, value: Any = None, traceback: Any = None) -> bytes:
        await self.aclose()
        raise kind if value is None else value

    async def aclose(self) -> None:
        if not self._incoming.ended:
            await self._incoming.aclose()
            self._isolate._cancel(self._invocation, self._grace_s)


def _init(bundle: Bundle) -> Init:
    return Init(
        worker=bundle.worker,
        version=bundle.version,
        root=bundle.root,
        main=bundle.main,
        vars=dict(bundle.vars),
        bindings=dict(bundle.bindings),
        search_paths=list(bundle.search_paths),
        compatibility_date=bundle.compatibility_date,
        compatibility_flags=list(bundle.compatibility_flags),
    )


def _is_new(frame: AiRun | Subrequest, calls: dict[int, _Call]) -> bool:
    return frame.id % 2 == 1 and frame.id not in calls


def _describe_exit(exit_code: asyncio.Future[int]) -> str:
    if not exit_code.done():
        return "it closed its connection"
    code = exit_code.result()
    if code >= 0:
        return f"it exited with status {code}"
    name = str(-code)
    with suppress(ValueError):
        name = signal.Signals(-code).name
    return f"it was killed by signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
