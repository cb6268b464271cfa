"""What the SDK's global names (`env`, `fetch`, `waitUntil`) see of the process and the invocation that they run in.

The names are global because the public contract has them so; this file is the only global state of the SDK. Outside of
an isolate (in a plain unit test of a handler, for example) `runtime` is None.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from workers._calls import Calls
    from workers.entrypoints import Context, Env


class Runtime(Protocol):
    """The isolate as the global names need it."""

    @property
    def calls(self) -> Calls:
        """How to call the node."""

    @property
    def env(self) -> Env:
        """The environment for code outside of any invocation."""


runtime: Runtime | None = None
env_patches: dict[str, Any] = {}
"""What `patch_env` has put into every environment for now."""
context: ContextVar[Context | None] = ContextVar("workers_context", default=None)


def invocation_id() -> int:
    """The invocation that this code runs in; 0 outside of any."""
    current = context.get()
    return current._invocation if current is not None else 0
