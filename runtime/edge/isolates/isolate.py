"""One handler process as the node sees it: its invocations, their limits, and its end.

Nothing that comes from the process is trusted: frames that break the rules end it, unknown ids are ignored, and what it
can make the node hold is bounded. It knows nothing about versions or about when to start another process.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from edge.billing.meter import new_id
from edge.errors import (
    EdgeError,
    ExceededCpu,
    ExceededMemory,
    HandlerFailed,
    HandlerTimeout,
    IsolateLost,
    RequestTooLarge,
    TooManyRequests,
    WorkerStartFailed,
)
from edge.isolates.accounting import CpuSplit
from edge.isolates.base import (
    Bindings,
    Bundle,
    InboundEvent,
    InboundRequest,
    InvocationUsage,
    OnInvocation,
    OnLog,
    OutboundResponse,
    Outcome,
)
from edge.isolates.calls import Calls
from edge.isolates.egress import Egress
from edge.isolates.gauge import Gauge
from edge.isolates.invocation import Invocation, ResponseBody, WholeBody
from edge.isolates.sandbox.layers import ForkSpec, SandboxReport, refusal
from edge.isolates.spawner import Spawner
from edge.isolates.watch import Watch
from workers._channel import BodyAborted, Channel
from workers._load import EVENTS
from workers._wire import (
    MAX_CHUNK_BYTES,
    Abort,
    AiRun,
    Call,
    Cancel,
    Chunk,
    CpuUsed,
    End,
    Event,
    EventResult,
    Fetch,
    Finished,
    Frame,
    FrameError,
    Init,
    Log,
    Probe,
    Ready,
    ResponseHead,
    Sandboxed,
    StartFailed,
    Subrequest,
    Threw,
    ToNode,
)

CANCEL_GRACE_S = 1.0
"""How long an isolate has to stop an invocation that ran out of time, before it is taken for wedged."""
CPU_GRACE_S = 0.2
"""The same for one that used too much CPU time: it goes on using it."""
EXIT_GRACE_S = 1.0
BACKGROUND_S = 900.0
"""How long a `scheduled` or `queue` event may take."""
FINISH_S = 40.0
"""How long `waitUntil` work may go on after the response. The isolate itself ends it some seconds earlier."""
PROBE_TICKS = 5
"""After how many silent checks a process that has work, but uses no CPU time, is asked whether it still reads."""
REPORTED_US = 1000
"""CPU time outside of invocations is reported from this much on."""
MAX_LOG_TEXT = 64 << 10
MAX_TRACEBACK = 128 << 10
MAX_NAME = 200
"""Characters of names that a process gives: levels of its log, types of exceptions."""
MAX_SOCKETS = 1000
"""WebSockets that a process may have open."""

_OF_INVOCATIONS = frozenset({ResponseHead, Finished, End, Threw, EventResult, Abort})
_BROKEN = frozenset({"MemoryError"})
"""Exceptions after which a process had better be replaced."""


class Owner(msgspec.Struct):
    """What an isolate is started with, and whom it tells: one for all processes of a node.

    `on_lost` and others are called in the event loop and must not block.
    """

    spawner: Spawner
    policy: str
    """Of the sandbox."""
    bindings: Bindings
    egress: Egress
    watch: Watch
    on_log: OnLog
    on_invocation: OnInvocation
    idle_s: float
    max_requests: int


class Home(Protocol):
    """Who keeps the processes of a worker."""

    def on_room(self) -> None:
        """Called when an invocation is over, or when a process accepts requests again."""
        ...

    def on_worn(self) -> None:
        """Called when a process that was in order takes no more requests."""
        ...


class Isolate:
    """A handler process that has imported its worker.

    `load` is the number of invocations in it; whoever is about to start one calls `take` first.
    """

    def __init__(self, owner: Owner, bundle: Bundle, home: Home) -> None:
        self.bundle = bundle
        self._owner = owner
        self._home = home
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(2, 2)
        self._invocations: dict[int, Invocation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_doubts = 0
        self._num_outside_calls = 0
        self._is_retiring = False
        self._is_over_cpu = False
        self._why_killed = ""
        self._loss: tuple[EdgeError, Outcome] | None = None
        self._sandboxed: asyncio.Future[SandboxReport] = self._loop.create_future()
        self._started: asyncio.Future[Ready | StartFailed] = self._loop.create_future()
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self.gone: asyncio.Future[str] = self._loop.create_future()
        """Resolved with the reason once the process is no more."""
        self._channel: Channel
        self._hang_up: asyncio.TimerHandle | None = None
        self._calls: Calls
        self._gauge: Gauge
        self._cpu = CpuSplit()
        self._cpu_read_at = 0.0
        self._cpu_read_us = 0
        self._born_bytes = 0
        self.pid = 0
        self.sandbox = SandboxReport()
        self.layers: tuple[str, ...] = ()
        """The sandbox layers that the process is under."""
        self.handlers: tuple[str, ...] = ()
        """The events that the code has handlers for, as it says itself."""
        self.cold_start_us = 0
        """What the fork and the import took, until the first invocation has been told."""
        self.load = 0
        self.num_sockets = 0
        """WebSockets among the invocations in it: they last, and take no slot."""
        self.num_served = 0
        self.is_blocked = False
        """Whether the process does not read what it is sent: its event loop stands still."""
        self._num_heard = 0
        self._heard_before = 0
        self._num_silent = 0
        self._cpu_before_us = 0
        self._block_cpu_us = 0
        self._idle_since = self._loop.time()

    @classmethod
    async def start(cls, owner: Owner, bundle: Bundle, spec: ForkSpec, home: Home, timeout_s: float) -> Isolate:
        """Fork a process and import `bundle` in it.

        Raises:
            WorkerStartFailed: the code could not be imported, or not in time.
            IsolateLost: no process could be had.
        """
        isolate = cls(owner, bundle, home)
        started = isolate._loop.time()
        isolate.pid, sock = await owner.spawner.fork(spec, isolate._on_exit)
        isolate._gauge = Gauge(isolate.pid)
        isolate._channel = await Channel.open(
            sock, ToNode, isolate._on_frame, isolate._on_lost, wait_for_reader=True, gathers=True
        )
        isolate._calls = Calls(
            isolate._channel, bundle, owner.bindings, owner.egress, isolate._count_call, isolate._context_of
        )
        isolate._exit_code.add_done_callback(isolate._after_exit)
        isolate.load = 1  # the import
        owner.watch.add(isolate)
        owner.watch.set_busy(isolate)
        try:
            await isolate._import(timeout_s)
        except BaseException:
            isolate.kill("it could not be started")
            await isolate.gone
            raise
        isolate.cold_start_us = max(1, round((isolate._loop.time() - started) * 1e6))
        isolate._cpu = CpuSplit(isolate._gauge.cpu_us())
        isolate._idle_since = isolate._loop.time()
        isolate.load = 0
        return isolate

    # -- what the owner asks -------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether this is to get more requests, now or once it is out of doubt."""
        return not (self._is_retiring or self._why_killed or self._channel.lost)

    @property
    def accepts(self) -> bool:
        """Whether this can take another request now."""
        return not (
            self._is_retiring
            or self._num_doubts
            or self.is_blocked
            or self._is_over_cpu
            or self._why_killed
            or self._channel.lost
        )

    def take(self) -> None:
        """Keep a slot for an invocation: `fetch`, `start_fetch`, `event` or `release` follows."""
        self.load += 1

    def release(self) -> None:
        """The slot is not needed any more."""
        self.load -= 1
        if self.load == 0:
            self._idle_since = self._loop.time()
            if self._is_retiring:
                self._channel.close()
        self._home.on_room()

    async def fetch(self, request: InboundRequest, entrypoint: str, props: dict[str, Any]) -> OutboundResponse:
        """Have the worker answer `request`. Cancelling this, or closing the response's body, cancels the invocation.

        Raises:
            HandlerFailed: the handler raised.
            ExceededResources: no response's head within limits.timeout_s, or over another limit.
            RequestTooLarge: the body is over limits.request_body_mb.
            IsolateLost: the process died.
        """
        invocation = self.start_fetch(request, entrypoint, props)
        try:
            await invocation.answer
        except asyncio.CancelledError:
            self.cancel(invocation)
            raise
        return self.response_of(invocation, is_websocket=request.is_websocket)

    def start_fetch(self, request: InboundRequest, entrypoint: str, props: dict[str, Any]) -> Invocation:
        """Hand `request` to the worker: as `fetch`, which waits for the invocation's `answer`.

        Raises:
            HandlerFailed: it cannot be handed over.
        """
        invocation = self._begin("fetch", entrypoint, request.request_id, self.bundle.limits.timeout_s)
        body = request.body
        fetch = Fetch(
            invocation.id,
            request.method,
            request.url,
            request.headers,
            body is not None,
            request.cf,
            entrypoint,
            props,
            request.is_websocket,
        )
        if isinstance(body, bytes):
            self._send(invocation, fetch, Chunk(invocation.id, body), End(invocation.id))
        else:
            self._send(invocation, fetch)
            if body is not None:
                body = body if request.is_websocket else self._limited(body)
                invocation.upload = self._spawn(self._upload(invocation, body))
        return invocation

    def cancel(self, invocation: Invocation) -> None:
        """Nobody waits for what `invocation` gives any more; harmless after its end."""
        self._cancel(invocation, self.bundle.limits.timeout_s, "canceled")

    def response_of(self, invocation: Invocation, *, is_websocket: bool = False) -> OutboundResponse:
        """The response, once the `answer` is there. Raises TooManyRequests: it is one WebSocket too many."""
        head: ResponseHead = invocation.answer.result()
        if invocation.incoming is None:
            content = head.content
            return OutboundResponse(head.status, head.headers, None if content is None else WholeBody(content))
        if is_websocket and head.status == 101:
            self._open_socket(invocation)
        body = ResponseBody(invocation.incoming, lambda: self.cancel(invocation), self._lost_error)
        return OutboundResponse(head.status, head.headers, body)

    async def event(self, event: InboundEvent) -> Any:
        """Have the worker handle `event`: what `workers._wire.Event` says for its kind. Cancelling cancels it.

        Raises:
            As `fetch`.
        """
        timeout_s = self.bundle.limits.timeout_s if event.kind == "rpc" else BACKGROUND_S
        invocation = self._begin(event.kind, event.entrypoint, event.request_id, timeout_s)
        self._send(invocation, Event(invocation.id, event.kind, event.payload, event.entrypoint, event.props))
        try:
            return await invocation.answer
        except asyncio.CancelledError:
            self._cancel(invocation, timeout_s, "canceled")
            raise

    def retire(self) -> None:
        """Take no more requests; end once those in flight are finished."""
        self._is_retiring = True
        if not self.load:
            self._channel.close()

    @property
    def was_ordered(self) -> bool:
        """Whether somebody wanted the end of this, and nothing is wrong with it."""
        return self._is_retiring and not self._why_killed

    def kill(self, why: str, loss: EdgeError | None = None, outcome: Outcome = "lost") -> None:
        """End the process now; requests in flight fail with `loss`, or with one that says `why`."""
        if not self.gone.done() and not self._why_killed:
            self._why_killed = why
            self._loss = (loss, outcome) if loss is not None else None
            self._owner.spawner.kill(self.pid)
            self._channel.fail(ConnectionResetError(why))

    # -- start ---------------------------------------------------------------------------------------------

    async def _import(self, timeout_s: float) -> None:
        bundle = self.bundle
        try:
            async with asyncio.timeout(timeout_s):
                self.sandbox = await self._or_gone(self._sandboxed)
                self.layers = tuple(self.sandbox.layers)
                problem = refusal(self._owner.policy, self.sandbox)
                if problem is not None:
                    raise WorkerStartFailed(problem)
                self._born_bytes = self._gauge.memory_bytes()
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
            text = f"{bundle.main} could not be imported: {started.type[:MAX_NAME]}: {started.message[:MAX_LOG_TEXT]}"
            raise WorkerStartFailed(text, traceback=started.traceback[:MAX_TRACEBACK])
        self.handlers = tuple(event for event in EVENTS if event in started.handlers)

    async def _or_gone(self, future: asyncio.Future[Any]) -> Any:
        await asyncio.wait([future, self.gone], return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        raise WorkerStartFailed(f"the process died while it imported {self.bundle.main}: {self.gone.result()}")

    # -- frames --------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Any) -> None:
        self._num_heard += 1
        if self.is_blocked:
            self._unblock()
        if type(frame) in _OF_INVOCATIONS:
            invocation = self._invocations.get(frame.id)
            if invocation is not None:
                self._on_invocation_frame(invocation, frame)
            return
        match frame:
            case AiRun() | Call() | Subrequest():
                self._calls.start(frame)
            case CpuUsed(used):
                self._on_cpu_used(used)
            case Cancel(id):
                self._calls.cancel(id)
            case Log(invocation_id, level, text):
                self._owner.on_log(self.bundle, invocation_id, level[:MAX_NAME], text[:MAX_LOG_TEXT])
            case Sandboxed() if not self._sandboxed.done():
                self._sandboxed.set_result(SandboxReport(frame.layers, frame.missing, frame.escapes))
            case Ready() | StartFailed() if not self._started.done():
                self._started.set_result(frame)

    def _on_invocation_frame(self, invocation: Invocation, frame: Any) -> None:
        match frame:
            case ResponseHead():
                if not invocation.answer.done() and invocation.kind == "fetch":
                    if frame.content is not None and len(frame.content) > MAX_CHUNK_BYTES:
                        raise FrameError(f"the content of a response is longer than {MAX_CHUNK_BYTES} bytes")
                    invocation.status = frame.status
                    if frame.has_body:
                        invocation.incoming = self._channel.receive_body(frame.id)
                    invocation.answer.set_result(frame)
                if not frame.has_body:
                    self._set_over(invocation)
                if frame.cpu_us is not None:
                    self._finish(invocation, frame.cpu_us)
            case Finished():
                self._finish(invocation, frame.cpu_us)
            case End():
                self._set_over(invocation)
            case Threw(_, type, message, traceback):
                error = HandlerFailed(message[:MAX_LOG_TEXT], type=type[:MAX_NAME], traceback=traceback[:MAX_TRACEBACK])
                invocation.fail(error, "exception")
                self._set_over(invocation)
                if type in _BROKEN:
                    self._wear_out()
            case Abort():
                if invocation.outcome == "ok":
                    invocation.outcome = "exception"
                self._set_over(invocation)
            case EventResult():
                if not invocation.answer.done() and invocation.kind != "fetch":
                    invocation.answer.set_result(frame.value)
                self._set_over(invocation)

    # -- invocations ---------------------------------------------------------------------------------------

    def _begin(self, kind: str, entrypoint: str, request_id: str, timeout_s: float) -> Invocation:
        total_us = self._cpu_us()
        if self._cpu.num_active == 0:
            self._report_background(total_us)
        self._cpu.begin(total_us)
        invocation = Invocation(
            next(self._ids),
            kind,
            entrypoint,
            request_id or new_id(),
            self._loop.create_future(),
            self._loop.time(),
            timeout_s,
            total_us,
        )
        invocation.cold_start_us, self.cold_start_us = self.cold_start_us, 0
        self._invocations[invocation.id] = invocation
        self._num_outside_calls = 0
        self.num_served += 1
        self._owner.watch.set_busy(self)
        if self.num_served >= self._owner.max_requests:
            self._wear_out()
        return invocation

    def _cpu_us(self) -> int:
        """What the process's clock says, read once in a turn of the event loop: frames come several at a time."""
        now = self._loop.time()  # which uvloop keeps for the turn
        if now != self._cpu_read_at:
            self._cpu_read_at = now
            self._cpu_read_us = self._gauge.cpu_us()
        return self._cpu_read_us

    def _wear_out(self) -> None:
        """Take no more requests; end after those in flight, this one included."""
        if not self._is_retiring:
            self._is_retiring = True
            self._home.on_worn()

    def _send(self, invocation: Invocation, *frames: Frame) -> None:
        try:
            self._channel.send(*frames)
        except FrameError as error:
            invocation.answer.cancel()
            invocation.outcome = "exception"
            self._finish(invocation, 0)
            raise HandlerFailed(f"the request cannot be handed to the handler: {error}") from error

    def _set_over(self, invocation: Invocation) -> None:
        """Nothing more comes of the response: if that was in doubt, it is not any more."""
        invocation.is_over = True
        if invocation.is_in_doubt:
            invocation.is_in_doubt = False
            self._num_doubts -= 1
            self._home.on_room()

    def _finish(self, invocation: Invocation, claim_us: int) -> None:
        """All of `invocation` is over, as far as the process says, or with it."""
        del self._invocations[invocation.id]
        self.num_sockets -= invocation.is_socket
        cpu_us = self._cpu.end(self._cpu_us(), claim_us)
        self._is_over_cpu = False
        self._leave(invocation)
        self._report(invocation, cpu_us)
        self.release()

    def _open_socket(self, invocation: Invocation) -> None:
        if invocation.id not in self._invocations:
            return
        if self.num_sockets >= MAX_SOCKETS:
            self.cancel(invocation)
            raise TooManyRequests(
                f"a process of this worker has {MAX_SOCKETS} WebSockets open already", retry_after_s=1
            )
        invocation.is_socket = True
        self.num_sockets += 1
        self._home.on_room()

    def _leave(self, invocation: Invocation) -> None:
        """End what `invocation` has left open, and whoever still waits for something of it gets an error."""
        why = "the handler ended without a response"
        if not invocation.is_over or not invocation.answer.done():
            invocation.fail(HandlerFailed(why), "exception")
        self._set_over(invocation)
        if invocation.incoming is not None:
            self._channel.forget_body(invocation.id)
            invocation.end_body(BodyAborted(why))
        if invocation.upload is not None:
            invocation.upload.cancel()
        if invocation.num_calls:
            self._calls.cancel_all_of(invocation.id)

    def _report(self, invocation: Invocation, cpu_us: int) -> None:
        self._owner.on_invocation(
            InvocationUsage(
                bundle=self.bundle,
                kind=invocation.kind,
                request_id=invocation.request_id,
                entrypoint=invocation.entrypoint,
                outcome=invocation.outcome,
                status=invocation.status,
                wall_us=round((self._loop.time() - invocation.started) * 1e6),
                cpu_us=cpu_us,
                cold_start_us=invocation.cold_start_us,
                subrequests=invocation.num_calls,
                layers=self.layers,
            )
        )

    def _report_background(self, total_us: int) -> None:
        if self._cpu.pending_background_us(total_us) >= REPORTED_US:
            cpu_us = self._cpu.take_background(total_us)
            self._owner.on_invocation(
                InvocationUsage(
                    bundle=self.bundle, kind="background", request_id=new_id(), cpu_us=cpu_us, layers=self.layers
                )
            )

    def _cancel(self, invocation: Invocation, grace_s: float, outcome: Outcome) -> None:
        """Stop `invocation`; a process that does not confirm that within `grace_s` is wedged and is killed."""
        if invocation.is_over:
            return
        if invocation.outcome == "ok":
            invocation.outcome = outcome
        self._channel.send(Cancel(invocation.id))
        kill_at = self._loop.time() + grace_s
        invocation.kill_at = kill_at if invocation.kill_at is None else min(kill_at, invocation.kill_at)

    def _stop(self, invocation: Invocation, grace_s: float, error: EdgeError, outcome: Outcome) -> None:
        """End `invocation` with `error` because it is over a limit; until that is confirmed, no other request comes."""
        invocation.fail(error, outcome)
        self._cancel(invocation, grace_s, outcome)
        self._channel.forget_body(invocation.id)
        invocation.end_body(BodyAborted(error.message))
        if not invocation.is_over and not invocation.is_in_doubt:
            invocation.is_in_doubt = True
            self._num_doubts += 1

    async def _upload(self, invocation: Invocation, body: AsyncIterator[bytes]) -> None:
        """Send a request's body to the handler."""
        try:
            await self._channel.send_body(invocation.id, body)
        except RequestTooLarge as error:
            self._channel.send(Abort(invocation.id, error.message))
            self._stop(invocation, CANCEL_GRACE_S, error, "exception")
        except (OSError, EdgeError) as error:
            self._channel.send(Abort(invocation.id, f"the request's body broke off: {error}"))

    async def _limited(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        limit_mb = self.bundle.limits.request_body_mb
        num_left = limit_mb << 20
        async for data in body:
            num_left -= len(data)
            if num_left < 0:
                raise RequestTooLarge(
                    f"the request's body is over {limit_mb} MB; "
                    f"raise limits.request_body_mb (now {limit_mb}) in the configuration if the worker takes more"
                )
            yield data

    def _count_call(self, invocation_id: int) -> int:
        """How many calls that invocation has made, this one included; those of no invocation count together."""
        invocation = self._invocations.get(invocation_id)
        if invocation is None:
            self._num_outside_calls += 1
            return self._num_outside_calls
        invocation.num_calls += 1
        return invocation.num_calls

    def _context_of(self, invocation_id: int) -> contextvars.Context:
        invocation = self._invocations.get(invocation_id)
        return invocation.context.copy() if invocation is not None else contextvars.Context()

    # -- limits --------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Look after the limits; see `Watch`."""
        total_us = self._gauge.cpu_us()
        if not self._started.done():
            if self._born_bytes:
                self._check_memory()
        elif self._cpu.num_active == 0:
            self._check_idle(now, total_us)
        else:
            self._check_times(now)
            self._check_blocked(total_us)
            self._check_cpu(total_us)
            self._check_memory()

    def _check_idle(self, now: float, total_us: int) -> None:
        limit_ms = self.bundle.limits.cpu_ms
        if self._cpu.pending_background_us(total_us) > limit_ms * 1000:
            self._report_background(total_us)
            self.kill(f"it used over {limit_ms} ms of CPU time (limits.cpu_ms) while it served no request")
        elif self.load == 0 and now - self._idle_since >= self._owner.idle_s:
            self._report_background(total_us)
            self.retire()

    def _check_times(self, now: float) -> None:
        for invocation in list(self._invocations.values()):
            if not invocation.is_over:
                if invocation.kill_at is not None and now >= invocation.kill_at:
                    self.kill("another request in it ran over its limits, did not stop when told to, and was killed")
                    return
                if not invocation.answer.done() and now >= invocation.deadline:
                    self._time_out(invocation, now)
            elif invocation.finish_by is None:
                invocation.finish_by = now + FINISH_S
            elif now >= invocation.finish_by:
                self.kill(f"waitUntil() work of a request did not end within {FINISH_S:g} s")
                return

    def _time_out(self, invocation: Invocation, now: float) -> None:
        limit_s = invocation.deadline - invocation.started
        if invocation.kind in ("fetch", "rpc"):
            text = (
                f"the handler did not begin to answer within {limit_s:g} s and was stopped; "
                f"raise limits.timeout_s (now {limit_s:g}) in the configuration if it needs longer"
            )
        else:
            text = (
                f"the {invocation.kind} handler did not end within {limit_s:g} s, the most it may take, and was stopped"
            )
        self._stop(invocation, CANCEL_GRACE_S, HandlerTimeout(text), "exceededTime")

    def _check_blocked(self, total_us: int) -> None:
        """Notice an event loop that stands still: frames are not read, and none come."""
        is_silent = self._num_heard == self._heard_before
        is_computing = total_us - self._cpu_before_us > 25_000
        self._heard_before, self._cpu_before_us = self._num_heard, total_us
        self._num_silent = self._num_silent + 1 if is_silent else 0
        if not is_silent or self._channel.num_unread_bytes == 0:
            if self.is_blocked:
                self._unblock()
            if is_silent and (is_computing or self._num_silent % PROBE_TICKS == 0):
                self._channel.send(Probe())
        elif self._num_silent > 1 and not self.is_blocked:
            self.is_blocked = True
            self._block_cpu_us = total_us

    def _unblock(self) -> None:
        self.is_blocked = False
        self._num_silent = 0
        self._home.on_room()

    def _check_cpu(self, total_us: int) -> None:
        limit_us = self.bundle.limits.cpu_ms * 1000
        used_us = self._cpu.pending_us(total_us)
        if used_us <= limit_us:
            return
        invocations = list(self._invocations.values())
        suspects = [each for each in invocations if total_us - each.begun_cpu_us > limit_us]
        if len(invocations) == 1:
            self._stop_over_cpu(suspects[0], used_us)
        elif suspects and self.is_blocked and total_us - self._block_cpu_us > limit_us:
            self._stop_over_cpu(suspects[-1], used_us)  # whoever came last had the loop last
        elif suspects and used_us > limit_us * len(invocations):
            self._stop_over_cpu(suspects[0], used_us // len(invocations))
        else:  # it is nobody yet, or it is not known who
            self._is_over_cpu = True
            self._channel.send(Probe())

    def _on_cpu_used(self, used: list[tuple[int, int]]) -> None:
        """What the process says of who uses its time is only good for choosing whom to stop, if somebody has to be."""
        limit_us = self.bundle.limits.cpu_ms * 1000
        pending_us = self._cpu.pending_us(self._gauge.cpu_us())
        for id, used_us in used:
            if id in self._invocations and limit_us < used_us <= pending_us:
                self._stop_over_cpu(self._invocations[id], used_us)

    def _stop_over_cpu(self, culprit: Invocation, used_us: int) -> None:
        if culprit.outcome == "exceededCpu":
            return
        limit_ms = self.bundle.limits.cpu_ms
        self._stop(
            culprit,
            CPU_GRACE_S,
            ExceededCpu(
                f"the worker exceeded its CPU time limit: used {used_us // 1000} ms of limits.cpu_ms {limit_ms}; "
                "raise it in the configuration if the handler needs more"
            ),
            "exceededCpu",
        )
        if culprit.is_over:  # in waitUntil, which cannot be stopped alone
            culprit.outcome = "exceededCpu"
            self.kill(f"waitUntil() work used over {limit_ms} ms of CPU time (limits.cpu_ms)")

    def _check_memory(self) -> None:
        limit_mb = self.bundle.limits.memory_mb
        used_bytes = self._gauge.memory_bytes() - self._born_bytes
        if used_bytes > limit_mb << 20:
            error = ExceededMemory(
                f"the worker exceeded its memory limit: its process held {used_bytes >> 20} MB of limits.memory_mb "
                f"{limit_mb}; raise it in the configuration if the handlers need more"
            )
            self.kill(error.message, error, "exceededMemory")

    # -- the end -------------------------------------------------------------------------------------------

    def _on_exit(self, exit_code: int) -> None:
        self._exit_code.set_result(exit_code)

    def _after_exit(self, _: asyncio.Future[int]) -> None:
        """The end of the connection follows, after the last frames, unless another process holds it open."""
        self._gauge.freeze()
        if not self._channel.lost:
            error = ConnectionResetError("the process ended")
            self._hang_up = self._loop.call_later(EXIT_GRACE_S, self._channel.fail, error)

    def _on_lost(self, error: Exception | None) -> None:
        if isinstance(error, FrameError):
            self._why_killed = self._why_killed or f"it broke the rules of the connection and was killed: {error}"
        if self._hang_up is not None:
            self._hang_up.cancel()
        self._owner.watch.remove(self)
        if not self._is_retiring or self._why_killed or error is not None:
            self._owner.spawner.kill(self.pid)
        self._spawn(self._settle_loss())

    async def _settle_loss(self) -> None:
        """Tell everybody who waits for this process how it ended."""
        await asyncio.wait([self._exit_code], timeout=EXIT_GRACE_S)
        if not self._exit_code.done():
            self._owner.spawner.kill(self.pid)
        self.gone.set_result(self._why_killed or _describe_exit(self._exit_code))
        error, outcome = self._loss or (await self._lost_error(), "lost")
        total_us = self._gauge.cpu_us()
        # Nobody can say any more who used what, but who was over the limit: that one comes last and pays the rest.
        invocations = sorted(self._invocations.values(), key=lambda each: each.outcome == "exceededCpu")
        is_blamed = bool(invocations) and invocations[-1].outcome == "exceededCpu"
        for invocation in invocations:
            if not invocation.is_over:
                invocation.fail(error, outcome)
            self._finish(invocation, 0 if is_blamed else self._cpu.pending_us(total_us) // self._cpu.num_active)
        self._report_background(total_us)
        self._calls.cancel_all()

    async def _lost_error(self) -> EdgeError:
        if self._loss is not None:
            return self._loss[0]
        return IsolateLost(f"the handler process died: {await self.gone}; the next request gets a new one")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


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
