"""The platform's objects as handlers use them through `js`: Fetch's classes, URLs, streams, crypto, timers, console."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import secrets
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import HTTPMessage
from typing import Any, NoReturn
from urllib.parse import SplitResult, parse_qsl, quote_plus, urljoin, urlsplit

import workers
from workers._headers import add_header, parse_headers
from workers._js.buffers import ArrayBuffer, Buffer, TypedArray
from workers._js.objects import Constructor, stringify
from workers._js_exception import JsException
from workers._urls import normalise
from workers._websocket_client import Opening
from workers._websocket_pair import WebSocket, WebSocketPair
from workers.blob import Blob, File
from workers.fetch import send
from workers.formdata import FormData
from workers.response import Response
from workers.streams import ReadableStream
from workers.values import JsClass, JsDict, JsList

_DEFAULT_PORTS = {"http": "80", "https": "443", "ws": "80", "wss": "443"}


# -- Fetch -------------------------------------------------------------------------------------------------------


class Headers(HTTPMessage):
    """Headers with JavaScript's methods: `get` (None if missing), `set`, `append`, `has`, `delete`, `entries`, …"""

    constructor = JsClass("Headers")

    @classmethod
    def new(cls, source: Any = None, **fields: Any) -> Headers:
        """Headers of a dict, of pairs, or of other headers."""
        headers = cls()
        for name, value in parse_headers(source if source is not None else fields).items():
            headers.append(name, value)
        return headers

    def append(self, name: str, value: Any) -> None:
        """Add a value after those of the same name; but for set-cookie, they become one, joined by commas."""
        if name in self and name.lower() != "set-cookie":
            value = f"{self[name]}, {value}"
            del self[name]
        add_header(self, name, value)

    def set(self, name: str, value: Any) -> None:
        """Replace all values of a name."""
        del self[name]
        add_header(self, name, value)

    def delete(self, name: str) -> None:
        """Remove a name; none is fine."""
        del self[name]

    def has(self, name: str) -> bool:
        """Whether there is such a name."""
        return name in self

    def entries(self) -> Iterator[tuple[str, str]]:
        """(name in lower case, value), in order of names."""
        return iter(sorted((name.lower(), value) for name, value in self.items()))

    def getSetCookie(self) -> list[str]:
        """Each set-cookie."""
        return JsList(self.get_all("set-cookie", []))

    def forEach(self, each: Callable[[str, str], Any]) -> None:
        """Call `each(value, name)`."""
        for name, value in self.entries():
            each(value, name)


def _new_response(body: Any = None, init: Any = None, **options: Any) -> Response:
    settings = {**(init or {}), **options}
    return Response(
        body,
        settings.get("status"),
        settings.get("statusText") or settings.get("status_text") or "",
        settings.get("headers"),
        settings.get("webSocket") or settings.get("web_socket"),
    )


def _json_response(data: Any, init: Any = None, **options: Any) -> Response:
    response = _new_response(stringify(data).encode(), init, **options)
    if "content-type" not in response.headers:
        add_header(response.headers, "content-type", "application/json")
    return response


def _new_request(resource: Any, init: Any = None, **options: Any) -> workers.Request:
    settings = {**(init or {}), **options}
    known = {key: settings[key] for key in ("method", "headers", "body", "redirect", "cf") if key in settings}
    return workers.Request(_url_text(resource), **known)


async def fetch(resource: Any, init: Any = None, **options: Any) -> Response:
    """JavaScript's `fetch(resource, init)`."""
    return await workers.fetch(_new_request(resource, init, **options))


def _url_text(resource: Any) -> Any:
    return resource.href if isinstance(resource, Url) else resource


def _new_blob(parts: Any = (), options: Any = None, **more: Any) -> Blob:
    settings = {**(options or {}), **more}
    return Blob(parts, settings.get("type"), settings.get("endings"))


def _new_file(parts: Any, name: str, options: Any = None, **more: Any) -> File:
    settings = {**(options or {}), **more}
    return File(parts, name, settings.get("type"), settings.get("endings"), settings.get("lastModified"))


# -- URLs --------------------------------------------------------------------------------------------------------


