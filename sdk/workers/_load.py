"""Imports a worker's main file and finds its entrypoints. It knows nothing about frames or requests."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from workers.entrypoints import Context, DurableObject, Env, WorkerEntrypoint, WorkflowEntrypoint

EVENTS = ("fetch", "scheduled", "queue", "email", "tail", "test")
DEFAULT = "Default"


class Worker:
    """A worker's code: classes derived from `WorkerEntrypoint`, or module functions `on_fetch` and the like."""

    def __init__(self, module: ModuleType, main: str, flags: Collection[str] = ()) -> None:
        self._main = main
        visible = _visible_names(module)
        self._classes: dict[str, type[WorkerEntrypoint]] = {
            name: value for name, value in visible.items() if _is_subclass(value, WorkerEntrypoint)
        }
        self._unsupported = {
            name
            for name, value in visible.items()
            if _is_subclass(value, DurableObject) or _is_subclass(value, WorkflowEntrypoint)
        }
        self._functions = {event: visible[f"on_{event}"] for event in EVENTS if callable(visible.get(f"on_{event}"))}
        self._num_arguments: dict[Callable[..., Any], int] = {}
        self._check(visible, flags)

    @property
    def handlers(self) -> list[str]:
        """The events that there are default handlers for."""
        default = self._classes.get(DEFAULT)
        if default is None:
            return list(self._functions)
        return [event for event in EVENTS if callable(getattr(default, event, None))]

    @property
    def entrypoints(self) -> list[str]:
        """The names of the entrypoint classes."""
        return list(self._classes)

    def call(self, event: str, argument: Any, ctx: Context, env: Env, entrypoint: str = "") -> Any:
        """Call the handler of `event` on a fresh instance with as many arguments as it takes; maybe an awaitable.

        Raises:
            TypeError: there is no such handler.
        """
        handler = self._handler(event, ctx, env, entrypoint)
        return handler(*(argument, env, ctx)[: self._num_taken(handler)])

    def call_method(self, method: str, args: list[Any], ctx: Context, env: Env, entrypoint: str = "") -> Any:
        """Call a public method of an entrypoint on a fresh instance; maybe an awaitable.

        Raises:
            TypeError: there is no such method, or it is not for others to call.
        """
        cls = self._class(entrypoint)
        if cls is None or not _is_public_method(cls, method):
            raise TypeError(f"Method {method} does not exist: {self._describe(entrypoint)} has no such public method")
        return getattr(cls(ctx, env), method)(*args)

    def name_of(self, event: str, entrypoint: str = "") -> str:
        """The handler of `event` as its author calls it."""
        if self._class(entrypoint) is None:
            return f"on_{event}() in {self._main}"
        return f"{event}() of {self._describe(entrypoint)}"

    def _handler(self, event: str, ctx: Context, env: Env, entrypoint: str) -> Callable[..., Any]:
        cls = self._class(entrypoint)
        if cls is None:
            if event in self._functions:
                return self._functions[event]  # type: ignore[no-any-return]
            raise TypeError(f'Python entrypoint "{self._main}" does not export a handler named "on_{event}"')
        method = getattr(cls(ctx, env), event, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
        raise TypeError(f"Method {event} does not exist: {self._describe(entrypoint)} serves no {event} events")

    def _class(self, entrypoint: str) -> type[WorkerEntrypoint] | None:
        """The class to serve an event; None if global functions do."""
        name = entrypoint or DEFAULT
        if name in self._classes:
            return self._classes[name]
        if name in self._unsupported:
            raise TypeError(f"{name} in {self._main} is a Durable Object or workflow, which are not supported yet")
        if entrypoint or not self._functions:
            known = ", ".join(self._classes) or "none"
            raise TypeError(f"no '{name}' class defined in {self._main}; its entrypoints are: {known}")
        return None

    def _describe(self, entrypoint: str) -> str:
        return f"class {entrypoint or DEFAULT} in {self._main}"

    def _num_taken(self, handler: Callable[..., Any]) -> int:
        """How many of the arguments (event, env, ctx) `handler` takes. Signatures are slow, so they are read once."""
        function = getattr(handler, "__func__", handler)
        if not isinstance(function, FunctionType):
            return _num_positional(handler)
        if function not in self._num_arguments:
            self._num_arguments[function] = _num_positional(handler)
        return self._num_arguments[function]

    def _check(self, visible: dict[str, Any], flags: Collection[str]) -> None:
        main = self._main
        if DEFAULT in visible and DEFAULT not in self._classes:
            raise TypeError(f"Default in {main} must be a class derived from workers.WorkerEntrypoint")
        first = next(iter(self._functions), "")
        if first and DEFAULT in self._classes:
            raise TypeError(f"Cannot define multiple default entrypoints: {main} has a class Default and on_{first}()")
        if first and "python_no_global_handlers" in flags:
            raise TypeError(
                f"{main} has the global handler on_{first}(), which the compatibility flag python_no_global_handlers "
                "forbids; make it a method of class Default(WorkerEntrypoint), or remove the flag"
            )
        if not self._classes and not self._functions:
            raise TypeError(
                f"{main} has no handler. Define one:\n\n"
                "from workers import Response, WorkerEntrypoint\n\n"
                "class Default(WorkerEntrypoint):\n"
                "    async def fetch(self, request):\n"
                '        return Response("hello")\n'
            )


def load(root: str, main: str, flags: Collection[str] = ()) -> Worker:
    """Import the file `main` below the module root `root`, which comes first on `sys.path` from here on.

    Args:
        flags: the compatibility flags of the worker.

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
    return Worker(module, main, flags)


def _visible_names(module: ModuleType) -> dict[str, Any]:
    """What a main module exports: the names in `__all__`, or all that have no leading underscore."""
    exported = getattr(module, "__all__", None)
    if exported is None:
        exported = [name for name in vars(module) if not name.startswith("_")]
    return {name: getattr(module, name) for name in exported}


def _is_subclass(value: Any, base: type) -> bool:
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def _is_public_method(cls: type, name: str) -> bool:
    """Whether others may call it: a function that the class or a base of it defines, without a leading underscore."""
    if name.startswith("_"):
        return False
    for base in cls.__mro__:
        if name in vars(base):
            return inspect.isfunction(vars(base)[name])
    return False


def _num_positional(function: Callable[..., Any]) -> int:
    num_taken = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return 3
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            num_taken += 1
    return num_taken


def _explain(error: ModuleNotFoundError, path: Path) -> None:
    """Say why `from src.foo import …` fails where `src` is the module root itself."""
    package, _, rest = (error.name or "").partition(".")
    if package == path.parent.name:
        shorter = rest or "foo"
        error.add_note(
            f"The module root is the folder of {path.name}, {package}/, itself: its modules are imported without the "
            f"prefix. Write `import {shorter}` or `from {shorter} import …`, not `{package}.{shorter}`."
        )
