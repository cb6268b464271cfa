"""What the bindings that keep state have in common: paths, SQLite files with group commit, bodies on their way to disk.

It knows nothing about keys, rows or objects. A write is durable once it is acknowledged: WAL with synchronous=FULL,
which is an fsync at each commit. What queues up for a file while it commits goes into its next transaction, so that
many writers share one fsync. Names that come from handlers or configurations never become parts of paths as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import sqlite3
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

from edge.errors import EdgeError, InvalidInput, StorageUnavailable
from edge.isolates.base import Bundle
from edge.sqlite import Migration, connect, identity_of, migrate, transaction

INLINE_BYTES = 64 << 10
"""Up to here, a value or object travels within one frame."""
PIECE_BYTES = 256 << 10
MIN_FREE_BYTES = 256 << 20
"""Of the disk, that bindings leave to the node."""
_REMEDY = "free some space, or move the state with `--state-dir`"
_MAX_BATCH = 1000
_MAX_OPEN = 128
_NUM_THREADS = 8

_log = logging.getLogger(__name__)

T = TypeVar("T")


# -- names and arguments -----------------------------------------------------------------------------------


def folder_name(name: str) -> str:
    """`name` as the name of one folder: as it is if it is plain, else a hash that no plain name can equal."""
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
        return name
    return f"~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def folder_of(state_dir: Path, kind: str, account: str, id: str) -> Path:
    """Where a binding of `kind` with `id` keeps the state of `account`."""
    return state_dir / kind / folder_name(account) / folder_name(id)


def content_of(what: str, data: bytes | None, body: AsyncIterator[bytes] | None) -> bytes | AsyncIterator[bytes]:
    """What is to be stored: `data` if it came with the call, else the body.

    Raises:
        InvalidInput: there is neither, or `data` should have been a body: many calls may wait with what came with them.
    """
    if data is not None and len(data) > INLINE_BYTES:
        raise InvalidInput(f"{what}: more than {INLINE_BYTES} bytes are sent as a body")
    content = data if data is not None else body
    if content is None:
        raise InvalidInput(f"{what}: there is nothing to store")
    return content


def check_space(folder: Path | int) -> None:
    """Refuse to write where the node itself would soon have no disk left: in a folder, or to an open file.

    Raises:
        StorageUnavailable: less than `MIN_FREE_BYTES` are free.
    """
    if not has_space(folder):
        raise StorageUnavailable(
            f"the disk of the node has less than {MIN_FREE_BYTES >> 20} MiB left, which bindings may not use: {_REMEDY}"
        )


def has_space(folder: Path | int) -> bool:
    """Whether bindings may write to a folder, or to an open file."""
    return free_bytes(folder) >= MIN_FREE_BYTES


def free_bytes(folder: Path | int) -> int:
    """What the file system of a folder, or of an open file, has left for programs like this one."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def is_disk_full(error: sqlite3.Error | OSError) -> bool:
    """Whether `error` says that something could not be written because there was no room for it."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # The latter: not even for the index of the log, which readers need as well.
    return getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")


def make_folder(folder: Path) -> None:
    """Have `folder`, for something that is about to be written to it.

    Raises:
        StorageUnavailable: it cannot be made, or the disk has no room.
    """
    with _failures_of(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_space(folder)


@contextlib.contextmanager
def _failures_of(path: Path | str) -> Iterator[None]:
    """Turn what the file system says into what a handler gets: path and reason are the operator's, and in the log."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        _log.error("%s: %s", path, error)
        if is_disk_full(error):
            raise StorageUnavailable(f"the disk of the node is full: {_REMEDY}") from error
        raise StorageUnavailable("what the binding keeps cannot be used: the node's log has the reason") from error


# -- SQLite files ------------------------------------------------------------------------------------------


