"""KV namespaces: one SQLite file per account and namespace, below `kv` in the state directory.

Limits and messages are those that Cloudflare documents, so that code which handles them goes on working. Unlike there,
a value can be read everywhere as soon as its `put` is acknowledged, and a key takes any number of writes a second.

Methods that a handler calls (`workers.bindings.kv` does it for the documented API):

* `get(key)` gives None, or {metadata, value} with the value as bytes; without `value` if it is longer than
  `INLINE_BYTES`: `read(key)` then streams it, with {metadata} as `info`, or answers 404.
* `get_many(keys)` gives a list with None or {metadata, value} for each.
* `put(key, value or None, options)` stores the value, or the body where it is None. `options` are `expiration` (seconds
  since 1970), `expirationTtl` (seconds) and `metadata` (JSON).
* `delete(key)`; `list({prefix, limit, cursor})` gives {keys: [{name, expiration, metadata}], list_complete, cursor}.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import math
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from edge.bindings.base import OneBody, parse
from edge.bindings.storage import (
    INLINE_BYTES,
    PIECE_BYTES,
    Databases,
    FileBody,
    Spool,
    content_of,
    has_space,
    make_folder,
)
from edge.errors import InvalidInput, RequestTooLarge, StorageUnavailable
from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 25 << 20
MAX_METADATA_BYTES = 1024
MAX_KEYS_PER_GET = 100
MAX_KEYS_PER_LIST = 1000
MIN_TTL_S = 60
MAX_COPIED_BYTES = 64 << 20
"""Of long values that are being read while the disk has no room for copies of them."""

_MAX_PURGED = 100


class _PutOptions(msgspec.Struct):
    expiration: float | None = None
    expirationTtl: float | None = None
    metadata: Any = None


class _ListOptions(msgspec.Struct):
    prefix: str | None = None
    limit: int | None = None
    cursor: str | None = None


class Kv:
    """All KV namespaces of a node."""

    def __init__(self, state_dir: Path, clock: Callable[[], float] = time.time) -> None:
        """Keep state below `state_dir`. `clock` gives seconds since 1970."""
        self._databases = Databases("kv", state_dir, [_m1_entries])
        self._clock = clock
        self.copies = _Copies()

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """One call of a handler: see the head of this module. Raises as `Provider.call`."""
        namespace = _Namespace(self, caller, str(binding.props.get("id", "")))
        match method:
            case "get":
                return JsonAnswer(await namespace.get(*parse("KV GET failed", args, tuple[str])))
            case "read":
                return await namespace.read(*parse("KV GET failed", args, tuple[str]))
            case "get_many":
                return JsonAnswer(await namespace.get_many(*parse("KV GET_BULK failed", args, tuple[list[str]])))
            case "put":
                shape = tuple[str, bytes | None, _PutOptions]
                key, value, options = parse("KV PUT failed", args, shape)
                await namespace.put(key, content_of("KV PUT failed", value, body), options)
                return JsonAnswer(None)
            case "delete":
                await namespace.delete(*parse("KV DELETE failed", args, tuple[str]))
                return JsonAnswer(None)
            case "list":
                return JsonAnswer(await namespace.list_keys(*parse("KV LIST failed", args, tuple[_ListOptions])))
            case _:
                raise InvalidInput(f"a KV namespace has no method {method!r}")

    async def close(self) -> None:
        """Finish what is being written and close all files."""
        await self._databases.close()

    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._clock()


class _Copies:
    """Where long values lie while they are read: in files without names, or in memory where the disk has no room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held_bytes = 0

    def new_file(self, folder: Path, size_bytes: int) -> IO[bytes]:
        """An empty file for a value of that size. It is gone when it is closed.

        Raises:
            StorageUnavailable: neither the disk nor `MAX_COPIED_BYTES` has room.
        """
        if has_space(folder):
            return tempfile.TemporaryFile(dir=folder)
        with self._lock:
            if self._held_bytes + size_bytes > MAX_COPIED_BYTES:
                raise StorageUnavailable(
                    "KV GET failed: 503 too many long values are being read for a node whose disk is full: read them "
                    "one after the other, or free some space"
                )
            self._held_bytes += size_bytes
        return _InMemory(lambda: self._give_back(size_bytes))

    def _give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._held_bytes -= size_bytes


