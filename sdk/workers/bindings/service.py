"""`env.NAME` of a service binding: another worker of the account, through `fetch` or through its public methods."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from workers import _rpc, _runtime
from workers._headers import header_pairs
from workers.bindings._calls import BindingCalls
from workers.request import Request
from workers.response import Response


class Service:
    """A worker's entrypoint: `await env.NAME.method(…)` calls a method, `await env.NAME.fetch(…)` its fetch handler.

    Keyword arguments of a method travel as one dict, the last argument. Raises BindingError with the message of what
    the method raised; TypeError and ValueError for arguments that RPC cannot carry.
    """

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    async def fetch(self, resource: str | Request, **options: Any) -> Response:
        """The worker's response to a URL or `Request`; options as for `fetch`. Redirects are not followed.

        Raises:
            BindingError: there is no such worker, or its handler raised.
            TypeError, ValueError: a wrong argument, as for `Request`.
        """
        request = Request(resource, **options)
        content = request._take()
        headers = [list(pair) for pair in header_pairs(request.headers)]
        if isinstance(content, bytes) and "content-length" not in request.headers:
            headers.append(["content-length", str(len(content))])
        head, stream = await self._calls.stream("fetch", str(request.method), request.url, headers, body=content)
        return Response._received(stream, head.status, head.headers, request.url, redirected=False)

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(f"service binding {self._name} has no attribute {method!r}", name=method, obj=self)

        async def call(*args: Any, **options: Any) -> Any:
            values = [*args, options] if options else list(args)
            await _rpc.buffered(values)
            return _rpc.unpack(await self._calls.call("rpc", method, _packed(values, f"{self._calls.name}.{method}()")))

        call.__name__ = call.__qualname__ = method
        return call

    def __repr__(self) -> str:
        return f"Service({self._name!r})"


class Exports:
    """`ctx.exports`: the worker's own entrypoints, each to be called like a service binding, in an invocation of its
    own. Those there are: the classes derived from `WorkerEntrypoint`."""

    def __getattr__(self, name: str) -> Service:
        if name not in (names := dir(self)):
            shown = ", ".join(names) or "none"
            raise AttributeError(f"ctx.exports has no entrypoint {name!r}; it has: {shown}", name=name, obj=self)
        return Service(name, {}, BindingCalls(f"ctx.exports.{name}"))

    def __dir__(self) -> list[str]:
        worker = getattr(_runtime.runtime, "worker", None)
        return worker.entrypoints if worker is not None else []


def _packed(values: list[Any], where: str) -> bytes:
    """`values` for the wire. Raises TypeError or ValueError that names the argument that cannot be sent."""
    try:
        return _rpc.pack(values)
    except (TypeError, ValueError):
        for number, value in enumerate(values, 1):
            try:
                _rpc.pack(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"argument {number} of {where}: {error}") from None
        raise
