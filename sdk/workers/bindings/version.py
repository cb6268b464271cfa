"""`env.NAME` of version metadata: which version of the worker runs."""

from __future__ import annotations

from typing import Any

from workers.bindings._calls import BindingCalls
from workers.values import JsDict


class VersionMetadata(JsDict):
    """`id`, `tag` and `timestamp` (ISO 8601) of the version, as attributes and as keys."""

    __slots__ = ()

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        super().__init__(id=props.get("id", ""), tag=props.get("tag", ""), timestamp=props.get("timestamp", ""))
