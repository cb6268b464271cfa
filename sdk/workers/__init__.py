"""What a handler imports: `from workers import Response, WorkerEntrypoint`.

`env`, `waitUntil` and `wait_until` belong to the running isolate and resolve when they are asked for. Names that few
handlers use are imported when they are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workers import entrypoints
from workers.blob import Blob, BlobEnding, File
from workers.entrypoints import Context, DurableObject, WorkerEntrypoint, WorkflowEntrypoint, handler
from workers.fetch import fetch
from workers.formdata import FormData, FormDataValue
from workers.request import Request
from workers.response import Response

if TYPE_CHECKING:
    from workers.entrypoints import Env
    from workers.types import BlobValue, Body, FetchKwargs, FetchResponse, Headers, JSBody, RequestInitCfProperties
    from workers.utils import import_from_javascript, patch_env, python_from_rpc, python_to_rpc

    env: Env
    waitUntil = wait_until = entrypoints.wait_until

__all__ = [
    "Blob",
    "BlobEnding",
    "BlobValue",
    "Body",
    "Context",
    "DurableObject",
    "FetchKwargs",
    "FetchResponse",
    "File",
    "FormData",
    "FormDataValue",
    "Headers",
    "JSBody",
    "Request",
    "RequestInitCfProperties",
    "Response",
    "WorkerEntrypoint",
    "WorkflowEntrypoint",
    "env",
    "fetch",
    "handler",
    "import_from_javascript",
    "patch_env",
    "python_from_rpc",
    "python_to_rpc",
    "waitUntil",
    "wait_until",
]

_LAZY = {
    **dict.fromkeys(("import_from_javascript", "patch_env", "python_from_rpc", "python_to_rpc"), "workers.utils"),
    **dict.fromkeys(
        ("BlobValue", "Body", "FetchKwargs", "FetchResponse", "Headers", "JSBody", "RequestInitCfProperties"),
        "workers.types",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "env":
        from workers.utils import current_env

        return current_env()
    if name in ("waitUntil", "wait_until"):
        return entrypoints.wait_until
    if name in _LAZY:
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
