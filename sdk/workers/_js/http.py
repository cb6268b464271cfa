"""What `pyodide.http` gives a handler."""

from __future__ import annotations

from typing import Any

from workers.fetch import fetch
from workers.response import FetchResponse, HttpStatusError, Response

__all__ = ["BodyUsedError", "FetchResponse", "HttpStatusError", "pyfetch"]

BodyUsedError = OSError
"""What reading a body twice raises."""


async def pyfetch(url: str, **options: Any) -> Response:
    """`fetch(url, **options)`. Raises as `workers.fetch`."""
    return await fetch(url, **options)
