"""What the node and its isolates say to each other: requests, responses, bindings. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Literal, Protocol

import msgspec

from edge.config import EgressConfig, LimitsConfig
from workers._wire import Binding

__all__ = [
    "Binding",
    "Bindings",
    "Bundle",
    "InboundEvent",
    "InboundRequest",
    "InvocationUsage",
    "JsonAnswer",
    "OnInvocation",
    "OnLog",
    "OutboundResponse",
    "Outcome",
    "StreamAnswer",
    "WorkerKey",
    "WorkerStatus",
]

WorkerKey = tuple[str, str]
"""Account and name of a worker."""


class Bundle(msgspec.Struct, frozen=True):
    """One version of a worker's code, and what its `env` gets.

    `root` is the module root; `main` is the file's path relative to it.
    """

    worker: str
    version: str
    root: str
    main: str
    account: str = "dev"
    vars: dict[str, Any] = {}
    """Secrets included."""
    bindings: dict[str, Binding] = {}
    search_paths: tuple[str, ...] = ()
    """Folders with the packages that the worker depends on."""
    compatibility_date: str = ""
    compatibility_flags: tuple[str, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    egress: EgressConfig = EgressConfig()

    @property
    def key(self) -> WorkerKey:
        """Whose versions replace each other."""
        return self.account, self.worker


class InboundRequest(msgspec.Struct):
    """An HTTP request for a worker."""

    method: str
    url: str
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes] | bytes | None = None
    """Bytes are the whole of it, and no more than `MAX_CHUNK_BYTES` of `workers._wire`."""
    cf: dict[str, Any] = {}
    request_id: str = ""
    """Under which logs and usage know it; empty: one is minted."""
    is_websocket: bool = False
    """`body` is then what the client sends, as messages (`workers._websocket`); so is the body of a response of 101."""


class InboundEvent(msgspec.Struct):
    """An event other than an HTTP request for a worker; `kind` and `payload` as in `workers._wire.Event`."""

    kind: str
    payload: Any
    entrypoint: str = ""
    props: dict[str, Any] = {}
    request_id: str = ""


class OutboundResponse(msgspec.Struct):
    """A worker's response. Status and headers are as the handler's process sent them: not to be trusted.

    Closing `body` before its end cancels the invocation. Iterating it raises HandlerFailed if the handler broke it off,
    IsolateLost if its process died.
    """

    status: int
    headers: list[tuple[str, str]]
    body: AsyncGenerator[bytes, None] | None


class JsonAnswer(msgspec.Struct):
    """A binding's complete answer: a JSON value."""

    value: Any
    info: dict[str, Any] = {}
    """`requestId` and `status`, for `env.AI.lastRequestId` and the like."""


class StreamAnswer(msgspec.Struct):
    """A binding's answer as a stream. `body` is closed (`aclose`) when the handler does not want the rest."""

    status: int
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes]
    info: dict[str, Any] = {}


class Bindings(Protocol):
    """What stands behind a worker's `env`. EdgeErrors travel to the handler."""

    async def ai_run(
        self, bundle: Bundle, model: str, inputs: Any, options: dict[str, Any]
    ) -> JsonAnswer | StreamAnswer:
        """`await env.AI.run(model, inputs, options)` in a handler of `bundle`. Cancelled when nobody waits for it."""
        ...

    async def call(
        self, bundle: Bundle, binding: str, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """`await env.BINDING.method(*args)` in a handler of `bundle`, for all other kinds. Nothing in it is trusted:
        a binding that the bundle lacks, unknown methods and wrong arguments are InvalidInput."""
        ...


OnLog = Callable[[Bundle, int, str, str], None]
"""Called with bundle, invocation (0: outside of any), level (`log`, `error`, `warning`, …) and text."""

Outcome = Literal["ok", "exception", "exceededCpu", "exceededMemory", "exceededTime", "canceled", "lost"]
"""How an invocation ended, in Cloudflare's terms; `lost`: with its process, for no fault of its own."""


class InvocationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one invocation used, measured by the node alone. Times are integer microseconds.

    `kind` is `fetch`, an event's kind, or `background`: CPU time of a process while none of its invocations ran.
    """

    bundle: Bundle
    kind: str
    request_id: str
    entrypoint: str = ""
    outcome: Outcome = "ok"
    status: int = 0
    """Of the response; 0: there was none."""
    wall_us: int = 0
    """From handing it to the process until `waitUntil` work was over."""
    cpu_us: int = 0
    """The parts of invocations that ran at the same time in one process sum up to what the process used."""
    cold_start_us: int = 0
    """What it waited for the fork and the import of its process; 0: the process was warm."""
    subrequests: int = 0
    layers: tuple[str, ...] = ()
    """The sandbox layers of the process."""

    @property
    def is_cold(self) -> bool:
        """Whether a process had to be forked for it."""
        return self.cold_start_us > 0


OnInvocation = Callable[[InvocationUsage], None]
"""Called once for each invocation, when all of it is over."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker at one moment; the counts are from its first deployment on."""

    account: str
    worker: str
    version: str
    """Empty: none could be imported so far."""
    pids: list[int]
    in_flight: int
    waiting: int
    """Requests that no process had room for yet."""
    blocked: int
    """Processes whose event loop stands still."""
    handlers: list[str]
    """The events that the code has handlers for."""
    layers: list[str]
    """The sandbox layers of the oldest process."""
    missing_layers: dict[str, str]
    """Those that it is not under, and why."""
    invocations: int
    forks: int
    losses: int
    """Processes that ended other than by order."""
