"""R2 buckets: an SQLite index and files per account and bucket, below `r2` in the state directory.

A short object lies in the index itself; a longer one is a file, and one that came in parts is a file for each part, so
that completing an upload moves nothing. A file is synced before the index names it, and removed after the index has
forgotten it: what a crash leaves behind is a file that nobody names, which is swept a day later. Object data goes
through the node a piece at a time, whatever its length.

Methods that a handler calls (`workers.bindings.r2` does it for the documented API). A `record` is {key, version, size,
etag, uploaded (ms), checksums, httpMetadata, customMetadata, storageClass}:

* `head(key)` gives a record or None; `delete(keys)`; `list(options)` gives {objects, truncated, cursor,
  delimitedPrefixes}.
* `get(key, {onlyIf, range})` gives None, {record, failed: true} where a condition does not hold, or {record, range,
  data}; without `data` if that is longer than `INLINE_BYTES`: `read(key, version, offset, length)` then streams it, or
  answers 404 if another version has taken its place.
* `put(key, data or None, options)` stores data, or the body where it is None; gives the record, or None where a
  condition does not hold.
* `create_upload(key, options)` gives an id; `put_part(key, upload, number, data or None)` gives {partNumber, etag};
  `complete_upload(key, upload, parts)` gives a record; `abort_upload(key, upload)`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from edge.bindings.kv import end_of_prefix
from edge.bindings.storage import (
    Database,
    Databases,
    FileBody,
    Spool,
    content_of,
    make_folder,
    no_bytes,
    parse,
)
from edge.errors import InvalidInput, RequestTooLarge
from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer

MAX_KEY_BYTES = 1024
MAX_PUT_BYTES = 5 << 30
MAX_METADATA_BYTES = 8192
MAX_KEYS_PER_CALL = 1000
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
SWEEP_AFTER_S = 86_400
UPLOAD_EXPIRES_S = 7 * 86_400

_COLUMNS = "key, version, size, etag, uploaded, checksums, http_metadata, custom_metadata, storage_class"

_log = logging.getLogger(__name__)


class _HttpMetadata(msgspec.Struct, omit_defaults=True):
    contentType: str | None = None
    contentLanguage: str | None = None
    contentDisposition: str | None = None
    contentEncoding: str | None = None
    cacheControl: str | None = None
    cacheExpiry: float | None = None
    """Milliseconds since 1970."""


class _Conditions(msgspec.Struct):
    """`etagMatches` and `etagDoesNotMatch` are lists of etags or "*"; times are in milliseconds since 1970."""

    etagMatches: list[str] | None = None
    etagDoesNotMatch: list[str] | None = None
    uploadedBefore: float | None = None
    uploadedAfter: float | None = None
    secondsGranularity: bool = False


class _Range(msgspec.Struct):
    offset: int | None = None
    length: int | None = None
    suffix: int | None = None


class _GetOptions(msgspec.Struct):
    onlyIf: _Conditions | None = None
    range: _Range | None = None


class _PutOptions(msgspec.Struct):
    onlyIf: _Conditions | None = None
    httpMetadata: _HttpMetadata = msgspec.field(default_factory=_HttpMetadata)
    customMetadata: dict[str, str] = {}
    storageClass: str = "Standard"
    checksums: dict[str, str] = {}
    """At most one: `md5`, `sha1`, `sha256`, `sha384` or `sha512`, in hex."""


class _ListOptions(msgspec.Struct):
    prefix: str | None = None
    limit: int | None = None
    cursor: str | None = None
    delimiter: str | None = None
    startAfter: str | None = None
    include: list[str] = []


class _Part(msgspec.Struct):
    partNumber: int
    etag: str


class R2:
    """All R2 buckets of a node."""

    def __init__(self, state_dir: Path, clock: Callable[[], float] = time.time) -> None:
        """Keep state below `state_dir`. `clock` gives seconds since 1970."""
        self._databases = Databases("r2", state_dir, [_m1_objects])
        self._clock = clock
        self._sweeps: dict[Path, asyncio.Task[None]] = {}

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """One call of a handler: see the head of this module. Raises as `Provider.call`."""
        database = self._databases.of(caller, str(binding.props.get("id", "")))
        bucket = _Bucket(database, self._clock)
        if database.folder not in self._sweeps:
            self._sweeps[database.folder] = asyncio.create_task(bucket.sweep())
        match method:
            case "head":
                return JsonAnswer(await bucket.head(*parse("head", args, tuple[str])))
            case "get":
                return JsonAnswer(await bucket.get(*parse("get", args, tuple[str, _GetOptions])))
            case "read":
                return await bucket.read(*parse("get", args, tuple[str, str, int, int]))
            case "put":
                key, data, options = parse("put", args, tuple[str, bytes | None, _PutOptions])
                return JsonAnswer(await bucket.put(key, content_of("put", data, body), options))
            case "delete":
                await bucket.delete(*parse("delete", args, tuple[list[str]]))
                return JsonAnswer(None)
            case "list":
                return JsonAnswer(await bucket.list_objects(*parse("list", args, tuple[_ListOptions])))
            case "create_upload":
                shape = tuple[str, _PutOptions]
                return JsonAnswer(await bucket.create_upload(*parse("createMultipartUpload", args, shape)))
            case "put_part":
                key, upload, number, data = parse("uploadPart", args, tuple[str, str, int, bytes | None])
                content = content_of("uploadPart", data, body)
                return JsonAnswer(await bucket.put_part(key, upload, number, content))
            case "complete_upload":
                shape_of_parts = tuple[str, str, list[_Part]]
                arguments = parse("completeMultipartUpload", args, shape_of_parts)
                return JsonAnswer(await bucket.complete_upload(*arguments))
            case "abort_upload":
                await bucket.abort_upload(*parse("abortMultipartUpload", args, tuple[str, str]))
                return JsonAnswer(None)
            case _:
                raise InvalidInput(f"an R2 bucket has no method {method!r}")

    async def close(self) -> None:
        """Finish what is being written and close all files."""
        for sweep in self._sweeps.values():
            sweep.cancel()
        await asyncio.gather(*self._sweeps.values(), return_exceptions=True)
        await self._databases.close()


class _Stored(NamedTuple):
    """Where the bytes of an object are: in `data`, or in files of (name, size in bytes)."""

    record: dict[str, Any]
    data: bytes | None
    files: list[tuple[str, int]]


class _Bucket:
    """One bucket for one call."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._files = database.folder / "files"

    async def head(self, key: str) -> dict[str, Any] | None:
        name = _key("head", key)
        stored = await self._database.read(lambda database: _find(database, name))
        return stored and stored.record

    async def get(self, key: str, options: _GetOptions) -> dict[str, Any] | None:
        name = _key("get", key)
        stored = await self._database.read(lambda database: _find(database, name, with_data=True))
        if stored is None:
            return None
        if options.onlyIf is not None and not _holds(options.onlyIf, stored.record):
            return {"record": stored.record, "failed": True}
        offset, length = _resolve(options.range, stored.record["size"])
        answer: dict[str, Any] = {"record": stored.record, "range": {"offset": offset, "length": length}}
        if stored.data is not None or length == 0:
            answer["data"] = (stored.data or b"")[offset : offset + length]
        return answer

    async def read(self, key: str, version: str, offset: int, length: int) -> StreamAnswer:
        name = _key("get", key)

        def find(database: sqlite3.Connection) -> tuple[IO[bytes], list[tuple[Path, int, int]]] | None:
            stored = _find(database, name)
            if stored is None or stored.record["version"] != version or offset + length > stored.record["size"]:
                return None
            wanted = _cut(stored.files, offset, length)
            spans = [(self._path(file), start, num_bytes) for file, start, num_bytes in wanted]
            try:
                return open(spans[0][0], "rb"), spans
            except (FileNotFoundError, IndexError):
                return None

        found = None if min(offset, length) < 0 else await self._database.read(find)
        if found is None:
            return StreamAnswer(404, [], no_bytes())
        file, spans = found
        return StreamAnswer(200, [], FileBody(file, spans[0][1], spans[0][2], spans[1:]))

    async def put(self, key: str, content: bytes | AsyncIterator[bytes], options: _PutOptions) -> dict[str, Any] | None:
        name = _key("put", key)
        metadata = _metadata("put", options)
        wanted = _wanted_checksum(options.checksums)
        async with self._received("put", content, {"md5", *wanted}) as (spool, file):
            checksums = {each: digest.hex() for each, digest in spool.digests.items()}
            for algorithm, digest in wanted.items():
                if checksums[algorithm] != digest:
                    raise InvalidInput(
                        f"put: The {algorithm} checksum you specified did not match what we received. You provided "
                        f"{digest}, actual {checksums[algorithm]} (10037)"
                    )
            version = secrets.token_hex(16)
            etag = checksums["md5"]
            row = (name, version, spool.size_bytes, etag, self._now_ms(), _json(checksums), *metadata)

            def change(database: sqlite3.Connection) -> tuple[dict[str, Any] | None, list[str]]:
                if options.onlyIf is not None:
                    stored = _find(database, name)
                    if not _holds(options.onlyIf, stored and stored.record):
                        return None, [file] if file else []
                unnamed = _forget(database, name)
                if file:
                    _name_file(database, file, version, 0, spool.size_bytes, etag)
                return _insert(database, row, spool.data), unnamed

            record, unnamed = await self._database.write(change)
        await self._remove(unnamed)
        return record

    async def delete(self, keys: list[str]) -> None:
        if len(keys) > MAX_KEYS_PER_CALL:
            raise InvalidInput(f"delete: at most {MAX_KEYS_PER_CALL} keys at a time, not {len(keys)}")
        names = [_key("delete", key) for key in keys]
        await self._remove(
            await self._database.write(lambda database: [file for name in names for file in _forget(database, name)])
        )

    async def list_objects(self, options: _ListOptions) -> dict[str, Any]:
        limit = MAX_KEYS_PER_CALL if options.limit is None else options.limit
        if not 1 <= limit <= MAX_KEYS_PER_CALL:
            raise InvalidInput(f"list: MaxKeys params must be positive integer <= {MAX_KEYS_PER_CALL}. (10022)")
        return await self._database.read(lambda database: _list(database, options, limit))

    async def create_upload(self, key: str, options: _PutOptions) -> str:
        name = _key("createMultipartUpload", key)
        metadata = _metadata("createMultipartUpload", options)
        upload = secrets.token_urlsafe(32)

        def change(database: sqlite3.Connection) -> None:
            database.execute(
                "INSERT INTO uploads (id, key, started, http_metadata, custom_metadata, storage_class) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (upload, name, self._now_ms(), *metadata),
            )

        await self._database.write(change)
        return upload

    async def put_part(
        self, key: str, upload: str, number: int, content: bytes | AsyncIterator[bytes]
    ) -> dict[str, Any]:
        name = _key("uploadPart", key)
        if not 1 <= number <= MAX_PARTS:
            raise InvalidInput(f"uploadPart: Part number must be between 1 and {MAX_PARTS}, inclusive, not {number}")
        await self._database.read(lambda database: _upload(database, "uploadPart", name, upload))
        async with self._received("uploadPart", content, {"md5"}, must_be_file=True) as (spool, file):
            etag = spool.digests["md5"].hex()

            def change(database: sqlite3.Connection) -> list[str]:
                _upload(database, "uploadPart", name, upload)
                replaced = database.execute(
                    "DELETE FROM files WHERE owner = ? AND number = ? RETURNING name", (upload, number)
                ).fetchall()
                _name_file(database, file, upload, number, spool.size_bytes, etag)
                return [each for (each,) in replaced]

            unnamed = await self._database.write(change)
        await self._remove(unnamed)
        return {"partNumber": number, "etag": etag}

    async def complete_upload(self, key: str, upload: str, parts: list[_Part]) -> dict[str, Any]:
        name = _key("completeMultipartUpload", key)
        version = secrets.token_hex(16)

        def change(database: sqlite3.Connection) -> tuple[dict[str, Any], list[str]]:
            metadata = _upload(database, "completeMultipartUpload", name, upload)
            found = {
                number: (file, size, etag)
                for file, number, size, etag in database.execute(
                    "SELECT name, number, size, etag FROM files WHERE owner = ?", (upload,)
                )
            }
            chosen = _chosen_parts(parts, found)
            unnamed = _forget(database, name)
            database.executemany(
                "UPDATE files SET owner = ?, number = ? WHERE name = ?",
                [(version, index, file) for index, (file, _, _) in enumerate(chosen)],
            )
            unnamed += _forget_files(database, upload)
            database.execute("DELETE FROM uploads WHERE id = ?", (upload,))
            digests = b"".join(bytes.fromhex(etag) for _, _, etag in chosen)
            etag = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(chosen)}"
            size = sum(size for _, size, _ in chosen)
            row = (name, version, size, etag, self._now_ms(), _json({}), *metadata)
            return _insert(database, row, None), unnamed

        record, unnamed = await self._database.write(change)
        await self._remove(unnamed)
        return record

    async def abort_upload(self, key: str, upload: str) -> None:
        name = _key("abortMultipartUpload", key)

        def change(database: sqlite3.Connection) -> list[str]:
            _upload(database, "abortMultipartUpload", name, upload)
            database.execute("DELETE FROM uploads WHERE id = ?", (upload,))
            return _forget_files(database, upload)

        await self._remove(await self._database.write(change))

    async def sweep(self) -> None:
        """Give up uploads that were never completed, and remove the files that a crash has left."""
        if not self._files.exists():
            return

        def give_up(database: sqlite3.Connection) -> list[str]:
            before = self._now_ms() - UPLOAD_EXPIRES_S * 1000
            stale = database.execute("DELETE FROM uploads WHERE started < ? RETURNING id", (before,)).fetchall()
            return [file for (upload,) in stale for file in _forget_files(database, upload)]

        await self._remove(await self._database.write(give_up))
        old = await asyncio.to_thread(self._old_files)
        for start in range(0, len(old), MAX_KEYS_PER_CALL):
            names = old[start : start + MAX_KEYS_PER_CALL]
            named = await self._database.read(lambda database, names=names: _named(database, names))  # type: ignore[misc]
            await self._remove([name for name in names if name not in named])

    # -- files ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _received(
        self, what: str, content: bytes | AsyncIterator[bytes], hashes: set[str], must_be_file: bool = False
    ) -> AsyncIterator[tuple[Spool, str]]:
        """The content, and the name of its file, on disk; empty: it has none. The file is gone if the block fails.

        A block that is cancelled may have had the file named already: it stays, for `sweep` to look at.
        """
        file = secrets.token_hex(16)
        path = self._path(file)
        make_folder(path.parent)
        too_long = RequestTooLarge(
            f"{what}: Your proposed upload exceeds the maximum allowed size of {MAX_PUT_BYTES} bytes. (100100)"
        )
        spool = Spool(lambda: open(path, "xb"), hashes)  # noqa: SIM115 - closed below
        try:
            try:
                await spool.receive(content, MAX_PUT_BYTES, too_long)
                if must_be_file or spool.file is not None:
                    await asyncio.to_thread(spool.sync)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            yield spool, file if spool.file is not None else ""
        except Exception:
            path.unlink(missing_ok=True)
            raise
        finally:
            spool.close()

    def _path(self, file: str) -> Path:
        return self._files / file[:2] / file

    async def _remove(self, files: list[str]) -> None:
        if files:
            await asyncio.to_thread(self._unlink, files)

    def _unlink(self, files: list[str]) -> None:
        for file in files:
            try:
                self._path(file).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("cannot remove %s: %s", self._path(file), error)

    def _old_files(self) -> list[str]:
        before = time.time() - SWEEP_AFTER_S
        found = []
        for folder, _, files in os.walk(self._files):
            for file in files:
                with contextlib.suppress(OSError):
                    if os.stat(os.path.join(folder, file)).st_mtime < before:
                        found.append(file)
        return found

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


