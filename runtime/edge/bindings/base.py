"""What every kind of binding is to the node, and how it reads what handlers give it.

Providers know nothing of processes, frames or HTTP servers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, Self

import msgspec

from edge.errors import InvalidInput
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


def parse(where: str, value: Any, shape: Any) -> Any:
    """`value`, which comes from untrusted code, as the type `shape`.

    Raises:
        InvalidInput: it is of another type; the message begins with `where`.
    """
    try:
        return msgspec.convert(value, shape, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidInput(f"{where}: {error}") from error


class OneBody:
    """A body in one piece, or of nothing."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = data

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._data:
            raise StopAsyncIteration
        data, self._data = self._data, b""
        return data
