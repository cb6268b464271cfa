"""What every kind of binding is to the node. Providers know nothing of processes, frames or HTTP servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer


class Provider(Protocol):
    """All bindings of one kind on this node. State is kept by account: two accounts never see each other's."""

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """One call of a handler of `caller` through its `binding`. What was acknowledged survives kill -9.

        Raises:
            InvalidInput: an unknown method, or arguments of wrong shape, type or size: they come from untrusted code.
            EdgeError: the call cannot be served; the handler gets its message.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections; calls in flight are finished or failed first."""
        ...