# -- the index, on other threads ---------------------------------------------------------------------------


def _find(database: sqlite3.Connection, name: bytes, with_data: bool = False) -> _Stored | None:
    row = database.execute(
        f"SELECT {_COLUMNS}, {'data' if with_data else 'NULL'} FROM objects WHERE key = ?", (name,)
    ).fetchone()
    if row is None:
        return None
    record = _record(row)
    files = database.execute("SELECT name, size FROM files WHERE owner = ? ORDER BY number", (record["version"],))
    return _Stored(record, row[-1], files.fetchall())


def _insert(database: sqlite3.Connection, row: tuple[Any, ...], data: bytes | None) -> dict[str, Any]:
    database.execute(f"INSERT INTO objects ({_COLUMNS}, data) VALUES ({', '.join('?' * (len(row) + 1))})", (*row, data))
    return _record(row)


def _forget(database: sqlite3.Connection, name: bytes) -> list[str]:
    """Remove an object from the index; the files that it had."""
    deleted = database.execute("DELETE FROM objects WHERE key = ? RETURNING version", (name,)).fetchall()
    return [file for (version,) in deleted for file in _forget_files(database, version)]


def _forget_files(database: sqlite3.Connection, owner: str) -> list[str]:
    return [
        name for (name,) in database.execute("DELETE FROM files WHERE owner = ? RETURNING name", (owner,)).fetchall()
    ]


