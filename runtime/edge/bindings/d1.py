"""D1 databases: one SQLite file per account and database, below `d1` in the state directory.

The SQL is untrusted and runs in the node, so SQLite is held to what it cannot harm: an authorizer refuses other files,
transactions over several calls and pragmas that change how files are written; SQLite's defensive mode refuses writes
that could make a file corrupt; and text, columns, rows, results, the file and the time of a query are limited.
A call that fills a disk, with rows or with the temporary files of a large sort, is ended while the node has room left.

Methods that a handler calls (`workers.bindings.d1` does it for the documented API), with parameters that are None,
bool, int, float, str or bytes:

* `query([[sql, parameters], …])` runs single statements in one transaction and gives {results, bookmark}, with
  {columns, rows, meta} for each and rows as lists.
* `exec(sql)` runs all statements of a text, stops at the first that fails, and gives {count, duration}.

`meta.rows_read` counts the rows that came back, not those that were looked at: SQLite does not tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import re
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edge.bindings import storage
from edge.bindings.base import parse
from edge.bindings.storage import check_space, folder_of
from edge.errors import EdgeError, InvalidInput, OutOfCapacity, StorageUnavailable
from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer
from edge.sqlite import BUSY_TIMEOUT_S, be_durable, identity_of

QUERY_TIMEOUT_S = 30.0
MAX_SQL_BYTES = 100_000
MAX_VALUE_BYTES = 2_000_000
MAX_PARAMETERS = 100
MAX_STATEMENTS = 10_000
MAX_COLUMNS = 100
MAX_RESULT_BYTES = 16 << 20
MAX_FILE_BYTES = 10 << 30
MAX_HELD_BYTES = 64 << 20
"""Of an account's calls that wait or run."""
MAX_EXEC_BYTES = 8 << 20

_MAX_OPEN = 64
_MAX_READERS = 4
_MAX_PER_ACCOUNT = 16  # of all its databases, so that slow queries in one leave room for the others
_MAX_WAITING = 1000
_NUM_THREADS = 32
_STEPS_PER_TICK = 10_000
_PAGE_BYTES = 4096
_LOOK_AT_DISKS_EVERY_S = 0.05
_MAX_DISK_USE_BYTES = 16 << 20
"""Of one call, where a disk has less left than bindings must leave: reading goes on there, if it is no large sort."""
_TOKENS_PER_TICK = 1000

