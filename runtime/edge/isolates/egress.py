"""Outbound `fetch` of handlers: HTTP and HTTPS, streamed both ways, to where `[egress]` of the worker lets it go.

A name is looked up here, its addresses are checked, and the connection goes to a checked one, for every redirect anew.
Proxies, cookies, netrc files and credentials of this machine are not used: a proxy would look names up itself. It does
NOT look into what is sent: a handler that may reach a host may send it anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore
import httpx
import msgspec
from websockets.exceptions import WebSocketException

from edge.config import EgressConfig
from edge.errors import SubrequestFailed
from edge.isolates.base import Bundle, StreamAnswer, WorkerKey
from edge.isolates.egress_rules import Address, Denied, Rules
from edge.isolates.egress_websocket import connected_socket, open_websocket

MAX_REDIRECTS = 20
REPLAYABLE_BYTES = 1 << 20
"""Bodies up to this size are read first, so that they can be sent again when a redirect asks for that."""
MAX_HELD_BYTES = 16 << 20
"""Of bodies that were read first, of one worker; what goes beyond is streamed."""
CONNECT_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 256
"""Of one worker."""
MAX_LOOKUPS = 8
"""Names that one worker can have looked up at once."""

Resolve = Callable[[str, int], Awaitable[list[Address]]]
"""The addresses of a host name, best first; OSError if there are none."""

_ATTEMPT_S = 3.0
"""What one of several addresses gets to accept a connection, before the next one is tried."""
_KEEPALIVE_S = 5.0
_PIECE_BYTES = 64 << 10
_DEFAULT_HEADERS = (
    *((b"accept", b"*/*"), (b"accept-encoding", b"gzip, deflate")),
    (b"user-agent", b"edge-workers-ai"),
)
_FORBIDDEN_METHODS = frozenset({"CONNECT", "TRACE", "TRACK"})
_WEBSOCKET_ERRORS = (
    httpx.InvalidURL, httpx.ConnectTimeout, httpcore.ConnectError, WebSocketException, Denied, ValueError, OSError,
)  # fmt: skip
_WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NOT_SENT = frozenset({"connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
_NOT_RECEIVED = frozenset({"connection", "keep-alive", "trailer", "transfer-encoding", "upgrade"})
# Bodies in these encodings are handed on decoded, so what describes the encoded form must not be.
_NOT_RECEIVED_DECODED = _NOT_RECEIVED | {"content-encoding", "content-length"}
_ZLIB_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_OF_BODIES = frozenset(
    {b"content-encoding", b"content-language", b"content-length", b"content-location", b"content-type"}
    | {b"transfer-encoding"}
)
_OF_ONE_ORIGIN = frozenset({b"authorization", b"cookie", b"proxy-authorization"})


class Traffic(msgspec.Struct):
    """Bytes of HTTP that a worker's subrequests moved, headers included, without what TLS adds."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Egress:
    """Sends the requests of all handlers on the node. Workers share no connections.

    Args:
        resolve: how host names are looked up; None: as the system does.
    """

    def __init__(self, resolve: Resolve | None = None) -> None:
        self._threads = ThreadPoolExecutor(32, "egress-lookup")
        self._resolve = resolve or self._look_up
        self._clients: dict[tuple[WorkerKey, bytes], _Client] = {}
        self._traffic: dict[WorkerKey, Traffic] = {}
        self._tls: ssl.SSLContext | None = None

    async def fetch(
        self,
        bundle: Bundle,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
        redirect: str,
    ) -> tuple[StreamAnswer, str]:
        """The response to a request of `bundle`'s, its body as a stream to be closed, and the URL that it came from.

        `redirect` is `follow`, `manual` (a redirect is returned as it is) or `error`.

        Raises:
            SubrequestFailed: there is no response, maybe because `bundle.egress` does not let the request go there.
        """
        client = await self._client(bundle)
        return await client.fetch(method, url, headers, body, redirect)

    async def websocket(
        self, bundle: Bundle, url: str, headers: list[tuple[str, str]], messages: AsyncIterator[bytes] | None
    ) -> tuple[StreamAnswer, str]:
        """The answer to a WebSocket's handshake, and its URL. With status 101, its body are the messages that come.

        Args:
            messages: what to send, as `workers._websocket` has it.

        Raises:
            SubrequestFailed: there is no answer, maybe because `bundle.egress` does not let the request go there.
        """
        client = await self._client(bundle)
        return await client.websocket(url, headers, messages), url

    def traffic(self, key: WorkerKey) -> Traffic:
        """What the subrequests of a worker have moved since the node started."""
        return self._traffic.setdefault(key, Traffic())

    async def forget(self, key: WorkerKey) -> None:
        """Close the connections of a worker that is gone; its requests under way fail."""
        self._traffic.pop(key, None)
        for each in [each for each in self._clients if each[0] == key]:
            await self._clients.pop(each).close()

    async def close(self) -> None:
        """Close every connection."""
        while self._clients:
            await self._clients.popitem()[1].close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _client(self, bundle: Bundle) -> _Client:
        key = (bundle.key, msgspec.json.encode(bundle.egress))
        client = self._clients.get(key)
        if client is None:
            for old in [old for old, each in self._clients.items() if old[0] == bundle.key and each.is_idle]:
                await self._clients.pop(old).close()  # of a version with other rules
            if self._tls is None:  # made when first needed: reading the certificates takes a while
                self._tls = httpx.create_ssl_context()
            client = self._clients[key] = _Client(bundle.egress, self._tls, self._resolve, self.traffic(bundle.key))
        return client

    async def _look_up(self, host: str, port: int) -> list[Address]:
        # Not in the threads that everything else shares: a slow name server would hold that up.
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(ipaddress.ip_address(address[0]) for *_, address in found))