def _name_file(database: sqlite3.Connection, file: str, owner: str, number: int, size: int, etag: str) -> None:
    database.execute(
        "INSERT INTO files (name, owner, number, size, etag) VALUES (?, ?, ?, ?, ?)", (file, owner, number, size, etag)
    )


def _named(database: sqlite3.Connection, names: list[str]) -> set[str]:
    marks = ", ".join("?" * len(names))
    return {name for (name,) in database.execute(f"SELECT name FROM files WHERE name IN ({marks})", names)}


def _upload(database: sqlite3.Connection, what: str, name: bytes, upload: str) -> tuple[Any, ...]:
    """The metadata of an upload of the object `name`."""
    row = database.execute(
        "SELECT http_metadata, custom_metadata, storage_class FROM uploads WHERE id = ? AND key = ?", (upload, name)
    ).fetchone()
    if row is None:
        raise InvalidInput(f"{what}: The specified multipart upload does not exist. (10024)")
    return tuple(row)


def _list(database: sqlite3.Connection, options: _ListOptions, limit: int) -> dict[str, Any]:
    prefix = (options.prefix or "").encode()
    stop = end_of_prefix(prefix)
    delimiter = (options.delimiter or "").encode()
    at, is_after = prefix, False
    for after in (options.startAfter.encode() if options.startAfter else b"", _cursor_key(options.cursor)):
        if after and after >= at:
            at, is_after = after, True
    if is_after and delimiter and (group := _group(at, prefix, delimiter)) == at:
        at, is_after = end_of_prefix(group) or group, False  # the cursor is a whole group
    objects: list[dict[str, Any]] = []
    prefixes: list[str] = []
    last = b""
    while True:
        room = limit - len(objects) - len(prefixes)
        rows = database.execute(
            f"SELECT {_COLUMNS} FROM objects WHERE key {'>' if is_after else '>='} ? AND (? IS NULL OR key < ?) "
            "ORDER BY key LIMIT ?",
            (at, stop, stop, room + 1 if not delimiter else 1),
        ).fetchall()
        for row in rows[:room]:
            last = at = row[0]
            is_after = True
            group = _group(row[0], prefix, delimiter) if delimiter else b""
            if group:
                prefixes.append(group.decode(errors="replace"))
                last = group
                at, is_after = end_of_prefix(group) or group, False
            else:
                objects.append(_listed(row, options.include))
        if not delimiter or not rows or room == 0:
            break
    found: dict[str, Any] = {"objects": objects, "delimitedPrefixes": prefixes, "truncated": len(rows) > room}
    if found["truncated"]:
        found["cursor"] = base64.urlsafe_b64encode(last).decode()
    return found


