"""A bucket in files: an SQLite index and files, below `r2` in the state directory, by account and bucket.

A short object lies in the index itself; a longer one is a file, and one that came in parts is a file for each part, so
that completing an upload moves nothing. A file is synced before the index names it, and removed after the index has
forgotten it: what a crash leaves behind is a file that nobody names, which is swept a day later. Object data goes
through the node a piece at a time, whatever its length.
"""

from __future__ import annotations

import asyncio
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

from edge.bindings.base import OneBody
from edge.bindings.kv import end_of_prefix
from edge.bindings.r2.objects import (
    MAX_KEYS_PER_CALL,
    MAX_PUT_BYTES,
    Content,
    GetOptions,
    ListOptions,
    Part,
    PutOptions,
    Record,
    StoredPart,
    check_checksum,
    chosen_parts,
    cursor_of,
    holds,
    last_of,
    limit_of,
    no_upload,
    resolve,
    too_long,
    wanted_checksum,
)
from edge.bindings.storage import Database, FileBody, Spool, make_folder
from edge.isolates.base import StreamAnswer

SWEEP_AFTER_S = 86_400
UPLOAD_EXPIRES_S = 7 * 86_400

_COLUMNS = "key, version, size, etag, uploaded, checksums, http_metadata, custom_metadata, storage_class"

_log = logging.getLogger(__name__)


class _Stored(NamedTuple):
    """Where the bytes of an object are: in `data`, or in files of (name, size in bytes)."""

    record: dict[str, Any]
    data: bytes | None
    files: list[tuple[str, int]]


