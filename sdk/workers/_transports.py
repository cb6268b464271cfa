"""`requests`, `urllib3`, `urllib.request`, `http.client`, `httpx`, `aiohttp` in a process that has no network.

An isolate may open no sockets. When a handler's code imports one of these libraries, the place where it would connect
is replaced: what it sends goes to the node as a subrequest, and the node's answer comes back to it. Redirects, cookies,
retries and errors stay the library's own. Sync ones wait through `run_sync`, so that other invocations go on meanwhile.

The node makes the connection and checks the certificate: proxies and client certificates are refused here, and
`verify=False` has no effect. WebSockets and other protocols need sockets, and are not replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http import HTTPStatus
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from workers import _runtime
from workers._run_sync import run_sync
from workers._wire import CallFailed, ResultHead, Subrequest
from workers.streams import ReadableStream

_NO_PROXIES = "proxies cannot be used in a worker: the node makes its connections; see [egress] of the configuration"
_NO_CLIENT_CERTIFICATES = "client certificates cannot be used in a worker: the node makes its TLS connections"


def activate() -> None:
    """Patch these libraries where they are imported already, and see to it that those imported later are."""
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds nothing by itself: it wraps what the other finders find for the modules that are patched."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None and (spec := find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, _PATCHES[fullname])
                return spec  # type: ignore[no-any-return]
        return None


class _Loader:
    """A module's own loader, after which the module is patched."""

    def __init__(self, loader: Any, patch: Callable[[Any], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(AttributeError):  # another module of that name, or a version without these classes
            self._patch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


# -- subrequests -------------------------------------------------------------------------------------------


class _Request:
    """An HTTP/1.1 request as a library writes it to a connection, taken apart again."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._data = bytearray()
        self._head_size = 0

    def feed(self, data: Any) -> None:
        """More of it."""
        self._data += data

    @property
    def is_complete(self) -> bool:
        """Whether all of it was fed."""
        if not self._head_size:
            if (end := self._data.find(b"\r\n\r\n")) < 0:
                return False
            self._head_size = end + 4
        head = self._data[: self._head_size]
        if _is_chunked(head):
            return self._data.endswith(b"0\r\n\r\n") and _unchunked(self._data[self._head_size :]) is not None
        length = re.search(rb"\r\ncontent-length:\s*(\d+)", head, re.IGNORECASE)
        return length is None or len(self._data) >= self._head_size + int(length[1])

    @property
    def expects_continue(self) -> bool:
        """Whether its sender waits for a word from the server before it sends the body (as boto3 does for S3)."""
        head = self._data[: self._head_size] if self._head_size else self._data
        return re.search(rb"\r\nexpect:\s*100-continue", head, re.IGNORECASE) is not None

    async def send(self) -> tuple[ResultHead, ReadableStream | None]:
        """The node's answer to it. Raises OSError if there is none."""
        head, _, body = self._data.partition(b"\r\n\r\n")
        content: bytes | None = bytes(body)
        if _is_chunked(head):
            content = _unchunked(body)
            if content is None:
                raise OSError("the request's body is incomplete")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        if method == "CONNECT" or not target.startswith("/"):
            raise OSError(_NO_PROXIES)
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return await _exchange(method, self._base_url + target, headers, content or None)


async def _exchange(
    method: str, url: str, headers: list[tuple[str, str]], content: bytes | ReadableStream | None
) -> tuple[ResultHead, ReadableStream | None]:
    runtime = _runtime.runtime
    assert runtime is not None, "activated in an isolate"
    frame = Subrequest(
        id=runtime.calls.next_id(),
        invocation=_runtime.invocation_id(),
        method=method,
        url=url,
        headers=[(name, value) for name, value in headers if name.lower() != "transfer-encoding"],
        has_body=content is not None,
        redirect="manual",
    )
    answer, stream = await runtime.calls.ask(frame, content)
    if isinstance(answer, CallFailed):
        raise OSError(answer.message)
    assert isinstance(answer, ResultHead)
    return answer, stream


class _Response:
    """An answer as the bytes that a server would send: the head first, then each chunk, then b""."""

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._stream: ReadableStream | None = None
        self._has_begun = False

    async def next_bytes(self) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            head, self._stream = await self._request.send()
            return _head_bytes(head)
        return await _next_chunk(self._stream)

    async def aclose(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


async def _next_chunk(stream: ReadableStream | None) -> bytes:
    """The next bytes of `stream`; b"" at its end."""
    if stream is not None:
        async for chunk in stream:
            if chunk:
                return bytes(chunk)
    return b""


def _head_bytes(head: ResultHead) -> bytes:
    # Without keep-alive, so that each request gets a connection of its own and a body without a length can end.
    lines = [f"HTTP/1.1 {head.status} {_phrase(head.status)}", *(f"{name}: {value}" for name, value in head.headers)]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1", "replace")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _is_chunked(head: bytes | bytearray) -> bool:
    return re.search(rb"\r\ntransfer-encoding:\s*chunked", head, re.IGNORECASE) is not None


def _unchunked(body: bytes | bytearray) -> bytes | None:
    """The content of a body in chunks; None if its last chunk is missing."""
    content = bytearray()
    start = 0
    while (end := body.find(b"\r\n", start)) >= 0:
        size = int(body[start:end].partition(b";")[0], 16)
        if size == 0:
            return bytes(content)
        content += body[end + 2 : end + 2 + size]
        start = end + 2 + size + 2
    return None


# -- http.client, urllib.request, urllib3, requests --------------------------------------------------------


class _Socket:
    """What a sync library takes for a connected socket: collects the request, and answers when it is read."""

    def __init__(self, base_url: str, timeout_s: Any) -> None:
        self._request = _Request(base_url)
        self.timeout_s = timeout_s if isinstance(timeout_s, int | float) else socket.getdefaulttimeout()
        self._readable: io.FileIO | None = None

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._request.feed(data)

    def send(self, data: Any, flags: int = 0) -> int:
        self._request.feed(data)
        return memoryview(data).nbytes

    def makefile(self, mode: str = "r", buffering: int | None = None, **_: Any) -> io.BufferedReader:
        if self._request.expects_continue and not self._request.is_complete:
            return io.BufferedReader(io.BytesIO(b"HTTP/1.1 100 Continue\r\n\r\n"))
        return io.BufferedReader(_SocketFile(self, _Response(self._request)))

    def fileno(self) -> int:
        """A descriptor for `select` and `poll`, which find it readable."""
        if self._readable is None:
            ours, theirs = os.pipe()
            os.close(theirs)
            self._readable = io.FileIO(ours)
        return self._readable.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        return self.timeout_s

    def setsockopt(self, *_: Any) -> None:
        """There is nothing to set."""

    def shutdown(self, how: int) -> None:
        """The file that was made of it goes on, as with a socket."""

    def close(self) -> None:
        """As `shutdown`."""
        if self._readable is not None:
            self._readable.close()


class _SocketFile(io.RawIOBase):
    """The answer, read without `await`."""

    def __init__(self, sock: _Socket, response: _Response) -> None:
        self._sock = sock
        self._response = response
        self._pending = memoryview(b"")
        self._loop: asyncio.AbstractEventLoop | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pending:
            self._pending = memoryview(run_sync(self._next_bytes()))
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def close(self) -> None:
        if not self.closed and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._response.aclose(), self._loop)  # not waited for: no network here
        super().close()

    async def _next_bytes(self) -> bytes:
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._sock.timeout_s):
                return await self._response.next_bytes()
        except TimeoutError:
            raise TimeoutError("timed out") from None


def _base_url(scheme: str, host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}" if port else f"{scheme}://{shown}"


def _patch_http_client(module: Any) -> None:
    def connect(self: Any) -> None:
        if self._tunnel_host:
            raise OSError(_NO_PROXIES)
        scheme = "https" if isinstance(self, http.client.HTTPSConnection) else "http"
        self.sock = _Socket(_base_url(scheme, self.host, self.port), self.timeout)

    module.HTTPConnection.connect = connect
    module.HTTPSConnection.connect = connect


def _patch_urllib_request(module: Any) -> None:
    do_open = module.AbstractHTTPHandler.do_open

    def do_open_or_url_error(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return do_open(self, *args, **options)
        except (module.URLError, TimeoutError):
            raise
        except OSError as error:  # from the first read, since only that connects; it expects them from the write
            raise module.URLError(error) from error

    module.AbstractHTTPHandler.do_open = do_open_or_url_error


def _patch_urllib3(module: Any) -> None:
    def new_connection(self: Any) -> _Socket:
        return _Socket(_base_url("http", self.host, self.port), self.timeout)

    def connect_tls(self: Any) -> None:
        if self._tunnel_host:
            raise OSError(_NO_PROXIES)
        if self.cert_file or self.key_file:
            raise OSError(_NO_CLIENT_CERTIFICATES)
        self.sock = _Socket(_base_url("https", self.host, self.port), self.timeout)
        self.is_verified = True  # by the node

    module.HTTPConnection._new_conn = new_connection
    module.HTTPSConnection.connect = connect_tls


# -- httpx -------------------------------------------------------------------------------------------------


def _patch_httpx(module: Any) -> None:
    class AsyncStream(module.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, request: Any, stream: ReadableStream | None) -> None:
            self._request = request
            self.stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while chunk := await self.next_chunk():
                yield chunk

        async def next_chunk(self) -> bytes:
            with _httpx_errors(module, self._request, "ReadError"):
                async with asyncio.timeout(_httpx_timeout(self._request)):
                    return await _next_chunk(self.stream)

        async def aclose(self) -> None:
            stream, self.stream = self.stream, None
            if stream is not None:
                await stream.aclose()

    class SyncStream(module.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: AsyncStream) -> None:
            self._inner = inner

        def __iter__(self) -> Iterator[bytes]:
            while chunk := run_sync(self._inner.next_chunk()):
                yield chunk

        def close(self) -> None:
            if self._inner.stream is not None:
                run_sync(self._inner.aclose())

    async def ask(request: Any, content: bytes | ReadableStream | None) -> tuple[ResultHead, AsyncStream]:
        url = str(request.url.copy_with(fragment=None, userinfo=b""))
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        with _httpx_errors(module, request, "ConnectError"):
            async with asyncio.timeout(_httpx_timeout(request)):
                head, stream = await _exchange(request.method, url, headers, content)
        return head, AsyncStream(request, stream)

    def respond(head: ResultHead, stream: Any) -> Any:
        return module.Response(head.status, headers=head.headers, stream=stream)

    async def handle_async_request(self: Any, request: Any) -> Any:
        whole = isinstance(request.stream, module.SyncByteStream)
        content = b"".join(request.stream) or None if whole else ReadableStream(request.stream)
        return respond(*await ask(request, content))

    def handle_request(self: Any, request: Any) -> Any:
        head, stream = run_sync(ask(request, b"".join(request.stream) or None))
        return respond(head, SyncStream(stream))

    for transport in (module.HTTPTransport, module.AsyncHTTPTransport):
        transport.__init__ = _without_proxy(transport.__init__)
    module.AsyncHTTPTransport.handle_async_request = handle_async_request
    module.HTTPTransport.handle_request = handle_request


def _without_proxy(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if options.get("proxy") is not None:
            raise ValueError(_NO_PROXIES)
        init(self, *args, **options)

    return __init__


def _httpx_timeout(request: Any) -> float | None:
    return request.extensions.get("timeout", {}).get("read")  # type: ignore[no-any-return]


@contextlib.contextmanager
def _httpx_errors(module: Any, request: Any, kind: str) -> Iterator[None]:
    """Turns our errors into those that httpx documents."""
    try:
        yield
    except TimeoutError as error:
        raise module.ReadTimeout("timed out", request=request) from error
    except OSError as error:
        raise getattr(module, kind)(str(error), request=request) from error


# -- aiohttp -----------------------------------------------------------------------------------------------


def _patch_aiohttp(module: Any) -> None:
    async def create_connection(self: Any, request: Any, *_: Any, **__: Any) -> Any:
        if request.proxy:
            raise OSError(_NO_PROXIES)
        protocol = self._factory()
        url = request.url
        transport = _Transport(protocol, _base_url(url.scheme, url.raw_host, url.port))
        protocol.connection_made(transport)
        return protocol

    module.TCPConnector._create_connection = create_connection


class _Transport(asyncio.Transport):
    """What an asyncio protocol takes for its connection: one request, one response."""

    def __init__(self, protocol: Any, base_url: str) -> None:
        super().__init__()
        self._protocol = protocol
        self._request = _Request(base_url)
        self._answering: asyncio.Task[None] | None = None
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self._request.feed(data)
        if self._answering is None and self._request.is_complete:
            self._answering = asyncio.create_task(self._answer())

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if self._answering is not None:
                self._answering.cancel()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def get_write_buffer_size(self) -> int:
        return 0

    async def _answer(self) -> None:
        response = _Response(self._request)
        error: OSError | None = None
        try:
            while data := await response.next_bytes():
                self._protocol.data_received(data)
                await self._may_read.wait()
            self._protocol.eof_received()
        except OSError as failure:
            error = failure
        finally:
            await response.aclose()
        if not self._is_closing:
            self._is_closing = True
            self._protocol.connection_lost(error)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "http.client": _patch_http_client,
    "urllib.request": _patch_urllib_request,
    "urllib3.connection": _patch_urllib3,
    "httpx": _patch_httpx,
    "httpx2": _patch_httpx,
    "aiohttp.connector": _patch_aiohttp,
}