def _group(key: bytes, prefix: bytes, delimiter: bytes) -> bytes:
    """The part of `key` up to the first delimiter after the prefix; empty if there is none."""
    at = key.find(delimiter, len(prefix))
    return b"" if at < 0 else key[: at + len(delimiter)]


def _listed(row: tuple[Any, ...], include: list[str]) -> dict[str, Any]:
    record = _record(row)
    for field in ("httpMetadata", "customMetadata"):
        if field not in include:
            record[field] = {}
    return record


def _record(row: tuple[Any, ...]) -> dict[str, Any]:
    key, version, size, etag, uploaded, checksums, http_metadata, custom_metadata, storage_class = row[:9]
    return {
        "key": key.decode(),
        "version": version,
        "size": size,
        "etag": etag,
        "uploaded": uploaded,
        "checksums": msgspec.json.decode(checksums),
        "httpMetadata": msgspec.json.decode(http_metadata),
        "customMetadata": msgspec.json.decode(custom_metadata),
        "storageClass": storage_class,
    }


# -- arguments ---------------------------------------------------------------------------------------------


def _key(what: str, key: str) -> bytes:
    name = key.encode()
    if not 1 <= len(name) <= MAX_KEY_BYTES:
        raise InvalidInput(
            f"{what}: The specified object name is not valid: it has {len(name)} bytes and may have 1 to "
            f"{MAX_KEY_BYTES}. (10020)"
        )
    return name


