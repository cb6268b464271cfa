"""The bindings of `env` but AI: one class per kind, which turns the documented methods into calls of the node.

They hold no state and check only what a call needs: what is allowed, and what it does, is the node's affair.
"""

from __future__ import annotations

from typing import Any

from workers.bindings._calls import BindingCalls, BindingError
from workers.bindings.assets import Assets
from workers.bindings.d1 import D1Database
from workers.bindings.kv import KvNamespace
from workers.bindings.queue import Queue
from workers.bindings.r2 import R2Bucket
from workers.bindings.ratelimit import RateLimit
from workers.bindings.service import Service
from workers.bindings.version import VersionMetadata

__all__ = ["CLASSES", "BindingCalls", "BindingError", "make_binding"]

CLASSES: dict[str, type] = {
    "assets": Assets,
    "d1": D1Database,
    "kv": KvNamespace,
    "queue": Queue,
    "r2": R2Bucket,
    "ratelimit": RateLimit,
    "service": Service,
    "version_metadata": VersionMetadata,
}
"""By kind of binding. A class is called with the binding's name, its props and its `BindingCalls`."""


def make_binding(kind: str, name: str, props: dict[str, Any]) -> Any:
    """What `env.NAME` is for a binding of `kind`, which says `props` of itself.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in CLASSES:
        raise ValueError(f"env.{name} is a binding of the unknown kind {kind!r}; known are: {', '.join(CLASSES)}")
    return CLASSES[kind](name, props, BindingCalls(name))
