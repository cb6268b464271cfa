"""`Response`: what a handler returns, and what `fetch` gives it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, Self, overload
from urllib.parse import urlsplit

from workers._body import Body, Content, to_body
from workers._headers import add_header, as_message, header_pairs, merge_headers, parse_pairs
from workers._urls import normalise
from workers.values import JsClass

NULL_BODY_STATUSES = frozenset({101, 103, 204, 205, 304})
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})


class HttpStatusError(OSError):
    """`raise_for_status()` found a status of 400 or more."""

    def __init__(self, status: int, status_text: str, url: str) -> None:
        super().__init__(f"{status} {status_text} for url: {url}" if url else f"{status} {status_text}")
        self.status = status
        self.status_text = status_text
        self.url = url


class _Json:
    """`Response.json(value)` on the class makes a response; `await response.json()` on an instance reads one."""

    @overload
    def __get__(self, instance: None, owner: type[Response]) -> Callable[..., Response]: ...
    @overload
    def __get__(self, instance: Response, owner: type[Response]) -> Callable[..., Coroutine[Any, Any, Any]]: ...
    def __get__(self, instance: Response | None, owner: type[Response]) -> Callable[..., Any]:
        return owner.from_json if instance is None else instance._parse_json


class Response(Body):
    """An HTTP response.

    Args:
        body: None, str, bytes, an async generator or iterable, a sync iterator, another response's `body`, or
            a stream from `env.AI.run`. Another `Response` is taken over whole.
        status: 200 to 599.
        status_text: reason phrase, for readers of this object; HTTP/2 and our wire do not carry it.
        headers: dict, or list of (name, value) tuples (several `set-cookie`, for example).
        web_socket: the client's end of a `WebSocketPair`, with the status 101: the answer to a WebSocket request.

    Raises:
        TypeError: a body or headers of another type, or a body with a status that has none (204, 304, …).
        ValueError: a status out of range, an illegal header, or options beside a whole `Response`.
        OSError: the given stream or response was read already.
    """

    constructor = JsClass("Response")

    def __init__(
        self,
        body: Any = None,
        status: int | HTTPStatus | None = None,
        status_text: str = "",
        headers: Any = None,
        web_socket: Any = None,
    ) -> None:
        if web_socket is not None:
            _check_web_socket(web_socket, status)
            self._assume(None, 101, status_text, parse_pairs(headers))
            self.web_socket = web_socket
            return
        if isinstance(body, Response):
            if status or status_text or headers:
                raise ValueError("Expected no options when a Response is given: it brings its own status and headers")
            self._assume(body._take(), body.status, body.status_text, [], body.url, body.redirected)
            self.headers = body.headers
            return
        status = _checked_status(status)
        content, content_type = to_body(body, "Response")
        if status in NULL_BODY_STATUSES:
            if content:
                raise TypeError(f"A response with status {status} cannot have a body")
            content = None
        pairs = parse_pairs(headers)
        has_type = any(name.lower() == "content-type" for name, _ in pairs)
        if content_type is not None and content is not None and not has_type:
            pairs.append(("content-type", content_type))
        self._assume(content, status, status_text, pairs)

    @functools.cached_property
    def headers(self) -> HTTPMessage:  # type: ignore[override]  # which can be assigned to as well
        """Case-insensitive, with `get_all()`. `headers[name] = value` adds; `del` first to replace."""
        return as_message(self._pairs)

    web_socket: Any = None
    """The end of a `WebSocketPair` that the client gets, or the WebSocket that `fetch` has opened, or None."""
    json = _Json()

    @classmethod
    def from_json(
        cls, data: Any, status: int | HTTPStatus | None = None, status_text: str = "", headers: Any = None
    ) -> Self:
        """`data` as JSON (`json.dumps` with its defaults), `application/json` unless the headers say otherwise.

        Raises:
            TypeError: `data` cannot be written as JSON.
        """
        response = cls(json.dumps(data).encode(), status, status_text, headers)
        if "content-type" not in response.headers:
            add_header(response.headers, "content-type", "application/json")
        return response

    @classmethod
    def redirect(cls, url: str, status: int | HTTPStatus = 302) -> Self:
        """A redirect to the absolute `url`.

        Raises:
            TypeError: `url` is not absolute.
            ValueError: `status` is none of 301, 302, 303, 307, 308.
        """
        if status not in REDIRECT_STATUSES:
            raise ValueError(f"{status} is no redirect status; use one of {sorted(REDIRECT_STATUSES)}")
        return cls(None, status, headers={"location": normalise(url)})

    @property
    def ok(self) -> bool:
        """Whether the status is 200 to 299."""
        return 200 <= self.status < 300

    def raise_for_status(self) -> None:
        """Raise HttpStatusError (an OSError) if the status is 400 or more."""
        if self.status >= 400:
            raise HttpStatusError(self.status, self.status_text or _phrase(self.status), self.url)

    async def unpack_archive(self, *, extract_dir: str | Path | None = None, format: str | None = None) -> None:
        """Unpack the body, an archive, into the folder `extract_dir`, by default the current one.

        Args:
            format: `zip`, `whl`, `tar`, `gztar`, `bztar`, `xztar`, or a file name's end such as `.tar.gz`; by default,
                what the URL ends with.

        Raises:
            ValueError: the format is none of these, or cannot be told from the URL.
            OSError: the body was used already or broke off, or the files cannot be written (below `/tmp` they can).
            shutil.ReadError, tarfile.TarError: the body is no such archive, or would write outside of the folder.
        """
        from workers._archives import archive_reader  # with modules that few handlers need

        unpack = archive_reader(format or urlsplit(self.url).path)
        await asyncio.to_thread(unpack, await self.bytes(), Path(extract_dir or "."))

    def clone(self) -> Response:
        """A second response with the same body. Raises OSError if the body was used already."""
        return self._with(self._copy())

    def replace_body(self, body: Any) -> Response:
        """A response with this one's status and headers, and another body.

        Raises:
            TypeError: a body of a type that is none, or with a status that has none.
        """
        content, _ = to_body(body, "Response")
        if content and self.status in NULL_BODY_STATUSES:
            raise TypeError(f"A response with status {self.status} cannot have a body")
        return self._with(content)

    @property
    def js_object(self) -> Response:
        """Itself: there is no JavaScript object behind it."""
        return self

    js_response = js_object
    type = "default"

    @property
    def webSocket(self) -> Any:
        """The same as `web_socket`."""
        return self.web_socket

    def __repr__(self) -> str:
        shown = [f"status={self.status}"]
        if self.status_text:
            shown.append(f"status_text={self.status_text!r}")
        shown.append(f"content_type={self.headers.get('content-type')!r}")
        if self.url:
            shown.append(f"url={self.url!r}")
        return f"Response({', '.join(shown)})"

    @classmethod
    def _received(
        cls, content: Content, status: int, headers: list[tuple[str, str]], url: str, redirected: bool
    ) -> Self:
        """A response that came from elsewhere; nothing in it is checked."""
        response = cls.__new__(cls)
        response._assume(content, status, _phrase(status), [], url, redirected)
        response.headers = merge_headers(headers)
        return response

    def _assume(
        self,
        content: Content,
        status: int,
        status_text: str,
        pairs: list[tuple[str, str]],
        url: str = "",
        redirected: bool = False,
    ) -> None:
        self._content = content
        self.status = status
        self.status_text = status_text
        self._pairs = pairs
        self.url = url
        """Where a fetched response came from, after redirects; empty for one's own."""
        self.redirected = redirected

    def _with(self, content: Content) -> Response:
        response = Response.__new__(Response)
        response._assume(content, self.status, self.status_text, self._header_pairs(), self.url, self.redirected)
        return response

    def _header_pairs(self) -> list[tuple[str, str]]:
        """The headers to send. Raises ValueError if the handler has put in what is none."""
        return header_pairs(self.headers) if "headers" in vars(self) else self._pairs


FetchResponse = Response
"""What `fetch` gives, under its name in Pyodide."""


def _checked_status(status: Any) -> int:
    if not status:
        return 200
    if not isinstance(status, int):
        raise TypeError(f"status must be an int or HTTPStatus, not {type(status).__name__}")
    if not 200 <= status <= 599:
        raise ValueError(f"status must be 200 to 599, not {int(status)}")
    return int(status)


def _check_web_socket(web_socket: Any, status: Any) -> None:
    if not hasattr(web_socket, "relay"):
        raise TypeError(f"web_socket must be one end of a js.WebSocketPair, not {type(web_socket).__name__}")
    if status != 101:
        raise ValueError(f"a response with web_socket must have the status 101, not {status}")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