class UrlSearchParams:
    """The parameters of a query in order, several of one name included."""

    constructor = JsClass("URLSearchParams")

    def __init__(self, source: Any = "", on_change: Callable[[str], None] | None = None) -> None:
        self._on_change = on_change
        if isinstance(source, str):
            self._pairs = parse_qsl(source.removeprefix("?"), keep_blank_values=True)
        else:
            items = source.items() if callable(getattr(source, "items", None)) else source
            self._pairs = [(str(name), str(value)) for name, value in items]

    def get(self, name: str) -> str | None:
        """The first value of a name, or None."""
        return next((value for key, value in self._pairs if key == name), None)

    def getAll(self, name: str) -> list[str]:
        """All values of a name."""
        return JsList(value for key, value in self._pairs if key == name)

    def has(self, name: str) -> bool:
        """Whether there is such a name."""
        return self.get(name) is not None

    def append(self, name: str, value: Any) -> None:
        """Add a parameter at the end."""
        self._change([*self._pairs, (name, str(value))])

    def set(self, name: str, value: Any) -> None:
        """Replace all parameters of a name by one, at the place of the first."""
        first = next((at for at, (key, _) in enumerate(self._pairs) if key == name), len(self._pairs))
        rest = [pair for pair in self._pairs[first:] if pair[0] != name]
        self._change([*self._pairs[:first], (name, str(value)), *rest])

    def delete(self, name: str) -> None:
        """Remove all parameters of a name."""
        self._change([pair for pair in self._pairs if pair[0] != name])

    def sort(self) -> None:
        """Sort by name."""
        self._change(sorted(self._pairs, key=lambda pair: pair[0]))

    def entries(self) -> Iterator[tuple[str, str]]:
        """(name, value)."""
        return iter(list(self._pairs))

    items = __iter__ = entries

    def keys(self) -> Iterator[str]:
        """Each name."""
        return (name for name, _ in self.entries())

    def values(self) -> Iterator[str]:
        """Each value."""
        return (value for _, value in self.entries())

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return len(self._pairs)

    def toString(self) -> str:
        """The query, without a question mark."""
        return "&".join(f"{quote_plus(name, '*')}={quote_plus(value, '*')}" for name, value in self._pairs)

    __str__ = toString

    def __repr__(self) -> str:
        return f"URLSearchParams({self.toString()!r})"

    def _change(self, pairs: list[tuple[str, str]]) -> None:
        self._pairs = pairs
        if self._on_change is not None:
            self._on_change(self.toString())

    def _as_body(self) -> tuple[bytes, str]:
        return self.toString().encode(), "application/x-www-form-urlencoded;charset=UTF-8"


class Url:
    """An absolute URL, or one relative to `base`; its parts can be read, and the common ones set."""

    constructor = JsClass("URL")

    def __init__(self, url: Any, base: Any = None) -> None:
        text = urljoin(str(base), str(url)) if base is not None else str(url)
        try:
            self._parts: SplitResult = urlsplit(normalise(text))
        except TypeError as error:
            raise JsException(f"Invalid URL: {text!r}", name="TypeError") from error

    @property
    def href(self) -> str:
        """The whole."""
        return self._parts.geturl()

    @property
    def protocol(self) -> str:
        """With its colon: `https:`."""
        return f"{self._parts.scheme}:"

    @property
    def hostname(self) -> str:
        """Without the port."""
        host = self._parts.hostname or ""
        return f"[{host}]" if ":" in host else host

    @property
    def port(self) -> str:
        """Empty if it is the scheme's own."""
        port = "" if self._parts.port is None else str(self._parts.port)
        return "" if port == _DEFAULT_PORTS.get(self._parts.scheme) else port

    @property
    def host(self) -> str:
        """With the port."""
        return f"{self.hostname}:{self.port}" if self.port else self.hostname

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{self._parts.scheme}://{self.host}"

    @property
    def username(self) -> str:
        """Empty if there is none."""
        return self._parts.username or ""

    @property
    def password(self) -> str:
        """Empty if there is none."""
        return self._parts.password or ""

    @property
    def pathname(self) -> str:
        """The path."""
        return self._parts.path

    @pathname.setter
    def pathname(self, path: str) -> None:
        self._replace(path=path if path.startswith("/") else f"/{path}")

    @property
    def search(self) -> str:
        """The query with its question mark; empty without one."""
        return f"?{self._parts.query}" if self._parts.query else ""

    @search.setter
    def search(self, query: str) -> None:
        self._replace(query=query.removeprefix("?"))

    @property
    def hash(self) -> str:
        """The fragment with its `#`; empty without one."""
        return f"#{self._parts.fragment}" if self._parts.fragment else ""

    @hash.setter
    def hash(self, fragment: str) -> None:
        self._replace(fragment=fragment.removeprefix("#"))

    @property
    def searchParams(self) -> UrlSearchParams:
        """The query's parameters; changing them changes the URL."""
        return UrlSearchParams(self._parts.query, lambda query: self._replace(query=query))

    def toString(self) -> str:
        """The whole."""
        return self.href

    __str__ = toJSON = toString

    def __repr__(self) -> str:
        return f"URL({self.href!r})"

    def _replace(self, **parts: str) -> None:
        self._parts = urlsplit(normalise(self._parts._replace(**parts).geturl()))