def _metadata(what: str, options: _PutOptions) -> tuple[bytes, bytes, str]:
    """HTTP metadata, custom metadata and storage class as the index has them."""
    if options.storageClass not in ("Standard", "InfrequentAccess"):
        raise InvalidInput(f"{what}: storageClass is {options.storageClass!r}; use Standard or InfrequentAccess")
    http_metadata, custom_metadata = _json(options.httpMetadata), _json(options.customMetadata)
    size = len(http_metadata) + sum(
        len(key.encode()) + len(value.encode()) for key, value in options.customMetadata.items()
    )
    if size > MAX_METADATA_BYTES:
        raise RequestTooLarge(
            f"{what}: Your metadata headers exceed the maximum allowed metadata size: {size} of {MAX_METADATA_BYTES} "
            "bytes. (10012)"
        )
    return http_metadata, custom_metadata, options.storageClass


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


_DIGEST_CHARACTERS = {"md5": 32, "sha1": 40, "sha256": 64, "sha384": 96, "sha512": 128}


def _wanted_checksum(checksums: dict[str, str]) -> dict[str, str]:
    """The checksum that the caller gave, by algorithm, in lowercase hex."""
    if len(checksums) > 1:
        raise InvalidInput("put: You cannot specify multiple hashing algorithms. (10037)")
    for algorithm, digest in checksums.items():
        if algorithm not in _DIGEST_CHARACTERS:
            raise InvalidInput(f"put: {algorithm!r} is no checksum; use one of {', '.join(_DIGEST_CHARACTERS)}")
        if len(digest) != _DIGEST_CHARACTERS[algorithm]:
            raise InvalidInput(f"put: {algorithm} has {_DIGEST_CHARACTERS[algorithm]} digits in hex, not {len(digest)}")
    return {algorithm: digest.lower() for algorithm, digest in checksums.items()}


