"""What `pyodide.ffi` gives a handler."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from workers._js.buffers import Buffer, TypedArray
from workers._js.objects import CallableProxy, JsMap, JsProxy, to_js
from workers._js_exception import JsException
from workers._run_sync import can_run_sync, run_sync
from workers.values import JsList

__all__ = [
    "ConversionError",
    "JsArray",
    "JsBuffer",
    "JsException",
    "JsMap",
    "JsProxy",
    "JsTypedArray",
    "can_run_sync",
    "create_once_callable",
    "create_proxy",
    "destroy_proxies",
    "jsnull",
    "register_js_module",
    "run_sync",
    "to_js",
    "unregister_js_module",
]

JsArray = JsList
JsBuffer = Buffer
JsTypedArray = TypedArray
jsnull = None


class ConversionError(Exception):
    """A value that cannot cross. Nothing raises it here."""


def create_proxy(target: Any, **_options: Any) -> CallableProxy:
    """`target`, with `destroy()`."""
    return CallableProxy(target)


create_once_callable = create_proxy


def destroy_proxies(proxies: Iterable[Any]) -> None:
    """Nothing is borrowed from JavaScript, so that nothing has to be given back."""


def register_js_module(name: str, module: Any) -> None:
    """Make the attributes (or keys) of `module` importable as `name`."""
    made = ModuleType(name)
    vars(made).update(module if isinstance(module, dict) else vars(module))
    sys.modules[name] = made


def unregister_js_module(name: str) -> None:
    """Take a registered module back. Raises ValueError if there is none of that name."""
    if sys.modules.pop(name, None) is None:
        raise ValueError(f"no module {name!r} was registered")