def _can_parse(url: Any, base: Any = None) -> bool:
    try:
        Url(url, base)
    except JsException:
        return False
    return True


# -- streams -----------------------------------------------------------------------------------------------------


class _Controller:
    """What the functions of a stream get: `enqueue`, `close`, `error`."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[Any] = asyncio.Queue()

    def enqueue(self, chunk: Any) -> None:
        self._chunks.put_nowait(chunk)

    def close(self) -> None:
        self._chunks.put_nowait(_END)

    terminate = close

    def error(self, reason: Any) -> None:
        self._chunks.put_nowait(reason if isinstance(reason, BaseException) else JsException(str(reason)))


_END = StopAsyncIteration()


def _new_stream(source: Any = None, _strategy: Any = None, **functions: Any) -> ReadableStream:
    given = {**(source or {}), **functions}
    return ReadableStream(_pulled(given.get("start"), given.get("pull"), given.get("cancel")))


async def _pulled(start: Any, pull: Any, cancel: Any) -> AsyncIterator[Any]:
    """The chunks that an underlying source of JavaScript's gives to its controller."""
    controller = _Controller()
    is_over = False
    try:
        await _maybe_await(start, controller)
        while True:
            if controller._chunks.empty() and pull is not None:
                await _maybe_await(pull, controller)
            chunk = await controller._chunks.get()
            if isinstance(chunk, BaseException):
                is_over = True
                if chunk is _END:
                    return
                raise chunk
            yield _body_chunk(chunk)
    finally:
        if not is_over:
            await _maybe_await(cancel, None)


class _Writer:
    """The writing end of a transform stream, and its own writer."""

    def __init__(self, chunks: asyncio.Queue[Any], transformer: dict[str, Any]) -> None:
        self._chunks = chunks
        self._transform = transformer.get("transform")
        self._flush = transformer.get("flush")
        self._controller = _Controller()
        self._controller._chunks = chunks

    def getWriter(self) -> _Writer:
        return self

    async def write(self, chunk: Any) -> None:
        if self._transform is None:
            await self._chunks.put(chunk)
            return
        result = self._transform(chunk, self._controller)
        if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future):
            await result

    async def close(self) -> None:
        await _maybe_await(self._flush, self._controller)
        await self._chunks.put(_END)

    async def abort(self, reason: Any = None) -> None:
        await self._chunks.put(reason if isinstance(reason, BaseException) else JsException(str(reason)))

    def releaseLock(self) -> None:
        """Nothing is locked."""


class _TransformStream:
    def __init__(self, transformer: Any = None, *_strategies: Any, **functions: Any) -> None:
        given = {**(transformer or {}), **functions}
        # Without a transform, a writer waits for the reader; a transform's controller cannot wait.
        self._chunks: asyncio.Queue[Any] = asyncio.Queue(0 if given.get("transform") else 1)
        self.writable = _Writer(self._chunks, given)
        self.readable = ReadableStream(self._read())

    async def _read(self) -> AsyncIterator[Any]:
        while True:
            chunk = await self._chunks.get()
            if chunk is _END:
                return
            if isinstance(chunk, BaseException):
                raise chunk
            yield _body_chunk(chunk)


