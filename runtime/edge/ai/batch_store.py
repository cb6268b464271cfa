"""Batches on disk: their requests, answers and files, in one SQLite file and a folder beside it.

What is acknowledged survives a crash: commits are on disk before a method returns, and a file has its name only once
its content is. All methods of one store run one at a time, on a thread of its own. It knows nothing about models,
dialects or HTTP. Times are integer seconds since the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edge import sqlite
from edge.billing.meter import new_id
from edge.errors import DiskFull, InvalidInput, RequestTooLarge, UnknownBatch, UnknownFile

MIN_FREE_BYTES = 256 << 20
"""Of the disk, that batches leave to the node: its ledger must be writable to the end."""
MAX_NATIVE_BYTES = 24 << 20
"""Of the requests and answers of a native batch, which are answered in one piece: what is left then fails."""
REQUEST_OVERHEAD_BYTES = 512
"""What a request counts on top of its body: rows are not free."""
ORPHAN_S = 3600
"""A file without a row is left from a crash if it is older than this; a younger one may be on its way."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
State = Literal["waiting", "started", "ok", "error", "dropped"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
CANCELLABLE: tuple[Status, ...] = ("validating", "in_progress")

NATIVE = "ai/run"
"""The endpoint of native batches."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


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


class BatchStore:
    """The batches and files of a node in `folder`, until `close`.

    Every method raises DiskFull if the disk cannot be read or written; what was asked for is then undone.
    """

    def __init__(self, folder: Path, *, max_account_bytes: int) -> None:
        """`max_account_bytes` bounds what requests, answers and files of one account hold when more are taken in."""
        self._folder = folder
        self._files = folder / "files"
        self._max_account_bytes = max_account_bytes
        self._thread = ThreadPoolExecutor(1, "batches")
        self._database: sqlite3.Connection | None = None
        self._lock: int | None = None

    async def close(self) -> None:
        """Finish what was asked for and close the file. Closing again does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def become_runner(self) -> bool:
        """Whether this process is the one that runs the batches in the folder: there is one at a time.

        What its predecessor had begun waits again, under the usage ids that it has.
        """

        def become(database: sqlite3.Connection) -> bool:
            if self._lock is None:
                lock = os.open(self._folder / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    return False
                self._lock = lock
                database.execute("UPDATE requests SET state = 'waiting' WHERE state = 'started'")
            return True

        return await self._write(become)

    # -- batches -------------------------------------------------------------------------------------------

    async def add(self, batch: Batch, requests: Sequence[NewRequest] = ()) -> None:
        """Store a new batch.

        Raises:
            RequestTooLarge: the account holds too much.
        """
        size_bytes = sum(_size(request) for request in requests)

        def add(database: sqlite3.Connection) -> None:
            self._check_room(database, batch.account, size_bytes)
            row = _row(msgspec.structs.replace(batch, size_bytes=size_bytes, times={batch.status: batch.created_at}))
            database.execute(
                f"INSERT INTO batches ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()]
            )
            _insert(database, batch.id, 0, requests)

        await self._write(add)

    async def add_requests(self, batch: Batch, first_number: int, requests: Sequence[NewRequest]) -> None:
        """Store more requests of a batch that is being validated.

        Raises:
            RequestTooLarge: the account holds too much.
        """
        size_bytes = sum(_size(request) for request in requests)

        def add(database: sqlite3.Connection) -> None:
            self._check_room(database, batch.account, size_bytes)
            _insert(database, batch.id, first_number, requests)
            database.execute("UPDATE batches SET size_bytes = size_bytes + ? WHERE id = ?", (size_bytes, batch.id))

        await self._write(add)

    async def restart_validation(self, batch: str) -> None:
        """Forget the requests that were stored so far."""

        def restart(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM requests WHERE batch = ?", (batch,))
            database.execute("UPDATE batches SET size_bytes = 0 WHERE id = ?", (batch,))

        await self._write(restart)

    async def enter(
        self,
        batch: str,
        status: Status,
        now: int,
        *,
        only_from: Sequence[Status],
        errors: list[dict[str, Any]] | None = None,
        files: tuple[str | None, str | None] = (None, None),
    ) -> bool:
        """Have a batch enter `status`, if it is in one of `only_from`; whether it was.

        Args:
            errors: why it has failed.
            files: ids of its output and error file.
        """

        def enter(database: sqlite3.Connection) -> bool:
            changed = database.execute(
                f"UPDATE batches SET status = ?, times = json_set(times, '$.' || ?, ?), errors = ?, output_file = ?, "
                f"error_file = ?, ended_at = ? WHERE id = ? AND status IN ({_list(only_from)})",
                (
                    *(status, status, now, None if errors is None else msgspec.json.encode(errors).decode(), *files),
                    *(now if status in ENDED else None, batch),
                ),
            ).rowcount
            if status == "failed":
                database.execute("DELETE FROM requests WHERE batch = ?", (batch,))
            return bool(changed)

        return await self._write(enter)

    async def cancel(self, account: str, batch: str, now: int) -> Batch:
        """Have a batch start nothing more; what has begun is finished. One that is over stays as it is.

        Raises:
            UnknownBatch: the account has no such batch.
        """

        def cancel(database: sqlite3.Connection) -> Batch:
            found = _batch(database, account, batch)
            if found.status in CANCELLABLE:
                database.execute(
                    "UPDATE batches SET status = 'cancelling', times = json_set(times, '$.cancelling', ?) WHERE id = ?",
                    (now, batch),
                )
            return _batch(database, account, batch)

        return await self._write(cancel)

    async def give_up(self, now: int) -> None:
        """Drop what has not begun of batches that are cancelled, or whose time is over."""
        query = (
            "UPDATE requests SET state = 'dropped' WHERE state = 'waiting' AND batch IN (SELECT id FROM batches "
            "WHERE status = 'cancelling' OR status = 'in_progress' AND expires_at <= ?)"
        )
        await self._write(lambda database: database.execute(query, (now,)))

    async def get(self, account: str, batch: str) -> tuple[Batch, Progress]:
        """A batch of the account.

        Raises:
            UnknownBatch: the account has no such batch.
        """
        return await self._read(
            lambda database: (found := _batch(database, account, batch), _progress(database, found.id))
        )

    async def page(
        self, account: str, *, is_native: bool, after: str | None = None, offset: int = 0, limit: int
    ) -> list[tuple[Batch, Progress]]:
        """Batches of the account, newest first: those that come after the id `after`, without the first `offset`."""

        def page(database: sqlite3.Connection) -> list[tuple[Batch, Progress]]:
            rows = database.execute(
                f"SELECT * FROM batches WHERE account = ? AND (endpoint = '{NATIVE}') = ? AND (? IS NULL OR id < ?) "
                "ORDER BY id DESC LIMIT ? OFFSET ?",
                (account, is_native, after, after, limit, offset),
            ).fetchall()
            return [(batch := _from_row(row), _progress(database, batch.id)) for row in rows]

        return await self._read(page)

    async def count(self, account: str) -> int:
        """How many native batches the account has."""
        query = f"SELECT count(*) FROM batches WHERE account = ? AND endpoint = '{NATIVE}'"
        return await self._read(lambda database: int(database.execute(query, (account,)).fetchone()[0]))

    async def in_status(self, *statuses: Status) -> list[Batch]:
        """All batches in one of `statuses`, oldest first."""
        query = f"SELECT * FROM batches WHERE status IN ({_list(statuses)}) ORDER BY id"
        return await self._read(lambda database: [_from_row(row) for row in database.execute(query)])

    async def finished(self) -> list[Batch]:
        """The batches that only have to be closed: each request is over."""
        query = (
            "SELECT * FROM batches WHERE status IN ('in_progress', 'cancelling', 'finalizing') AND NOT EXISTS "
            "(SELECT 1 FROM requests WHERE batch = batches.id AND state IN ('waiting', 'started')) ORDER BY id"
        )
        return await self._read(lambda database: [_from_row(row) for row in database.execute(query)])

    async def has_dropped(self, batch: str) -> bool:
        """Whether a request was given up before it began."""
        query = "SELECT EXISTS (SELECT 1 FROM requests WHERE batch = ? AND state = 'dropped')"
        return await self._read(lambda database: bool(database.execute(query, (batch,)).fetchone()[0]))

    async def answered(self, batch: str, after: int, limit: int) -> list[Answered]:
        """Up to `limit` requests of a batch that are over, by number, from behind `after` on."""

        def answered(database: sqlite3.Connection) -> list[Answered]:
            rows = database.execute(
                "SELECT number, custom_id, state, coalesce(status_code, 0), coalesce(usage_id, ''), "
                "coalesce(answer, x'') FROM requests WHERE batch = ? AND number > ? "
                "AND state IN ('ok', 'error', 'dropped') ORDER BY number LIMIT ?",
                (batch, after, limit),
            )
            return [Answered(*row) for row in rows]

        return await self._read(answered)

    # -- running -------------------------------------------------------------------------------------------

    async def start(self, rank: Callable[[str], Any]) -> Item | None:
        """Start a waiting request: of the account with the lowest `rank`, of its oldest batch; None: none waits."""

        def start(database: sqlite3.Connection) -> Item | None:
            waits = "status = 'in_progress' AND EXISTS (SELECT 1 FROM requests WHERE batch = id AND state = 'waiting')"
            accounts = database.execute(f"SELECT DISTINCT account FROM batches WHERE {waits}").fetchall()
            if not accounts:
                return None
            account = min((row[0] for row in accounts), key=rank)
            batch = database.execute(
                "SELECT id, account, worker, endpoint, model, size_bytes FROM batches "
                f"WHERE account = ? AND {waits} ORDER BY created_at, id LIMIT 1",
                (account,),
            ).fetchone()
            row = database.execute(
                "SELECT number, body, attempts, usage_id FROM requests WHERE batch = ? AND state = 'waiting' "
                "ORDER BY number LIMIT 1",
                (batch["id"],),
            ).fetchone()
            is_full = batch["endpoint"] == NATIVE and batch["size_bytes"] > MAX_NATIVE_BYTES
            item = Item(
                batch=batch["id"],
                number=row["number"],
                account=account,
                worker=batch["worker"],
                endpoint=batch["endpoint"],
                model=batch["model"],
                body=row["body"],
                attempts=row["attempts"] + 1,
                usage_id=row["usage_id"] or new_id(),
                is_over_limit=is_full or _held(database, account) > self._max_account_bytes,
            )
            database.execute(
                "UPDATE requests SET state = 'started', attempts = ?, usage_id = ? WHERE batch = ? AND number = ?",
                (item.attempts, item.usage_id, item.batch, item.number),
            )
            return item

        return await self._write(start)

    async def finish(self, item: Item, state: State, status_code: int, answer: bytes) -> None:
        """Keep the answer of a started request."""

        def finish(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE requests SET state = ?, status_code = ?, answer = ? WHERE batch = ? AND number = ?",
                (state, status_code, answer, item.batch, item.number),
            )
            database.execute("UPDATE batches SET size_bytes = size_bytes + ? WHERE id = ?", (len(answer), item.batch))

        await self._write(finish)

    async def put_back(self, item: Item, *, is_recorded: bool, counts: bool) -> None:
        """Have a started request wait again.

        Args:
            is_recorded: its usage record is written: the next attempt needs another id.
            counts: it is one attempt more.
        """
        query = "UPDATE requests SET state = 'waiting', attempts = ?, usage_id = ? WHERE batch = ? AND number = ?"
        usage_id = None if is_recorded else item.usage_id
        values = (item.attempts if counts else item.attempts - 1, usage_id, item.batch, item.number)
        await self._write(lambda database: database.execute(query, values))

    # -- files ---------------------------------------------------------------------------------------------

    async def add_file(
        self, account: str, name: str, purpose: str, now: int, path: Path, *, id: str | None = None
    ) -> StoredFile:
        """Take over the file at `path`, which is on disk and in one of our folders: as a new one, or as our own with
        the given `id`, which may be there from an attempt that was cut short.

        Raises:
            RequestTooLarge: the account holds too much; our own files are not refused.
        """
        is_ours, id = id is not None, id or _file_id()
        with _failures():
            size_bytes = path.stat().st_size
        made = StoredFile(id=id, account=account, name=name, purpose=purpose, size_bytes=size_bytes, created_at=now)

        def add(database: sqlite3.Connection) -> StoredFile:
            if not is_ours:
                self._check_room(database, account, size_bytes)
            row = msgspec.structs.asdict(made)
            database.execute(
                f"INSERT OR REPLACE INTO files ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()]
            )
            path.rename(self._files / id)
            _sync_folder(self._files)
            return made

        return await self._write(add)

    async def check_room(self, account: str) -> None:
        """Whether the account may store anything more.

        Raises:
            RequestTooLarge: it holds too much.
        """
        await self._read(lambda database: self._check_room(database, account, 1))

    @contextlib.asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """A folder for what is going to be a file, or several; it is removed with what is left in it.

        What goes wrong on the disk within the block is raised as DiskFull, too.
        """
        with _failures():
            folder = await asyncio.to_thread(self._make_scratch)
            try:
                yield folder
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _make_scratch(self) -> Path:
        folder = self._folder / "scratch"
        for each in (self._files, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_space(folder)
        return Path(tempfile.mkdtemp(dir=folder))

    async def file(self, account: str, id: str) -> StoredFile:
        """A file of the account.

        Raises:
            UnknownFile: the account has no such file.
        """
        return await self._read(lambda database: _file(database, account, id))

    async def files(self, account: str, *, purpose: str | None, after: str | None, limit: int) -> list[StoredFile]:
        """Files of the account, newest first: those that come after the id `after`."""
        query = (
            "SELECT * FROM files WHERE account = ? AND (? IS NULL OR purpose = ?) AND (? IS NULL OR id < ?) "
            "ORDER BY id DESC LIMIT ?"
        )
        values = (account, purpose, purpose, after, after, limit)
        return await self._read(lambda database: [StoredFile(**dict(row)) for row in database.execute(query, values)])

    def path(self, file: StoredFile) -> Path:
        """Where the content of a file is."""
        return self._files / file.id

    async def remove_file(self, account: str, id: str) -> None:
        """Remove a file.

        Raises:
            UnknownFile: the account has no such file.
            InvalidInput: a batch that is being validated reads it.
        """

        def remove(database: sqlite3.Connection) -> None:
            _file(database, account, id)
            reader = database.execute(
                "SELECT id FROM batches WHERE input_file = ? AND status = 'validating'", (id,)
            ).fetchone()
            if reader is not None:
                raise InvalidInput(f"the file is being read by the batch {reader[0]}: wait a moment", param="file_id")
            database.execute("DELETE FROM files WHERE id = ?", (id,))

        await self._write(remove)
        await asyncio.to_thread((self._files / id).unlink, missing_ok=True)

    # -- retention -----------------------------------------------------------------------------------------

    async def remove_older(self, ended_before: int, now: int) -> None:
        """Remove batches that ended, and files that were made, before that time, and what crashes have left."""

        def remove(database: sqlite3.Connection) -> list[str]:
            old = f"SELECT id FROM batches WHERE ended_at < ? AND status IN ({_list(ENDED)})"
            database.execute(f"DELETE FROM requests WHERE batch IN ({old})", (ended_before,))
            database.execute(f"DELETE FROM batches WHERE id IN ({old})", (ended_before,))
            database.execute(
                "DELETE FROM files WHERE created_at < ? AND id NOT IN "
                f"(SELECT input_file FROM batches WHERE input_file IS NOT NULL AND status NOT IN ({_list(ENDED)}))",
                (ended_before,),
            )
            return [row[0] for row in database.execute("SELECT id FROM files")]

        kept = set(await self._write(remove))

        def sweep() -> None:
            left = [path for path in self._files.iterdir() if path.name not in kept]
            left += (self._folder / "scratch").glob("*")
            for path in left:
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < now - ORPHAN_S:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

        with _failures():
            await asyncio.to_thread(sweep)

    # -- on the store's thread -----------------------------------------------------------------------------

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await self._on_thread(query)

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        def write(database: sqlite3.Connection) -> T:
            with sqlite.transaction(database):
                return change(database)

        return await self._on_thread(write)

    async def _on_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def do() -> T:
            with _failures():
                return work(self._connected())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, do)
        except RuntimeError as error:
            raise DiskFull("the node is shutting down; try again", retry_after_s=5) from error

    def _connected(self) -> sqlite3.Connection:
        if self._database is None:
            self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
            database = sqlite.connect(self._folder / "index.sqlite")
            try:
                sqlite.migrate(database, _MIGRATIONS, "the batches' file")
            except BaseException:
                database.close()
                raise
            database.row_factory = sqlite3.Row
            self._database = database
        return self._database

    def _check_room(self, database: sqlite3.Connection, account: str, size_bytes: int) -> None:
        _check_space(self._folder)
        held = _held(database, account)
        if held + size_bytes > self._max_account_bytes:
            raise self._too_much(held + size_bytes)

    def _too_much(self, size_bytes: int) -> RequestTooLarge:
        return RequestTooLarge(
            f"with this, the account's batches and files would hold {size_bytes} bytes, over the limit of "
            f"{self._max_account_bytes}: delete files, wait until batches that ended are removed, or have the operator "
            "raise batches.max_mb_per_account"
        )


def new_batch_id(*, is_native: bool) -> str:
    """A new id; ids of one kind sort by the time at which they were minted."""
    return new_id() if is_native else f"batch_{new_id().replace('-', '')}"


def _file_id() -> str:
    return f"file-{new_id().replace('-', '')}"


# -- rows --------------------------------------------------------------------------------------------------

_JSON_COLUMNS = ("metadata", "errors", "times")


def _row(batch: Batch) -> dict[str, Any]:
    row = msgspec.structs.asdict(batch)
    for column in _JSON_COLUMNS:
        row[column] = None if row[column] is None else msgspec.json.encode(row[column]).decode()
    return row


def _from_row(row: sqlite3.Row) -> Batch:
    values = dict(row)
    for column in _JSON_COLUMNS:
        values[column] = None if values[column] is None else msgspec.json.decode(values[column])
    return Batch(**values)


def _batch(database: sqlite3.Connection, account: str, id: str) -> Batch:
    row = database.execute("SELECT * FROM batches WHERE id = ? AND account = ?", (id, account)).fetchone()
    if row is None:
        raise UnknownBatch(
            f"there is no batch {id[:100]!r} in this account, or it ended so long ago that it was removed"
        )
    return _from_row(row)


def _file(database: sqlite3.Connection, account: str, id: str) -> StoredFile:
    row = database.execute("SELECT * FROM files WHERE id = ? AND account = ?", (id, account)).fetchone()
    if row is None:
        raise UnknownFile(f"there is no file {id[:100]!r} in this account, or it is so old that it was removed")
    return StoredFile(**dict(row))


def _progress(database: sqlite3.Connection, batch: str) -> Progress:
    counts = dict(
        database.execute("SELECT state, count(*) FROM requests WHERE batch = ? GROUP BY state", (batch,)).fetchall()
    )
    return Progress(
        total=sum(counts.values()),
        started=counts.get("started", 0),
        completed=counts.get("ok", 0),
        failed=counts.get("error", 0) + counts.get("dropped", 0),
    )


def _insert(database: sqlite3.Connection, batch: str, first_number: int, requests: Iterable[NewRequest]) -> None:
    database.executemany(
        "INSERT INTO requests (batch, number, custom_id, body) VALUES (?, ?, ?, ?)",
        [
            (batch, number, request.custom_id, request.body)
            for number, request in enumerate(requests, start=first_number)
        ],
    )


def _held(database: sqlite3.Connection, account: str) -> int:
    """Bytes of the account's requests, answers and files."""
    sums = [f"SELECT coalesce(sum(size_bytes), 0) FROM {table} WHERE account = ?" for table in ("batches", "files")]
    return sum(int(database.execute(query, (account,)).fetchone()[0]) for query in sums)


def _size(request: NewRequest) -> int:
    return len(request.body) + REQUEST_OVERHEAD_BYTES


def _list(names: Sequence[str]) -> str:
    """Statuses, which are our own words, as SQL."""
    return ", ".join(f"'{name}'" for name in names)


# -- the disk ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn what the disk says into what a caller gets: the reason is the operator's, and in the log."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        _log.error("batches: %s", error)
        raise DiskFull(
            "what batches keep cannot be read or written: the node's log has the reason; usually its disk is full. "
            "Free some space, or move the state with `--state-dir`",
            retry_after_s=30,
        ) from error


def _check_space(folder: Path) -> None:
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < MIN_FREE_BYTES:
        raise DiskFull(
            f"the disk of the node has less than {MIN_FREE_BYTES >> 20} MiB left, which batches may not use: free some "
            "space, or move the state with `--state-dir`",
            retry_after_s=30,
        )


async def write_file(path: Path, content: AsyncIterator[bytes]) -> None:
    """Write a file in a `scratch` folder; it is on disk then."""
    with await asyncio.to_thread(open, path, "xb") as file:
        async for chunk in content:
            await asyncio.to_thread(_write_piece, file, chunk)
        await asyncio.to_thread(os.fsync, file.fileno())


def _write_piece(file: BufferedWriter, chunk: bytes) -> None:
    _check_space(Path(file.name).parent)
    file.write(chunk)
    file.flush()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


_MIGRATIONS: tuple[sqlite.Migration, ...] = (_create,)