def _holds(conditions: _Conditions, record: dict[str, Any] | None) -> bool:
    """Whether an object, or that there is none, meets the conditions (RFC 9110, 13.2.2: etags go before times)."""
    if record is None:
        return conditions.etagMatches is None and conditions.uploadedAfter is None
    etag, uploaded = record["etag"], record["uploaded"]
    if conditions.secondsGranularity:
        uploaded = uploaded // 1000 * 1000
    if conditions.etagMatches is not None:
        if not _is_among(etag, conditions.etagMatches):
            return False
    elif conditions.uploadedBefore is not None and not uploaded < conditions.uploadedBefore:
        return False
    if conditions.etagDoesNotMatch is not None:
        return not _is_among(etag, conditions.etagDoesNotMatch)
    return conditions.uploadedAfter is None or uploaded > conditions.uploadedAfter


def _is_among(etag: str, etags: list[str]) -> bool:
    return any(each == "*" or each.removeprefix("W/").strip('"') == etag for each in etags)


def _resolve(wanted: _Range | None, size: int) -> tuple[int, int]:
    """Offset and length of a range within an object of `size` bytes."""
    if wanted is None:
        return 0, size
    offset, length, suffix = wanted.offset, wanted.length, wanted.suffix
    if suffix is not None:
        if offset is not None or length is not None or suffix <= 0:
            raise InvalidInput("get: range takes a suffix above 0, or offset and length. (10039)")
        offset = max(size - suffix, 0)
        length = size - offset
    offset = offset or 0
    if offset < 0 or (length is not None and length <= 0) or offset >= max(size, 1):
        raise InvalidInput(
            f"get: The requested range is not satisfiable: offset {offset}, length {length}, of {size} bytes. (10039)"
        )
    return offset, size - offset if length is None else min(length, size - offset)


