"""Buckets in S3, or in a store that speaks its protocol, through botocore, whose calls run on threads here.

An object is at PREFIX + key; its data is S3's own, so that other programs can read and write it. What S3 has no field
for is in its user metadata under names that begin with `edge-`: digests, the id of the write, and custom metadata that
no header can hold. A body is spooled to a file without a name first, because S3 wants to know its length, and because
data with a wrong checksum must not become an object.

A write with conditions is atomic: what is there is looked at, and the write carries If-Match with its etag, or
If-None-Match where there is nothing; if S3 says that it has changed since, it is looked at again. Stores that ignore
these headers are found out with an object of their own, and such writes refused.

What S3 answers goes to the log, for the operator; handlers learn what they can do about it. The library finds the
credentials, in the environment and files of the node, and they are never in messages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import re
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import botocore.loaders
import botocore.session
import msgspec
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from edge.bindings.base import OneBody
from edge.bindings.r2.objects import (
    MAX_KEY_BYTES,
    MAX_PUT_BYTES,
    WRONG_CURSOR,
    Conditions,
    Content,
    GetOptions,
    HttpMetadata,
    ListOptions,
    Part,
    PutOptions,
    Record,
    StoredPart,
    check_checksum,
    check_metadata_size,
    chosen_parts,
    cursor_of,
    holds,
    last_of,
    limit_of,
    no_upload,
    resolve,
    size_of,
    too_long,
    wanted_checksum,
)
from edge.bindings.storage import INLINE_BYTES, PIECE_BYTES, Spool, make_folder
from edge.config import S3Config
from edge.errors import EdgeError, InvalidInput, StorageUnavailable
from edge.isolates.base import StreamAnswer

MAX_USER_METADATA_BYTES = 2048 - 256
"""What S3 keeps besides our own entries."""
MAX_DESCRIBED_PER_LIST = 100
"""Objects on a page of a list that includes metadata: each of them is a call to S3."""

_NUM_THREADS = 32
_NUM_DESCRIBED_AT_ONCE = 8
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
_NUM_TRIES = 3
_MAX_REPLACED = 5
"""How often an object may change under a call before that gives up."""

_UNUSABLE = "what the binding keeps cannot be used: the node's log has the reason"
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the node's environment, or another source that AWS's tools know"
)

_HTTP_METADATA = {
    "contentType": "ContentType",
    "contentLanguage": "ContentLanguage",
    "contentDisposition": "ContentDisposition",
    "contentEncoding": "ContentEncoding",
    "cacheControl": "CacheControl",
}
_NO_CONTENT_TYPE = "binary/octet-stream"
"""What S3 says of an object that was given none."""
_OURS = "edge-"
_CHECKSUMS, _WRITE, _MORE = "edge-checksums", "edge-write", "edge-more"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class S3:
    """The S3 clients of a node and their threads."""

    def __init__(self, spool_dir: Path) -> None:
        """Keep bodies below `spool_dir` while they arrive."""
        self.spool_dir = spool_dir
        self.has_conditions: dict[S3Config, bool] = {}
        """Whether a store minds If-Match and If-None-Match when it writes, as far as known."""
        self.known_buckets: set[S3Config] = set()
        """Those that are there for sure."""
        self._closed = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "r2-s3")
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}

    def bucket(self, account: str, place: S3Config) -> S3Bucket:
        """The bucket at `place`; without a prefix there, that part of it which is the account's."""
        return S3Bucket(self, place, f"{account}/" if place.prefix is None else place.prefix)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, which runs on a thread.

        Raises:
            StorageUnavailable: the node shuts down.
        """
        if self._closed:
            raise StorageUnavailable("r2: the node is shutting down; try again")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def client(self, place: S3Config) -> Any:
        """The client for the store of `place`. To be called on a thread: the first time it reads files."""
        key = (place.endpoint, place.region)
        with self._lock:
            if key not in self._clients:
                self._clients[key] = _new_client(*key)
            return self._clients[key]

    async def close(self) -> None:
        """Finish the calls that are under way, then close all connections."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        while self._clients:
            self._clients.popitem()[1].close()


