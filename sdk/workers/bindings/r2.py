"""`env.NAME` of an R2 bucket: objects with metadata, conditions, ranges, and uploads in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from http.client import HTTPMessage
from typing import Any

from workers._body import Body, Content
from workers.bindings._calls import BindingCalls, BindingError
from workers.bindings._options import content_of, merged, milliseconds, options_of, split_content
from workers.streams import ReadableStream
from workers.values import JsBytes, JsDict, JsList, plain, wrap

_CHECKSUMS = ("md5", "sha1", "sha256", "sha384", "sha512")
_HTTP_METADATA = {
    "contentType": "content-type",
    "contentLanguage": "content-language",
    "contentDisposition": "content-disposition",
    "contentEncoding": "content-encoding",
    "cacheControl": "cache-control",
}
_MAX_ATTEMPTS = 3


class R2Bucket:
    """Objects by key. A write is durable when the call returns, and every read from then on sees it.

    Options are a trailing dict or are given by name. Raises BindingError if the node refuses a call, TypeError for
    arguments of wrong types.
    """

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    async def head(self, key: str) -> R2Object | None:
        """What is known of an object without its data; None if there is none."""
        record = await self._calls.call("head", _key(key))
        return None if record is None else R2Object(record)

    async def get(self, key: str, options: Any = None, **more_options: Any) -> R2Object | None:
        """An object with its data (`R2ObjectBody`), or without if `onlyIf` does not hold; None if there is none.

        Options: `onlyIf`, a dict of conditions or request headers; `range`, `{"offset", "length"}`, `{"suffix"}` or
        request headers.
        """
        given = options_of(options, more_options, "get()")
        wanted = {"onlyIf": _conditions(given.get("onlyIf"), "get()"), "range": _range(given.get("range"))}
        for _ in range(_MAX_ATTEMPTS):
            found = await self._calls.call("get", _key(key), wanted)
            if found is None:
                return None
            if found.get("failed"):
                return R2Object(found["record"])
            if "data" in found:
                return R2ObjectBody(found["record"], found["range"], found["data"])
            span = found["range"]
            head, stream = await self._calls.stream(
                "read", key, found["record"]["version"], span["offset"], span["length"]
            )
            if head.status != 404 and stream is not None:
                return R2ObjectBody(found["record"], span, stream)
            # Another version has taken its place between the two calls.
        raise BindingError(f"get: the object {key!r} is replaced faster than it can be read; try again", status=503)

    async def put(self, key: str, value: Any, options: Any = None, **more_options: Any) -> R2Object | None:
        """Store `value`: a str, a buffer, a Blob, or a stream or iterator; None is an empty object.

        Options: `onlyIf`, conditions that the object there must meet, else None is the answer; `httpMetadata`, a dict
        or headers; `customMetadata`, str to str; `storageClass`; one of `md5`, `sha1`, `sha256`, `sha384` and `sha512`
        (hex or bytes), which the data must have.
        """
        given = options_of(options, more_options, "put()")
        wanted = _metadata(given, "put()")
        wanted["onlyIf"] = _conditions(given.get("onlyIf"), "put()")
        wanted["checksums"] = {name: _hex(given[name]) for name in _CHECKSUMS if given.get(name) is not None}
        data, body = split_content(content_of(value, "put()"))
        record = await self._calls.call("put", _key(key), data, wanted, body=body)
        return None if record is None else R2Object(record)

    async def delete(self, keys: Any) -> None:
        """Remove one key, or a list of up to 1000; that one is not there is no error."""
        await self._calls.call("delete", [keys] if isinstance(keys, str) else [_key(key) for key in keys])

    async def list(self, options: Any = None, **more_options: Any) -> JsDict:
        """Objects in the order of their keys' UTF-8 bytes: `objects`, `truncated`, `cursor`, `delimitedPrefixes`.

        Options: `prefix`; `limit`, at most 1000, the default; `cursor`, that of the list before; `delimiter`, at which
        keys are grouped; `startAfter`; `include`, a list of `httpMetadata` and `customMetadata`.
        """
        found: JsDict = wrap(await self._calls.call("list", merged(options, more_options, "list()")))
        found["objects"] = JsList(map(R2Object, found["objects"]))
        return found

    async def createMultipartUpload(self, key: str, options: Any = None, **more_options: Any) -> R2MultipartUpload:
        """Begin an upload in parts. Options: `httpMetadata`, `customMetadata`, `storageClass`."""
        given = options_of(options, more_options, "createMultipartUpload()")
        upload = await self._calls.call("create_upload", _key(key), _metadata(given, "createMultipartUpload()"))
        return R2MultipartUpload(self._calls, key, upload)

    def resumeMultipartUpload(self, key: str, uploadId: str) -> R2MultipartUpload:
        """An upload that was begun before. Whether there is one shows with its first call."""
        return R2MultipartUpload(self._calls, _key(key), uploadId)

    create_multipart_upload = createMultipartUpload
    resume_multipart_upload = resumeMultipartUpload

    def __repr__(self) -> str:
        return f"R2Bucket({self._name!r})"


class R2Object:
    """What is known of an object.

    Attributes:
        size: bytes of the whole object.
        etag, httpEtag: the MD5 of the data in hex (of an upload in parts: one of the parts); and in quotes.
        uploaded: when, as a naive local datetime.
        range: `offset` and `length` of the data in an `R2ObjectBody`.
        checksums: digests as bytes, by algorithm; `toJSON()` has them in hex.
    """

    def __init__(self, record: dict[str, Any], range: dict[str, int] | None = None) -> None:
        self.key: str = record["key"]
        self.version: str = record["version"]
        self.size: int = record["size"]
        self.etag: str = record["etag"]
        self.httpEtag = f'"{self.etag}"'
        self.uploaded = datetime.fromtimestamp(record["uploaded"] / 1000)
        self.checksums = R2Checksums(record["checksums"])
        self.httpMetadata = _http_metadata(record["httpMetadata"])
        self.customMetadata: JsDict = wrap(record["customMetadata"])
        self.storageClass: str = record["storageClass"]
        self.range = None if range is None else JsDict(range)

    @property
    def http_etag(self) -> str:
        """The same as `httpEtag`."""
        return self.httpEtag

    def writeHttpMetadata(self, headers: Any) -> None:
        """Put the HTTP metadata into `headers`: a dict, or an object with `set` or item assignment."""
        metadata = self.httpMetadata
        pairs = {header: metadata[name] for name, header in _HTTP_METADATA.items() if metadata.get(name) is not None}
        if (expires := metadata.get("cacheExpiry")) is not None:
            pairs["expires"] = format_datetime(expires.astimezone(UTC), usegmt=True)
        for name, value in pairs.items():
            if callable(setter := getattr(headers, "set", None)):
                setter(name, value)
            else:
                if isinstance(headers, HTTPMessage):
                    del headers[name]  # assignment would add another line
                headers[name] = value

    write_http_metadata = writeHttpMetadata

    def __repr__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r}, size={self.size}, etag={self.etag!r})"


class R2ObjectBody(R2Object, Body):
    """An object with its data, to be read once: `text()`, `json()`, `arrayBuffer()`, `bytes()`, `blob()` or `body`."""

    def __init__(self, record: dict[str, Any], range: dict[str, int], content: Content) -> None:
        super().__init__(record, range)
        self._content = content
        self.headers = HTTPMessage()
        self.writeHttpMetadata(self.headers)

    @property
    def body(self) -> ReadableStream:
        """The data as a stream of `JsBytes`. Reading it uses it up."""
        stream = super().body
        assert stream is not None
        return stream

    async def json(self, **options: Any) -> Any:
        """The data parsed as JSON. Raises as `text()`, and ValueError if it is none."""
        return await self._parse_json(**options)

    async def arrayBuffer(self) -> JsBytes:
        """The data as bytes with `to_bytes()`. Raises as `text()`."""
        return await self.buffer()


class R2Checksums(JsDict):
    """Digests by algorithm, as bytes."""

    __slots__ = ()

    def __init__(self, checksums: Mapping[str, str]) -> None:
        super().__init__({name: JsBytes(bytes.fromhex(digest)) for name, digest in checksums.items()})

    def toJSON(self) -> dict[str, str]:
        """The digests in hex."""
        return {name: digest.hex() for name, digest in self.items()}


class R2MultipartUpload:
    """An upload in parts, of `key`. All parts but the last have the same size, of at least 5 MiB."""

    def __init__(self, calls: BindingCalls, key: str, uploadId: str) -> None:
        self._calls = calls
        self.key = key
        self.uploadId = uploadId

    @property
    def upload_id(self) -> str:
        """The same as `uploadId`."""
        return self.uploadId

    async def uploadPart(self, partNumber: int, value: Any, options: Any = None, **more_options: Any) -> JsDict:
        """Store part `partNumber`, from 1 to 10000. What `complete` needs: `partNumber` and `etag`."""
        data, body = split_content(content_of(value, "uploadPart()"))
        return JsDict(await self._calls.call("put_part", self.key, self.uploadId, partNumber, data, body=body))

    async def complete(self, uploadedParts: Any) -> R2Object:
        """Make the parts, as `uploadPart` gave them, the object."""
        parts = plain(list(uploadedParts), "uploadedParts")
        return R2Object(await self._calls.call("complete_upload", self.key, self.uploadId, parts))

    async def abort(self) -> None:
        """Give the upload up and remove its parts."""
        await self._calls.call("abort_upload", self.key, self.uploadId)

    upload_part = uploadPart

    def __repr__(self) -> str:
        return f"R2MultipartUpload(key={self.key!r}, uploadId={self.uploadId!r})"


# -- arguments ---------------------------------------------------------------------------------------------


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    return key


def _is_headers(value: Any) -> bool:
    return not isinstance(value, Mapping) and not callable(getattr(value, "to_py", None)) and hasattr(value, "get")


def _conditions(given: Any, where: str) -> dict[str, Any] | None:
    if given is None:
        return None
    if _is_headers(given):
        return {
            "etagMatches": _etags(given.get("if-match")),
            "etagDoesNotMatch": _etags(given.get("if-none-match")),
            "uploadedBefore": _header_ms(given.get("if-unmodified-since")),
            "uploadedAfter": _header_ms(given.get("if-modified-since")),
            "secondsGranularity": True,
        }
    given = options_of(given, {}, f"onlyIf in {where}")
    return {
        "etagMatches": _etags(given.get("etagMatches")),
        "etagDoesNotMatch": _etags(given.get("etagDoesNotMatch")),
        "uploadedBefore": milliseconds(given.get("uploadedBefore"), "uploadedBefore"),
        "uploadedAfter": milliseconds(given.get("uploadedAfter"), "uploadedAfter"),
        "secondsGranularity": bool(given.get("secondsGranularity", False)),
    }


def _etags(given: Any) -> list[str] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return re.findall(r'(?:W/)?"[^"]*"|[^\s,]+', given)
    return [str(etag) for etag in given]


def _header_ms(text: str | None) -> float | None:
    """A time in a header; what is no time is as good as no header (RFC 9110)."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp() * 1000
    except ValueError:
        return None


