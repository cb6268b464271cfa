"""`fetch`: an HTTP request from a handler. The node sends it, because a handler process has no network of its own."""

from __future__ import annotations

from typing import Any

from workers import _runtime
from workers._headers import header_pairs
from workers._websocket_client import Opening
from workers._wire import CallFailed, FrameError, ResultHead, Subrequest
from workers.request import Request
from workers.response import Response

_OPTIONS = frozenset({"method", "headers", "body", "redirect", "cf", "fetcher"})


async def fetch(resource: str | Request, **options: Any) -> Response:
    """Fetch a URL or send a `Request`; the response's body streams.

    With the header `Upgrade: websocket` it opens a WebSocket: the response has status 101 and `web_socket`, to be
    accepted; any other status means that there is none.

    Options are `method`, `headers`, `body`, `redirect` (`follow`, `manual`, `error`), `cf` (no effect here), and
    `fetcher`, a service or assets binding to send the request to instead.

    Raises:
        OSError: no response: the host is unknown or unreachable, it took too long, a redirect was an error, …
        TypeError, ValueError: a wrong argument, as for `Request`.
        RuntimeError: called outside of a running worker.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"fetch() has no option {', '.join(unknown)}; it has {', '.join(sorted(_OPTIONS))}")
    fetcher = options.pop("fetcher", None)
    if fetcher is not None:
        return await fetcher.fetch(resource, **options)  # type: ignore[no-any-return]
    request = Request(resource, **options)
    is_websocket = request.headers.get("upgrade", "").lower() == "websocket"
    return await send(request, Opening() if is_websocket else None)


async def send(request: Request, opening: Opening | None = None) -> Response:
    """The response to `request`, which asks for a WebSocket if there is an `opening`. Raises as `fetch`."""
    if _runtime.runtime is None:
        raise RuntimeError("fetch() works only inside a running worker; start it with `edge dev`")
    content = request._take() if opening is None else opening.outgoing
    headers = header_pairs(request.headers)
    if isinstance(content, bytes) and "content-length" not in request.headers:
        headers.append(("content-length", str(len(content))))
    calls = _runtime.runtime.calls
    frame = Subrequest(
        id=calls.next_id(),
        invocation=_runtime.invocation_id(),
        method=str(request.method),
        url=request.url,
        headers=headers,
        has_body=content is not None,
        redirect=request.redirect,
        is_websocket=opening is not None,
    )
    try:
        answer, stream = await calls.ask(frame, content)
    except FrameError as error:
        raise ValueError(f"fetch({request.url!r}): {error}") from error
    if isinstance(answer, CallFailed):
        raise OSError(answer.message)
    assert isinstance(answer, ResultHead)
    is_open = opening is not None and answer.status == 101
    response = Response._received(
        None if is_open else stream,
        answer.status,
        answer.headers,
        answer.url,
        redirected=_differ(answer.url, request.url),
    )
    if opening is not None:
        opening.answered(stream if is_open else None)
        response.web_socket = opening.client if is_open else None
    return response


def _differ(final_url: str, asked_url: str) -> bool:
    return final_url.partition("#")[0] != asked_url.partition("#")[0]
