"""ASGI's scopes as requests of the isolates, and their responses as ASGI's headers.

Nothing that an isolate says is trusted: status and headers are checked before they reach a socket.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from starlette.types import Scope

from edge.errors import HandlerFailed

_HEADER_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_HEADER_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*\Z")
MAX_HEADER_BYTES = 128 << 10
"""Of all headers of a response together, as they travel in HTTP/1.1; Cloudflare's limit."""
_MAX_CACHED = 128
_MAX_SHOWN = 100
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"})


def text_headers(scope: Scope) -> list[tuple[str, str]]:
    """The request's headers as text."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


def raw_path(scope: Scope) -> str:
    """The request's path as the client wrote it."""
    return scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]  # type: ignore[no-any-return]


def url_of(scope: Scope, host: str) -> str:
    """The request's URL as the client wrote it; that of a WebSocket has the scheme `http` or `https`, as in Fetch."""
    query = scope["query_string"].decode("latin-1")
    scheme = scope["scheme"].replace("ws", "http")
    return f"{scheme}://{host or 'localhost'}{raw_path(scope)}" + (f"?{query}" if query else "")


def cf_of(http_version: str) -> dict[str, Any]:
    """What `request.cf` says."""
    return {"httpProtocol": f"HTTP/{http_version}", "colo": "DEV", "country": "XX"}


def client_ip(scope: Scope) -> str:
    """The client's address; empty if it has none, on a Unix socket."""
    client = scope.get("client")
    return client[0] if client else ""


def with_client_ip(headers: list[tuple[str, str]], ip: str) -> list[tuple[str, str]]:
    """`headers` with the address of the client, which it cannot give itself."""
    return [*(pair for pair in headers if pair[0] != "cf-connecting-ip"), ("cf-connecting-ip", ip)]


def checked_headers(status: int, headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """The headers of a response, fit for the socket.

    Raises:
        HandlerFailed: the status is no status, a header could break out of its line, or they are too long together.
    """
    if not 200 <= status <= 599:
        raise HandlerFailed(f"the worker answered with status {status}; it must be between 200 and 599")
    num_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in headers)
    if num_bytes > MAX_HEADER_BYTES:
        raise HandlerFailed(
            f"the worker's response has {len(headers)} headers of {num_bytes} bytes together; at most "
            f"{MAX_HEADER_BYTES >> 10} KiB can be sent, so put what is long into the body"
        )
    pairs = [
        _short_header(name, value) if len(name) + len(value) <= _MAX_CACHED else _checked_header(name, value)
        for name, value in headers
    ]
    return [pair for pair in pairs if pair[0] not in _HOP_BY_HOP]


def _checked_header(name: str, value: str) -> tuple[bytes, bytes]:
    raw_name, raw_value = name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace")
    if not _HEADER_NAME.match(raw_name) or not _HEADER_VALUE.match(raw_value):
        shown = f"{name[:_MAX_SHOWN]!r}: {value[:_MAX_SHOWN]!r}"
        raise HandlerFailed(f"the worker set a header that is not valid in HTTP: {shown}")
    return raw_name, raw_value


_short_header = functools.lru_cache(1024)(_checked_header)
"""The same few headers are in most responses."""
