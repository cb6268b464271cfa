"""What a handler is built from: `WorkerEntrypoint`, its `Context` (`self.ctx`) and its `Env` (`self.env`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from workers import _runtime
from workers._cpu import CpuTime
from workers.values import JsDict, wrap

if TYPE_CHECKING:
    from workers.bindings.service import Exports

F = TypeVar("F", bound=Callable[..., Any])


class Env:
    """The variables and bindings of a worker, as attributes and as items. They are made when they are first asked for.

    A missing one raises AttributeError (KeyError as an item) that names those there are.

    Args:
        sources: what there is, by name.
        make: turns a source into the value; by default a source is the value.
    """

    def __init__(self, sources: Mapping[str, Any] | None = None, make: Callable[[str, Any], Any] | None = None) -> None:
        state = self.__dict__
        state["_Env__sources"] = sources or {}
        state["_Env__make"] = make

    def __getattr__(self, name: str) -> Any:
        sources = self.__sources
        if name not in sources:
            raise AttributeError(self._missing(name), name=name, obj=self)
        value = sources[name] if self.__make is None else self.__make(name, sources[name])
        self.__dict__[name] = value
        return value

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(self._missing(name))
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.__sources or (name in self.__dict__ and name not in _INTERNAL)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.__sources, *self.__dict__.keys() - _INTERNAL]))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def __repr__(self) -> str:
        return f"Env({', '.join(self)})"  # names only: values can be secret

    def _missing(self, name: str) -> str:
        return (
            f"env has no variable or binding {name!r}; it has: {', '.join(self) or 'none'} "
            "(variables are declared under [vars] of the configuration, secrets in .dev.vars, bindings under the key "
            "of their kind, such as [ai] and [[kv_namespaces]])"
        )


_INTERNAL = frozenset({"_Env__sources", "_Env__make"})


class Context:
    """What one invocation can ask of its surroundings.

    Attributes:
        props: what the service binding that the event came through says of its caller; empty otherwise.
    """

    def __init__(self, _invocation: int = 0, props: Mapping[str, Any] | None = None) -> None:
        self.props: JsDict = wrap(dict(props or {}))
        self._invocation = _invocation
        self._cpu = CpuTime()
        self._env: Env | None = None
        self._waits: set[asyncio.Future[Any]] = set()
        self._is_over = False

    def waitUntil(self, awaitable: Awaitable[Any]) -> None:
        """Let `awaitable` run on after the response is sent; what it raises is logged.

        Raises:
            TypeError: it is no awaitable.
            RuntimeError: the invocation is over already.
        """
        if not isinstance(awaitable, Awaitable):
            raise TypeError(f"waitUntil() needs an awaitable, not {type(awaitable).__name__}; call the async function")
        if self._is_over:
            if asyncio.iscoroutine(awaitable):
                awaitable.close()  # it is never going to be awaited, and saying so once is enough
            raise RuntimeError("waitUntil() was called after the invocation was over")
        self._waits.add(asyncio.ensure_future(awaitable))

    wait_until = waitUntil

    @property
    def exports(self) -> Exports:
        """The worker's own entrypoints: `await ctx.exports.NAME.method(…)`."""
        from workers.bindings.service import Exports  # which most workers have no use for

        return Exports()

    def passThroughOnException(self) -> None:
        """Accepted and without effect: there is no origin server behind a worker here."""


class WorkerEntrypoint:
    """Base of `class Default` and of named entrypoints: a fresh instance serves each event.

    Handlers read `self.env` and `self.ctx`. Service bindings can call methods without a leading underscore.
    """

    def __init__(self, ctx: Context, env: Env) -> None:
        self.ctx = ctx
        self.env: Any = env
        """An `Env`; typed Any because its attributes are known only to the configuration."""


class DurableObject:
    """Base of Durable Objects, which this runtime cannot run yet: defining them works, using them does not."""

    def __init__(self, ctx: Any, env: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is a Durable Object, and this runtime does not support those yet; "
            "keep state in a KV namespace or a D1 database"
        )


class WorkflowEntrypoint:
    """Base of workflows, which this runtime cannot run yet: defining them works, using them does not."""

    def __init__(self, ctx: Any, env: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is a workflow, and this runtime does not support those yet; "
            "a queue with retries can do the steps"
        )


def handler(function: F) -> F:
    """Decorator of global handlers such as `on_fetch`. It changes nothing: all handlers get the same objects here."""
    return function


def wait_until(awaitable: Awaitable[Any]) -> None:
    """`ctx.waitUntil` of the invocation that this code runs in.

    Raises:
        RuntimeError: no invocation is running.
    """
    context = _runtime.context.get()
    if context is None:
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError("waitUntil() works only while a handler serves an event")
    context.waitUntil(awaitable)