class Databases:
    """The SQLite files of one kind of binding, opened when used and closed when others are used more."""

    def __init__(self, kind: str, state_dir: Path, migrations: Sequence[Migration]) -> None:
        self._kind = kind
        self._state_dir = state_dir
        self._migrations = migrations
        self._open: OrderedDict[tuple[str, str], Database] = OrderedDict()
        self._closed = False
        self.readers = ThreadPoolExecutor(_NUM_THREADS, f"{kind}-read")
        self._writers = ThreadPoolExecutor(_NUM_THREADS, f"{kind}-write")

    def of(self, caller: Bundle, id: str) -> Database:
        """The file of `id` in the account of `caller`.

        Raises:
            StorageUnavailable: the node shuts down.
        """
        if self._closed:
            raise StorageUnavailable(f"{self._kind}: the node is shutting down; try again")
        key = (caller.account, id)
        if key not in self._open:
            folder = folder_of(self._state_dir, self._kind, *key)
            self._open[key] = Database(folder, self._migrations, self.readers, self._writers)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(key)
        return self._open[key]

    async def close(self) -> None:
        """Finish what is queued, then close all files. Closing again does nothing."""
        self._closed = True
        await asyncio.to_thread(self._writers.shutdown)
        await asyncio.to_thread(self.readers.shutdown)
        while self._open:
            self._open.popitem()[1].close()