def _new_client(endpoint: str, region: str) -> Any:
    config = ClientConfig(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        max_pool_connections=2 * _NUM_THREADS,
        retries={"mode": "standard", "total_max_attempts": _NUM_TRIES},
        # The newer checksums are unknown to many stores; Content-MD5, which all of them check, is given instead.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = botocore.session.get_session()
    session.register_component("data_loader", _descriptions())
    region = region or session.get_config_variable("region") or "us-east-1"
    client = session.create_client("s3", region_name=region, endpoint_url=endpoint or None, config=config)
    client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
    return client


@functools.cache
def _descriptions() -> Any:
    """What the library knows of AWS, which takes it a while to read."""
    return botocore.loaders.create_loader()


def _add_md5(request: Any, **_: Any) -> None:
    """Many stores want Content-MD5 for DeleteObjects, which botocore no longer sends."""
    request.headers["Content-MD5"] = _base64(hashlib.md5(request.body, usedforsecurity=False).digest())


class _Answered(Exception):
    """S3 has refused a call with a code that its caller expects."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


_MISSING = frozenset({"404", "NoSuchKey"})
_CHANGED = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_NO_UPLOAD = frozenset({"NoSuchUpload"})


class S3Bucket:
    """One bucket, for one call. See `Bucket`."""

    def __init__(self, s3: S3, place: S3Config, prefix: str) -> None:
        self._s3 = s3
        self._place = place
        self._prefix = prefix

    async def head(self, key: str) -> Record | None:
        """One call to S3."""
        return await self._find(key, self._key("head", key))

    async def get(self, key: str, options: GetOptions) -> dict[str, Any] | None:
        """The record, and then, if it is short, the data with the same etag."""
        name = self._key("get", key)
        for _ in range(_MAX_REPLACED):
            record = await self._find(key, name)
            if record is None:
                return None
            if options.onlyIf is not None and not holds(options.onlyIf, record):
                return {"record": record, "failed": True}
            offset, length = resolve(options.range, record["size"])
            answer: dict[str, Any] = {"record": record, "range": {"offset": offset, "length": length}}
            if length > INLINE_BYTES:
                return answer
            body = await self._open(name, record["etag"], offset, length)
            if body is not None:
                answer["data"] = b"".join([piece async for piece in body])
                return answer
        raise StorageUnavailable(f"get: the object {key!r} is replaced faster than it can be read; try again")

    async def read(self, key: str, version: str, offset: int, length: int) -> StreamAnswer:
        """S3 sends the range only if the object still has the version's etag."""
        name = self._key("get", key)
        etag = version.partition("-")[2]
        if not re.fullmatch(r"[!#-~]{1,256}", etag) or offset < 0 or length < 0:
            return StreamAnswer(404, [], OneBody())
        body = await self._open(name, etag, offset, length)
        return StreamAnswer(404, [], OneBody()) if body is None else StreamAnswer(200, [], body)

    async def put(self, key: str, content: Content, options: PutOptions) -> Record | None:
        """Without conditions one write, and a look at what S3 has made of it."""
        name = self._key("put", key)
        wanted = wanted_checksum(options.checksums)
        described = _described("put", options)
        async with self._received("put", content, {"md5", *wanted}) as spool:
            checksums = {each: digest.hex() for each, digest in spool.digests.items()}
            check_checksum(wanted, checksums)
            described["Metadata"][_CHECKSUMS] = ",".join(f"{each}={checksums[each]}" for each in sorted(checksums))
            arguments = described | {"Key": name, "ContentMD5": _base64(spool.digests["md5"])}
            if options.onlyIf is None:
                await self._call("put_object", arguments, spool=spool)
            elif not await self._put_if(key, options.onlyIf, arguments, spool):
                return None
            found = await self._find_with_metadata(key, name)
            if found is not None and found[1].get(_WRITE) == described["Metadata"][_WRITE]:
                return found[0]
            return _record(key, spool.size_bytes, checksums["md5"], time.time(), described)  # it is replaced already

    async def _put_if(self, key: str, conditions: Conditions, arguments: dict[str, Any], spool: Spool) -> bool:
        """Write an object if the conditions hold; whether they did.

        Raises:
            InvalidInput: the store cannot look and write at once.
        """
        if not await self._has_conditions():
            raise InvalidInput(
                "put: the S3 store of this bucket ignores If-Match and If-None-Match, so that `onlyIf` cannot be "
                "checked and the object written at once: leave `onlyIf` out, or keep the bucket in files"
            )
        for _ in range(_MAX_REPLACED):
            found = await self._find_with_metadata(key, arguments["Key"])
            record, metadata = found if found is not None else (None, {})
            if metadata.get(_WRITE) == arguments["Metadata"][_WRITE]:
                return True  # the library has tried again after a write whose answer was lost
            if not holds(conditions, record):
                return False
            condition = {"IfNoneMatch": "*"} if record is None else {"IfMatch": f'"{record["etag"]}"'}
            try:
                await self._call("put_object", arguments | condition, expected=_CHANGED | _MISSING, spool=spool)
                return True
            except _Answered:
                continue
        raise StorageUnavailable(f"put: the object {key!r} is replaced faster than it can be looked at; try again")

    async def delete(self, keys: list[str]) -> None:
        """One call, but for keys that cannot be in its XML."""
        names = [self._key("delete", key) for key in keys]
        together = dict.fromkeys(name for name in names if len(names) > 1 and _is_xml(name))
        if together:
            wanted = {"Objects": [{"Key": name} for name in together], "Quiet": True}
            answer = await self._call("delete_objects", {"Delete": wanted})
            for error in answer.get("Errors", ()):
                raise self._refused("delete_objects", str(error.get("Code")), str(error.get("Message")))
        for name in (name for name in names if name not in together):
            await self._call("delete_object", {"Key": name})

    async def list_objects(self, options: ListOptions) -> dict[str, Any]:
        """One page of S3's, whose token is in the cursor."""
        limit = limit_of(options)
        if any(
            len((each or "").encode()) > MAX_KEY_BYTES
            for each in (options.prefix, options.startAfter, options.delimiter)
        ):
            raise InvalidInput(f"list: prefix, startAfter and delimiter have at most {MAX_KEY_BYTES} bytes")
        is_described = bool({"httpMetadata", "customMetadata"} & set(options.include))
        arguments: dict[str, Any] = {
            "Prefix": self._prefix + (options.prefix or ""),
            "MaxKeys": min(limit, MAX_DESCRIBED_PER_LIST) if is_described else limit,
        }
        if options.delimiter:
            arguments["Delimiter"] = options.delimiter
        if options.startAfter:
            arguments["StartAfter"] = self._prefix + options.startAfter
        if options.cursor:
            try:
                arguments["ContinuationToken"] = last_of(options.cursor).decode("ascii")
            except UnicodeDecodeError as error:
                raise InvalidInput(WRONG_CURSOR) from error
        try:
            answer = await self._call("list_objects_v2", arguments, expected=frozenset({"InvalidArgument"}))
        except _Answered as error:
            raise InvalidInput(WRONG_CURSOR) from error
        start = len(self._prefix)
        listed = [_listed(each["Key"][start:], each) for each in answer.get("Contents", ()) if each["Key"][start:]]
        found: dict[str, Any] = {
            "objects": await self._describe(listed, options.include) if is_described else listed,
            "delimitedPrefixes": [each["Prefix"][start:] for each in answer.get("CommonPrefixes", ())],
            "truncated": bool(answer.get("IsTruncated")),
        }
        if found["truncated"]:
            found["cursor"] = cursor_of(answer["NextContinuationToken"].encode())
        return found

    async def _describe(self, listed: list[Record], include: list[str]) -> list[Record]:
        """The records with the metadata that the caller wants. Those that are gone by now are left out."""
        places = asyncio.Semaphore(_NUM_DESCRIBED_AT_ONCE)

        async def describe(record: Record) -> Record | None:
            async with places:
                return await self._find(record["key"], self._prefix + record["key"])

        found = [record for record in await asyncio.gather(*map(describe, listed)) if record is not None]
        for record in found:
            for field in {"httpMetadata", "customMetadata"} - set(include):
                record[field] = {}
        return found

    # -- uploads in parts ----------------------------------------------------------------------------------

    async def create_upload(self, key: str, options: PutOptions) -> str:
        """S3's own; what is never completed stays until a lifecycle rule of the bucket removes it."""
        name = self._key("createMultipartUpload", key)
        arguments = _described("createMultipartUpload", options) | {"Key": name}
        return str((await self._call("create_multipart_upload", arguments))["UploadId"])

    async def put_part(self, key: str, upload: str, number: int, content: Content) -> dict[str, Any]:
        """A part of S3's upload."""
        name = self._key("uploadPart", key)
        async with self._received("uploadPart", content, {"md5"}) as spool:
            arguments = {"Key": name, "UploadId": _upload_id("uploadPart", upload), "PartNumber": number}
            arguments["ContentMD5"] = _base64(spool.digests["md5"])
            try:
                answer = await self._call("upload_part", arguments, expected=_NO_UPLOAD, spool=spool)
            except _Answered as error:
                raise no_upload("uploadPart") from error
        return {"partNumber": number, "etag": _bare(answer["ETag"])}

    async def complete_upload(self, key: str, upload: str, parts: list[Part]) -> Record:
        """S3's own, once the parts have been looked at."""
        what = "completeMultipartUpload"
        name = self._key(what, key)
        arguments: dict[str, Any] = {"Key": name, "UploadId": _upload_id(what, upload)}
        try:
            chosen = chosen_parts(parts, await self._parts(arguments))
            arguments["MultipartUpload"] = {
                "Parts": [{"PartNumber": part.number, "ETag": f'"{part.etag}"'} for part in chosen]
            }
            answer = await self._call("complete_multipart_upload", arguments, expected=_NO_UPLOAD)
        except _Answered as error:
            raise no_upload(what) from error
        record = await self._find(key, name)
        return record or _record(key, sum(part.size for part in chosen), _bare(answer["ETag"]), time.time(), {})

    async def _parts(self, upload: dict[str, Any]) -> dict[int, StoredPart]:
        found: dict[int, StoredPart] = {}
        after = 0
        while True:
            answer = await self._call("list_parts", upload | {"PartNumberMarker": after}, expected=_NO_UPLOAD)
            for part in answer.get("Parts", ()):
                number = part["PartNumber"]
                found[number] = StoredPart(number, part["Size"], _bare(part["ETag"]))
            if not answer.get("IsTruncated") or not answer.get("Parts"):
                return found
            after = answer["NextPartNumberMarker"]

    async def abort_upload(self, key: str, upload: str) -> None:
        """S3's own."""
        what = "abortMultipartUpload"
        arguments = {"Key": self._key(what, key), "UploadId": _upload_id(what, upload)}
        try:
            await self._call("abort_multipart_upload", arguments, expected=_NO_UPLOAD)
        except _Answered as error:
            raise no_upload(what) from error

    # -- calls ---------------------------------------------------------------------------------------------

    def _key(self, what: str, key: str) -> str:
        """The key in S3. Raises InvalidInput if it cannot be one, or could be taken for another one on the way."""
        if {".", ".."} & set(key.split("/")):
            raise InvalidInput(
                f"{what}: The specified object name is not valid: in S3, no part between slashes may be . or .., which "
                "servers on the way resolve like paths. (10020)"
            )
        name = self._prefix + key
        if (num_bytes := len(name.encode())) > MAX_KEY_BYTES:
            raise InvalidInput(
                f"{what}: The specified object name is not valid: with the prefix of the bucket in S3 it has "
                f"{num_bytes} bytes and may have {MAX_KEY_BYTES}. (10020)"
            )
        return name

    async def _find(self, key: str, name: str) -> Record | None:
        found = await self._find_with_metadata(key, name)
        return found and found[0]

    async def _find_with_metadata(self, key: str, name: str) -> tuple[Record, dict[str, str]] | None:
        """The record of an object, and S3's user metadata of it."""
        try:
            answer = await self._call("head_object", {"Key": name}, expected=_MISSING)
        except _Answered:
            await self._check_bucket()
            return None
        modified_s = answer["LastModified"].timestamp()
        return _record(key, answer["ContentLength"], _bare(answer["ETag"]), modified_s, answer), answer["Metadata"]

    async def _check_bucket(self) -> None:
        """A missing object and a missing bucket look the same to `head_object`. Raises StorageUnavailable."""
        if self._place not in self._s3.known_buckets:
            with contextlib.suppress(_Answered):
                await self._call("head_bucket", {}, expected=frozenset({"403"}))
            self._s3.known_buckets.add(self._place)

    async def _open(self, name: str, etag: str, offset: int, length: int) -> _S3Body | OneBody | None:
        """These bytes of the object, if it still has that etag."""
        if length == 0:
            return OneBody()
        arguments = {"Key": name, "IfMatch": f'"{etag}"', "Range": f"bytes={offset}-{offset + length - 1}"}
        try:
            answer = await self._call("get_object", arguments, expected=_MISSING | _CHANGED | {"InvalidRange", "416"})
        except _Answered:
            return None
        body = _S3Body(self, answer["Body"], length)
        if _bare(answer["ETag"]) != etag or answer["ContentLength"] != length:
            await body.aclose()
            return None
        return body

    @contextlib.asynccontextmanager
    async def _received(self, what: str, content: Content, hashes: set[str]) -> AsyncIterator[Spool]:
        """The content: in memory if it is short, else in a file without a name."""
        folder = self._s3.spool_dir
        make_folder(folder)
        spool = Spool(lambda: tempfile.TemporaryFile(dir=folder), hashes)  # noqa: SIM115 - closed below
        try:
            await spool.receive(content, MAX_PUT_BYTES, too_long(what))
            yield spool
        finally:
            spool.close()

    async def _has_conditions(self) -> bool:
        """Whether the store minds conditions when it writes, which is tried with an object that is then removed."""
        known = self._s3.has_conditions.get(self._place)
        if known is not None:
            return known
        refused = _CHANGED | _MISSING | {"NotImplemented", "501"}
        probe = {"Key": f"{self._prefix}.edge-probe-{secrets.token_hex(8)}", "Body": b""}
        try:
            is_minded = await self._is_refused(probe | {"IfMatch": f'"{"0" * 32}"'}, refused)
            if is_minded:
                await self._call("put_object", probe)
                is_minded = await self._is_refused(probe | {"IfNoneMatch": "*"}, refused)
        finally:
            await self._call("delete_object", {"Key": probe["Key"]})
        self._s3.has_conditions[self._place] = is_minded
        return is_minded

    async def _is_refused(self, arguments: dict[str, Any], codes: frozenset[str]) -> bool:
        try:
            await self._call("put_object", arguments, expected=codes)
        except _Answered as error:
            return error.code not in {"NotImplemented", "501"}
        return False

    async def _call(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        *,
        expected: frozenset[str] = frozenset(),
        spool: Spool | None = None,
    ) -> Any:
        """The answer of S3 to one call, with the data in `spool` as its body.

        Raises:
            _Answered: S3 refuses it with a code that is `expected`.
            InvalidInput, RequestTooLarge: it refuses what the handler has sent.
            StorageUnavailable: anything else; the log has the reason.
        """

        def request() -> Any:
            client = self._s3.client(self._place)
            body = {} if spool is None else {"Body": _body_of(spool)}
            return getattr(client, operation)(Bucket=self._place.bucket, **arguments, **body)

        with self.failures_of(operation, expected):
            return await self._s3.run(request)

    @contextlib.contextmanager
    def failures_of(self, operation: str, expected: frozenset[str] = frozenset()) -> Iterator[None]:
        """Turn what the library raises into what `_call` raises."""
        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in expected:
                raise _Answered(code) from error
            raise self._refused(operation, code, str(error)) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise self._failed(operation, f"there are no credentials for S3: set {_CREDENTIALS}") from error
        except (BotoCoreError, OSError, ValueError) as error:  # ValueError: an endpoint that is none
            raise self._failed(operation, str(error)) from error

    def _refused(self, operation: str, code: str, message: str) -> EdgeError:
        """What a handler gets where S3 has refused a call."""
        bucket = self._place.bucket
        match code:
            case "EntityTooLarge":
                return too_long("put")
            case "KeyTooLongError" | "InvalidStorageClass" | "MetadataTooLarge" | "InvalidPart" | "EntityTooSmall":
                return InvalidInput(f"S3 refuses this: {code}")
            case "NoSuchBucket" | "404":
                return self._failed(
                    operation, f"there is no S3 bucket {bucket!r}: create it, or correct `s3` in [[r2_buckets]]"
                )
            case (
                "AccessDenied"
                | "403"
                | "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "ExpiredToken"
                | "InvalidToken"
            ):
                return self._failed(
                    operation,
                    f"S3 refuses the credentials ({code}): check {_CREDENTIALS}; they must allow s3:GetObject, "
                    f"s3:PutObject, s3:DeleteObject and s3:ListBucket on {bucket!r}",
                )
            case "PermanentRedirect" | "301" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException":
                return self._failed(
                    operation, f"the S3 bucket {bucket!r} is in another region ({code}): correct `region` of its `s3`"
                )
            case _:
                return self._failed(operation, message)

    def _failed(self, operation: str, reason: str) -> StorageUnavailable:
        where = self._place.endpoint or "S3"
        _log.error("%s, bucket %s, %s: %s", where, self._place.bucket, operation, reason)
        return StorageUnavailable(_UNUSABLE)

    async def run(self, operation: str, work: Callable[[], T]) -> T:
        """What `work` gives, which runs on a thread. Raises StorageUnavailable if S3 does not go on."""
        with self.failures_of(operation):
            return await self._s3.run(work)


class _S3Body:
    """A body that S3 sends, a piece at a time. Closed in the end and by `aclose`."""

    def __init__(self, bucket: S3Bucket, stream: Any, length: int) -> None:
        self._bucket = bucket
        self._stream = stream
        self._left = length

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._left == 0:
            await self.aclose()
            raise StopAsyncIteration
        piece: bytes = await self._bucket.run("get_object", lambda: self._stream.read(min(PIECE_BYTES, self._left)))
        if not piece:
            await self.aclose()
            raise StorageUnavailable("the object is shorter than it should be")
        self._left -= len(piece)
        return piece

    async def aclose(self) -> None:
        """Let go of the connection."""
        self._left = 0
        self._stream.close()


# -- records and headers -----------------------------------------------------------------------------------


def _record(key: str, size: int, etag: str, modified_s: float, answer: Mapping[str, Any]) -> Record:
    """An object as its handler knows it. S3 tells times in whole seconds only, and lists tell no more than this."""
    metadata = answer.get("Metadata", {})
    return {
        "key": key,
        "version": f"{int(modified_s):x}-{etag}",
        "size": size,
        "etag": etag,
        "uploaded": int(modified_s) * 1000,
        "checksums": _checksums(metadata.get(_CHECKSUMS, "")),
        "httpMetadata": _http_metadata(answer),
        "customMetadata": _custom_metadata(metadata),
        "storageClass": "InfrequentAccess" if str(answer.get("StorageClass", "")).endswith("_IA") else "Standard",
    }


def _listed(key: str, entry: Mapping[str, Any]) -> Record:
    return _record(key, entry["Size"], _bare(entry["ETag"]), entry["LastModified"].timestamp(), entry)


def _bare(etag: str) -> str:
    return etag.strip('"')


def _checksums(text: str) -> dict[str, str]:
    return dict(re.findall(r"(md5|sha1|sha256|sha384|sha512)=((?:[0-9a-f]{2})+)", text))


def _http_metadata(answer: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: answer[field] for name, field in _HTTP_METADATA.items() if answer.get(field)}
    if found.get("contentType") == _NO_CONTENT_TYPE:
        del found["contentType"]
    if isinstance(expires := answer.get("Expires"), datetime):
        found["cacheExpiry"] = expires.timestamp() * 1000
    return found


def _custom_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in metadata.items() if not name.startswith(_OURS)}
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, ValueError):  # somebody else's, then
        found |= msgspec.json.decode(base64.urlsafe_b64decode(metadata.get(_MORE, "")), type=dict[str, str])
    return found


