"""`env.NAME` of the worker's static assets."""

from __future__ import annotations

from typing import Any

from workers._headers import header_pairs
from workers.bindings._calls import BindingCalls
from workers.request import Request
from workers.response import Response


class Assets:
    """The files that are served beside the worker."""

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    async def fetch(self, resource: str | Request, **options: Any) -> Response:
        """The response for a URL or `Request`, of which only the path matters; 404 if no file is meant by it.

        Raises:
            TypeError, ValueError: a wrong argument, as for `Request`.
        """
        request = Request(resource, **options)
        headers = [list(pair) for pair in header_pairs(request.headers)]
        head, stream = await self._calls.stream("fetch", str(request.method), request.url, headers)
        return Response._received(stream, head.status, head.headers, request.url, redirected=False)

    def __repr__(self) -> str:
        return f"Assets({self._name!r})"