class _Change(NamedTuple):
    apply: Callable[[sqlite3.Connection], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


class Database:
    """One SQLite file, `index.sqlite` in `folder`, which exists from the first write on.

    Functions given to `read` and `write` run on other threads. Connections are not shared: each is used by one thread
    at a time. A file that is removed while open is noticed, and a new one begun.
    """

    def __init__(
        self,
        folder: Path,
        migrations: Sequence[Migration],
        readers: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
    ) -> None:
        self.folder = folder
        self._path = folder / "index.sqlite"
        self._migrations = migrations
        self._readers = readers
        self._writers = writers
        self._idle: deque[_Connection] = deque()
        self._lock = threading.Lock()
        self._waiting: deque[_Change] = deque()
        self._is_writing = False
        self._closed = False

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """What `query` gives, as of the last acknowledged write or a later one.

        Raises:
            StorageUnavailable: the file cannot be read; the log has the reason.
        """
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, query)

    async def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Apply `change` in a transaction; return what it gave once that is durable. If it raises, it changes nothing.

        Raises:
            StorageUnavailable: the change could not be made durable, or this is not known; the log has the reason.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        with self._lock:
            self._waiting.append(_Change(change, loop, done))
            is_first, self._is_writing = not self._is_writing, True
        if is_first:
            self._writers.submit(self._write_next)
        result: T = await done
        return result

    def close(self) -> None:
        """Close what is idle now and the rest when it becomes idle."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._idle.pop().database.close()

    # -- on other threads ----------------------------------------------------------------------------------

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        with _failures_of(self._path), self._connection() as database:
            return query(database)

    def _write_next(self) -> None:
        """Commit what waits, up to `_MAX_BATCH` changes; then make room for other files before going on."""
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))]
        outcomes: list[tuple[Any, Exception | None]]
        try:
            with _failures_of(self._path), self._connection() as database:
                outcomes = _commit(database, batch)
        except Exception as error:  # whatever it is, callers must not wait for ever
            outcomes = [(None, error)] * len(batch)
        _resolve(batch, outcomes)
        with self._lock:
            self._is_writing = bool(self._waiting)
        if self._is_writing:
            try:
                self._writers.submit(self._write_next)
            except RuntimeError:  # shutting down: nothing new comes, what waits is written
                self._write_next()

    @contextlib.contextmanager
    def _connection(self) -> Any:
        connection = self._take() or _open(self._path, self._migrations)
        try:
            yield connection.database
        except BaseException:
            connection.database.close()
            raise
        if self._closed:
            connection.database.close()
        else:
            self._idle.append(connection)

    def _take(self) -> _Connection | None:
        """An idle connection to the file that is there now."""
        identity = identity_of(self._path)
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.identity == identity:
                return connection
            connection.database.close()


class _Connection(NamedTuple):
    database: sqlite3.Connection
    identity: tuple[int, int] | None


def _open(path: Path, migrations: Sequence[Migration]) -> _Connection:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    database = connect(path)
    try:
        migrate(database, migrations, "the state")
    except BaseException:
        database.close()
        raise
    return _Connection(database, identity_of(path))


def _commit(database: sqlite3.Connection, batch: list[_Change]) -> list[tuple[Any, Exception | None]]:
    """Result or error of each change, all in one transaction; one that fails takes back only what it did itself."""
    outcomes: list[tuple[Any, Exception | None]] = []
    with transaction(database):
        for change in batch:
            database.execute("SAVEPOINT change")
            try:
                with _failures_of("a change"):
                    outcomes.append((change.apply(database), None))
            except EdgeError as error:
                if not database.in_transaction:  # a full disk, for example, takes back the whole transaction
                    raise
                database.execute("ROLLBACK TO change")
                outcomes.append((None, error))
            database.execute("RELEASE change")
    return outcomes


def _resolve(batch: list[_Change], outcomes: Sequence[tuple[Any, Exception | None]]) -> None:
    """Tell each caller of `write`, on its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, Exception | None]]] = {}
    for change, (result, error) in zip(batch, outcomes, strict=True):
        by_loop.setdefault(change.loop, []).append((change.done, result, error))
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: Iterable[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    for future, result, error in settled:
        if future.done():  # the caller was cancelled
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


# -- bodies ------------------------------------------------------------------------------------------------


class Spool:
    """A body that has arrived: `data` if it is short, else `file`. `digests` are those of its bytes, by name."""

    def __init__(self, open_file: Callable[[], IO[bytes]], hashes: Iterable[str] = ()) -> None:
        self.size_bytes = 0
        self.file: IO[bytes] | None = None
        self._open_file = open_file
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in hashes}
        self._buffer = bytearray()

    @property
    def data(self) -> bytes | None:
        """The whole body, where it is not in `file`."""
        return bytes(self._buffer) if self.file is None else None

    @property
    def digests(self) -> dict[str, bytes]:
        """Digest by name of the hash."""
        return {name: digest.digest() for name, digest in self._hashes.items()}

    async def receive(self, body: bytes | AsyncIterator[bytes], max_bytes: int, too_long: EdgeError) -> None:
        """Take all of `body`, holding no more than a piece of it in memory.

        Raises:
            EdgeError: `too_long`, if it is longer than `max_bytes`; what the body itself raises, too.
        """
        async for chunk in _chunks(body):
            self.size_bytes += len(chunk)
            if self.size_bytes > max_bytes:
                raise too_long
            self._buffer += chunk
            if len(self._buffer) > (INLINE_BYTES if self.file is None else PIECE_BYTES):
                await asyncio.to_thread(self._flush)
        if self.file is None:
            self._hash()
        else:
            await asyncio.to_thread(self._flush)

    def sync(self) -> None:
        """Have the whole body on disk, in a file that has a name, and the name too."""
        if self.file is None:
            self._flush_to_file()
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        folder = os.open(os.path.dirname(self.file.name), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Let go of the file."""
        if self.file is not None:
            self.file.close()

    def _flush(self) -> None:
        self._hash()
        self._flush_to_file()

    def _flush_to_file(self) -> None:
        with _failures_of("a body"):
            if self.file is None:
                self.file = self._open_file()
            check_space(self.file.fileno())
            self.file.write(self._buffer)
        self._buffer.clear()

    def _hash(self) -> None:
        for digest in self._hashes.values():
            digest.update(self._buffer)


async def _chunks(body: bytes | AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if isinstance(body, bytes):
        yield body
        return
    async for chunk in body:
        yield chunk


class FileBody:
    """Bytes of a file, and of files that follow it, a piece at a time. Closed in the end and by `aclose`."""

    def __init__(self, file: IO[bytes], start: int, length: int, more: Iterable[tuple[Path, int, int]] = ()) -> None:
        """Give `length` bytes of `file` from `start` on, then those of `more`: path, start and length."""
        self._file = file
        self._left = length
        self._more = iter(more)
        file.seek(start)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self._left == 0:
            self._file.close()
            following = next(self._more, None)
            if following is None:
                raise StopAsyncIteration
            path, start, self._left = following
            try:
                self._file = await asyncio.to_thread(open, path, "rb")
            except OSError as error:
                raise StorageUnavailable("the object was removed while it was read; read it again") from error
            self._file.seek(start)
        piece: bytes = await asyncio.to_thread(self._file.read, min(self._left, PIECE_BYTES))
        if not piece:
            raise StorageUnavailable("a stored file is shorter than it should be: it was changed or damaged")
        self._left -= len(piece)
        return piece

    async def aclose(self) -> None:
        """Let go of the file: nobody wants the rest."""
        self._left, self._more = 0, iter(())
        self._file.close()

    def __del__(self) -> None:
        self._file.close()  # of an answer that was never asked for
