"""The ledger: an append-only SQLite database of usage records and of the price books that were in force.

A record is durable once `record` returns: WAL with synchronous=FULL, which is an fsync at each commit. One
thread writes; everything that is queued while it commits goes into its next transaction (group commit), so
that many calls in flight share one fsync. A COMMIT that fails is *unknown*, not "not written"; writing the
same id again is harmless, and that alone makes the retry safe.

This protects against crashes of the process and, as far as the disk honours fsync, of the machine. It does
not protect against somebody who can write the file: the triggers refuse UPDATE and DELETE, but not `rm`. A file
that is removed while it is open is noticed at the next record, which begins a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edge import sqlite
from edge.billing.meter import UsageRecord
from edge.billing.prices import PriceBook
from edge.billing.times import now_us
from edge.errors import EdgeError, MeteringUnavailable

FILE_NAME = "ledger.sqlite"

_COLUMNS = UsageRecord.__struct_fields__
_INSERT = (
    f"INSERT INTO usage ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT (id) DO NOTHING"
)
_MAX_BATCH = 1000
_RETRY_DELAYS_S = (0.0, 0.05, 0.5)
_RETRY_AFTER_S = 5
_UNWRITTEN = (  # the path and the reason are the operator's: they are in the log
    "the call's usage record could not be written, and an answer that is not metered is not given: try again. "
    "The node's log has the reason; usually its disk is full"
)

_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    record: UsageRecord
    loop: asyncio.AbstractEventLoop
    durable: asyncio.Future[None]


class Ledger:
    """The `Meter` of a node: one open ledger file and the thread that writes it, until `close`."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger in the file `path`.

        Raises:
            EdgeError: it cannot be opened, or is of a newer version than this program.
        """
        self._path = path
        self._database: sqlite3.Connection | None = connect(path)
        self._opened_files = self._files()
        self._price_books: list[PriceBook] = []
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._write_until_closed, name="ledger", daemon=True)
        self._thread.start()

    async def record(self, record: UsageRecord) -> None:
        """Return once `record` is durable; a record of the same id that is already there stays as it is.

        Raises:
            MeteringUnavailable: it could not be written, or this is not known.
        """
        if self._closed:
            raise MeteringUnavailable("the ledger is closed: the node is shutting down")
        loop = asyncio.get_running_loop()
        entry = _Entry(record, loop, loop.create_future())
        self._queue.put(entry)
        await entry.durable

    def add_price_book(self, book: PriceBook) -> None:
        """Keep `book` beside the records that will name it, so that they can always be priced again.

        Raises:
            EdgeError: it could not be written.
        """
        with opened(self._path) as database:
            _insert_price_book(database, book)
        self._price_books.append(book)

    async def close(self) -> None:
        """Write what is queued, then stop. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- on the writer thread ------------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._next_batch()
            try:
                self._write(batch)
            except Exception:  # without this thread, every call from now on would wait for ever
                _log.exception("%d usage records could not be written to %s", len(batch), self._path)
                _resolve(batch, is_written=False)
        self._disconnect()

    def _next_batch(self) -> tuple[list[_Entry], bool]:
        """What is queued, waiting for the first entry; and whether more can follow."""
        batch: list[_Entry] = []
        while len(batch) < _MAX_BATCH and not (batch and self._queue.empty()):
            entry = self._queue.get()
            if entry is None:
                return batch, False
            batch.append(entry)
        return batch, True

    def _write(self, batch: list[_Entry]) -> None:
        failure: Exception | None = None
        for delay_s in _RETRY_DELAYS_S:
            time.sleep(delay_s)
            try:
                self._commit(batch)
            except (sqlite3.IntegrityError, sqlite3.DataError, ValueError, OverflowError) as error:
                if len(batch) > 1:  # one record that no column takes must not be the end of the others
                    for entry in batch:
                        self._write([entry])
                    return
                failure = error
                break
            except (sqlite3.Error, OSError, EdgeError) as error:
                self._disconnect()
                failure = error
            else:
                failure = None
                break
        if failure is not None:
            _log.error("%d usage records could not be written to %s: %s", len(batch), self._path, failure)
        _resolve(batch, is_written=failure is None)

    def _commit(self, batch: list[_Entry]) -> None:
        database = self._database or self._reconnect()
        with sqlite.transaction(database):
            database.executemany(_INSERT, [msgspec.structs.astuple(entry.record) for entry in batch])
        if self._files() != self._opened_files:  # SQLite itself goes on writing to a file that has no name any more
            _log.error("the ledger %s was removed or replaced while it was open; beginning a new one", self._path)
            raise EdgeError("it was removed or replaced")

    def _reconnect(self) -> sqlite3.Connection:
        (was_file, was_wal), (file, wal) = self._opened_files, self._files()
        if file != was_file and wal is not None and wal == was_wal:
            self._set_aside_wal()
        self._database = connect(self._path)
        for book in self._price_books:
            _insert_price_book(self._database, book)
        self._opened_files = self._files()
        return self._database

    def _set_aside_wal(self) -> None:
        """SQLite would apply the removed file's log to the one that is there now. It can hold records: it is kept."""
        kept = Path(f"{self._path}-wal.orphaned-{now_us()}")
        Path(f"{self._path}-wal").rename(kept)
        Path(f"{self._path}-shm").unlink(missing_ok=True)
        _log.error("the log of the ledger that was removed is kept as %s", kept)

    def _files(self) -> list[tuple[int, int] | None]:
        """Which files are at the ledger's paths now: device and inode, None for a missing one."""
        return [sqlite.identity_of(Path(f"{self._path}{suffix}")) for suffix in ("", "-wal")]

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _insert_price_book(database: sqlite3.Connection, book: PriceBook) -> None:
    database.execute(
        "INSERT INTO price_books (id, content, added_at) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING",
        (book.id, book.to_json().decode(), now_us()),
    )


