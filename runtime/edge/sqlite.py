"""What every SQLite file of the node has in common: commits that are on disk, transactions, numbered migrations.

Nothing but SQLite opens such a file, be it to copy it or to look at it: whoever closes a file loses all locks that its
process has on it, also those of SQLite's connections, and then another process believes that it is alone and removes
the log under them.

It knows nothing about tables, about who shares a connection, or about what becomes of errors.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edge.errors import StorageUnavailable

BUSY_TIMEOUT_S = 10.0
"""For which one process waits for another that writes to the same file."""

_MAX_LOG_BYTES = 64 << 20
"""What a write-ahead log may keep on disk once all of it is in its database."""

Migration = Callable[[sqlite3.Connection], None]


def connect(path: Path | None) -> sqlite3.Connection:
    """A durable connection to the file `path` (None: in memory), which is created if need be.

    It begins no transactions by itself, and any thread may use it, one at a time.

    Raises:
        sqlite3.Error: the file cannot be opened.
    """
    database = sqlite3.connect(
        path or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        be_durable(database)
    except BaseException:
        database.close()
        raise
    return database


def create_private(path: Path) -> None:
    """Make the file for its owner alone, unless it exists; SQLite gives its other files the same mode."""
    with contextlib.suppress(FileExistsError):  # one that is there is not opened
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def be_durable(database: sqlite3.Connection) -> None:
    """Have a commit return only when it is on disk, and readers not wait for a writer."""
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # Of several that make a new file, SQLite lets only the first wait for its turn.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                raise
            time.sleep(0.005)
    database.execute("PRAGMA synchronous = FULL")
    database.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction that is committed, or rolled back if its block raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # the first error is the one to report
            database.execute("ROLLBACK")
        raise


def _user_version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _set_user_version(database: sqlite3.Connection, number: int) -> None:
    database.execute(f"PRAGMA user_version = {number}")


def migrate(
    database: sqlite3.Connection,
    migrations: Sequence[Migration],
    what: str,
    *,
    version: Callable[[sqlite3.Connection], int] = _user_version,
    record: Callable[[sqlite3.Connection, int], None] = _set_user_version,
) -> None:
    """Apply those of `migrations` that the file has not seen, in their order and in one transaction.

    Args:
        what: the file in words, for the error.
        version: how many of them it has seen.
        record: called after each with its number, from 1.

    Raises:
        StorageUnavailable: it has seen more than there are: a newer program has written it.
    """
    if version(database) == len(migrations):
        return
    with transaction(database):
        found = version(database)  # again: another process may have migrated before our turn
        if found > len(migrations):
            raise StorageUnavailable(
                f"{what} is of version {found} and this program knows up to {len(migrations)}: upgrade edge-workers-ai"
            )
        for number, migration in enumerate(migrations[found:], start=found + 1):
            migration(database)
            record(database, number)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is at `path` now; None: nothing.

    SQLite goes on with a file that has no name any more, which only this tells.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
