import asyncio
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from doubles import usage_record

import edge.billing.ledger
from edge.billing.ledger import Ledger, connect, latest_records, opened, price_books
from edge.billing.meter import UsageRecord
from edge.billing.prices import load_prices
from edge.errors import EdgeError, MeteringUnavailable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite"


@pytest.fixture
async def ledger(path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    await ledger.close()


def ids(path: Path) -> list[str]:
    return [record.id for record in latest_records(path, limit=10**6)]


async def test_a_record_comes_back_as_it_was_written(ledger: Ledger, path: Path) -> None:
    record = usage_record(worker=None, error_code=3043, status="error")
    await ledger.record(record)
    assert latest_records(path, limit=10) == [record]


async def test_the_same_id_is_written_once_and_stays_as_it_is(ledger: Ledger, path: Path) -> None:
    record = usage_record(id="one")
    await asyncio.gather(ledger.record(record), ledger.record(record), ledger.record(usage_record(id="one", model="x")))
    assert latest_records(path, limit=10) == [record]


async def test_records_that_are_queued_together_share_transactions(ledger: Ledger, path: Path) -> None:
    with closing(connect(path)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")  # holds the writer back at its first commit
        waiting = [asyncio.create_task(ledger.record(usage_record())) for _ in range(200)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        blocker.execute("ROLLBACK")
    await asyncio.gather(*waiting)
    assert len(ids(path)) == 200


async def test_what_is_queued_is_written_before_closing(path: Path) -> None:
    ledger = Ledger(path)
    waiting = [asyncio.create_task(ledger.record(usage_record())) for _ in range(50)]
    await asyncio.sleep(0)
    await ledger.close()
    await asyncio.gather(*waiting)
    assert len(ids(path)) == 50
    await ledger.close()
    with pytest.raises(MeteringUnavailable, match="closed"):
        await ledger.record(usage_record())


@pytest.mark.parametrize("removed", [[""], ["-wal"], ["", "-wal", "-shm"], None])
async def test_a_ledger_that_is_removed_while_it_is_open_is_begun_anew(
    ledger: Ledger, path: Path, removed: list[str] | None
) -> None:
    book = load_prices()
    ledger.add_price_book(book)
    await ledger.record(usage_record(id="before"))
    if removed is None:
        path.parent.rename(path.parent.with_name("moved"))
    else:
        for suffix in removed:
            Path(f"{path}{suffix}").unlink()
    await asyncio.gather(*(ledger.record(usage_record(id=id)) for id in ("a", "b")))
    await ledger.record(usage_record(id="c"))
    assert {"a", "b", "c"} <= set(ids(path))
    with opened(path) as database:
        assert price_books(database) == {book.id: book}


async def test_an_error_that_nobody_foresaw_fails_the_call_and_not_the_ledger(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_commit", lambda batch: 1 / 0)
    with pytest.raises(MeteringUnavailable):
        await asyncio.wait_for(ledger.record(usage_record(id="a")), 10)
    monkeypatch.undo()
    await asyncio.wait_for(ledger.record(usage_record(id="b")), 10)
    assert ids(path) == ["b"]


async def test_the_log_of_a_removed_ledger_is_kept_while_somebody_has_it_open(ledger: Ledger, path: Path) -> None:
    await ledger.record(usage_record(id="before"))
    with opened(path) as reader:  # so that SQLite does not fold the log into the file and remove it
        reader.execute("SELECT count(*) FROM usage").fetchone()
        path.unlink()
        await asyncio.wait_for(ledger.record(usage_record(id="after")), 10)
        (kept,) = path.parent.glob("*-wal.orphaned-*")
        assert kept.stat().st_size > 0
    assert ids(path) == ["after"]


async def test_a_ledger_that_is_replaced_by_something_else_is_not_written_to(ledger: Ledger, path: Path) -> None:
    await ledger.record(usage_record())
    path.unlink()
    path.write_bytes(b"something else" * 100)
    with pytest.raises(MeteringUnavailable):
        await ledger.record(usage_record())
    path.unlink()
    await ledger.record(usage_record(id="again"))
    assert ids(path) == ["again"]


async def test_a_cancelled_caller_does_not_stop_the_others(ledger: Ledger, path: Path) -> None:
    first, second = (asyncio.create_task(ledger.record(usage_record(id=id))) for id in ("a", "b"))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert set(ids(path)) == {"a", "b"}


@pytest.mark.parametrize(
    "bad", [{"output_tokens": -1}, {"output_tokens": 2**70}, {"worker": "\ud800"}, {"wall_us": 1.5}]
)
async def test_a_record_that_no_column_takes_fails_alone(ledger: Ledger, path: Path, bad: dict[str, object]) -> None:
    results = await asyncio.gather(
        *(ledger.record(usage_record(**changes)) for changes in ({}, bad, {})), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), MeteringUnavailable, type(None)]
    assert len(ids(path)) == 2


async def test_a_write_that_fails_is_tried_again_on_a_new_connection(ledger: Ledger, path: Path) -> None:
    assert ledger._database is not None
    ledger._database.close()
    await ledger.record(usage_record(id="a"))
    assert ids(path) == ["a"]


async def test_a_ledger_that_cannot_be_written_says_so_and_recovers(
    ledger: Ledger, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, moved = path.parent, path.parent.with_name("moved")
    folder.rename(moved)
    folder.write_text("in the way")
    ledger._disconnect()  # as after any failed write
    with pytest.raises(MeteringUnavailable, match="could not be written") as caught:
        await ledger.record(usage_record())
    assert str(path) in caplog.text
    assert str(path) not in caught.value.message
    assert (caught.value.status, caught.value.retryable, caught.value.retry_after_s) == (503, True, 5)
    folder.unlink()
    moved.rename(folder)
    await ledger.record(usage_record(id="later"))
    assert ids(path) == ["later"]


async def test_records_are_append_only(ledger: Ledger, path: Path) -> None:
    record = usage_record(id="a")
    await ledger.record(record)
    ledger.add_price_book(load_prices())
    with closing(sqlite3.connect(path)) as database:
        for statement in (
            "UPDATE usage SET output_tokens = 0",
            "DELETE FROM usage",
            "UPDATE price_books SET content = '{}'",
            "DELETE FROM price_books",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                database.execute(statement)
        database.execute("REPLACE INTO usage SELECT * FROM usage")
        database.execute("REPLACE INTO price_books (id, content, added_at) SELECT id, '{}', 0 FROM price_books")
    assert latest_records(path, limit=10) == [record]


async def test_price_books_are_kept_once(ledger: Ledger, path: Path) -> None:
    book = load_prices()
    ledger.add_price_book(book)
    ledger.add_price_book(book)
    with opened(path) as database:
        assert price_books(database) == {book.id: book}


async def test_latest_records_can_be_narrowed(ledger: Ledger, path: Path) -> None:
    for second in range(5):
        model = "even" if second % 2 == 0 else "odd"
        await ledger.record(usage_record(id=str(second), ended_at=second * 10**6, model=model, served_by="real"))
    assert ids(path) == ["4", "3", "2", "1", "0"]
    assert [record.id for record in latest_records(path, limit=2)] == ["4", "3"]
    assert [record.id for record in latest_records(path, limit=9, since_us=3 * 10**6)] == ["4", "3"]
    assert [record.id for record in latest_records(path, limit=9, model="odd")] == ["3", "1"]
    assert len(latest_records(path, limit=9, model="real")) == 5


def test_migrations_are_recorded_and_applied_once(path: Path) -> None:
    for _ in range(2):
        with closing(connect(path)) as database:
            rows = database.execute("SELECT number, name FROM migrations").fetchall()
            modes = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
        assert rows == [(1, "_m1_usage"), (2, "_m2_sandbox"), (3, "_m3_requests")]
        assert modes == ["wal", 2]


async def test_a_ledger_from_before_the_sandbox_was_recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(edge.billing.ledger, "_MIGRATIONS", edge.billing.ledger._MIGRATIONS[:1])
        with closing(connect(path)) as database:
            columns = [column for column in UsageRecord.__struct_fields__ if column != "sandbox"]
            values = [getattr(usage_record(id="old"), column) for column in columns]
            marks = ", ".join("?" * len(columns))
            database.execute(f"INSERT INTO usage ({', '.join(columns)}) VALUES ({marks})", values)
    ledger = Ledger(path)
    await ledger.record(usage_record(id="new", sandbox=5))
    await ledger.close()
    found = {record.id: record.sandbox for record in latest_records(path, limit=9)}
    assert found == {"old": 0, "new": 5}


def test_a_ledger_of_a_newer_version_is_refused(path: Path) -> None:
    with closing(connect(path)) as database:
        database.execute("INSERT INTO migrations VALUES (99, 'future', 0)")
    with pytest.raises(EdgeError, match=r"version 99 .* upgrade"):
        connect(path)


def test_a_missing_ledger_is_empty_and_stays_missing(path: Path) -> None:
    assert latest_records(path, limit=1) == []
    assert not path.exists()


def test_what_is_no_ledger_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(EdgeError, match="cannot be opened"):
        latest_records(path, limit=1)


WRITER = """
import asyncio, sys
from pathlib import Path
from doubles import usage_record
from edge.billing.ledger import Ledger

async def write(ledger, name):
    for i in range(10**9):
        id = f"{name}-{i}"
        await ledger.record(usage_record(id=id))
        sys.stdout.write(id + "\\n")
        sys.stdout.flush()

async def main():
    ledger = Ledger(Path(sys.argv[1]))
    await asyncio.gather(*(write(ledger, f"{sys.argv[2]}-{k}") for k in range(8)))

asyncio.run(main())
"""


def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    acknowledged: list[str] = []
    for life in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(life)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        assert process.stdout is not None
        acknowledged += [process.stdout.readline() for _ in range(random.randint(15, 60))]
        process.kill()
        acknowledged += process.stdout.readlines()
        process.wait()
        process.stdout.close()
    complete = {line.strip() for line in acknowledged if line.endswith("\n")}
    written = ids(path)
    assert len(complete) >= 8 * 15
    assert complete <= set(written)
    assert len(written) == len(set(written))
    with closing(connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
