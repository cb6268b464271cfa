"""What a handler imports: `from workers import Response, WorkerEntrypoint`.

`env`, `waitUntil` and `wait_until` belong to the running isolate and resolve when they are asked for.
"""

from __future__ import annotations

from typing import Any

from workers import _runtime, entrypoints
from workers._fetch import fetch
from workers.entrypoints import Context, WorkerEntrypoint
from workers.request import Request
from workers.response import Response

__all__ = ["Context", "Request", "Response", "WorkerEntrypoint", "env", "fetch", "waitUntil", "wait_until"]


def __getattr__(name: str) -> Any:
    if name == "env":
        return _runtime.runtime.env if _runtime.runtime is not None else entrypoints.Env()
    if name in ("waitUntil", "wait_until"):
        return entrypoints.wait_until
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
