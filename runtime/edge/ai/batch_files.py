"""The files of accounts, which batches read and write: their rows in the batches' database, their content beside it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec

from edge.ai.batch_disk import BatchDisk, failures, sync_folder
from edge.ai.batch_rows import StoredFile, find_file, new_file_id
from edge.errors import InvalidInput


class FileStore:
    """The files on `disk`. Every method raises DiskFull if it cannot be read or written."""

    def __init__(self, disk: BatchDisk) -> None:
        self._disk = disk
        self._arriving: Counter[str] = Counter()
        """By account, the bytes of the uploads that are under way."""

    async def add(
        self, account: str, name: str, purpose: str, now: int, path: Path, *, id: str | None = None
    ) -> StoredFile:
        """Take over the file at `path`, which is on disk and in one of our folders: as a new one, or as our own with
        the given `id`, which may be there from an attempt that was cut short.

        Raises:
            RequestTooLarge: the account holds too much; our own files are not refused.
        """
        is_ours, id = id is not None, id or new_file_id()
        with failures():
            size_bytes = path.stat().st_size
        made = StoredFile(id=id, account=account, name=name, purpose=purpose, size_bytes=size_bytes, created_at=now)

        def add(database: sqlite3.Connection) -> StoredFile:
            if not is_ours:
                self._disk.check_room(database, account, size_bytes)
            row = msgspec.structs.asdict(made)
            database.execute(
                f"INSERT OR REPLACE INTO files ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()]
            )
            path.rename(self._disk.files / id)
            sync_folder(self._disk.files)
            return made

        return await self._disk.write(add)

    async def get(self, account: str, id: str) -> StoredFile:
        """A file of the account.

        Raises:
            UnknownFile: the account has no such file.
        """
        return await self._disk.read(lambda database: find_file(database, account, id))

    async def page(self, account: str, *, purpose: str | None, after: str | None, limit: int) -> list[StoredFile]:
        """Files of the account, newest first: those that come after the id `after`."""
        query = (
            "SELECT * FROM files WHERE account = ? AND (? IS NULL OR purpose = ?) AND (? IS NULL OR id < ?) "
            "ORDER BY id DESC LIMIT ?"
        )
        values = (account, purpose, purpose, after, after, limit)
        return await self._disk.read(
            lambda database: [StoredFile(**dict(row)) for row in database.execute(query, values)]
        )

    def path(self, file: StoredFile) -> Path:
        """Where the content of a file is."""
        return self._disk.files / file.id

    async def remove(self, account: str, id: str) -> None:
        """Remove a file.

        Raises:
            UnknownFile: the account has no such file.
            InvalidInput: a batch that is being validated reads it.
        """

        def remove(database: sqlite3.Connection) -> None:
            find_file(database, account, id)
            reader = database.execute(
                "SELECT id FROM batches WHERE input_file = ? AND status = 'validating'", (id,)
            ).fetchone()
            if reader is not None:
                raise InvalidInput(f"the file is being read by the batch {reader[0]}: wait a moment", param="file_id")
            database.execute("DELETE FROM files WHERE id = ?", (id,))

        await self._disk.write(remove)
        await asyncio.to_thread((self._disk.files / id).unlink, missing_ok=True)

    def scratch(self) -> AbstractAsyncContextManager[Path]:
        """As `BatchDisk.scratch`."""
        return self._disk.scratch()

    @asynccontextmanager
    async def upload(self, account: str) -> AsyncIterator[tuple[Path, Callable[[int], Awaitable[None]]]]:
        """A `scratch` folder for a file that is on its way, and what is to be called with the number of bytes before so
        many more of it are written; it raises RequestTooLarge if the account would hold too much with all that are on
        their way to it, and DiskFull if the disk would."""
        num_bytes = 0

        async def reserve(more: int) -> None:
            nonlocal num_bytes
            num_bytes += more
            self._arriving[account] += more
            arriving = self._arriving[account]
            await self._disk.read(lambda database: self._disk.check_room(database, account, arriving))

        try:
            async with self._disk.scratch() as folder:
                yield folder, reserve
        finally:
            self._arriving[account] -= num_bytes
            if not self._arriving[account]:
                del self._arriving[account]