def _resolve(batch: list[_Entry], *, is_written: bool) -> None:
    """Tell each caller of `record`, on its own event loop."""
    for loop in {entry.loop for entry in batch}:
        durable = [entry.durable for entry in batch if entry.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(_settle, durable, is_written)


def _settle(durable: list[asyncio.Future[None]], is_written: bool) -> None:
    for future in durable:
        if future.done():  # the caller was cancelled
            continue
        if is_written:
            future.set_result(None)
        else:
            future.set_exception(MeteringUnavailable(_UNWRITTEN, retry_after_s=_RETRY_AFTER_S))


# -- reading -----------------------------------------------------------------------------------------------


def latest_records(
    path: Path, *, limit: int, since_us: int | None = None, model: str | None = None, account: str | None = None
) -> list[UsageRecord]:
    """The last `limit` records of calls that ended at `since_us` or later, newest first.

    `model` is the id that was called, or the installed model that ran; without `account` they are of all accounts.

    Raises:
        EdgeError: the ledger cannot be read.
    """
    query = f"""
        SELECT {", ".join(_COLUMNS)} FROM usage
        WHERE ended_at >= :since AND (:model IS NULL OR model = :model OR served_by = :model)
              AND (:account IS NULL OR account = :account)
        ORDER BY ended_at DESC, id DESC LIMIT :limit
    """
    with opened(path) as database:
        wanted = {"since": since_us or 0, "model": model, "account": account, "limit": limit}
        rows = database.execute(query, wanted).fetchall()
    return list(map(_record, rows))


def records_of(database: sqlite3.Connection, label: str) -> list[UsageRecord]:
    """The records of the request with the id `label`, or the record with that id, in the order in which they ended."""
    query = f"SELECT {', '.join(_COLUMNS)} FROM usage WHERE request_id = :label OR id = :label ORDER BY ended_at, id"
    return [_record(row) for row in database.execute(query, {"label": label})]


def all_records(database: sqlite3.Connection) -> Iterator[UsageRecord]:
    """Every record, in the order in which they were written."""
    return map(_record, database.execute(f"SELECT {', '.join(_COLUMNS)} FROM usage ORDER BY rowid"))


def _record(row: tuple[Any, ...]) -> UsageRecord:
    return UsageRecord(**dict(zip(_COLUMNS, row, strict=True)))


def price_books(database: sqlite3.Connection) -> dict[str, PriceBook]:
    """Every price book that records can name, by id."""
    rows = database.execute("SELECT id, content FROM price_books").fetchall()
    return {book_id: PriceBook.from_json(content.encode()) for book_id, content in rows}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the ledger in the file `path`; where there is no such file yet, to an empty ledger.

    Raises:
        EdgeError: it cannot be opened or read.
    """
    database = connect(path) if path.exists() else connect(None)
    try:
        yield database
    except sqlite3.Error as error:
        raise EdgeError(f"the ledger {path} cannot be used: {error}") from error
    finally:
        database.close()


# -- the database ------------------------------------------------------------------------------------------


def connect(path: Path | None) -> sqlite3.Connection:
    """A connection to the ledger in the file `path` (None: in memory), created and brought up to date if need be.

    Raises:
        EdgeError: it cannot be opened, or is of a newer version than this program.
    """
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite.connect(path)
        try:
            database.execute("PRAGMA wal_autocheckpoint = 4000")
            sqlite.migrate(database, _MIGRATIONS, "the ledger", version=_version, record=_record_migration)
        except BaseException:
            database.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise EdgeError(f"the ledger {path} cannot be opened: {error}") from error
    return database


def _version(database: sqlite3.Connection) -> int:
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'migrations'").fetchone():
        return 0
    return int(database.execute("SELECT max(number) FROM migrations").fetchone()[0])


def _record_migration(database: sqlite3.Connection, number: int) -> None:
    values = (number, _MIGRATIONS[number - 1].__name__, now_us())
    database.execute("INSERT INTO migrations VALUES (?, ?, ?)", values)


def _m1_usage(database: sqlite3.Connection) -> None:
    database.execute(
        "CREATE TABLE migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL) STRICT"
    )
    database.execute(
        """
        CREATE TABLE usage (
            id TEXT PRIMARY KEY NOT NULL,
            request_id TEXT NOT NULL,
            started_at INTEGER NOT NULL,
            ended_at INTEGER NOT NULL,
            account TEXT NOT NULL,
            worker TEXT,
            version TEXT,
            model TEXT NOT NULL,
            served_by TEXT NOT NULL,
            task TEXT NOT NULL,
            trigger TEXT NOT NULL,
            status TEXT NOT NULL CHECK (status IN ('ok', 'cancelled', 'error')),
            error_code INTEGER,
            input_tokens INTEGER NOT NULL CHECK (input_tokens >= 0),
            cached_input_tokens INTEGER NOT NULL CHECK (cached_input_tokens >= 0),
            output_tokens INTEGER NOT NULL CHECK (output_tokens >= 0),
            compute_us INTEGER NOT NULL CHECK (compute_us >= 0),
            wall_us INTEGER NOT NULL CHECK (wall_us >= 0),
            price_version TEXT NOT NULL
        ) STRICT
        """
    )
    database.execute("CREATE INDEX usage_by_time ON usage (ended_at)")
    database.execute(
        "CREATE TABLE price_books "
        "(id TEXT PRIMARY KEY NOT NULL, content TEXT NOT NULL, added_at INTEGER NOT NULL) STRICT"
    )
    for table in ("usage", "price_books"):
        for verb in ("UPDATE", "DELETE"):
            database.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        # INSERT OR REPLACE deletes the old row without firing a DELETE trigger, so a known id is skipped before.
        database.execute(
            f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
            f"WHEN EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id) BEGIN SELECT RAISE(IGNORE); END"
        )


def _m2_sandbox(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE usage ADD COLUMN sandbox INTEGER NOT NULL DEFAULT 0")


def _m3_requests(database: sqlite3.Connection) -> None:
    database.execute("CREATE INDEX usage_by_request ON usage (request_id)")


_MIGRATIONS: tuple[sqlite.Migration, ...] = (_m1_usage, _m2_sandbox, _m3_requests)
"""Applied once each, in this order, and recorded in the table `migrations`; a released one is never edited."""