class _Client:
    """The connections of one worker under one set of rules."""

    def __init__(self, config: EgressConfig, tls: ssl.SSLContext, resolve: Resolve, traffic: Traffic) -> None:
        self._config = config
        self._held_bytes = 0
        self._timeout = httpx.Timeout(config.timeout_s, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
        self._tls = tls
        self._traffic = traffic
        self._network = _Network(Rules(config), resolve, traffic)
        self._transport = _Transport(self._network, tls)
        self._num_websockets = 0

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: AsyncIterator[bytes] | None,
        redirect: str,
    ) -> tuple[StreamAnswer, str]:
        content: Any = body
        held = 0
        try:
            if body is not None and (length := _length(headers)) is not None:
                content = _measured(body, length)
                if length <= min(REPLAYABLE_BYTES, MAX_HELD_BYTES - self._held_bytes):
                    held = length
                    self._held_bytes += held
                    content = b"".join([chunk async for chunk in content])
            request = self._request(method, httpx.URL(url), _sent(headers), content)
            response = await self._send(request, content, redirect)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, Denied, ValueError, OSError) as error:
            raise self._failure(method, url, error) from error
        finally:
            self._held_bytes -= held
        decoder = _decoder(response)
        stream = _Body(response, decoder, self._config.max_response_mb << 20, lambda e: self._failure(method, url, e))
        return StreamAnswer(response.status_code, _received(response, decoder), stream), str(response.url)

    async def websocket(
        self, url: str, headers: list[tuple[str, str]], messages: AsyncIterator[bytes] | None
    ) -> StreamAnswer:
        try:
            target = httpx.URL(url)
            if target.scheme not in _WEBSOCKET_SCHEMES or messages is None:
                raise ValueError("WebSockets have http://, https://, ws:// and wss:// URLs")
            if self._num_websockets >= MAX_CONNECTIONS:
                raise ValueError(f"{MAX_CONNECTIONS} WebSockets of this worker are open already")
            target = target.copy_with(scheme=_WEBSOCKET_SCHEMES[target.scheme], fragment=None)
            is_secure = target.scheme == "wss"
            self._num_websockets += 1
            try:
                sock = await self._network.connect_socket(
                    target.raw_host.decode("ascii"), target.port or (443 if is_secure else 80)
                )
                tls = self._tls if is_secure else None
                return await open_websocket(
                    sock, tls, str(target), headers, messages, self._config.timeout_s, self._on_websocket_closed
                )
            except BaseException:
                self._num_websockets -= 1
                raise
        except _WEBSOCKET_ERRORS as error:
            raise self._failure("WebSocket", url, error) from error

    def _on_websocket_closed(self, sent_bytes: int, received_bytes: int) -> None:
        self._num_websockets -= 1
        self._traffic.sent_bytes += sent_bytes
        self._traffic.received_bytes += received_bytes

    @property
    def is_idle(self) -> bool:
        return self._transport.is_idle and not self._num_websockets

    async def close(self) -> None:
        await self._transport.aclose()

    def _request(self, method: str, url: httpx.URL, headers: list[tuple[bytes, bytes]], content: Any) -> httpx.Request:
        if url.scheme not in ("http", "https"):
            raise ValueError("only http:// and https:// URLs can be fetched")
        if method.upper() in _FORBIDDEN_METHODS:
            raise ValueError(f"requests with the method {method.upper()} cannot be fetched")
        named = {name.lower() for name, _ in headers}
        headers = [*headers, *(default for default in _DEFAULT_HEADERS if default[0] not in named)]
        timeout = {"timeout": self._timeout.as_dict()}
        request = httpx.Request(method, url, headers=headers, content=content, extensions=timeout)
        if url.userinfo and b"authorization" not in named:
            request = next(httpx.BasicAuth(url.username, url.password).sync_auth_flow(request))
        return request

    async def _send(self, request: httpx.Request, content: Any, redirect: str) -> httpx.Response:
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._transport.handle_async_request(request)
            response.request = request
            location = response.headers.get("location")
            if redirect == "manual" or response.status_code not in _REDIRECTS or location is None:
                return response
            await response.aclose()
            if redirect == "error":
                raise ValueError("it redirects, and the option redirect is 'error'")
            request, content = self._redirected(request, response, location, content)
        raise ValueError(f"more than {MAX_REDIRECTS} redirects")

    def _redirected(
        self, request: httpx.Request, response: httpx.Response, location: str, content: Any
    ) -> tuple[httpx.Request, Any]:
        """The request that `response` asks for, as in the Fetch standard (section "HTTP-redirect fetch")."""
        url = request.url.join(location)
        method, left_out = request.method, {b"host"}
        is_post = method == "POST" and response.status_code in (301, 302)
        if is_post or (response.status_code == 303 and method not in ("GET", "HEAD")):
            method, content = "GET", None
            left_out |= _OF_BODIES
        if content is not None and not isinstance(content, bytes):
            raise ValueError("a redirect asks for the body again, which was a stream; send it as str or bytes")
        if _origin(url) != _origin(request.url):
            left_out |= _OF_ONE_ORIGIN
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in left_out]
        return self._request(method, url, headers, content), content

    def _failure(self, method: str, url: str, error: Exception) -> SubrequestFailed:
        reasons: dict[type[Exception], str] = {
            httpx.ConnectTimeout: f"no connection within {CONNECT_TIMEOUT_S:g} s",
            httpx.ReadTimeout: f"nothing was received for {self._config.timeout_s:g} s (egress.timeout_s)",
            httpx.WriteTimeout: f"nothing could be sent for {self._config.timeout_s:g} s (egress.timeout_s)",
            TimeoutError: f"no answer to the handshake within {self._config.timeout_s:g} s (egress.timeout_s)",
            httpx.PoolTimeout: f"{MAX_CONNECTIONS} requests of this worker are under way already",
        }
        reason = reasons.get(type(error)) or str(error) or type(error).__name__
        return SubrequestFailed(f"fetch {method} {url} failed: {reason}")