class _InMemory(io.BytesIO):
    """Calls `on_close` once."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        super().__init__()
        self._on_close = on_close

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._on_close()


class _Namespace:
    """One namespace for one call."""

    def __init__(self, kv: Kv, caller: Bundle, id: str) -> None:
        self._kv = kv
        self._database = kv._databases.of(caller, id)

    async def get(self, key: str) -> dict[str, Any] | None:
        name = _key("GET", key)
        return await self._database.read(lambda database: self._get(database, name))

    async def get_many(self, keys: list[str]) -> list[dict[str, Any] | None]:
        if len(keys) > MAX_KEYS_PER_GET:
            raise InvalidInput(
                f"KV GET_BULK failed: 400 You can request a maximum of {MAX_KEYS_PER_GET} keys, not {len(keys)}"
            )
        names = [_key("GET_BULK", key) for key in keys]

        def query(database: sqlite3.Connection) -> list[dict[str, Any] | None]:
            left = MAX_VALUE_BYTES
            found = []
            for name in names:
                found.append(self._get(database, name, left))
                if found[-1] is not None:
                    if "value" not in found[-1]:
                        raise RequestTooLarge(
                            f"KV GET_BULK failed: 413 the values together are over the limit of {MAX_VALUE_BYTES} "
                            "bytes: get fewer keys at a time"
                        )
                    left -= len(found[-1]["value"])
            return found

        return await self._database.read(query)

    async def read(self, key: str) -> StreamAnswer:
        name = _key("GET", key)
        found = await self._database.read(lambda database: self._copy(database, name))
        if found is None:
            return StreamAnswer(404, [], OneBody())
        file, size, metadata = found
        return StreamAnswer(200, [], FileBody(file, 0, size), {"metadata": metadata})

    async def put(self, key: str, content: bytes | AsyncIterator[bytes], options: _PutOptions) -> None:
        name = _key("PUT", key)
        expiration_s = self._expiration_s(options)
        metadata = _metadata(options.metadata)
        make_folder(self._database.folder)
        # A body that is still on its way lies in a file without a name, which nothing has to clean up.
        spool = Spool(lambda: tempfile.TemporaryFile(dir=self._database.folder))  # noqa: SIM115 - `spool.close` does
        with contextlib.closing(spool):
            too_long = RequestTooLarge(f"KV PUT failed: 413 Value length exceeds limit of {MAX_VALUE_BYTES}.")
            await spool.receive(content, MAX_VALUE_BYTES, too_long)

            def change(database: sqlite3.Connection) -> None:
                database.execute(
                    "INSERT INTO entries (key, value, metadata, expiration) VALUES (?, ?, ?, ?) ON CONFLICT (key) "
                    "DO UPDATE SET value = excluded.value, metadata = excluded.metadata, "
                    "expiration = excluded.expiration",
                    (name, _whole(spool), metadata, expiration_s),
                )
                self._purge(database)

            await self._database.write(change)

    async def delete(self, key: str) -> None:
        name = _key("DELETE", key)

        def change(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM entries WHERE key = ?", (name,))
            self._purge(database)

        await self._database.write(change)

    async def list_keys(self, options: _ListOptions) -> dict[str, Any]:
        limit = MAX_KEYS_PER_LIST if options.limit is None else options.limit
        if not 1 <= limit <= MAX_KEYS_PER_LIST:
            raise InvalidInput(
                f"KV LIST failed: 400 Invalid key_count_limit of {limit}. "
                f"Please specify an integer from 1 to {MAX_KEYS_PER_LIST}."
            )
        prefix = (options.prefix or "").encode()
        after = _cursor_key(options.cursor) if options.cursor else b""
        start, operator = (after, ">") if after >= prefix and after else (prefix, ">=")
        stop = end_of_prefix(prefix)

        def query(database: sqlite3.Connection) -> list[Any]:
            return database.execute(
                f"SELECT key, metadata, expiration FROM entries WHERE key {operator} ? AND (? IS NULL OR key < ?) "
                "AND (expiration IS NULL OR expiration > ?) ORDER BY key LIMIT ?",
                (start, stop, stop, self._kv.now_s(), limit + 1),
            ).fetchall()

        rows = await self._database.read(query)
        found: dict[str, Any] = {"keys": [_listed(*row) for row in rows[:limit]], "list_complete": len(rows) <= limit}
        if len(rows) > limit:
            found["cursor"] = base64.urlsafe_b64encode(rows[limit - 1][0]).decode()
        return found

    # -- on other threads ----------------------------------------------------------------------------------

    def _get(self, database: sqlite3.Connection, name: bytes, max_bytes: int = INLINE_BYTES) -> dict[str, Any] | None:
        row = database.execute(
            "SELECT metadata, iif(length(value) <= ?, value, NULL) FROM entries "
            "WHERE key = ? AND (expiration IS NULL OR expiration > ?)",
            (max_bytes, name, self._kv.now_s()),
        ).fetchone()
        if row is None:
            return None
        metadata, value = row
        found = {"metadata": metadata and msgspec.json.decode(metadata)}
        return found if value is None else {**found, "value": value}

    def _copy(self, database: sqlite3.Connection, name: bytes) -> tuple[IO[bytes], int, Any] | None:
        """A long value as a file of its own, so that a slow reader holds no transaction and, if possible, no memory."""
        database.execute("BEGIN")
        try:
            row = database.execute(
                "SELECT id, metadata FROM entries WHERE key = ? AND (expiration IS NULL OR expiration > ?)",
                (name, self._kv.now_s()),
            ).fetchone()
            if row is None:
                return None
            with database.blobopen("entries", "value", row[0], readonly=True) as blob:
                size = len(blob)
                file = self._kv.copies.new_file(self._database.folder, size)
                while piece := blob.read(PIECE_BYTES):
                    file.write(piece)
            return file, size, row[1] and msgspec.json.decode(row[1])
        finally:
            database.execute("ROLLBACK")

    def _purge(self, database: sqlite3.Connection) -> None:
        """Remove a few of the entries that have expired: with every write, so that they cannot pile up."""
        database.execute(
            "DELETE FROM entries WHERE id IN (SELECT id FROM entries WHERE expiration <= ? LIMIT ?)",
            (self._kv.now_s(), _MAX_PURGED),
        )

    def _expiration_s(self, options: _PutOptions) -> int | None:
        """When the entry goes, in seconds since 1970.

        Raises:
            InvalidInput: that is less than a minute from now.
        """
        ttl_s, at_s = options.expirationTtl, options.expiration
        now_s = self._kv.now_s()
        if ttl_s is not None:
            if not MIN_TTL_S <= ttl_s <= 1e11:
                raise InvalidInput(
                    f"KV PUT failed: 400 Invalid expiration_ttl of {ttl_s:g}. "
                    f"Expiration TTL must be at least {MIN_TTL_S}."
                )
            return math.floor(now_s + ttl_s)
        if at_s is not None:
            if not math.floor(now_s) + MIN_TTL_S <= at_s <= 1e12:
                raise InvalidInput(
                    f"KV PUT failed: 400 Invalid expiration of {at_s:.0f}. Expiration times must be at least "
                    f"{MIN_TTL_S} seconds in the future, in seconds since 1970."
                )
            return math.floor(at_s)
        return None


def end_of_prefix(prefix: bytes) -> bytes | None:
    """The first key after all that begin with `prefix`; None: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def _key(operation: str, key: str) -> bytes:
    name = key.encode()
    if not name or key in (".", ".."):
        raise InvalidInput(
            f"KV {operation} failed: 400 Key name cannot be empty."
            if not name
            else f'KV {operation} failed: 400 "{key}" is not allowed as a key name.'
        )
    if len(name) > MAX_KEY_BYTES:
        raise InvalidInput(
            f"KV {operation} failed: 414 UTF-8 encoded length of {len(name)} exceeds key length limit of "
            f"{MAX_KEY_BYTES}."
        )
    return name