def _described(what: str, options: PutOptions) -> dict[str, Any]:
    """The arguments of a call that describe an object.

    Raises:
        InvalidInput, RequestTooLarge: S3 cannot keep that; the message says what.
    """
    described = _http_arguments(what, options.httpMetadata)
    if options.storageClass == "InfrequentAccess":
        described["StorageClass"] = "STANDARD_IA"
    metadata = {name: value for name, value in options.customMetadata.items() if _is_header(name, value)}
    if more := {name: value for name, value in options.customMetadata.items() if name not in metadata}:
        metadata[_MORE] = base64.urlsafe_b64encode(msgspec.json.encode(more)).decode()
    check_metadata_size(what, size_of(metadata), MAX_USER_METADATA_BYTES, " that S3 keeps of customMetadata")
    return described | {"Metadata": metadata | {_WRITE: secrets.token_hex(16)}}


def _http_arguments(what: str, metadata: HttpMetadata) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, field in _HTTP_METADATA.items():
        value = getattr(metadata, name)
        if value and not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", value):
            raise InvalidInput(f"{what}: httpMetadata.{name} is a header in S3: printable ASCII, no space at its ends")
        if value:
            arguments[field] = value
    if metadata.cacheExpiry is not None:
        try:
            arguments["Expires"] = datetime.fromtimestamp(metadata.cacheExpiry / 1000, UTC)
        except (OverflowError, ValueError, OSError) as error:
            raise InvalidInput(f"{what}: httpMetadata.cacheExpiry is no time") from error
    return arguments


def _is_header(name: str, value: str) -> bool:
    """Whether S3 gives user metadata back just as it was given. Names lose their case, values what is not ASCII."""
    if name.startswith(_OURS) or not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        return False
    return re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", value) is not None and "=?" not in value


def _upload_id(what: str, upload: str) -> str:
    """`upload` as S3 could have given it. Raises InvalidInput if it could not."""
    if not re.fullmatch(r"[\x21-\x7e]{1,1024}", upload):
        raise no_upload(what)
    return upload


def _is_xml(name: str) -> bool:
    """Whether a key can be in XML as it is."""
    return not re.search(r"[\x00-\x1f\ufffe\uffff]", name)


def _body_of(spool: Spool) -> Any:
    if spool.file is None:
        return spool.data
    spool.file.seek(0)
    return spool.file


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