class _Body:
    """A response's body, decoded. Errors while reading are SubrequestFailed; closing it ends the connection."""

    def __init__(
        self,
        response: httpx.Response,
        decoder: _Inflater | None,
        max_bytes: int,
        failure: Callable[[Exception], SubrequestFailed],
    ) -> None:
        self._response = response
        self._failure = failure
        self._pieces = _pieces(response, decoder, max_bytes)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except (httpx.HTTPError, httpx.StreamError, ValueError, zlib.error) as error:
            await self.aclose()
            raise self._failure(error) from error

    async def aclose(self) -> None:
        await self._pieces.aclose()
        await self._response.aclose()


async def _pieces(response: httpx.Response, decoder: _Inflater | None, max_bytes: int) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    async with contextlib.aclosing(response.aiter_raw()) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            for piece in [chunk] if decoder is None else decoder.pieces(chunk):
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise ValueError(
                        f"its response is longer than {max_bytes >> 20} MB; raise egress.max_response_mb "
                        f"(now {max_bytes >> 20}) in the configuration if that is wanted"
                    )
                yield piece
    if decoder is not None:
        decoder.check_end()


class _Inflater:
    """Decodes gzip and deflate in pieces of bounded size, so that a small response cannot fill the memory."""

    def __init__(self, encoding: str) -> None:
        self._bits = _ZLIB_BITS[encoding]
        self._zlib = zlib.decompressobj(self._bits)
        self._has_begun = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What `data` decodes to. Raises zlib.error if it is damaged."""
        piece = b""
        while data or len(piece) == _PIECE_BYTES:
            if self._zlib.eof:
                if self._bits != 31 or not data.startswith(b"\x1f"):
                    return  # rubbish after the end, as browsers do
                self._zlib = zlib.decompressobj(self._bits)
            piece = self._decode(data)
            data = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raise ValueError if what was decoded so far is incomplete."""
        if self._has_begun and not self._zlib.eof:
            raise ValueError("its compressed body ends too early")

    def _decode(self, data: bytes) -> bytes:
        is_first, self._has_begun = not self._has_begun, True
        try:
            return self._zlib.decompress(data, _PIECE_BYTES)
        except zlib.error:
            if self._bits != 15 or not is_first:
                raise
            self._bits = -15  # "deflate" without zlib's header, as some servers have it
            self._zlib = zlib.decompressobj(self._bits)
            return self._zlib.decompress(data, _PIECE_BYTES)