async def _maybe_await(function: Any, *args: Any) -> None:
    if function is not None:
        result = function(*args)
        if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future):
            await result


def _body_chunk(chunk: Any) -> Any:
    return chunk.to_bytes() if isinstance(chunk, Buffer) else chunk


# -- crypto ------------------------------------------------------------------------------------------------------


def _random_values(target: TypedArray) -> TypedArray:
    target.assign(secrets.token_bytes(target.byteLength))
    return target


async def _digest(algorithm: Any, data: Any) -> ArrayBuffer:
    name = algorithm if isinstance(algorithm, str) else algorithm["name"]
    known = {"SHA-1": "sha1", "SHA-256": "sha256", "SHA-384": "sha384", "SHA-512": "sha512", "MD5": "md5"}
    if name.upper() not in known:
        raise JsException(f"Unrecognized algorithm name {name!r}", name="NotSupportedError")
    raw = data.to_bytes() if callable(getattr(data, "to_bytes", None)) else bytes(data)
    return ArrayBuffer(memoryview(bytearray(hashlib.new(known[name.upper()], raw).digest())))


crypto = Constructor(
    "crypto",
    randomUUID=lambda: str(uuid.uuid4()),
    getRandomValues=_random_values,
    subtle=Constructor("crypto.subtle", digest=_digest),
)

# -- timers and promises -----------------------------------------------------------------------------------------

_timers: dict[int, asyncio.TimerHandle] = {}
_tasks: set[asyncio.Future[Any]] = set()


def set_timeout(function: Callable[..., Any], delay_ms: float = 0, *args: Any) -> int:
    """Call `function` once after `delay_ms`; gives the number for `clearTimeout`."""
    return _start_timer(function, delay_ms, args, repeats=False)


def set_interval(function: Callable[..., Any], delay_ms: float = 0, *args: Any) -> int:
    """Call `function` every `delay_ms`; gives the number for `clearInterval`."""
    return _start_timer(function, delay_ms, args, repeats=True)


def clear_timer(number: int | None = None) -> None:
    """Stop a timer; one that is over, or none, is fine."""
    timer = _timers.pop(number or 0, None)
    if timer is not None:
        timer.cancel()


def queue_microtask(function: Callable[[], Any]) -> None:
    """Call `function` soon."""
    _start(function, ())


def _start_timer(function: Callable[..., Any], delay_ms: float, args: tuple[Any, ...], *, repeats: bool) -> int:
    loop = asyncio.get_running_loop()
    number = max(_timers, default=0) + 1

    def fire() -> None:
        if repeats:
            _timers[number] = loop.call_later(max(delay_ms, 1) / 1000, fire)
        else:
            _timers.pop(number, None)
        _start(function, args)

    _timers[number] = loop.call_later(max(delay_ms or 0, 0) / 1000, fire)
    return number


