"""What a handler is built from: `WorkerEntrypoint`, its `Context` (`self.ctx`) and its `Env` (`self.env`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from workers import _runtime


class Env:
    """The variables and bindings of a worker, as attributes and as items.

    A missing one raises AttributeError (KeyError as an item) that names those there are.
    """

    def __init__(self, bindings: Mapping[str, Any] | None = None) -> None:
        self.__dict__.update(bindings or {})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._missing(name), name=name, obj=self)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise KeyError(self._missing(name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __repr__(self) -> str:
        return f"Env({', '.join(self.__dict__)})"  # names only: values can be secret

    def _missing(self, name: str) -> str:
        return (
            f"env has no variable or binding {name!r}; it has: {', '.join(self.__dict__) or 'none'} "
            "(variables are declared under [vars], the AI binding under [ai] of the configuration; "
            "bindings of other kinds, such as KV, R2, D1 and queues, are not supported yet)"
        )


class Context:
    """What one invocation can ask of its surroundings."""

    def __init__(self, _invocation: int = 0) -> None:
        self._invocation = _invocation
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
            raise RuntimeError("waitUntil() was called after the invocation was over")
        self._waits.add(asyncio.ensure_future(awaitable))

    wait_until = waitUntil

    def passThroughOnException(self) -> None:
        """Accepted and without effect: there is no origin server behind a worker here."""


class WorkerEntrypoint:
    """Base of `class Default`: a fresh instance serves each event. Handlers read `self.env` and `self.ctx`."""

    def __init__(self, ctx: Context, env: Env) -> None:
        self.ctx = ctx
        self.env: Any = env
        """An `Env`; typed Any because its attributes are known only to the configuration."""


def wait_until(awaitable: Awaitable[Any]) -> None:
    """`ctx.waitUntil` of the invocation that this code runs in.

    Raises:
        RuntimeError: no invocation is running.
    """
    context = _runtime.context.get()
    if context is None:
        raise RuntimeError("waitUntil() works only while a handler serves an event")
    context.waitUntil(awaitable)
