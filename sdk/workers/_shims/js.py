"""`import js`: JavaScript's globals, as far as a Python runtime can have them."""

import sys
from typing import Any

from workers import _js


def __getattr__(name: str) -> Any:
    if name in ("globalThis", "self"):
        return sys.modules[__name__]
    value = _js.lookup(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_js.PLACES)
