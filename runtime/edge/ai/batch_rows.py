"""The rows of the batches' database: its schema, what each row is, and how it is found.

Times are integer seconds since the epoch. This module knows nothing about threads, files or who asks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from edge import sqlite
from edge.billing.meter import new_id
from edge.errors import UnknownBatch, UnknownFile

REQUEST_OVERHEAD_BYTES = 512
"""What a request counts on top of its body: rows are not free."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
State = Literal["waiting", "started", "ok", "error", "dropped"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
CANCELLABLE: tuple[Status, ...] = ("validating", "in_progress")

NATIVE = "ai/run"
"""The endpoint of native batches."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, as its row is."""

    id: str
    account: str
    endpoint: str
    """The route that each request would have been sent to: `/v1/chat/completions`, ...; `ai/run` is the native one."""
    model: str | None
    """The model of a native batch as its caller wrote it; requests of others name their own."""
    status: Status
    created_at: int
    expires_at: int | None = None
    """When requests that have not begun are given up."""
    ended_at: int | None = None
    input_file: str | None = None
    output_file: str | None = None
    error_file: str | None = None
    window: str | None = None
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] | None = None
    """Why it failed validation, as OpenAI shows it."""
    times: dict[str, int] = {}
    """When it entered each status."""
    worker: str | None = None
    """Who made it, if a worker did."""
    size_bytes: int = 0


class Progress(msgspec.Struct, frozen=True):
    """How many requests of a batch are in which state."""

    total: int = 0
    started: int = 0
    completed: int = 0
    failed: int = 0
    """Also those that were given up before they began."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request that is going to be stored: its body as JSON, and the caller's own name for it."""

    body: bytes
    custom_id: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was started, and what it needs to be run."""

    batch: str
    number: int
    account: str
    worker: str | None
    endpoint: str
    model: str | None
    body: bytes
    attempts: int
    """How often it has been started, this time included."""
    usage_id: str
    """Of its usage record: on disk before the call is made, so that a call that is made again is not billed again."""
    failures: dict[int, int] = {}
    """By the number of a usage record, in how many attempts it was written as failed: the next one needs another id."""
    is_over_limit: bool
    """Whether there is no room for its answer: the account holds too much, or the native batch."""


class Answered(msgspec.Struct, frozen=True):
    """A request that is over, and its answer or error as JSON; `request_id` is empty if it never began."""

    number: int
    custom_id: str | None
    state: State
    status_code: int
    request_id: str
    answer: bytes


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an account."""

    id: str
    account: str
    name: str
    purpose: str
    size_bytes: int
    created_at: int


def new_batch_id(*, is_native: bool) -> str:
    """A new id; ids of one kind sort by the time at which they were minted."""
    return new_id() if is_native else f"batch_{new_id().replace('-', '')}"


def new_file_id() -> str:
    """A new id; ids sort by the time at which they were minted."""
    return f"file-{new_id().replace('-', '')}"


# -- rows --------------------------------------------------------------------------------------------------

_JSON_COLUMNS = ("metadata", "errors", "times")


def row_of(batch: Batch) -> dict[str, Any]:
    """The columns of a batch."""
    row = msgspec.structs.asdict(batch)
    for column in _JSON_COLUMNS:
        row[column] = None if row[column] is None else msgspec.json.encode(row[column]).decode()
    return row


def batch_of(row: sqlite3.Row) -> Batch:
    """The batch in a whole row."""
    values = dict(row)
    for column in _JSON_COLUMNS:
        values[column] = None if values[column] is None else msgspec.json.decode(values[column])
    return Batch(**values)


def find_batch(database: sqlite3.Connection, account: str, id: str, *, is_native: bool) -> Batch:
    """A batch of the account, of the native form or of OpenAI's: neither can be shown as the other.

    Raises:
        UnknownBatch: the account has no such batch.
    """
    row = database.execute(
        f"SELECT * FROM batches WHERE id = ? AND account = ? AND (endpoint = '{NATIVE}') = ?", (id, account, is_native)
    ).fetchone()
    if row is None:
        raise UnknownBatch(
            f"there is no batch {id[:100]!r} in this account, or it ended so long ago that it was removed"
        )
    return batch_of(row)


