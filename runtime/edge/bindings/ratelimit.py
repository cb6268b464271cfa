"""Rate limits: how often each key was seen in its period, in memory.

A key's period begins with its first call and ends `period` seconds later; then it begins anew. Counts are lost when the
node ends, and a namespace that sees very many keys forgets those whose period began first: a limit protects and does
not account.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from edge.bindings.base import parse
from edge.errors import InvalidInput
from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer

MAX_KEYS = 100_000
"""Per namespace."""


class _Options(msgspec.Struct):
    key: str


class _Count:
    __slots__ = ("began_s", "number")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.number = 0


class RateLimits:
    """All rate limits of a node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._namespaces: dict[tuple[str, str, float], OrderedDict[bytes, _Count]] = {}

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """`limit({key})` gives {success}; `props` of the binding are `id`, `limit` and `period` (seconds)."""
        if method != "limit":
            raise InvalidInput(f"a rate limit has no method {method!r}")
        (options,) = parse("limit", args, tuple[_Options])
        props = binding.props
        namespace = (caller.account, str(props["id"]), float(props["period"]))
        return JsonAnswer({"success": self._is_within(namespace, options.key, int(props["limit"]))})

    async def close(self) -> None:
        """Nothing is open."""

    def _is_within(self, namespace: tuple[str, str, float], key: str, limit: int) -> bool:
        now_s, period_s = self._clock(), namespace[2]
        counts = self._namespaces.setdefault(namespace, OrderedDict())  # in the order in which periods began
        while counts and (len(counts) >= MAX_KEYS or next(iter(counts.values())).began_s + period_s <= now_s):
            counts.popitem(last=False)
        name = hashlib.blake2b(key.encode(), digest_size=16).digest()  # a long key takes no more room than a short one
        count = counts.get(name)
        if count is None:
            count = counts[name] = _Count(now_s)
        count.number += 1
        return count.number <= limit