class FileBucket:
    """One bucket, for one call. See `Bucket`."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._files = database.folder / "files"

    async def head(self, key: str) -> Record | None:
        """Looked up in the index."""
        name = key.encode()
        stored = await self._database.read(lambda database: _find(database, name))
        return stored and stored.record

    async def get(self, key: str, options: GetOptions) -> dict[str, Any] | None:
        """Short objects come from the index, in `data`."""
        name = key.encode()
        stored = await self._database.read(lambda database: _find(database, name, with_data=True))
        if stored is None:
            return None
        if options.onlyIf is not None and not holds(options.onlyIf, stored.record):
            return {"record": stored.record, "failed": True}
        offset, length = resolve(options.range, stored.record["size"])
        answer: dict[str, Any] = {"record": stored.record, "range": {"offset": offset, "length": length}}
        if stored.data is not None or length == 0:
            answer["data"] = (stored.data or b"")[offset : offset + length]
        return answer

    async def read(self, key: str, version: str, offset: int, length: int) -> StreamAnswer:
        """Streamed from the object's files, which stay open though it is replaced."""
        name = key.encode()

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
            return StreamAnswer(404, [], OneBody())
        file, spans = found
        return StreamAnswer(200, [], FileBody(file, spans[0][1], spans[0][2], spans[1:]))

    async def put(self, key: str, content: Content, options: PutOptions) -> dict[str, Any] | None:
        """The data is on disk before the index names it."""
        name = key.encode()
        metadata = _metadata(options)
        wanted = wanted_checksum(options.checksums)
        async with self._received("put", content, {"md5", *wanted}) as (spool, file):
            checksums = {each: digest.hex() for each, digest in spool.digests.items()}
            check_checksum(wanted, checksums)
            version = secrets.token_hex(16)
            etag = checksums["md5"]
            row = (name, version, spool.size_bytes, etag, self._now_ms(), _json(checksums), *metadata)

            def change(database: sqlite3.Connection) -> tuple[dict[str, Any] | None, list[str]]:
                if options.onlyIf is not None:
                    stored = _find(database, name)
                    if not holds(options.onlyIf, stored and stored.record):
                        return None, [file] if file else []
                unnamed = _forget(database, name)
                if file:
                    _name_file(database, file, version, 0, spool.size_bytes, etag)
                return _insert(database, row, spool.data), unnamed

            record, unnamed = await self._database.write(change)
        await self._remove(unnamed)
        return record

    async def delete(self, keys: list[str]) -> None:
        """One transaction, whatever the number of keys."""
        names = [key.encode() for key in keys]
        await self._remove(
            await self._database.write(lambda database: [file for name in names for file in _forget(database, name)])
        )

    async def list_objects(self, options: ListOptions) -> dict[str, Any]:
        """One page, out of the index."""
        limit = limit_of(options)
        return await self._database.read(lambda database: _list(database, options, limit))

    async def create_upload(self, key: str, options: PutOptions) -> str:
        """An entry in the index."""
        name = key.encode()
        metadata = _metadata(options)
        make_folder(self._database.folder)
        upload = secrets.token_urlsafe(32)

        def change(database: sqlite3.Connection) -> None:
            database.execute(
                "INSERT INTO uploads (id, key, started, http_metadata, custom_metadata, storage_class) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (upload, name, self._now_ms(), *metadata),
            )

        await self._database.write(change)
        return upload

    async def put_part(self, key: str, upload: str, number: int, content: Content) -> dict[str, Any]:
        """A part is always a file."""
        name = key.encode()
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

    async def complete_upload(self, key: str, upload: str, parts: list[Part]) -> dict[str, Any]:
        """The object takes over the files of its parts."""
        name = key.encode()
        version = secrets.token_hex(16)

        def change(database: sqlite3.Connection) -> tuple[dict[str, Any], list[str]]:
            metadata = _upload(database, "completeMultipartUpload", name, upload)
            found = {
                number: StoredPart(number, size, etag, file)
                for file, number, size, etag in database.execute(
                    "SELECT name, number, size, etag FROM files WHERE owner = ?", (upload,)
                )
            }
            chosen = chosen_parts(parts, found)
            unnamed = _forget(database, name)
            database.executemany(
                "UPDATE files SET owner = ?, number = ? WHERE name = ?",
                [(version, index, part.file) for index, part in enumerate(chosen)],
            )
            unnamed += _forget_files(database, upload)
            database.execute("DELETE FROM uploads WHERE id = ?", (upload,))
            digests = b"".join(bytes.fromhex(part.etag) for part in chosen)
            etag = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(chosen)}"
            size = sum(part.size for part in chosen)
            row = (name, version, size, etag, self._now_ms(), _json({}), *metadata)
            return _insert(database, row, None), unnamed

        record, unnamed = await self._database.write(change)
        await self._remove(unnamed)
        return record

    async def abort_upload(self, key: str, upload: str) -> None:
        """Remove the entry and its files."""
        name = key.encode()

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
        self, what: str, content: Content, hashes: set[str], must_be_file: bool = False
    ) -> AsyncIterator[tuple[Spool, str]]:
        """The content, and the name of its file, on disk; empty: it has none. The file is gone if the block fails.

        A block that is cancelled may have had the file named already: it stays, for `sweep` to look at.
        """
        file = secrets.token_hex(16)
        path = self._path(file)
        make_folder(path.parent)
        spool = Spool(lambda: open(path, "xb"), hashes)  # noqa: SIM115 - closed below
        try:
            try:
                await spool.receive(content, MAX_PUT_BYTES, too_long(what))
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
        raise no_upload(what)
    return tuple(row)


def _list(database: sqlite3.Connection, options: ListOptions, limit: int) -> dict[str, Any]:
    prefix = (options.prefix or "").encode()
    stop = end_of_prefix(prefix)
    delimiter = (options.delimiter or "").encode()
    at, is_after = prefix, False
    for after in (options.startAfter.encode() if options.startAfter else b"", last_of(options.cursor)):
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
        found["cursor"] = cursor_of(last)
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


def _metadata(options: PutOptions) -> tuple[bytes, bytes, str]:
    """HTTP metadata, custom metadata and storage class as the index has them."""
    return _json(options.httpMetadata), _json(options.customMetadata), options.storageClass


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


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


MIGRATIONS = [_m1_objects]
"""Of the index."""
