"""`pyodide.code`: calling with as many arguments as a function takes; there is no JavaScript to run."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["relaxed_call", "run_js"]


def relaxed_call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `function` with those of the arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        args = args[: len(positional)]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        options = {name: value for name, value in options.items() if name in inspect.signature(function).parameters}
    return function(*args, **options)


def run_js(code: str) -> NoReturn:
    """Always raises NotImplementedError."""
    raise NotImplementedError("run_js() is not supported by this runtime: it runs Python only, and no JavaScript")