def find_file(database: sqlite3.Connection, account: str, id: str) -> StoredFile:
    """A file of the account.

    Raises:
        UnknownFile: the account has no such file.
    """
    row = database.execute("SELECT * FROM files WHERE id = ? AND account = ?", (id, account)).fetchone()
    if row is None:
        raise UnknownFile(f"there is no file {id[:100]!r} in this account, or it is so old that it was removed")
    return StoredFile(**dict(row))


def progress_of(database: sqlite3.Connection, batch: str) -> Progress:
    """How far a batch is."""
    counts = dict(
        database.execute("SELECT state, count(*) FROM requests WHERE batch = ? GROUP BY state", (batch,)).fetchall()
    )
    return Progress(
        total=sum(counts.values()),
        started=counts.get("started", 0),
        completed=counts.get("ok", 0),
        failed=counts.get("error", 0) + counts.get("dropped", 0),
    )


def insert_requests(
    database: sqlite3.Connection, batch: str, first_number: int, requests: Iterable[NewRequest]
) -> None:
    """Store requests of a batch, numbered from `first_number` on."""
    database.executemany(
        "INSERT INTO requests (batch, number, custom_id, body) VALUES (?, ?, ?, ?)",
        [
            (batch, number, request.custom_id, request.body)
            for number, request in enumerate(requests, start=first_number)
        ],
    )


def held_bytes(database: sqlite3.Connection, account: str) -> int:
    """Bytes of the account's requests, answers and files."""
    sums = [f"SELECT coalesce(sum(size_bytes), 0) FROM {table} WHERE account = ?" for table in ("batches", "files")]
    return sum(int(database.execute(query, (account,)).fetchone()[0]) for query in sums)


def size_of(request: NewRequest) -> int:
    """Bytes that a request counts for."""
    return len(request.body) + REQUEST_OVERHEAD_BYTES


def listed(names: Sequence[str]) -> str:
    """Statuses, which are our own words, as SQL."""
    return ", ".join(f"'{name}'" for name in names)


# -- the schema --------------------------------------------------------------------------------------------


def _create(database: sqlite3.Connection) -> None:
    database.execute(
        """
        CREATE TABLE batches (
            id TEXT PRIMARY KEY NOT NULL,
            account TEXT NOT NULL,
            worker TEXT,
            endpoint TEXT NOT NULL,
            model TEXT,
            status TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER,
            ended_at INTEGER,
            input_file TEXT,
            output_file TEXT,
            error_file TEXT,
            window TEXT,
            metadata TEXT,
            errors TEXT,
            times TEXT NOT NULL,
            size_bytes INTEGER NOT NULL
        ) STRICT
        """
    )
    database.execute("CREATE INDEX batches_by_account ON batches (account, id)")
    database.execute("CREATE INDEX batches_by_status ON batches (status, id)")
    database.execute(
        """
        CREATE TABLE requests (
            batch TEXT NOT NULL,
            number INTEGER NOT NULL,
            custom_id TEXT,
            state TEXT NOT NULL DEFAULT 'waiting',
            attempts INTEGER NOT NULL DEFAULT 0,
            usage_id TEXT,
            status_code INTEGER,
            body BLOB NOT NULL,
            answer BLOB,
            UNIQUE (batch, number)
        ) STRICT
        """
    )
    database.execute("CREATE INDEX requests_by_state ON requests (batch, state, number)")
    database.execute(
        """
        CREATE TABLE files (
            id TEXT PRIMARY KEY NOT NULL,
            account TEXT NOT NULL,
            name TEXT NOT NULL,
            purpose TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL
        ) STRICT
        """
    )
    database.execute("CREATE INDEX files_by_account ON files (account, id)")


def _add_failures(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE requests ADD COLUMN failures TEXT")


MIGRATIONS: tuple[sqlite.Migration, ...] = (_create, _add_failures)
