"""`Request`: what a handler is given, and what it can give to `fetch`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from http import HTTPMethod
from http.client import HTTPMessage
from typing import Any

from workers._body import Body, Content, to_body
from workers._headers import add_header, header_pairs, is_token, merge_headers, parse_headers
from workers._urls import normalise
from workers.values import JsClass, JsDict, wrap

_REDIRECTS = ("follow", "manual", "error")
_METHODS: dict[str, HTTPMethod] = {method.value: method for method in HTTPMethod}


class Request(Body):
    """An HTTP request. Attributes that only browsers fill (`mode`, `referrer`, …) have the values of a server.

    Args:
        input: an absolute URL, or another request to take everything from that is not given here.
        method: `GET` unless given; standard methods are `http.HTTPMethod`s, others plain str.
        headers: dict, or list of (name, value) tuples; replaces all headers of another request.
        body: as for `Response`.
        redirect: what `fetch` does on one: `follow`, `manual` or `error`.
        cf: a mapping, readable as attributes of `request.cf`.

    Raises:
        TypeError: a URL that is not absolute, a body with GET or HEAD, or an argument of the wrong type.
        ValueError: an illegal header, method or `redirect`.
        OSError: the body of the other request was used already.
    """

    constructor = JsClass("Request")

    cache = "default"
    credentials = "same-origin"
    destination = ""
    integrity = ""
    is_history_navigation = False
    keepalive = False
    mode = "cors"
    referrer = "about:client"
    referrer_policy = ""

    _received_headers: Iterable[tuple[str, str]] = ()

    def __init__(
        self,
        input: str | Request,  # JavaScript's name
        *,
        method: str | None = None,
        headers: Any = None,
        body: Any = None,
        redirect: str | None = None,
        cf: Mapping[str, Any] | None = None,
    ) -> None:
        source = input if isinstance(input, Request) else None
        self.url: str = source.url if source else normalise(input)  # type: ignore[arg-type]
        self.method: HTTPMethod | str = _as_method(method) if method else source.method if source else HTTPMethod.GET
        self.redirect: str = _as_redirect(redirect) if redirect else source.redirect if source else "follow"
        given = source.headers if source and headers is None else headers
        self.headers = merge_headers(header_pairs(parse_headers(given)))
        self.cf: JsDict | None = wrap(dict(cf)) if cf is not None else source.cf if source else None
        """What is known of the client (`cf.country`, …), or None."""
        if body is None and source is not None:
            self._content = source._take()
            source._used = source._content is not None
        else:
            self._content, content_type = to_body(body, "Request")
            if content_type is not None and "content-type" not in self.headers:
                add_header(self.headers, "content-type", content_type)
        if self._content is not None and self.method in ("GET", "HEAD"):
            raise TypeError(f"A {self.method} request cannot have a body")

    async def json(self, **options: Any) -> Any:
        """The body, parsed; dicts in it have attribute access. `options` go to `json.loads`.

        Raises:
            OSError: the body was used already, or broke off.
            ValueError: the body is not JSON.
        """
        return await self._parse_json(**options)

    def clone(self) -> Request:
        """A second request with the same body. Raises OSError if the body was used already."""
        return self._received(self.method, self.url, self.headers.items(), self._copy(), self.cf, self.redirect)

    @functools.cached_property
    def headers(self) -> HTTPMessage:  # type: ignore[override]  # which can be assigned to as well
        """Case-insensitive, with `get_all()`; repeated headers are joined by commas, but for set-cookie."""
        return merge_headers(self._received_headers)

    @property
    def js_object(self) -> Request:
        """Itself: there is no JavaScript object behind it."""
        return self

    _js_request = js_object

    def __repr__(self) -> str:
        return f"Request(method={str(self.method)!r}, url={self.url!r})"

    @classmethod
    def _received(
        cls, method: str, url: str, headers: Any, content: Content, cf: Any, redirect: str = "follow"
    ) -> Request:
        """A request that came from elsewhere; nothing in it is refused."""
        request = cls.__new__(cls)
        try:
            request.url = normalise(url)
        except TypeError:  # a client can send any Host header
            request.url = url
        request.method = _known_method(method)
        request.redirect = redirect
        request._received_headers = headers
        request.cf = wrap(dict(cf)) if cf else None
        request._content = content
        return request


def _as_method(method: str) -> HTTPMethod | str:
    if not isinstance(method, str) or not is_token(method):
        raise ValueError(f"{method!r} is no HTTP method")
    return _known_method(method)


def _known_method(method: str) -> HTTPMethod | str:
    return _METHODS.get(method) or _METHODS.get(method.upper()) or str(method)


def _as_redirect(redirect: str) -> str:
    if redirect not in _REDIRECTS:
        raise ValueError(f"redirect must be one of {', '.join(_REDIRECTS)}, not {redirect!r}")
    return redirect