def _cut(files: list[tuple[str, int]], offset: int, length: int) -> list[tuple[str, int, int]]:
    """Which bytes of which files make up a range: name, start, number of bytes."""
    wanted = []
    for name, size in files:
        if length > 0 and offset < size:
            num_bytes = min(size - offset, length)
            wanted.append((name, offset, num_bytes))
            length -= num_bytes
        offset = max(offset - size, 0)
    return wanted


def _chosen_parts(parts: list[_Part], found: dict[int, tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The parts that make up an object, in order: file, size and etag of each.

    Raises:
        InvalidInput: there is none, one is missing or there twice, or one but the last is too short.
    """
    what = "completeMultipartUpload"
    numbers = sorted(part.partNumber for part in parts)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InvalidInput(f"{what}: there must be parts, each once. (10025)")
    etags = {part.partNumber: part.etag.strip('"') for part in parts}
    for number in numbers:
        if number not in found or found[number][2] != etags[number]:
            raise InvalidInput(f"{what}: One or more of the specified parts could not be found: part {number}. (10025)")
    chosen = [found[number] for number in numbers]
    for number, (_, size, _) in zip(numbers[:-1], chosen[:-1], strict=True):
        if size < MIN_PART_BYTES:
            raise InvalidInput(
                f"{what}: Your proposed upload is smaller than the minimum allowed object size: part {number} has "
                f"{size} bytes, and all but the last need {MIN_PART_BYTES}. (10011)"
            )
        if size != chosen[0][1]:
            raise InvalidInput(f"{what}: All non-trailing parts must have the same length: part {number}. (10048)")
    return chosen


def _cursor_key(cursor: str | None) -> bytes:
    try:
        return base64.b64decode(cursor or "", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput("list: The cursor is invalid: use the one that the last list() gave") from error


def _m1_objects(database: sqlite3.Connection) -> None:
    database.execute(
        "CREATE TABLE objects (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, version TEXT NOT NULL, "
        "size INTEGER NOT NULL, etag TEXT NOT NULL, uploaded INTEGER NOT NULL, checksums BLOB NOT NULL, "
        "http_metadata BLOB NOT NULL, custom_metadata BLOB NOT NULL, storage_class TEXT NOT NULL, data BLOB) STRICT"
    )
    database.execute(
        "CREATE TABLE uploads (id TEXT PRIMARY KEY, key BLOB NOT NULL, started INTEGER NOT NULL, "
        "http_metadata BLOB NOT NULL, custom_metadata BLOB NOT NULL, storage_class TEXT NOT NULL) STRICT"
    )
    database.execute(
        "CREATE TABLE files (name TEXT PRIMARY KEY, owner TEXT NOT NULL, number INTEGER NOT NULL, "
        "size INTEGER NOT NULL, etag TEXT NOT NULL, UNIQUE (owner, number)) STRICT"
    )
