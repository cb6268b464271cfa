"""The messages of one account's queues in an SQLite file. It knows nothing about workers or about who consumes them.

What was sent is durable once `send` returns. A message that is taken stays in the file, marked as in flight, until
`settle` says what became of it; `release` makes visible again what a consumer that died had taken.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from edge.bindings.storage import Database, make_folder
from edge.errors import OutOfCapacity

MAX_FILE_BYTES = 1 << 30
"""Of an account's file; beyond it nothing more is taken in."""
RETENTION_MS = 4 * 86_400_000
"""How long a message is kept that nobody consumes."""
_NUM_THREADS = 2


class Message(NamedTuple):
    """A message that was taken; `attempts` counts this delivery as well."""

    seq: int
    id: str
    sent_ms: int
    attempts: int
    body: bytes


class Backlog(NamedTuple):
    """What waits in a queue. Times are None where there is no such message."""

    num_visible: int
    oldest_visible_ms: int | None
    """Since when the first one that can be taken has been visible."""
    next_visible_ms: int | None
    """When the next one that was delayed becomes visible."""


class Retry(NamedTuple):
    """A message that is to be delivered again."""

    seq: int
    visible_ms: int
    is_counted: bool = True
    """False: what happened was no attempt."""


def _create(database: sqlite3.Connection) -> None:
    database.execute(
        """
        CREATE TABLE messages (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL,
            queue TEXT NOT NULL,
            sent_ms INTEGER NOT NULL,
            visible_ms INTEGER NOT NULL,
            attempts INTEGER NOT NULL DEFAULT 0,
            in_flight INTEGER NOT NULL DEFAULT 0,
            body BLOB NOT NULL
        )
        """
    )
    database.execute("CREATE INDEX messages_by_queue ON messages (queue, in_flight, visible_ms, seq)")


class QueueStore:
    """The file of one account in `folder`, until `close`.

    Every method raises StorageUnavailable if the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "queues")
        self._database = Database(folder, [_create], self._threads, self._threads)

    async def send(self, name: str, bodies: Sequence[tuple[bytes, int]], now_ms: int) -> None:
        """Add messages to the queue `name`: each a body and when it becomes visible.

        Raises:
            OutOfCapacity: the account's queues hold `MAX_FILE_BYTES`.
            StorageUnavailable: the disk has no room for bindings.
        """
        make_folder(self._database.folder)

        def send(connection: sqlite3.Connection) -> None:
            _check_room(connection)
            rows = [(secrets.token_hex(16), name, now_ms, visible_ms, body) for body, visible_ms in bodies]
            connection.executemany(
                "INSERT INTO messages (id, queue, sent_ms, visible_ms, body) VALUES (?, ?, ?, ?, ?)", rows
            )

        await self._database.write(send)

    async def look(self, name: str, limit: int, now_ms: int) -> Backlog:
        """What can be taken from the queue `name` now, counted up to `limit`, and later."""

        def look(connection: sqlite3.Connection) -> Backlog:
            of_queue = "FROM messages WHERE queue = ? AND in_flight = 0 AND visible_ms"
            visible = connection.execute(
                f"SELECT visible_ms {of_queue} <= ? ORDER BY visible_ms LIMIT ?", (name, now_ms, limit)
            ).fetchall()
            (later,) = connection.execute(f"SELECT MIN(visible_ms) {of_queue} > ?", (name, now_ms)).fetchone()
            return Backlog(len(visible), visible[0][0] if visible else None, later)

        return await self._database.read(look)

    async def take(self, name: str, limit: int, now_ms: int) -> list[Message]:
        """Up to `limit` visible messages of the queue `name`, which are in flight from here on."""

        def take(connection: sqlite3.Connection) -> list[Message]:
            rows = connection.execute(
                "SELECT seq, id, sent_ms, attempts + 1, body FROM messages "
                "WHERE queue = ? AND in_flight = 0 AND visible_ms <= ? ORDER BY visible_ms, seq LIMIT ?",
                (name, now_ms, limit),
            ).fetchall()
            connection.executemany(
                "UPDATE messages SET in_flight = 1, attempts = attempts + 1 WHERE seq = ?", [row[:1] for row in rows]
            )
            return [Message(*row) for row in rows]

        return await self._database.write(take)

    async def waiting(self, name: str) -> list[Message]:
        """All messages of the queue `name`, also delayed ones, but those in flight; they stay where they are."""

        def waiting(connection: sqlite3.Connection) -> list[Message]:
            rows = connection.execute(
                "SELECT seq, id, sent_ms, attempts, body FROM messages WHERE queue = ? AND in_flight = 0 "
                "ORDER BY visible_ms, seq",
                (name,),
            )
            return [Message(*row) for row in rows]

        return await self._database.read(waiting)

    async def settle(
        self, done: Sequence[int], retries: Sequence[Retry], dead: Sequence[int], dead_letter_queue: str, now_ms: int
    ) -> None:
        """Say what became of messages in flight, by `seq`: those that are `done` are removed, those that are `dead`
        become new messages of `dead_letter_queue`, or are removed if that is empty."""

        def settle(connection: sqlite3.Connection) -> None:
            if dead_letter_queue:
                rows = [(secrets.token_hex(16), dead_letter_queue, now_ms, now_ms, seq) for seq in dead]
                connection.executemany(
                    "INSERT INTO messages (id, queue, sent_ms, visible_ms, body) "
                    "SELECT ?, ?, ?, ?, body FROM messages WHERE seq = ?",
                    rows,
                )
            connection.executemany("DELETE FROM messages WHERE seq = ?", [(seq,) for seq in (*done, *dead)])
            connection.executemany(
                "UPDATE messages SET in_flight = 0, visible_ms = ?, attempts = attempts - ? WHERE seq = ?",
                [(retry.visible_ms, not retry.is_counted, retry.seq) for retry in retries],
            )

        await self._database.write(settle)

    async def release(self, name: str) -> None:
        """Make visible what is in flight in the queue `name`: nobody consumes it now."""

        def release(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE messages SET in_flight = 0 WHERE queue = ? AND in_flight = 1", (name,))

        await self._database.write(release)

    async def remove_expired(self, now_ms: int) -> int:
        """Remove what is older than `RETENTION_MS`; how many that were."""

        def remove(connection: sqlite3.Connection) -> int:
            expired = (now_ms - RETENTION_MS,)
            return connection.execute("DELETE FROM messages WHERE in_flight = 0 AND sent_ms < ?", expired).rowcount

        return await self._database.write(remove)

    async def close(self) -> None:
        """Finish what was asked for and close the file."""
        await asyncio.to_thread(self._threads.shutdown)
        self._database.close()


def _check_room(connection: sqlite3.Connection) -> None:
    pages, free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * page_bytes > MAX_FILE_BYTES:
        raise OutOfCapacity(
            f"the account's queues hold over {MAX_FILE_BYTES >> 20} MB of messages: "
            "a worker must consume them ([[queues.consumers]])"
        )
