"""`env` for tests: the worker's variables and bindings with the same classes that handlers use, called without `await`.

Calls go straight to the providers, not through the worker's process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from edge.errors import EdgeError
from edge.isolates.base import Binding, Bundle, JsonAnswer
from edge.node.hub import Hub
from workers import _rpc
from workers._body import Content
from workers._wire import Result, ResultHead
from workers.bindings import CLASSES, BindingCalls, BindingError
from workers.streams import ReadableStream
from workers.values import plain, wrap


class Host(Protocol):
    """What runs the worker of a test."""

    bundle: Bundle
    hub: Hub
    overrides: dict[str, Any]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which runs in the loop of the bindings."""
        ...

    def override(self, values: Mapping[str, Any]) -> None:
        """Let `env` have these values instead of others, from the next call of the worker on."""
        ...

    async def waiting(self, queue: str) -> list[Any]:
        """The bodies of the messages that wait in a queue."""
        ...


class Env:
    """`env.NAME` is a variable or binding of the worker; methods of bindings give their results without `await`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def override(self, **values: Any) -> Override:
        """Give variables and bindings other values, or add some, from here to the end of the test; or, in a `with`
        block, to its end.

        Raises:
            TypeError: in subprocess mode, a value is not plain JSON: objects cannot get into another process.
        """
        return Override(self._host, values)

    def __getattr__(self, name: str) -> Any:
        host = self._host
        if name in host.overrides:
            return host.overrides[name]
        bundle = host.bundle
        if name in bundle.vars:
            return wrap(bundle.vars[name])
        binding = bundle.bindings.get(name)
        if binding is None:
            known = ", ".join([*bundle.vars, *bundle.bindings]) or "none"
            raise AttributeError(f"env has no variable or binding {name!r}; it has: {known}", name=name, obj=self)
        if binding.kind == "ai":
            raise AttributeError(f"env.{name} is for handlers: tests say what it answers with the fixture `ai`")
        calls = _Calls(host, name)
        return _wrapped(host, CLASSES[binding.kind](name, binding.props, calls), _extras(host, binding))

    def __contains__(self, name: object) -> bool:
        host = self._host
        return name in host.overrides or name in host.bundle.vars or name in host.bundle.bindings

    def __repr__(self) -> str:
        return f"Env({', '.join([*self._host.bundle.vars, *self._host.bundle.bindings])})"


class Override:
    """Values that are in force; as a context manager, those from before are back afterwards."""

    def __init__(self, host: Host, values: Mapping[str, Any]) -> None:
        self._host = host
        self._before = dict(host.overrides)
        host.override({**self._before, **values})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self._host.override(self._before)


class _Calls(BindingCalls):
    """Calls of a test, which no invocation makes."""

    def __init__(self, host: Host, binding: str) -> None:
        super().__init__(binding)
        self._host = host

    async def _ask(
        self, method: str, args: tuple[Any, ...], body: Content
    ) -> tuple[Result | ResultHead, ReadableStream | None]:
        where = f"env.{self.binding}.{method}()"
        sendable = [plain(arg, f"argument {number} of {where}") for number, arg in enumerate(args, 1)]
        content = ReadableStream(iter([body])) if isinstance(body, bytes) else body
        try:
            answer = await self._host.hub.call(self._host.bundle, self.binding, method, sendable, content)
        except EdgeError as error:
            raise BindingError(error.message, name=error.name, code=error.code, status=error.status) from error
        if isinstance(answer, JsonAnswer):
            return Result(1, answer.value, answer.info), None
        head = ResultHead(1, answer.status, answer.headers, True, "", answer.info)
        return head, ReadableStream(answer.body)


class _Waiting:
    """An object of the SDK whose methods do not have to be awaited."""

    def __init__(self, host: Host, target: Any, extras: Mapping[str, Callable[[], Any]]) -> None:
        self._host = host
        self._target = target
        self._extras = extras

    def __getattr__(self, name: str) -> Any:
        if name in self._extras:
            return self._extras[name]
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            return _wrapped(self._host, self._host.run(_result(value, _bare(args), options)), {})

        return call

    def __repr__(self) -> str:
        return repr(self._target)


async def _result(function: Callable[..., Any], args: Any, options: Mapping[str, Any]) -> Any:
    result = function(*args, **options)
    return await result if inspect.isawaitable(result) else result


def _bare(value: Any) -> Any:
    """`value` as the SDK knows it: `batch()` gets a list of statements."""
    if isinstance(value, _Waiting):
        return value._target
    return type(value)(map(_bare, value)) if type(value) in (list, tuple) else value


def _wrapped(host: Host, value: Any, extras: Mapping[str, Callable[[], Any]]) -> Any:
    """`value`, or something that calls its methods: those of bindings, and of what they return."""
    is_of_sdk = type(value).__module__.startswith(("workers.bindings", "workers.response", "workers.streams"))
    return _Waiting(host, value, extras) if is_of_sdk else value


def _extras(host: Host, binding: Binding) -> dict[str, Callable[[], Any]]:
    """What only tests can ask of a binding."""
    if binding.kind != "queue":
        return {}
    return {"messages": lambda: host.run(host.waiting(str(binding.props["queue"])))}


def unpacked(body: bytes) -> Any:
    """A message's body as plain Python."""
    value = _rpc.unpack(body)
    to_py = getattr(value, "to_py", None)
    return to_py() if to_py is not None else value