def _start(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call `function` in a task of its own, in which it can be async and use `run_sync`."""
    task = asyncio.get_running_loop().create_task(_maybe_await(function, *args), context=contextvars.copy_context())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _new_promise(executor: Callable[[Any, Any], Any]) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def resolve(value: Any = None) -> None:
        if not future.done():
            future.set_result(value)

    def reject(reason: Any = None) -> None:
        if not future.done():
            future.set_exception(reason if isinstance(reason, BaseException) else JsException(str(reason)))

    try:
        executor(resolve, reject)
    except Exception as error:
        reject(error)
    return future


def _resolved(value: Any = None) -> asyncio.Future[Any]:
    return asyncio.ensure_future(_awaited(value))


def _rejected(reason: Any) -> asyncio.Future[Any]:
    return _new_promise(lambda _resolve, reject: reject(reason))


async def _awaited(value: Any) -> Any:
    return await value if asyncio.isfuture(value) or hasattr(value, "__await__") else value


async def _all(values: Any) -> JsList:
    return JsList(await asyncio.gather(*map(_awaited, values)))


async def _all_settled(values: Any) -> JsList:
    results = await asyncio.gather(*map(_awaited, values), return_exceptions=True)
    return JsList(
        JsDict(status="rejected", reason=result)
        if isinstance(result, BaseException)
        else JsDict(status="fulfilled", value=result)
        for result in results
    )


async def _race(values: Any) -> Any:
    tasks = [asyncio.ensure_future(_awaited(value)) for value in values]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return next(iter(done)).result()


Promise = Constructor(
    "Promise",
    _new_promise,
    kind=asyncio.Future,
    all=lambda values: asyncio.ensure_future(_all(values)),
    allSettled=lambda values: asyncio.ensure_future(_all_settled(values)),
    race=lambda values: asyncio.ensure_future(_race(values)),
    resolve=_resolved,
    reject=_rejected,
)

# -- the rest ----------------------------------------------------------------------------------------------------


def _shown(values: tuple[Any, ...]) -> str:
    return " ".join(value if isinstance(value, str) else repr(value) for value in values)


def _print(*values: Any) -> None:
    print(_shown(values))


def _print_error(*values: Any) -> None:
    print(_shown(values), file=sys.stderr)


console = Constructor(
    "console",
    log=_print,
    info=_print,
    debug=_print,
    trace=_print,
    warn=_print_error,
    error=_print_error,
)
_started = time.perf_counter()
performance = Constructor(
    "performance", now=lambda: (time.perf_counter() - _started) * 1000, timeOrigin=time.time() * 1000
)
navigator = JsDict(userAgent="Cloudflare-Workers")


def _new_websocket(url: Any, protocols: Any = ()) -> WebSocket:
    """`open`, or `error` and `close`, events tell how the handshake went."""
    names = [protocols] if isinstance(protocols, str) else list(protocols)
    headers = {"upgrade": "websocket", **({"sec-websocket-protocol": ", ".join(names)} if names else {})}
    request = workers.Request(_url_text(url), headers=headers)
    opening = Opening()

    async def shake_hands() -> None:
        response = await send(request, opening)
        if response.web_socket is None:
            raise OSError(f"the server answered with status {response.status}")

    opening.client.connect(shake_hands)
    return opening.client


def _missing(name: str, instead: str) -> Constructor:
    def refuse(*_args: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(f"js.{name} is not supported by this runtime; {instead}")

    return Constructor(name, refuse)


Response_ = Constructor(
    "Response",
    _new_response,
    kind=Response,
    json=_json_response,
    redirect=lambda url, status=302: Response.redirect(str(url), status),
)
Request_ = Constructor("Request", _new_request, kind=workers.Request)
Headers_ = Constructor("Headers", Headers.new, kind=HTTPMessage)
FormData_ = Constructor("FormData", FormData, kind=FormData)
Blob_ = Constructor("Blob", _new_blob, kind=Blob)
File_ = Constructor("File", _new_file, kind=File)
URL_ = Constructor("URL", Url, kind=Url, canParse=_can_parse)
URLSearchParams_ = Constructor("URLSearchParams", UrlSearchParams, kind=UrlSearchParams)
ReadableStream_ = Constructor("ReadableStream", _new_stream, kind=ReadableStream)
TransformStream_ = Constructor("TransformStream", _TransformStream, kind=_TransformStream)
IdentityTransformStream_ = Constructor("IdentityTransformStream", _TransformStream, kind=_TransformStream)
WebSocketPair_ = Constructor("WebSocketPair", WebSocketPair, kind=WebSocketPair)
WebSocket_ = Constructor(
    "WebSocket",
    _new_websocket,
    kind=WebSocket,
    CONNECTING=0,
    OPEN=1,
    CLOSING=2,
    CLOSED=3,
)
_WASM = _missing("WebAssembly", "use a Python package with native code instead")
HTMLRewriter = _missing("HTMLRewriter", "parse HTML with a Python package, such as html.parser or selectolax")
WebAssembly = Constructor("WebAssembly", _WASM.new, Module=_WASM, Instance=_WASM, instantiate=_WASM, compile=_WASM)
