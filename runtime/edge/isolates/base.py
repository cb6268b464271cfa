"""What the node and its isolates say to each other: requests, responses, bindings. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import msgspec


class Bundle(msgspec.Struct, frozen=True):
    """One version of a worker's code, and what its `env` gets.

    `root` is the module root; `main` is the file's path relative to it.
    """

    worker: str
    version: str
    root: str
    main: str
    vars: dict[str, Any] = {}
    ai_binding: str | None = None


class InboundRequest(msgspec.Struct):
    """An HTTP request for a worker."""

    method: str
    url: str
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes] | None = None
    cf: dict[str, Any] = {}


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


OnLog = Callable[[Bundle, int, str, str], None]
"""Called with bundle, invocation (0: outside of any), level (`log`, `error`, `warning`, …) and text."""
