"""Where batches are kept on disk: one SQLite file with its thread, and a folder of files beside it.

What is acknowledged survives a crash: commits are on disk before a method returns, and a file has its name only once
its content is. It knows nothing about what the rows and files mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from typing import TypeVar

from edge import sqlite
from edge.ai.batch_rows import MIGRATIONS, held_bytes
from edge.errors import DiskFull, RequestTooLarge

MIN_FREE_BYTES = 256 << 20
"""Of the disk, that batches leave to the node: its ledger must be writable to the end."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class BatchDisk:
    """The database and the files in `folder`, until `close`.

    What works on the database runs one at a time, on a thread of its own. Every method raises DiskFull if the disk
    cannot be read or written; what was asked for is then undone.
    """

    def __init__(self, folder: Path, *, max_account_bytes: int) -> None:
        """`max_account_bytes` bounds what requests, answers and files of one account hold when more are taken in."""
        self.folder = folder
        self.files = folder / "files"
        self.max_account_bytes = max_account_bytes
        self._thread = ThreadPoolExecutor(1, "batches")
        self._database: sqlite3.Connection | None = None

    async def close(self) -> None:
        """Finish what was asked for and close the file. Closing again does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._database is not None:
            self._database.close()
            self._database = None

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """What `query` gives."""

        def do() -> T:
            with failures():
                return query(self._connected())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, do)
        except RuntimeError as error:
            raise DiskFull("the node is shutting down; try again", retry_after_s=5) from error

    async def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """What `change` gives, in one transaction."""

        def do(database: sqlite3.Connection) -> T:
            with sqlite.transaction(database):
                return change(database)

        return await self.read(do)

    def _connected(self) -> sqlite3.Connection:
        if self._database is None:
            self._make(self.files)
            path = self.folder / "index.sqlite"
            sqlite.create_private(path)
            database = sqlite.connect(path)
            try:
                sqlite.migrate(database, MIGRATIONS, "the batches' file")
            except BaseException:
                database.close()
                raise
            database.row_factory = sqlite3.Row
            self._database = database
        return self._database

    def _make(self, *folders: Path) -> None:
        for folder in (self.folder, *folders):  # parents that `mkdir` makes by itself are open to everybody
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def check_room(self, database: sqlite3.Connection, account: str, size_bytes: int) -> None:
        """Within `read` or `write`: whether the account may store so much more.

        Raises:
            RequestTooLarge: it would hold too much.
        """
        check_space(self.folder)
        held = held_bytes(database, account)
        if held + size_bytes > self.max_account_bytes:
            raise self._too_much(held + size_bytes)

    def _too_much(self, size_bytes: int) -> RequestTooLarge:
        return RequestTooLarge(
            f"with this, the account's batches and files would hold {size_bytes} bytes, over the limit of "
            f"{self.max_account_bytes}: delete files, wait until batches that ended are removed, or have the operator "
            "raise batches.max_mb_per_account"
        )

    @contextlib.asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """A folder for what is going to be a file, or several; it is removed with what is left in it.

        What goes wrong on the disk within the block is raised as DiskFull, too.
        """
        with failures():
            folder = await asyncio.to_thread(self._make_scratch)
            try:
                yield folder
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _make_scratch(self) -> Path:
        folder = self.folder / "scratch"
        self._make(self.files, folder)
        check_space(folder)
        return Path(tempfile.mkdtemp(dir=folder))


@contextlib.contextmanager
def failures() -> Iterator[None]:
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


def check_space(folder: Path) -> None:
    """Raise DiskFull if the disk of `folder` has less than `MIN_FREE_BYTES` left."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < MIN_FREE_BYTES:
        raise DiskFull(
            f"the disk of the node has less than {MIN_FREE_BYTES >> 20} MiB left, which uploads and batches may not "
            "use: free some space, or move the state with `--state-dir`",
            retry_after_s=30,
        )


async def write_file(path: Path, content: AsyncIterator[bytes]) -> None:
    """Write a file in a `scratch` folder; it is on disk then."""
    with await asyncio.to_thread(open, path, "xb") as file:
        async for chunk in content:
            await asyncio.to_thread(_write_piece, file, chunk)
        await asyncio.to_thread(os.fsync, file.fileno())


def _write_piece(file: BufferedWriter, chunk: bytes) -> None:
    check_space(Path(file.name).parent)
    file.write(chunk)
    file.flush()


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
