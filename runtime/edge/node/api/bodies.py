"""The bodies of requests and their query parameters, read within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.datastructures import State
from starlette.requests import Request

from edge.ai.inputs import Binary, FormInputs
from edge.errors import InvalidInput, InvalidJson, OutOfCapacity, RequestTooLarge, UnsupportedContent
from edge.node.api.forms import Form, read_form
from edge.node.api.json_size import check_json_size

MAX_BODY_BYTES = 10 << 20
MAX_HELD_BYTES = 64 << 20
"""Of the bodies of all requests that are not answered yet; what they decode to takes a few times as much."""
MAX_ACCOUNT_HELD_BYTES = MAX_HELD_BYTES // 2
"""Of those of one account, so that none can keep all others out."""


class Bodies:
    """Reads the bodies of requests, and bounds what those under way hold together."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of all bodies under way."""
        self._by_account: Counter[str] = Counter()

    def take(self, account: str, num_bytes: int) -> None:
        """Count so many bytes more of `account` as under way.

        Raises:
            OutOfCapacity: it has too many under way, or all have together. They are counted all the same.
        """
        self.num_bytes += num_bytes
        self._by_account[account] += num_bytes
        if self._by_account[account] > MAX_ACCOUNT_HELD_BYTES:
            raise OutOfCapacity(
                "too many large requests of the account are under way; try again later", retry_after_s=1
            )
        if self.num_bytes > MAX_HELD_BYTES:
            raise OutOfCapacity("too many large requests are under way; try again later", retry_after_s=1)

    def give_back(self, account: str, num_bytes: int) -> None:
        """Count so many bytes of `account` as under way no longer."""
        self.num_bytes -= num_bytes
        self._by_account[account] -= num_bytes
        if self._by_account[account] == 0:
            del self._by_account[account]

    @asynccontextmanager
    async def json_of(self, request: Request) -> AsyncIterator[Any]:
        """The JSON value in the body of `request`; what follows in the `async with` block counts as under way.

        Its content type does not matter: clients that send JSON write many.

        Raises:
            RequestTooLarge: the body is longer than `MAX_BODY_BYTES`; not more than that is read.
            OutOfCapacity: the bodies under way are longer than `MAX_HELD_BYTES` together, or those of the account
                longer than `MAX_ACCOUNT_HELD_BYTES`.
            UnsupportedContent: it is compressed.
            InvalidJson: it is no JSON.
        """
        async with self.bytes_of(request) as body:
            yield _decoded(body, request.headers.get("content-type", ""))

    @asynccontextmanager
    async def inputs_of(self, request: Request, *, is_json: bool = True) -> AsyncIterator[Any]:
        """The inputs of a call: a JSON value; bytes, as a `Binary`; or a form, as `FormInputs`.

        A content type that says nothing means JSON, if `is_json`.

        Raises:
            InvalidInput: it is no form, though its content type says so.
            EdgeError: as `json_of`.
        """
        content_type = request.headers.get("content-type", "")
        match _kind(content_type):
            case "form":
                async with self.form_of(request) as form:
                    files = {file.name: Binary(file.content_type, file.data) for file in form.files}
                    yield FormInputs(form.fields | files)
            case "json" if is_json:
                async with self.json_of(request) as value:
                    yield value
            case _:
                async with self.bytes_of(request) as body:
                    yield Binary(content_type, bytes(body))

    @asynccontextmanager
    async def form_of(
        self,
        request: Request,
        *,
        max_bytes: int = MAX_BODY_BYTES,
        folder: Path | None = None,
        reserve: Callable[[int], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Form]:
        """The multipart form in the body of `request`; its files are written to `folder`, or counted as under way.

        `reserve`: as in `read_form`.

        Raises:
            UnsupportedContent: it is compressed, or no form.
            EdgeError, OSError: as `json_of` and `read_form`.
        """
        content_type = request.headers.get("content-type", "")
        if _kind(content_type) != "form":
            raise UnsupportedContent(f"the body is {content_type[:100]!r}: send a form, as multipart/form-data")
        held = Held(self, request.state, max_bytes, is_counted=folder is None)
        try:
            async with aclosing(held.chunks(request)) as chunks:
                form = await read_form(chunks, content_type, folder, reserve)
            yield form
        finally:
            held.release()

    @asynccontextmanager
    async def bytes_of(self, request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> AsyncIterator[bytearray]:
        """The body of `request` as it came. The same is raised as by `json_of`, but for its JSON."""
        held = Held(self, request.state, max_bytes)
        try:
            body = bytearray()
            async with aclosing(held.chunks(request)) as chunks:
                async for chunk in chunks:
                    body += chunk
            yield body
        finally:
            held.release()


class Held:
    """What one request has of `Bodies`, until it is released. Its `state` has the account, once that is known."""

    def __init__(
        self, bodies: Bodies, state: State, max_bytes: int = MAX_BODY_BYTES, *, is_counted: bool = True
    ) -> None:
        self._bodies = bodies
        self._state = state
        self._max_bytes = max_bytes
        self._is_counted = is_counted
        self._account = ""
        self._num_bytes = 0

    async def chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The body as it comes, as far as it is allowed."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedContent(
                f"the body has Content-Encoding {encoding[:40]!r}: send it as it is, without compression"
            )
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise RequestTooLarge(f"the request body is over the limit of {self._max_bytes} bytes")
            if self._is_counted:
                self.take(len(chunk))
            yield chunk

    def take(self, num_bytes: int) -> None:
        """Count so many bytes more as under way. Raises what `Bodies.take` does."""
        if self._num_bytes == 0:
            self._account = getattr(self._state, "account", "")
        self._num_bytes += num_bytes
        self._bodies.take(self._account, num_bytes)

    def release(self) -> None:
        """Nothing of it is under way any more."""
        self._bodies.give_back(self._account, self._num_bytes)
        self._num_bytes = 0


def _kind(content_type: str) -> Literal["form", "bytes", "json"]:
    """Whether a body of that type is a form or bytes; whatever else it says, it is taken for JSON."""
    essence = content_type.partition(";")[0].strip().lower()
    if essence == "multipart/form-data":
        return "form"
    is_bytes = essence == "application/octet-stream" or essence.startswith(("audio/", "image/", "video/"))
    return "bytes" if is_bytes else "json"


def _decoded(body: bytearray, content_type: str) -> Any:
    if not body:
        raise InvalidJson("the request has no body: send a JSON object")
    check_json_size(body)
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidJson(f"the request body is not JSON: {error}{_hint(content_type)}") from error
    except RecursionError as error:
        raise InvalidJson("the request body is nested too deeply") from error


def _hint(content_type: str) -> str:
    if content_type.partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        return ""
    return (
        "; it is a form of the type application/x-www-form-urlencoded, which is not taken: send JSON with the header "
        "Content-Type: application/json, or a multipart form (`curl -F`)"
    )


def count(query: Mapping[str, str], key: str, default: int, limit: int) -> int:
    """The integer from 1 to `limit` in the query parameter `key`, else `default`.

    Raises:
        InvalidInput: it is something else.
    """
    text = query.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or not 1 <= int(text) <= limit:
        raise InvalidInput(f"{key} is {text[:40]!r}, must be an integer from 1 to {limit}", param=key)
    return int(text)
