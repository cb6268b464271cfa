"""Types for annotations in handlers."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Iterator, Mapping
from http.client import HTTPMessage
from typing import Any, Protocol, TypedDict

from workers.blob import Blob, BlobValue
from workers.formdata import FormData, FormDataValue
from workers.response import FetchResponse
from workers.streams import ReadableStream

__all__ = [
    "BlobValue",
    "Body",
    "Context",
    "FetchKwargs",
    "FetchResponse",
    "FormDataValue",
    "Headers",
    "JSBody",
    "RequestInitCfProperties",
]

JSBody = ReadableStream | Blob | FormData
Body = str | bytes | JSBody | AsyncIterable[Any] | Iterator[Any] | None
Headers = Mapping[str, Any] | list[tuple[str, Any]] | HTTPMessage


class Context(Protocol):
    """What handlers get as `ctx`."""

    def waitUntil(self, awaitable: Awaitable[Any]) -> None:
        """Let `awaitable` run on after the response is sent."""


class RequestInitCfProperties(TypedDict, total=False):
    """The option `cf` of requests; nothing in it has an effect here."""

    apps: bool
    cacheEverything: bool
    cacheKey: str
    cacheTags: list[str]
    cacheTtl: int
    cacheTtlByStatus: dict[str, int]
    image: dict[str, Any]
    mirage: bool
    polish: str
    resolveOverride: str
    scrapeShield: bool
    webp: bool


class FetchKwargs(TypedDict, total=False):
    """The options of `fetch` and `Request`."""

    headers: Headers
    body: Body
    method: str
    redirect: str
    cf: RequestInitCfProperties
    fetcher: Any
