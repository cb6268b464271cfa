"""Imports a worker's main file and finds its handlers. It knows nothing about frames or requests."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from workers.entrypoints import Context, Env, WorkerEntrypoint

EVENTS = ("fetch", "scheduled", "queue", "email", "tail", "test")


class Worker:
    """A worker's code: a class `Default`, or module functions `on_fetch` and the like."""

    def __init__(self, module: ModuleType, main: str) -> None:
        self._main = main
        self._default = _default_class(module, main)
        self._functions = {
            event: getattr(module, f"on_{event}") for event in EVENTS if callable(getattr(module, f"on_{event}", None))
        }
        if self._default is not None and self._functions:
            raise TypeError(
                f"Cannot define multiple default entrypoints: {main} has a class Default and "
                f"on_{next(iter(self._functions))}()"
            )
        if self._default is None and not self._functions:
            raise TypeError(
                f"{main} has no handler. Define one:\n\n"
                "from workers import Response, WorkerEntrypoint\n\n"
                "class Default(WorkerEntrypoint):\n"
                "    async def fetch(self, request):\n"
                '        return Response("hello")\n'
            )

    @property
    def handlers(self) -> list[str]:
        """The events that there are handlers for."""
        if self._default is None:
            return list(self._functions)
        return [event for event in EVENTS if callable(getattr(self._default, event, None))]

    def call(self, event: str, argument: Any, ctx: Context, env: Env) -> Any:
        """Call the handler of `event` on a fresh instance with as many arguments as it takes; maybe an awaitable.

        Raises:
            TypeError: there is no such handler.
        """
        return _call_relaxed(self._handler(event, ctx, env), argument, env, ctx)

    def name_of(self, event: str) -> str:
        """The handler of `event` as its author calls it."""
        return f"{event}() of class Default in {self._main}" if self._default else f"on_{event}() in {self._main}"

    def _handler(self, event: str, ctx: Context, env: Env) -> Callable[..., Any]:
        if self._default is not None:
            method = getattr(self._default(ctx, env), event, None)
            if callable(method):
                return method  # type: ignore[no-any-return]
            raise TypeError(f"Method {event} does not exist: class Default in {self._main} serves no {event} events")
        if event in self._functions:
            return self._functions[event]  # type: ignore[no-any-return]
        raise TypeError(f'Python entrypoint "{self._main}" does not export a handler named "on_{event}"')


def load(root: str, main: str) -> Worker:
    """Import the file `main` below the module root `root`, which comes first on `sys.path` from here on.

    Raises:
        ImportError: the file cannot be imported; BaseException: whatever its code raises.
        TypeError: it has no handler, or handlers of both kinds.
    """
    path = Path(root, main)
    name = path.stem
    if not path.is_file():
        raise ImportError(f"{main} is not in {root}; set `main` in the configuration to the worker's Python file")
    if name in sys.stdlib_module_names or name in sys.modules:
        raise ImportError(f"{main} has the name of another module, {name!r}, and would hide it; rename the file")
    sys.path.insert(0, root)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{main} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        _explain(error, path)
        raise
    return Worker(module, main)


def _default_class(module: ModuleType, main: str) -> type[WorkerEntrypoint] | None:
    default = getattr(module, "Default", None)
    if default is None or (inspect.isclass(default) and issubclass(default, WorkerEntrypoint)):
        return default
    raise TypeError(f"Default in {main} must be a class derived from workers.WorkerEntrypoint")


def _explain(error: ModuleNotFoundError, path: Path) -> None:
    """Say why `from src.foo import …` fails where `src` is the module root itself."""
    package, _, rest = (error.name or "").partition(".")
    if package == path.parent.name:
        shorter = rest or "foo"
        error.add_note(
            f"The module root is the folder of {path.name}, {package}/, itself: its modules are imported without the "
            f"prefix. Write `import {shorter}` or `from {shorter} import …`, not `{package}.{shorter}`."
        )


def _call_relaxed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` with as many of `arguments` as it has positional parameters."""
    num_taken = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            num_taken = len(arguments)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            num_taken += 1
    return function(*arguments[:num_taken])
