"""Service bindings: `env.NAME` is another worker of the account, or a named entrypoint of it.

Calls of the binding: `fetch` with method, URL and header pairs, and the request's body as the body; the answer is the
response. `rpc` with the method's name and its packed arguments; the answer is the packed result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any, Protocol

from edge.bindings.base import OneBody, parse
from edge.errors import EdgeError, InvalidInput, LoopDetected, UnknownWorker
from edge.isolates.base import (
    Binding,
    Bundle,
    InboundEvent,
    InboundRequest,
    JsonAnswer,
    OutboundResponse,
    StreamAnswer,
    WorkerKey,
)

MAX_DEPTH = 16
"""Workers that may call each other in one chain."""

_depth: ContextVar[int] = ContextVar("service_depth", default=0)
"""How many service bindings led to what runs here. A call is handled in the context of the invocation that makes it."""


class Workers(Protocol):
    """What runs the workers of this node; `edge.isolates.dispatch.Isolates`."""

    async def fetch(
        self, key: WorkerKey, request: InboundRequest, *, entrypoint: str = "", props: dict[str, Any] | None = None
    ) -> OutboundResponse:
        """The response of the worker `key`."""

    async def event(self, key: WorkerKey, event: InboundEvent) -> Any:
        """What the worker `key` makes of `event`."""


class Services:
    """Service bindings of all workers of a node."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """`fetch` or `rpc` of the binding; see above."""
        service = str(binding.props["service"])
        if (depth := _depth.get()) >= MAX_DEPTH:
            raise LoopDetected(
                f"service bindings led through {MAX_DEPTH} workers, and {service!r} would be one more: do they call "
                "each other in a loop?"
            )
        entered = _depth.set(depth + 1)
        try:
            match method:
                case "fetch":
                    return await self._fetch(caller, binding, args, body)
                case "rpc":
                    return await self._rpc(caller, binding, args)
        except UnknownWorker as error:
            raise UnknownWorker(
                f"there is no worker {service!r} of the account {caller.account!r} on this node; start it beside this "
                "one: edge dev -c FIRST.toml -c SECOND.toml"
            ) from error
        finally:
            _depth.reset(entered)
        raise InvalidInput(f"a service binding has no method {method[:40]!r}; it has fetch and rpc")

    async def close(self) -> None:
        """Nothing is kept."""

    async def _fetch(
        self, caller: Bundle, binding: Binding, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> StreamAnswer:
        method, url, headers = parse("fetch(method, url, headers)", args, tuple[str, str, list[tuple[str, str]]])
        request = InboundRequest(method, url, headers, body)
        response = await self._workers.fetch(
            (caller.account, str(binding.props["service"])),
            request,
            entrypoint=str(binding.props.get("entrypoint", "")),
            props=binding.props.get("props", {}),
        )
        return StreamAnswer(response.status, response.headers, response.body or OneBody())

    async def _rpc(self, caller: Bundle, binding: Binding, args: list[Any]) -> JsonAnswer:
        method, packed = parse("rpc(method, args)", args, tuple[str, bytes])
        event = InboundEvent(
            "rpc",
            {"method": method, "args": packed},
            str(binding.props.get("entrypoint", "")),
            binding.props.get("props", {}),
        )
        result = await self._workers.event((caller.account, str(binding.props["service"])), event)
        if not isinstance(result, bytes):
            raise EdgeError(f"the process of the worker {binding.props['service']!r} gave a result that is none")
        return JsonAnswer(result)