T = TypeVar("T")
Statement = tuple[str, list[Any]]
"""SQL, and what is bound to its parameters: None, bool, int, float, str or bytes."""

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_BYTES,
    sqlite3.SQLITE_LIMIT_COLUMN: MAX_COLUMNS,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: MAX_PARAMETERS,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_PRAGMAS = frozenset(
    {
        *("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"),
        *("foreign_key_check", "function_list", "quick_check", "optimize", "data_version"),
        *("defer_foreign_keys", "foreign_keys"),  # the latter does nothing within a transaction
    }
)
_MODULES = frozenset({"fts5", "fts5vocab", "rtree"})
_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})
_REFUSED = {
    sqlite3.SQLITE_ATTACH: "ATTACH: a binding is one database",
    sqlite3.SQLITE_DETACH: "DETACH: a binding is one database",
    sqlite3.SQLITE_TRANSACTION: "transactions in SQL: batch([…]) runs statements in one",
    sqlite3.SQLITE_SAVEPOINT: "savepoints in SQL: batch([…]) runs statements in one transaction",
    sqlite3.SQLITE_CREATE_TEMP_INDEX: "temporary objects: a connection is not yours between calls",
    sqlite3.SQLITE_CREATE_TEMP_TABLE: "temporary objects: a connection is not yours between calls",
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER: "temporary objects: a connection is not yours between calls",
    sqlite3.SQLITE_CREATE_TEMP_VIEW: "temporary objects: a connection is not yours between calls",
}
_COMMENTS = r"(?>\s+|--[^\n]*|/\*.*?(?:\*/|$))*+"  # atomic: there is one way to read it, and no other is tried
_VERB = re.compile(rf"{_COMMENTS}([A-Za-z]+)", re.DOTALL)
_READING = frozenset({"SELECT", "WITH", "VALUES", "EXPLAIN", "PRAGMA"})
_WRITING_WORD = re.compile(r"\b(INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
_SCHEMA = frozenset({"CREATE", "ALTER", "DROP"})
_NOT_THE_CALLER_S = frozenset(
    {"SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOTADB", "SQLITE_PERM"}
)

_log = logging.getLogger(__name__)


class D1:
    """All D1 databases of a node."""

    def __init__(self, state_dir: Path, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """Keep state below `state_dir`. A call may take `timeout_s` seconds in SQLite."""
        self._state_dir = state_dir
        self._timeout_s = timeout_s
        self._files: OrderedDict[tuple[str, str], _File] = OrderedDict()
        self._accounts: dict[str, asyncio.Semaphore] = {}
        self._held_bytes: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "d1")
        self._closed = False

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """One call of a handler: see the head of this module. Raises as `Provider.call`; texts begin as D1's do."""
        id = str(binding.props.get("id", ""))
        answer: Any
        match method:
            case "query":
                (statements,) = parse("D1_TYPE_ERROR", args, tuple[list[Statement]])
                is_read = not _seem_to_write(statements)
                with self._holding(caller.account, _checked_size(statements)):
                    results = await self._run(caller, id, is_read, lambda connection: connection.query(statements))
                answer = {"results": results, "bookmark": f"{time.time_ns() // 1_000_000:016x}"}
            case "exec":
                (text,) = parse("D1_TYPE_ERROR", args, tuple[str])
                if len(text.encode()) > MAX_EXEC_BYTES:
                    raise InvalidInput(f"D1_EXEC_ERROR: the text is over the limit of {MAX_EXEC_BYTES} bytes")
                with self._holding(caller.account, len(text)):
                    answer = await self.exec(caller, id, text)
            case _:
                raise InvalidInput(f"D1_ERROR: a D1 database has no method {method!r}")
        return JsonAnswer(answer)

    async def exec(self, caller: Bundle, id: str, text: str) -> dict[str, Any]:
        """Run the statements of `text`, of any length: {count, duration}; those before one that fails stay done.

        Raises:
            InvalidInput: a statement failed.
        """
        return await self._run(caller, id, False, lambda connection: connection.exec(text))

    async def migrations(self, caller: Bundle, id: str, table: str) -> list[tuple[str, str]]:
        """Name and time (UTC) of the migrations that were applied, oldest first; `table` is where this is kept."""
        return await self._run(caller, id, False, lambda connection: connection.migrations(table))

    async def migrate(self, caller: Bundle, id: str, table: str, name: str, text: str) -> bool:
        """Run the migration `text` as a whole or not at all, and note `name`; False: it was applied already.

        Raises:
            InvalidInput: a statement failed.
        """
        return await self._run(caller, id, False, lambda connection: connection.migrate(table, name, text))

    async def close(self) -> None:
        """Wait for the queries that run, then close all files. Closing again does nothing."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        while self._files:
            self._files.popitem()[1].close()

    async def _run(self, caller: Bundle, id: str, is_read: bool, job: Callable[[_Connection], T]) -> T:
        if self._closed:
            raise StorageUnavailable("D1_ERROR: the node is shutting down; try again")
        file = self._file(caller.account, id)
        async with self._accounts.setdefault(caller.account, asyncio.Semaphore(_MAX_PER_ACCOUNT)):
            if is_read:
                try:
                    return await self._use(file, file.reading, job, is_read=True)
                except _IsWrite:  # `WITH … INSERT`, for example
                    pass
            return await self._use(file, file.writing, job, is_read=False)

    async def _use(self, file: _File, turns: asyncio.Semaphore, job: Callable[[_Connection], T], is_read: bool) -> T:
        if file.num_waiting >= _MAX_WAITING:
            raise OutOfCapacity(f"D1_ERROR: {_MAX_WAITING} queries wait for this database already; try again later")
        file.num_waiting += 1
        try:
            async with turns:
                deadline = _Deadline(self._timeout_s)
                future = asyncio.get_running_loop().run_in_executor(self._threads, file.run, job, deadline, is_read)
                future.add_done_callback(_looked_at)
                try:
                    await self._watch_disks(file, deadline, future)
                    return future.result()
                except asyncio.CancelledError:
                    deadline.stop()
                    await asyncio.wait([future])  # its turn ends when the connection is free
                    raise
        finally:
            file.num_waiting -= 1

    async def _watch_disks(self, file: _File, deadline: _Deadline, future: asyncio.Future[Any]) -> None:
        """Until `future` is done, stop it where it fills a disk: SQLite itself cannot tell, between two rows of a sort
        it may write a gigabyte."""
        disks: _Disks | None = None
        while not (await asyncio.wait([future], timeout=_LOOK_AT_DISKS_EVERY_S))[0]:
            disks = disks or _Disks(file.path.parent)
            if shortage := disks.shortage():
                deadline.stop(StorageUnavailable(f"D1_ERROR: {shortage}"))

    @contextlib.contextmanager
    def _holding(self, account: str, num_bytes: int) -> Iterator[None]:
        """While a call of this size waits and runs. The accounts share the node's memory."""
        held = self._held_bytes.get(account, 0) + num_bytes
        if held > MAX_HELD_BYTES:
            raise OutOfCapacity(
                f"D1_ERROR: statements and values of {MAX_HELD_BYTES >> 20} MiB wait already; await some of them first"
            )
        self._held_bytes[account] = held
        try:
            yield
        finally:
            self._held_bytes[account] -= num_bytes

    def _file(self, account: str, id: str) -> _File:
        key = (account, id)
        if key not in self._files:
            self._files[key] = _File(folder_of(self._state_dir, "d1", account, id) / "database.sqlite")
            if len(self._files) > _MAX_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(key)
        return self._files[key]


def _looked_at(future: asyncio.Future[Any]) -> None:
    """Of a call that was cancelled nobody wants to know how it ended."""
    if not future.cancelled():
        future.exception()


class _IsWrite(Exception):
    """What was taken for reading wants to write."""


class _Disks:
    """Where a call can write: the disk of its database, and the one that SQLite's temporary files are on."""

    def __init__(self, folder: Path) -> None:
        self._free_before = {each: _free_bytes(each) for each in (folder, _temp_folder())}

    def shortage(self) -> str:
        """What is short, where a disk has less left than bindings must leave and has lost much since this was made."""
        for folder, before in self._free_before.items():
            free = _free_bytes(folder)
            if free < storage.MIN_FREE_BYTES and before - free > _MAX_DISK_USE_BYTES:
                return (
                    f"a disk filled while the call ran and has less than {storage.MIN_FREE_BYTES >> 20} MiB left: "
                    "use an index or LIMIT where it sorts; or free some space there, have $SQLITE_TMPDIR name a folder "
                    "with room for large sorts, or move the state with `--state-dir`"
                )
        return ""


def _free_bytes(folder: Path) -> int:
    try:
        return storage.free_bytes(folder)
    except OSError:  # the folder of a database that nobody has written to
        return sys.maxsize


def _temp_folder() -> Path:
    """Where SQLite puts temporary files (see its `unixTempFileDir`)."""
    candidates = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp")
    usable = (each for each in candidates if each and os.path.isdir(each) and os.access(each, os.W_OK | os.X_OK))
    return Path(next(usable, "."))


class _Deadline:
    """When a call has to end: when its time is over, or when it is stopped."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s
        self._reason: EdgeError | None = None
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    def is_over(self) -> bool:
        return time.monotonic() >= self._at

    def check(self) -> None:
        """Raises what `error` gives if the call has to end."""
        if self.is_over():
            raise self.error()

    def error(self, details: str = "") -> EdgeError:
        """Why the call has to end."""
        return self._reason or InvalidInput(
            f"D1_ERROR: the query ran longer than {self._timeout_s:g} s, the limit of a call{details}"
        )

    def stop(self, reason: EdgeError | None = None) -> None:
        """End what runs, from another thread; `reason` is what its caller gets."""
        with self._lock:
            self._at, self._reason = 0.0, reason
            if self._database is not None:
                self._database.interrupt()

    @contextlib.contextmanager
    def interrupting(self, database: sqlite3.Connection) -> Iterator[None]:
        """While the block runs, `database` is what `stop` interrupts."""
        with self._lock:
            self._database = database
        try:
            yield
        finally:
            with self._lock:
                self._database = None


class _File:
    """One database: its connections that are idle, and whose turn it is. One writes at a time."""

    def __init__(self, path: Path) -> None:
        self.writing = asyncio.Semaphore(1)
        self.reading = asyncio.Semaphore(_MAX_READERS)
        self.num_waiting = 0
        self.path = path
        self._idle: dict[bool, list[_Connection]] = {True: [], False: []}
        self._closed = False

    def run(self, job: Callable[[_Connection], T], deadline: _Deadline, is_read: bool) -> T:
        """`job` on a connection of its own, on this thread."""
        try:
            connection = self._take(is_read)
            try:
                with connection.held_to(deadline):
                    result = job(connection)
            except EdgeError:
                self._give_back(connection)
                raise
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY and is_read:
                raise _IsWrite from error
            raise _failure(error, deadline, None) from error
        except OSError as error:
            _log.error("%s: %s", self.path, error)
            raise StorageUnavailable(
                "D1_ERROR: the database cannot be opened: is the state folder writable?"
            ) from error
        return result

    def close(self) -> None:
        """Close what is idle now, and the rest when it becomes idle."""
        self._closed = True
        for connections in self._idle.values():
            while connections:
                connections.pop().close()

    def _take(self, is_read: bool) -> _Connection:
        identity = identity_of(self.path)
        while self._idle[is_read]:
            connection = self._idle[is_read].pop()
            if connection.identity == identity:
                return connection
            connection.close()
        if identity is None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _Connection(self.path, is_read)

    def _give_back(self, connection: _Connection) -> None:
        if self._closed:
            connection.close()
        else:
            self._idle[connection.is_read].append(connection)


class _Connection:
    """A connection that runs statements of others. Used by one thread at a time."""

    def __init__(self, path: Path, is_read: bool) -> None:
        self.is_read = is_read
        self.deadline = _Deadline(QUERY_TIMEOUT_S)
        self._folder = path.parent
        self._is_theirs = False
        self._refusal: str | None = None
        # Nothing is cached: SQLite asks the authorizer when it compiles, and theirs must not find a COMMIT of ours.
        self._database = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=0
        )
        try:
            self._set_up()
        except BaseException:
            self._database.close()
            raise
        self.identity = identity_of(path)

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    @contextlib.contextmanager
    def held_to(self, deadline: _Deadline) -> Iterator[None]:
        """While the block runs, end what runs when `deadline` says so."""
        self.deadline = deadline
        with deadline.interrupting(self._database):
            yield

    def query(self, statements: list[Statement]) -> list[dict[str, Any]]:
        """Columns, rows and meta of each statement, all in one transaction."""
        with self._transaction():
            left = MAX_RESULT_BYTES
            results = []
            for sql, parameters in statements:
                result, size = self._execute(sql, parameters, left)
                left -= size
                results.append(result)
        return results

    def exec(self, text: str) -> dict[str, Any]:
        """Run the statements of `text`; those before one that fails stay done."""
        started = time.perf_counter()
        with self._transaction():
            count, failure = self._execute_all(text)
            if failure is not None and not self._database.in_transaction:
                raise failure
        if failure is not None:
            raise failure
        return {"count": count, "duration": _ms_since(started)}

    def migrations(self, table: str) -> list[tuple[str, str]]:
        """As `D1.migrations`."""
        with self._transaction():
            self._make_migrations_table(table)
            found, _ = self._execute(f"SELECT name, applied_at FROM {_quoted(table)} ORDER BY id", [], MAX_RESULT_BYTES)
        return [tuple(row) for row in found["rows"]]

    def migrate(self, table: str, name: str, text: str) -> bool:
        """As `D1.migrate`."""
        with self._transaction():
            self._make_migrations_table(table)
            found, _ = self._execute(f"SELECT 1 FROM {_quoted(table)} WHERE name = ?", [name], MAX_RESULT_BYTES)
            if found["rows"]:
                return False
            _, failure = self._execute_all(text)
            if failure is not None:
                raise failure
            self._execute(f"INSERT INTO {_quoted(table)} (name) VALUES (?)", [name], 0)
        return True

    def _execute_all(self, text: str) -> tuple[int, EdgeError | None]:
        """How many of the statements of `text` were run, and why the next one was not."""
        count, line = 0, 1
        try:
            for piece in split_statements(text, self.deadline.check):
                line = piece.line
                self._execute(piece.sql, [], MAX_RESULT_BYTES)
                count += 1
        except EdgeError as error:
            return count, _in_line(error, line)
        return count, None

    def _execute(self, sql: str, parameters: list[Any], max_bytes: int) -> tuple[dict[str, Any], int]:
        """The result of one statement, and about how many bytes it has."""
        self.deadline.check()
        started = time.perf_counter()
        changes_before = self._database.total_changes
        self._is_theirs, self._refusal = True, None
        try:
            cursor = self._database.execute(sql, parameters)
            columns = [column[0] for column in cursor.description or ()]
            rows, size = _fetch(cursor, max_bytes)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
            if isinstance(error, sqlite3.Error) and self.is_read and _code(error) == sqlite3.SQLITE_READONLY:
                raise
            raise _failure(error, self.deadline, self._refusal) from error
        finally:
            self._is_theirs = False
        written = self._database.total_changes - changes_before
        meta = {
            "served_by": "edge",
            "duration": _ms_since(started),
            "changes": self._one("SELECT changes()") if written and verb_of(sql) not in _SCHEMA else 0,
            "last_row_id": self._one("SELECT last_insert_rowid()") if not self.is_read else 0,
            "changed_db": written > 0 or verb_of(sql) in _SCHEMA,
            "size_after": self._one("PRAGMA page_count") * _PAGE_BYTES,
            "rows_read": len(rows),
            "rows_written": written,
        }
        cursor.close()
        return {"columns": columns, "rows": rows, "meta": meta}, size

    def _one(self, sql: str) -> int:
        return int(self._database.execute(sql).fetchone()[0])

    def _transaction(self) -> _Transaction:
        if not self.is_read:
            check_space(self._folder)
        return _Transaction(self._database, "BEGIN" if self.is_read else "BEGIN IMMEDIATE", self.deadline)

    def _make_migrations_table(self, table: str) -> None:
        """A worker may have a view of that name, or triggers on the table: it is used as carefully as theirs."""
        sql = (
            f"CREATE TABLE IF NOT EXISTS {_quoted(table)} (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, "
            "applied_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL)"
        )
        self._execute(sql, [], 0)

    def _set_up(self) -> None:
        database = self._database
        database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        be_durable(database)
        database.execute("PRAGMA foreign_keys = ON")
        database.execute(f"PRAGMA max_page_count = {MAX_FILE_BYTES // _PAGE_BYTES}")
        if self.is_read:
            database.execute("PRAGMA query_only = ON")
        database.text_factory = lambda data: data.decode(errors="replace")
        for limit, value in _LIMITS.items():
            database.setlimit(limit, value)
        self._modules = _MODULES if _be_defensive(database) else frozenset()
        database.set_progress_handler(self._must_stop, _STEPS_PER_TICK)
        database.set_authorizer(self._authorize)

    def _must_stop(self) -> bool:
        """Asked by SQLite every `_STEPS_PER_TICK` steps."""
        return self._is_theirs and self.deadline.is_over()

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if not self._is_theirs:
            return sqlite3.SQLITE_OK
        match action:
            case sqlite3.SQLITE_PRAGMA if (first or "").lower() not in _PRAGMAS:
                self._refuse(f"PRAGMA {first}: allowed are {', '.join(sorted(_PRAGMAS))}")
            case sqlite3.SQLITE_FUNCTION if (second or "").lower() in _FUNCTIONS:
                self._refuse(f"the function {second}()")
            case sqlite3.SQLITE_CREATE_VTABLE if (second or "").lower() not in self._modules:
                self._refuse(f"virtual tables of {second}: allowed are {', '.join(sorted(self._modules)) or 'none'}")
            case _ if action in _REFUSED:
                self._refuse(_REFUSED[action])
            case _:
                return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _refuse(self, what: str) -> None:
        self._refusal = f"not authorized: {what}: SQLITE_AUTH"


class _Transaction:
    """A transaction that is committed, or rolled back if its block raises."""

    def __init__(self, database: sqlite3.Connection, begin: str, deadline: _Deadline) -> None:
        self._database = database
        self._begin = begin
        self._deadline = deadline

    def __enter__(self) -> None:
        self._database.execute(self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._database.execute("COMMIT")
        except sqlite3.Error as error:  # a foreign key that was deferred, for example
            raise _failure(error, self._deadline, None) from error
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")


# -- statements --------------------------------------------------------------------------------------------


def verb_of(sql: str) -> str:
    """The first word of a statement, in capitals; empty if there is none."""
    found = _VERB.match(sql)
    return found[1].upper() if found else ""


class Piece(NamedTuple):
    """A statement of a longer text, and the line that it begins in."""

    line: int
    sql: str


def _checked_size(statements: list[Statement]) -> int:
    """About how many bytes the statements have.

    Raises:
        InvalidInput: there are too many, one is too long, or a value is of a type that SQLite does not know.
    """
    num_bytes = 0
    if len(statements) > MAX_STATEMENTS:
        raise InvalidInput(f"D1_ERROR: a batch of {len(statements)} statements is over the limit of {MAX_STATEMENTS}")
    for sql, parameters in statements:
        if len(sql) > MAX_SQL_BYTES:
            raise InvalidInput(f"D1_ERROR: statement too long: it has {len(sql)} characters of {MAX_SQL_BYTES}")
        num_bytes += len(sql)
        for number, value in enumerate(parameters, 1):
            if not isinstance(value, bool | int | float | str | bytes | None):
                kind = type(value).__name__
                raise InvalidInput(f"D1_TYPE_ERROR: Type '{kind}' not supported for the value of parameter {number}")
            num_bytes += len(value) if isinstance(value, str | bytes) else 8
    return num_bytes


def _seem_to_write(statements: list[Statement]) -> bool:
    """A guess that decides where to try first: a connection for reading finds out what writes all the same. The event
    loop makes it, so that it is not made for very long texts."""
    if sum(len(sql) for sql, _ in statements) > MAX_SQL_BYTES:
        return True
    return any(_seems_to_write(sql) for sql, _ in statements)


def _seems_to_write(sql: str) -> bool:
    verb = verb_of(sql)
    return verb not in _READING or (verb == "WITH" and _WRITING_WORD.search(sql) is not None)


_CLOSING = {"'": "'", '"': '"', "`": "`", "[": "]", "--": "\n", "/*": "*/"}
"""What ends that which begins so. A quote that is doubled within quotes ends one string and begins another."""
_MARK = re.compile(r"""(?P<end>;)|(?P<quote>['"`\[])|(?P<comment>--|/\*)""")
_MARK_OR_WORD = re.compile(rf"{_MARK.pattern}|(?P<word>\w{{1,1000}})")
_GAP = re.compile(r"(?:[\s;]++|--[^\n]*+|/\*[^*]{0,1000}+\*/){1,1000}+")
"""Between statements. Whatever cannot be bounded here, one search must not keep other threads waiting for long."""


def split_statements(text: str, tick: Callable[[], None] = lambda: None) -> Iterator[Piece]:
    """The statements of `text`, without the `;` between them; the body of a trigger stays in one piece.

    Args:
        tick: called now and then, to give up by raising.

    Raises:
        InvalidInput: a statement is longer than `MAX_SQL_BYTES`.
    """
    words: list[str] = []
    start, depth, line = -1, 0, 1
    at = counted = 0
    for num_tokens in itertools.count(1):
        if num_tokens % _TOKENS_PER_TICK == 0:
            tick()
        if start < 0:
            words, depth = [], 0
            while gap := _GAP.match(text, at):
                tick()
                at = gap.end()
        is_trigger = words[:1] == ["CREATE"] and "TRIGGER" in words
        end = (at if start < 0 else start) + MAX_SQL_BYTES
        token = (_MARK_OR_WORD if is_trigger or len(words) < 3 else _MARK).search(text, at, end + 2)
        if token is None and len(text) > end:
            raise InvalidInput(f"D1_ERROR: statement too long: it has more than {MAX_SQL_BYTES} characters")
        if start < 0 and not (token and token.start() == at and token["comment"]):
            line += text.count("\n", counted, at)
            start = counted = at
        if token is None:
            break
        at = token.end()
        if opening := token["comment"] or token["quote"]:
            closing = text.find(_CLOSING[opening], at)
            at = closing + len(_CLOSING[opening]) if closing >= 0 else len(text)
        elif token["end"] and depth <= 0:
            yield Piece(line, text[start : token.start()].strip())
            start = -1
        elif word := token["word"]:
            if len(words) < 3:
                words.append(word.upper())
            elif is_trigger:
                depth += {"BEGIN": 1, "CASE": 1, "END": -1}.get(word.upper(), 0)
    if rest := text[start:].strip():
        yield Piece(line, rest)


def _fetch(cursor: sqlite3.Cursor, max_bytes: int) -> tuple[list[Any], int]:
    rows: list[Any] = []
    size = 0
    for row in cursor:
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row) + 8
        if size > max_bytes:
            raise InvalidInput(
                f"D1_ERROR: the results of the call are over the limit of {MAX_RESULT_BYTES >> 20} MiB: select fewer "
                "columns, or read pages with LIMIT and OFFSET"
            )
        rows.append(list(row))
    return rows, size


def _failure(error: Exception, deadline: _Deadline, refusal: str | None) -> EdgeError:
    if refusal is not None:
        return InvalidInput(f"D1_ERROR: {refusal}")
    if isinstance(error, OverflowError):
        return InvalidInput("D1_TYPE_ERROR: a parameter is beyond the integers of 64 bits")
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_INTERRUPT":
        return deadline.error(f": {name}")
    if "one statement at a time" in str(error):
        return InvalidInput("D1_ERROR: a prepared statement is one statement: use batch([…]) or exec() for several")
    if "number of bindings" in str(error):
        return InvalidInput(f"D1_ERROR: Wrong number of parameter bindings for SQL query. {error}")
    primary = "_".join(name.split("_")[:2])
    text = f"D1_ERROR: {error}: {primary}" if primary else f"D1_ERROR: {error}"
    if isinstance(error, sqlite3.Error) and storage.is_disk_full(error):
        text += f": the disk of the node is full, or the database has {MAX_FILE_BYTES >> 30} GiB: free some space"
    if primary in _NOT_THE_CALLER_S:
        _log.error("%s", text)
        return StorageUnavailable(text)
    return InvalidInput(text)


def _in_line(error: EdgeError, line: int) -> EdgeError:
    return type(error)(f"D1_EXEC_ERROR: Error in line {line}: {error.message.removeprefix('D1_ERROR: ')}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 4)


# -- SQLite's defensive mode -------------------------------------------------------------------------------

_DBCONFIG_DEFENSIVE = 1010


def _be_defensive(database: sqlite3.Connection) -> bool:
    """Have SQLite refuse writes to the tables that hold the inner state of virtual tables; False: it cannot be done.

    Whoever writes to those can have SQLite's C code read nonsense, in this process.
    """
    if sys.version_info >= (3, 12):
        database.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        return True
    try:
        import _sqlite3

        configure = ctypes.CDLL(getattr(_sqlite3, "__file__", None)).sqlite3_db_config
    except (OSError, AttributeError):
        return False
    # In Python 3.11 the connection's struct has its `sqlite3 *` right after the head that every object has.
    handle = ctypes.c_void_p.from_address(id(database) + object.__basicsize__)
    is_on = ctypes.c_int(0)
    failed = configure(handle, ctypes.c_int(_DBCONFIG_DEFENSIVE), ctypes.c_int(1), ctypes.byref(is_on))
    return failed == 0 and is_on.value == 1