# -- the network -------------------------------------------------------------------------------------------


class _Transport(httpx.AsyncHTTPTransport):
    """HTTPX's transport over a network of ours."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, tls: ssl.SSLContext) -> None:
        # Not super().__init__(), which would make a pool that connects on its own.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS // 8,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=network,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return all(each.is_idle() or each.is_closed() for each in self._pool.connections)


class _Network(httpcore.AsyncNetworkBackend):
    """Connections to addresses that the rules permit."""

    def __init__(self, rules: Rules, resolve: Resolve, traffic: Traffic) -> None:
        self._rules = rules
        self._resolve = resolve
        self._traffic = traffic
        self._backend = httpcore.AnyIOBackend()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return _Counted(await self._connect(host.lower().rstrip("."), port), self._traffic)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout from error

    async def connect_socket(self, host: str, port: int) -> socket.socket:
        """A connected socket, for other protocols than HTTP. Raises as the addresses do, OSError, ConnectTimeout."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                addresses = await self._addresses(host.lower().rstrip("."), port)
                for address in addresses[:-1]:
                    with contextlib.suppress(OSError):
                        return await connected_socket(address, port, _ATTEMPT_S)
                return await connected_socket(addresses[-1], port, CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("") from error

    async def _connect(self, host: str, port: int) -> httpcore.AsyncNetworkStream:
        addresses = await self._addresses(host, port)
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(str(address), port, timeout=_ATTEMPT_S)
        return await self._backend.connect_tcp(str(addresses[-1]), port)

    async def _addresses(self, host: str, port: int) -> list[Address]:
        """Where a connection may go, best first: at least one address."""
        self._rules.check_name(host, port)
        async with self._lookups:
            try:
                found = await self._resolve(host, port)
            except (OSError, UnicodeError) as error:
                raise httpcore.ConnectError(f"{host} cannot be looked up: {error}") from error
        return self._rules.permitted(host, port, found)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Counted(httpcore.AsyncNetworkStream):
    """A connection whose bytes are counted."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, traffic: Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._traffic.received_bytes += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)
        self._traffic.sent_bytes += len(buffer)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Counted(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._traffic)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


# -- headers and bodies ------------------------------------------------------------------------------------


def _sent(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(_encoded(name), _encoded(value)) for name, value in headers if name.lower() not in _NOT_SENT]


def _encoded(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _received(response: httpx.Response, decoder: _Inflater | None) -> list[tuple[str, str]]:
    left_out = _NOT_RECEIVED if decoder is None else _NOT_RECEIVED_DECODED
    return [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]


def _decoder(response: httpx.Response) -> _Inflater | None:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    return _Inflater(encoding) if encoding in _ZLIB_BITS else None


def _origin(url: httpx.URL) -> tuple[str, bytes, int | None]:
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return url.scheme, url.raw_host, port


def _length(headers: list[tuple[str, str]]) -> int | None:
    """What the headers say of the body's length."""
    text = next((value for name, value in headers if name.lower() == "content-length"), "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


async def _measured(body: AsyncIterator[bytes], length: int) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in body:
        num_bytes += len(chunk)
        if num_bytes > length:
            raise ValueError(f"its body is longer than its content-length of {length} bytes")
        yield chunk
    if num_bytes < length:
        raise ValueError(f"its body has {num_bytes} bytes, but its content-length says {length}")
