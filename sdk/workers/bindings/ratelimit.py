"""`env.NAME` of a rate limit."""

from __future__ import annotations

from typing import Any

from workers.bindings._calls import BindingCalls
from workers.bindings._options import merged
from workers.values import JsDict


class RateLimit:
    """Counts calls by key."""

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    async def limit(self, options: Any = None, **more_options: Any) -> JsDict:
        """Count a call of `key` (a str): `success` is False if there were more in the period than the limit allows.

        Raises:
            TypeError: there is no `key`, or it is no str.
        """
        key = merged(options, more_options, "limit()").get("key")
        if not isinstance(key, str):
            raise TypeError(f'limit() needs {{"key": …}} with a str, not {type(key).__name__}')
        return JsDict(await self._calls.call("limit", {"key": key}))

    def __repr__(self) -> str:
        return f"RateLimit({self._name!r})"
