"""What the node and its isolates say to each other: requests, responses, bindings. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from edge.config import LimitsConfig
from workers._wire import Binding

__all__ = [
    "Binding",
    "Bindings",
    "Bundle",
    "InboundEvent",
    "InboundRequest",
    "JsonAnswer",
    "OnLog",
    "OutboundResponse",
    "StreamAnswer",
    "WorkerKey",
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

    @property
    def key(self) -> WorkerKey:
        """Whose versions replace each other."""
        return self.account, self.worker


class InboundRequest(msgspec.Struct):
    """An HTTP request for a worker."""

    method: str
    url: str
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes] | None = None
    cf: dict[str, Any] = {}
    is_websocket: bool = False
    """`body` is then what the client sends, as messages (`workers._websocket`); so is the body of a response of 101."""


class InboundEvent(msgspec.Struct):
    """An event other than an HTTP request for a worker; `kind` and `payload` as in `workers._wire.Event`."""

    kind: str
    payload: Any
    entrypoint: str = ""
    props: dict[str, Any] = {}


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
