"""Batches on disk: their requests and answers, from the first to the last.

Times are integer seconds since the epoch. It knows nothing about models, dialects or HTTP; what a row is, is in
`batch_rows`, the disk is `batch_disk`, and files are `batch_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge.ai.batch_disk import BatchDisk, failures
from edge.ai.batch_files import FileStore
from edge.ai.batch_rows import (
    CANCELLABLE,
    ENDED,
    NATIVE,
    Answered,
    Batch,
    Item,
    NewRequest,
    Progress,
    State,
    Status,
    batch_of,
    find_batch,
    held_bytes,
    insert_requests,
    listed,
    progress_of,
    row_of,
    size_of,
)
from edge.billing.meter import new_id

_failures_decoder = msgspec.json.Decoder(dict[int, int])

MAX_NATIVE_BYTES = 24 << 20
"""Of the requests and answers of a native batch, which are answered in one piece: what is left then fails."""
ORPHAN_S = 3600
"""A file without a row is left from a crash if it is older than this; a younger one may be on its way."""


class BatchStore:
    """The batches and files of a node in `folder`, until `close`.

    Every method raises DiskFull if the disk cannot be read or written; what was asked for is then undone.
    """

    def __init__(self, folder: Path, *, max_account_bytes: int) -> None:
        """`max_account_bytes` bounds what requests, answers and files of one account hold when more are taken in."""
        self._folder = folder
        self._disk = BatchDisk(folder, max_account_bytes=max_account_bytes)
        self.files = FileStore(self._disk)
        self._lock: int | None = None

    async def close(self) -> None:
        """Finish what was asked for and close the file. Closing again does nothing."""
        await self._disk.close()
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

        return await self._disk.write(become)

    # -- batches -------------------------------------------------------------------------------------------

    async def add(self, batch: Batch, requests: Sequence[NewRequest] = ()) -> None:
        """Store a new batch.

        Raises:
            RequestTooLarge: the account holds too much.
        """
        size_bytes = sum(size_of(request) for request in requests)

        def add(database: sqlite3.Connection) -> None:
            self._disk.check_room(database, batch.account, size_bytes)
            row = row_of(msgspec.structs.replace(batch, size_bytes=size_bytes, times={batch.status: batch.created_at}))
            database.execute(
                f"INSERT INTO batches ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()]
            )
            insert_requests(database, batch.id, 0, requests)

        await self._disk.write(add)

    async def add_requests(self, batch: Batch, first_number: int, requests: Sequence[NewRequest]) -> None:
        """Store more requests of a batch that is being validated.

        Raises:
            RequestTooLarge: the account holds too much.
        """
        size_bytes = sum(size_of(request) for request in requests)

        def add(database: sqlite3.Connection) -> None:
            self._disk.check_room(database, batch.account, size_bytes)
            insert_requests(database, batch.id, first_number, requests)
            database.execute("UPDATE batches SET size_bytes = size_bytes + ? WHERE id = ?", (size_bytes, batch.id))

        await self._disk.write(add)

    async def restart_validation(self, batch: str) -> None:
        """Forget the requests that were stored so far."""

        def restart(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM requests WHERE batch = ?", (batch,))
            database.execute("UPDATE batches SET size_bytes = 0 WHERE id = ?", (batch,))

        await self._disk.write(restart)

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
                f"error_file = ?, ended_at = ? WHERE id = ? AND status IN ({listed(only_from)})",
                (
                    *(status, status, now, None if errors is None else msgspec.json.encode(errors).decode(), *files),
                    *(now if status in ENDED else None, batch),
                ),
            ).rowcount
            if status == "failed":
                database.execute("DELETE FROM requests WHERE batch = ?", (batch,))
            return bool(changed)

        return await self._disk.write(enter)

    async def cancel(self, account: str, batch: str, now: int, *, is_native: bool) -> Batch:
        """Have a batch start nothing more; what has begun is finished. One that is over stays as it is.

        Raises:
            UnknownBatch: the account has no such batch of that form.
        """

        def cancel(database: sqlite3.Connection) -> Batch:
            found = find_batch(database, account, batch, is_native=is_native)
            if found.status in CANCELLABLE:
                database.execute(
                    "UPDATE batches SET status = 'cancelling', times = json_set(times, '$.cancelling', ?) WHERE id = ?",
                    (now, batch),
                )
            return find_batch(database, account, batch, is_native=is_native)

        return await self._disk.write(cancel)

    async def give_up(self, now: int) -> None:
        """Drop what has not begun of batches that are cancelled, or whose time is over."""
        query = (
            "UPDATE requests SET state = 'dropped' WHERE state = 'waiting' AND batch IN (SELECT id FROM batches "
            "WHERE status = 'cancelling' OR status = 'in_progress' AND expires_at <= ?)"
        )
        await self._disk.write(lambda database: database.execute(query, (now,)))

    async def get(self, account: str, batch: str, *, is_native: bool) -> tuple[Batch, Progress]:
        """A batch of the account.

        Raises:
            UnknownBatch: the account has no such batch of that form.
        """

        def get(database: sqlite3.Connection) -> tuple[Batch, Progress]:
            return find_batch(database, account, batch, is_native=is_native), progress_of(database, batch)

        return await self._disk.read(get)

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
            return [(batch := batch_of(row), progress_of(database, batch.id)) for row in rows]

        return await self._disk.read(page)

    async def count(self, account: str) -> int:
        """How many native batches the account has."""
        query = f"SELECT count(*) FROM batches WHERE account = ? AND endpoint = '{NATIVE}'"
        return await self._disk.read(lambda database: int(database.execute(query, (account,)).fetchone()[0]))

    async def in_status(self, *statuses: Status) -> list[Batch]:
        """All batches in one of `statuses`, oldest first."""
        query = f"SELECT * FROM batches WHERE status IN ({listed(statuses)}) ORDER BY id"
        return await self._disk.read(lambda database: [batch_of(row) for row in database.execute(query)])

    async def finished(self) -> list[Batch]:
        """The batches that only have to be closed: each request is over."""
        query = (
            "SELECT * FROM batches WHERE status IN ('in_progress', 'cancelling', 'finalizing') AND NOT EXISTS "
            "(SELECT 1 FROM requests WHERE batch = batches.id AND state IN ('waiting', 'started')) ORDER BY id"
        )
        return await self._disk.read(lambda database: [batch_of(row) for row in database.execute(query)])

    async def has_dropped(self, batch: str) -> bool:
        """Whether a request was given up before it began."""
        query = "SELECT EXISTS (SELECT 1 FROM requests WHERE batch = ? AND state = 'dropped')"
        return await self._disk.read(lambda database: bool(database.execute(query, (batch,)).fetchone()[0]))

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

        return await self._disk.read(answered)

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
                "SELECT number, body, attempts, usage_id, failures FROM requests WHERE batch = ? AND state = 'waiting' "
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
                failures=_failures_decoder.decode(row["failures"] or "{}"),
                is_over_limit=is_full or held_bytes(database, account) > self._disk.max_account_bytes,
            )
            database.execute(
                "UPDATE requests SET state = 'started', attempts = ?, usage_id = ? WHERE batch = ? AND number = ?",
                (item.attempts, item.usage_id, item.batch, item.number),
            )
            return item

        return await self._disk.write(start)

    async def finish(self, item: Item, state: State, status_code: int, answer: bytes) -> None:
        """Keep the answer of a started request."""

        def finish(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE requests SET state = ?, status_code = ?, answer = ? WHERE batch = ? AND number = ?",
                (state, status_code, answer, item.batch, item.number),
            )
            database.execute("UPDATE batches SET size_bytes = size_bytes + ? WHERE id = ?", (len(answer), item.batch))

        await self._disk.write(finish)

    async def put_back(self, item: Item, *, failures: dict[int, int], counts: bool) -> None:
        """Have a started request wait again.

        Args:
            failures: as in `Item`, this attempt included.
            counts: it is one attempt more.
        """
        query = "UPDATE requests SET state = 'waiting', attempts = ?, failures = ? WHERE batch = ? AND number = ?"
        attempts = item.attempts if counts else item.attempts - 1
        values = (attempts, msgspec.json.encode(failures).decode(), item.batch, item.number)
        await self._disk.write(lambda database: database.execute(query, values))

    # -- retention -----------------------------------------------------------------------------------------

    async def remove_older(self, ended_before: int, now: int) -> None:
        """Remove batches that ended, and files that were made, before that time, and what crashes have left."""

        def remove(database: sqlite3.Connection) -> list[str]:
            old = f"SELECT id FROM batches WHERE ended_at < ? AND status IN ({listed(ENDED)})"
            database.execute(f"DELETE FROM requests WHERE batch IN ({old})", (ended_before,))
            database.execute(f"DELETE FROM batches WHERE id IN ({old})", (ended_before,))
            database.execute(
                "DELETE FROM files WHERE created_at < ? AND id NOT IN "
                f"(SELECT input_file FROM batches WHERE input_file IS NOT NULL AND status NOT IN ({listed(ENDED)}))",
                (ended_before,),
            )
            return [row[0] for row in database.execute("SELECT id FROM files")]

        kept = set(await self._disk.write(remove))

        def sweep() -> None:
            left = [path for path in self._disk.files.iterdir() if path.name not in kept]
            left += (self._folder / "scratch").glob("*")
            for path in left:
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < now - ORPHAN_S:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

        with failures():
            await asyncio.to_thread(sweep)