def _range(given: Any) -> dict[str, int] | None:
    if given is None:
        return None
    if not _is_headers(given):
        return merged(given, {}, "range in get()")
    found = re.fullmatch(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*", given.get("range") or "")
    if not found or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return {"suffix": int(last)}
    return {"offset": int(first)} | ({"length": int(last) - int(first) + 1} if last else {})


def _metadata(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options that describe an object, as the node takes them."""
    wanted: dict[str, Any] = {"httpMetadata": {}, "customMetadata": {}}
    metadata = given.get("httpMetadata")
    if metadata is not None and _is_headers(metadata):
        named = {name: metadata.get(header) for name, header in _HTTP_METADATA.items()}
        wanted["httpMetadata"] = {**named, "cacheExpiry": _header_ms(metadata.get("expires"))}
    elif metadata is not None:
        metadata = options_of(metadata, {}, f"httpMetadata in {where}")
        expiry = milliseconds(metadata.get("cacheExpiry"), "cacheExpiry")
        wanted["httpMetadata"] = {**merged({**metadata, "cacheExpiry": None}, {}, where), "cacheExpiry": expiry}
    if given.get("customMetadata") is not None:
        wanted["customMetadata"] = merged(given["customMetadata"], {}, f"customMetadata in {where}")
    if given.get("storageClass") is not None:
        wanted["storageClass"] = str(given["storageClass"])
    return wanted


def _http_metadata(stored: Mapping[str, Any]) -> JsDict:
    metadata = JsDict(stored)
    if metadata.get("cacheExpiry") is not None:
        metadata["cacheExpiry"] = datetime.fromtimestamp(metadata["cacheExpiry"] / 1000)
    return metadata


def _hex(digest: Any) -> str:
    if isinstance(digest, str):
        return digest
    return bytes(digest.to_bytes() if hasattr(digest, "to_bytes") else digest).hex()
