from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from edge.errors import StorageUnavailable
from edge.sqlite import connect, identity_of, migrate, transaction


def _m1(database: sqlite3.Connection) -> None:
    database.execute("CREATE TABLE notes (text TEXT)")


def _m2(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO notes VALUES ('second')")


def _broken(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO notes VALUES ('half')")
    raise ValueError("broken")


def _notes(database: sqlite3.Connection) -> list[str]:
    return [text for (text,) in database.execute("SELECT text FROM notes")]


def test_a_connection_is_durable(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "file")) as database:
        modes = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert modes == ["wal", 2]


def test_many_that_make_one_file_at_the_same_time_all_get_it(tmp_path: Path) -> None:
    failures: list[Exception] = []
    begin = threading.Barrier(8)

    def make() -> None:
        begin.wait()
        try:
            with closing(connect(tmp_path / "file")) as database:
                migrate(database, [_m1, _m2], "the file")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with closing(connect(tmp_path / "file")) as database:
        assert _notes(database) == ["second"]


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    with closing(connect(None)) as database:
        _m1(database)
        with pytest.raises(ValueError, match="broken"), transaction(database):
            _broken(database)
        assert _notes(database) == []


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with closing(connect(None)) as database:
        migrate(database, [_m1], "the file")
        with pytest.raises(ValueError, match="broken"):
            migrate(database, [_m1, _m2, _broken], "the file")
        assert _notes(database) == []
        migrate(database, [_m1, _m2], "the file")
        assert _notes(database) == ["second"]


def test_a_file_of_a_newer_program_is_refused() -> None:
    with closing(connect(None)) as database:
        migrate(database, [_m1, _m2], "the file")
        with pytest.raises(StorageUnavailable, match=r"the file is of version 2 .* knows up to 1: upgrade"):
            migrate(database, [_m1], "the file")


def test_identity_tells_a_file_that_was_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert identity_of(file) is None
    file.write_text("one")
    first = identity_of(file)
    (tmp_path / "other").write_text("two")
    (tmp_path / "other").replace(file)
    assert first is not None
    assert identity_of(file) != first
