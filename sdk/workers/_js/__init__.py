"""What `import js` gives a handler: JavaScript's globals, made when they are asked for first."""

from __future__ import annotations

import importlib
from typing import Any

_OBJECTS = (
    "Object Array Map Set JSON Date Math Number String Boolean BigInt Error RangeError "
    "TypeError=TypeError_ SyntaxError=SyntaxError_ structuredClone=structured_clone"
)
_BUFFERS = (
    "ArrayBuffer Uint8Array Uint8ClampedArray Int8Array Uint16Array Int16Array Uint32Array Int32Array Float32Array "
    "Float64Array TextEncoder TextDecoder atob btoa"
)
_WEB = (
    "Response=Response_ Request=Request_ Headers=Headers_ FormData=FormData_ Blob=Blob_ File=File_ URL=URL_ "
    "URLSearchParams=URLSearchParams_ ReadableStream=ReadableStream_ TransformStream=TransformStream_ "
    "IdentityTransformStream=IdentityTransformStream_ WebSocket=WebSocket_ WebSocketPair=WebSocketPair_ fetch crypto "
    "setTimeout=set_timeout setInterval=set_interval clearTimeout=clear_timer clearInterval=clear_timer "
    "queueMicrotask=queue_microtask Promise console performance navigator HTMLRewriter WebAssembly"
)


def _places() -> dict[str, tuple[str, str]]:
    places = {}
    for module, names in (("objects", _OBJECTS), ("buffers", _BUFFERS), ("web", _WEB)):
        for entry in names.split():
            public, _, own = entry.partition("=")
            places[public] = module, own or public
    return places


PLACES = _places()
"""By JavaScript's name: the module in this package, and the name there."""


def lookup(name: str) -> Any:
    """JavaScript's global `name`.

    Raises:
        AttributeError: there is none in this runtime.
    """
    if name == "undefined":
        return None
    if name not in PLACES:
        raise AttributeError(f"js.{name} does not exist in this runtime; there are: {', '.join(sorted(PLACES))}")
    module, own = PLACES[name]
    value = getattr(importlib.import_module(f"workers._js.{module}"), own)
    if module == "buffers" and isinstance(value, type):
        value = importlib.import_module("workers._js.objects").Constructor(name, value, kind=value)
        if name == "Uint8Array":
            vars(value)["from"] = value.from_ = value.of = value.new
    return value