def _metadata(metadata: Any) -> bytes | None:
    if metadata is None:
        return None
    try:
        text = msgspec.json.encode(metadata)
    except RecursionError as error:
        raise InvalidInput("KV PUT failed: 400 the metadata is nested too deeply") from error
    if len(text) > MAX_METADATA_BYTES:
        raise RequestTooLarge(
            f"KV PUT failed: 413 Metadata length of {len(text)} exceeds limit of {MAX_METADATA_BYTES}."
        )
    return text


def _cursor_key(cursor: str) -> bytes:
    try:
        return base64.b64decode(cursor, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput("KV LIST failed: 400 Invalid cursor: use the one that the last list() gave") from error


def _listed(key: bytes, metadata: bytes | None, expiration_s: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": key.decode()}
    if expiration_s is not None:
        entry["expiration"] = expiration_s
    if metadata is not None:
        entry["metadata"] = msgspec.json.decode(metadata)
    return entry


def _whole(spool: Spool) -> bytes:
    if spool.file is None:
        return spool.data or b""
    spool.file.seek(0)
    return spool.file.read()


def _m1_entries(database: sqlite3.Connection) -> None:
    database.execute(
        "CREATE TABLE entries (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, metadata BLOB, "
        "expiration INTEGER) STRICT"
    )
    database.execute("CREATE INDEX expiring ON entries (expiration) WHERE expiration IS NOT NULL")
