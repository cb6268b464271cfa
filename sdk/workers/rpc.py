"""The conversions of RPC under their documented name; `workers._rpc` is what they look like on the wire."""

from __future__ import annotations

from workers._rpc import DataCloneError
from workers.utils import python_from_rpc, python_to_rpc
from workers.values import JsDict

__all__ = ["DataCloneError", "JsDict", "python_from_rpc", "python_to_rpc"]
