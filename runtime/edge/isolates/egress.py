"""Outbound `fetch` of handlers: HTTP and HTTPS, streamed both ways.

It does NOT keep handlers away from private addresses: whatever the node can reach, they can.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from edge.errors import SubrequestFailed
from edge.isolates.base import StreamAnswer

MAX_REDIRECTS = 20
REPLAYABLE_BYTES = 1 << 20
"""Bodies up to this size are read first, so that they can be sent again when a redirect asks for that."""

_TIMEOUT = httpx.Timeout(connect=10.0, read=100.0, write=100.0, pool=10.0)
_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
_NOT_SENT = frozenset({"connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
# Bodies are handed on decoded, so what describes the encoded form must not be.
_NOT_RECEIVED = frozenset({"connection", "keep-alive", "trailer", "transfer-encoding", "upgrade"})
_NOT_RECEIVED_DECODED = _NOT_RECEIVED | {"content-encoding", "content-length"}


class Egress:
    """Sends handlers' requests. No cookies and no credentials of this machine are added to them."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
        redirect: str,
    ) -> tuple[StreamAnswer, str]:
        """The response, its body as a stream to be closed, and the URL that it came from.

        `redirect` is `follow`, `manual` (a redirect is returned as it is) or `error`.

        Raises:
            SubrequestFailed: there is no response.
        """
        try:
            request = self._open_client().build_request(
                method, url, headers=_sent(headers), content=await _replayable(body, headers)
            )
            if request.url.scheme not in ("http", "https"):
                raise SubrequestFailed(f"fetch {url} failed: only http:// and https:// URLs can be fetched")
            response = await self._open_client().send(request, stream=True, follow_redirects=redirect == "follow")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError, OSError) as error:
            raise _failure(method, url, error) from error
        if redirect == "error" and response.is_redirect:
            await response.aclose()
            raise SubrequestFailed(f"fetch {url} failed: it redirects, and the option redirect is 'error'")
        final_url = str(response.url)
        return StreamAnswer(response.status_code, _received(response), _Body(response, method, final_url)), final_url

    async def close(self) -> None:
        """Close every connection."""
        if self._client is not None:
            await self._client.aclose()

    def _open_client(self) -> httpx.AsyncClient:
        if self._client is None:  # made when first needed: reading the certificates takes a while
            self._client = httpx.AsyncClient(
                timeout=_TIMEOUT,
                limits=_LIMITS,
                max_redirects=MAX_REDIRECTS,
                headers={"user-agent": "edge-workers-ai"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        return self._client


class _Body:
    """A response's body, decoded. Errors while reading are SubrequestFailed; closing it ends the connection."""

    def __init__(self, response: httpx.Response, method: str, url: str) -> None:
        self._response = response
        self._method = method
        self._url = url
        self._chunks = response.aiter_bytes()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._chunks)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _failure(self._method, self._url, error) from error

    async def aclose(self) -> None:
        await self._response.aclose()


def _sent(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _NOT_SENT]


def _received(response: httpx.Response) -> list[tuple[str, str]]:
    left_out = _NOT_RECEIVED_DECODED if "content-encoding" in response.headers else _NOT_RECEIVED
    return [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]


async def _replayable(
    body: AsyncIterator[bytes] | None, headers: list[tuple[str, str]]
) -> AsyncIterator[bytes] | bytes | None:
    length = next((value for name, value in headers if name.lower() == "content-length"), "")
    if body is None or not length.isdecimal():
        return body
    measured = _measured(body, int(length))
    if int(length) > REPLAYABLE_BYTES:
        return measured
    return b"".join([chunk async for chunk in measured])


async def _measured(body: AsyncIterator[bytes], length: int) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in body:
        num_bytes += len(chunk)
        if num_bytes > length:
            raise ValueError(f"its body is longer than its content-length of {length} bytes")
        yield chunk
    if num_bytes < length:
        raise ValueError(f"its body has {num_bytes} bytes, but its content-length says {length}")


def _failure(method: str, url: str, error: Exception) -> SubrequestFailed:
    reasons: dict[type[Exception], str] = {
        httpx.ConnectTimeout: f"no connection within {_TIMEOUT.connect:g} s",
        httpx.ReadTimeout: f"nothing was received for {_TIMEOUT.read:g} s",
        httpx.WriteTimeout: f"nothing could be sent for {_TIMEOUT.write:g} s",
        httpx.PoolTimeout: f"{_LIMITS.max_connections} requests of this node are under way already",
        httpx.TooManyRedirects: f"more than {MAX_REDIRECTS} redirects",
        httpx.StreamConsumed: "a redirect asks for the body again, which was a stream; send it as str or bytes",
    }
    reason = reasons.get(type(error)) or str(error) or type(error).__name__
    return SubrequestFailed(f"fetch {method} {url} failed: {reason}")
