from __future__ import annotations

import asyncio
import math
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.bindings import d1, storage
from edge.bindings.d1 import D1, MAX_RESULT_BYTES, split_statements, verb_of
from edge.errors import InvalidInput
from edge.isolates.base import Binding, Bundle
from workers.bindings import BindingError
from workers.bindings.d1 import D1Database

USERS = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT UNIQUE, age INTEGER)"


@pytest.fixture
async def db(open_d1: Any) -> D1Database:
    database: D1Database = await open_d1()
    await database.exec(USERS)
    return database


async def test_run_first_raw_and_all(db: D1Database) -> None:
    insert = db.prepare("INSERT INTO users (name, age) VALUES (?, ?)")
    made = await insert.bind("Ada", 36).run()
    assert (made.success, made.results) == (True, [])
    assert (made.meta.changes, made.meta.last_row_id, made.meta.changed_db, made.meta.rows_written) == (1, 1, True, 1)
    assert made.meta.duration > 0
    assert made.meta.size_after >= 8192
    await insert.bind("Bob", None).run()
    found = await db.prepare("SELECT name, age FROM users WHERE id >= ?1 ORDER BY id").bind(1).all()
    assert found.results[0].name == "Ada"
    assert found.results.to_py() == [{"name": "Ada", "age": 36}, {"name": "Bob", "age": None}]
    assert (found.meta.changes, found.meta.changed_db, found.meta.rows_read) == (0, False, 2)
    by_name = db.prepare("SELECT * FROM users WHERE name = ?")
    assert (await by_name.bind("Bob").first()).to_py() == {"id": 2, "name": "Bob", "age": None}
    assert await by_name.bind("Ada").first("age") == 36
    assert await by_name.bind("Eve").first() is None
    assert await by_name.bind("Eve").first("age") is None
    with pytest.raises(BindingError, match=r"D1_COLUMN_NOTFOUND: Column not found \(nope\)"):
        await by_name.bind("Ada").first("nope")
    names = db.prepare("SELECT name, age FROM users")
    assert await names.raw() == [["Ada", 36], ["Bob", None]]
    assert await names.raw(columnNames=True) == [["name", "age"], ["Ada", 36], ["Bob", None]]
    assert await names.raw({"columnNames": True}) == await names.raw(columnNames=True)


async def test_bind_gives_another_statement(db: D1Database) -> None:
    statement = db.prepare("SELECT ? AS value")
    one, two = statement.bind(1), statement.bind(2)
    assert (await one.first("value"), await two.first("value")) == (1, 2)
    with pytest.raises(BindingError, match="Wrong number of parameter bindings"):
        await statement.run()


async def test_returning_and_with(db: D1Database) -> None:
    made = await db.prepare("INSERT INTO users (name) VALUES ('a'), ('b') RETURNING id").all()
    assert made.results.to_py() == [{"id": 1}, {"id": 2}]
    assert made.meta.changes == 2
    made = await db.prepare("WITH n(name) AS (SELECT 'c') INSERT INTO users (name) SELECT name FROM n").run()
    assert made.meta.changes == 1
    assert await db.prepare("/* how many? */ -- ;\n SELECT count(*) AS n FROM users").first("n") == 3


async def test_batch_is_one_transaction(db: D1Database) -> None:
    insert = db.prepare("INSERT INTO users (name) VALUES (?)")
    results = await db.batch([insert.bind("a"), db.prepare("SELECT count(*) AS n FROM users"), insert.bind("b")])
    assert [result.meta.changes for result in results] == [1, 0, 1]
    assert results[1].results[0].n == 1
    with pytest.raises(BindingError, match=r"D1_ERROR: UNIQUE constraint failed: users.name: SQLITE_CONSTRAINT"):
        await db.batch([insert.bind("c"), insert.bind("a")])
    assert await db.prepare("SELECT count(*) AS n FROM users").first("n") == 2
    assert await db.batch([]) == []
    with pytest.raises(TypeError, match="list of prepared statements"):
        await db.batch(["SELECT 1"])


async def test_batch_may_defer_foreign_keys(db: D1Database) -> None:
    await db.exec("CREATE TABLE pets (id INTEGER PRIMARY KEY, owner INTEGER REFERENCES users (id))")
    pet = db.prepare("INSERT INTO pets (owner) VALUES (7)")
    with pytest.raises(BindingError, match="FOREIGN KEY constraint failed"):
        await pet.run()
    deferred = db.prepare("PRAGMA defer_foreign_keys = on")
    await db.batch([deferred, pet, db.prepare("INSERT INTO users (id) VALUES (7)")])
    with pytest.raises(BindingError, match="FOREIGN KEY constraint failed"):
        await db.batch([deferred, db.prepare("INSERT INTO pets (owner) VALUES (8)")])
    assert await db.prepare("SELECT count(*) AS n FROM pets").first("n") == 1


async def test_exec(db: D1Database) -> None:
    done = await db.exec(
        "INSERT INTO users (name) VALUES ('a;b');\n-- nothing; here\nINSERT INTO users (name) VALUES ('c')"
    )
    assert done.count == 2
    with pytest.raises(BindingError, match="D1_EXEC_ERROR: Error in line 3: no such table: nope"):
        await db.exec(
            "INSERT INTO users (name) VALUES ('d');\n\nDELETE FROM nope;\nINSERT INTO users (name) VALUES ('e')"
        )
    names = [row.name for row in (await db.prepare("SELECT name FROM users ORDER BY id").all()).results]
    assert names == ["a;b", "c", "d"], "what comes before the failure stays done, what comes after is not done"


async def test_sessions_have_bookmarks(db: D1Database) -> None:
    session = db.withSession("first-primary")
    assert session.getBookmark() is None
    await session.prepare("INSERT INTO users (name) VALUES ('a')").run()
    first = session.getBookmark()
    later = db.withSession(first)
    assert later.getBookmark() == first
    assert (await later.batch([later.prepare("SELECT name FROM users")]))[0].results[0].name == "a"
    assert later.getBookmark() >= first


@pytest.mark.parametrize("value", [{"a": 1}, object(), [1, 300], ["a"], (1,), {1}])
async def test_values_that_cannot_be_bound(db: D1Database, value: Any) -> None:
    with pytest.raises(TypeError, match=r"D1_TYPE_ERROR: Type '.*' not supported"):
        db.prepare("SELECT ?").bind(value)


async def test_integers_end_at_64_bits(db: D1Database) -> None:
    statement = db.prepare("SELECT ? AS value")
    assert await statement.bind(2**63 - 1).first("value") == 2**63 - 1
    with pytest.raises(TypeError, match=r"D1_TYPE_ERROR: value number 1, .* 64 bits"):
        statement.bind(2**63)
    with pytest.raises(BindingError, match=r"D1_TYPE_ERROR: .* 64 bits"):
        await db._calls.call("query", [["SELECT ?", [2**63]]])


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(_VALUES, min_size=1, max_size=8))
async def test_what_is_bound_comes_back(open_d1: Any, values: list[Any]) -> None:
    db = await open_d1()
    marks = ", ".join(f"? AS c{number}" for number in range(len(values)))
    (row,) = await db.prepare(f"SELECT {marks}").bind(*values).raw()
    for given_value, value in zip(values, row, strict=True):
        wanted = list(given_value) if isinstance(given_value, bytes) else given_value
        assert value == wanted
        assert not isinstance(given_value, float) or math.copysign(1, value) == math.copysign(1, given_value)
    assert type(row[0]) is not bool


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("ATTACH '/tmp/other.sqlite' AS other", "not authorized: ATTACH"),
        ("SELECT load_extension('libc.so.6')", "not authorized"),
        ("VACUUM INTO '/tmp/copy.sqlite'", "VACUUM"),
        ("PRAGMA journal_mode = DELETE", "not authorized: PRAGMA journal_mode"),
        ("PRAGMA writable_schema = ON", "not authorized: PRAGMA writable_schema"),
        ("PRAGMA max_page_count = 99", "not authorized: PRAGMA"),
        ("PRAGMA temp_store_directory = '/tmp'", "not authorized: PRAGMA"),
        ("SELECT * FROM pragma_database_list", "not authorized: PRAGMA database_list"),
        ("BEGIN IMMEDIATE", "not authorized: transactions"),
        ("COMMIT", "not authorized: transactions"),
        ("ROLLBACK", "not authorized: transactions"),
        ("SAVEPOINT a", "not authorized: savepoints"),
        ("CREATE TEMP TABLE t (a)", "not authorized: temporary"),
        ("CREATE VIRTUAL TABLE t USING fts4(a)", "not authorized: virtual tables of fts4"),
        ("DELETE FROM sqlite_master", "may not be modified"),
        ("SELECT randomblob(1000000000)", "too big"),
        ("SELECT " + "1," * 100 + "1", "too many columns"),
        ("SELECT '" + "x" * 100_000 + "'", "statement too long"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELEC 1", 'near "SELEC": syntax error: SQLITE_ERROR'),
        ("SELECT * FROM nope", "D1_ERROR: no such table: nope: SQLITE_ERROR"),
    ],
)
async def test_what_sql_may_not_do(db: D1Database, sql: str, message: str) -> None:
    for statement in (sql, sql):  # the second time it may come from a cache
        with pytest.raises(BindingError, match=message):
            await db.prepare(statement).run()
    await db.prepare("INSERT INTO users (name) VALUES ('still works')").run()
    assert not Path("/tmp/copy.sqlite").exists()


async def test_full_text_search_without_its_inner_tables(db: D1Database) -> None:
    await db.exec("CREATE VIRTUAL TABLE notes USING fts5(text); INSERT INTO notes VALUES ('the quick fox')")
    assert await db.prepare("SELECT text FROM notes WHERE notes MATCH 'quick'").first("text") == "the quick fox"
    with pytest.raises(BindingError, match="may not be modified"):
        await db.prepare("UPDATE notes_data SET block = x'00'").run()


async def test_endless_queries_are_stopped(tmp_path: Path) -> None:
    d1 = D1(tmp_path, timeout_s=0.2)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    caller, binding = Bundle("w", "v", "/", "m.py"), Binding("d1", {"id": "x"})
    for sql in (endless, "CREATE TABLE t AS " + endless):
        with pytest.raises(Exception, match=r"ran longer than 0.2 s.*SQLITE_INTERRUPT"):
            await d1.call(caller, binding, "query", [[[sql, []]]], None)
    await d1.close()


async def test_a_call_that_nobody_waits_for_is_stopped(tmp_path: Path) -> None:
    d1 = D1(tmp_path, timeout_s=3600)
    caller, binding = Bundle("w", "v", "/", "m.py"), Binding("d1", {"id": "x"})
    endless = "CREATE TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    call = asyncio.ensure_future(d1.call(caller, binding, "query", [[[endless, []]]], None))
    async with asyncio.timeout(20):
        while not list(tmp_path.rglob("*.sqlite-wal")):  # noqa: ASYNC110 - written to by another thread
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await d1.call(caller, binding, "exec", ["CREATE TABLE t (a)"], None)
        await d1.close()


async def test_results_are_bounded(db: D1Database) -> None:
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100) SELECT hex(zeroblob(500000)) FROM n"
    )
    with pytest.raises(BindingError, match=f"limit of {MAX_RESULT_BYTES >> 20} MiB"):
        await db.prepare(many).run()


async def test_a_batch_of_very_many_statements_is_bounded(db: D1Database, tmp_path: Path) -> None:
    with pytest.raises(BindingError, match="over the limit"):
        await db.batch([db.prepare("SELECT 1")] * 10_001)
    hasty = D1(tmp_path, timeout_s=0.05)
    with pytest.raises(Exception, match=r"ran longer than 0.05 s"):
        await hasty.exec(Bundle("w", "v", "/", "m.py"), "x", "SELECT 1;" * 100_000)
    await hasty.close()


async def test_what_waits_is_bounded(db: D1Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d1, "MAX_HELD_BYTES", 5_000_000)
    select = db.prepare("SELECT length(?) AS n").bind("x" * 1_000_000)
    outcomes = await asyncio.gather(*(select.first("n") for _ in range(20)), return_exceptions=True)
    assert [str(each)[:30] for each in outcomes].count("D1_ERROR: statements and value") == 16
    assert outcomes.count(1_000_000) == 4
    assert await select.first("n") == 1_000_000, "what is done is not held any more"


async def test_a_query_that_fills_the_disk_is_stopped(db: D1Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await db.exec("CREATE TABLE full (a)")
    real = storage.MIN_FREE_BYTES
    insert = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO full SELECT zeroblob(1000) FROM n"
    )
    call = asyncio.ensure_future(db.prepare(insert).run())
    provider = db._calls.provider
    async with asyncio.timeout(20):
        while not any(file.num_waiting for file in provider._files.values()):  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0)
        monkeypatch.setattr(storage, "MIN_FREE_BYTES", 1 << 62)
        # Which of the two it is depends on what the statement does at the moment that it is looked at.
        with pytest.raises(BindingError, match=r"disk of the node|a disk filled"):
            await call
    monkeypatch.setattr(storage, "MIN_FREE_BYTES", real)
    assert await db.prepare("SELECT count(*) AS n FROM full").first("n") == 0


async def test_a_damaged_file_is_not_the_caller_s_mistake(
    open_d1: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = storage.folder_of(tmp_path, "d1", "dev", "ID")
    folder.mkdir(parents=True)
    (folder / "database.sqlite").write_bytes(b"x" * 8192)
    db = await open_d1()
    for call in (db.exec("SELECT 1"), db.prepare("SELECT 1").run()):
        with pytest.raises(BindingError, match="file is not a database: SQLITE_NOTADB") as caught:
            await call
        assert caught.value.status == 503
    assert "file is not a database" in caplog.text
    with pytest.raises(BindingError, match="no such table") as caught:
        await (await open_d1("OTHER")).exec("SELECT * FROM nope")
    assert caught.value.status == 400


async def test_text_that_is_no_utf8(db: D1Database) -> None:
    assert await db.prepare("SELECT CAST(x'61ff' AS TEXT) AS t").first("t") == "a�"


async def test_databases_and_accounts_are_apart(open_d1: Any, tmp_path: Path) -> None:
    one, other, foreign = await open_d1("a"), await open_d1("b"), await open_d1("a", "../..")
    await one.exec(USERS)
    for database in (other, foreign):
        with pytest.raises(BindingError, match="no such table"):
            await database.prepare("SELECT * FROM users").run()
    assert {path.name for path in tmp_path.iterdir()} == {"d1"}


async def test_a_database_is_an_ordinary_sqlite_file_that_others_may_write_to(open_d1: Any, tmp_path: Path) -> None:
    db = await open_d1("shop")
    await db.exec(USERS)
    beside = sqlite3.connect(tmp_path / "d1" / "dev" / "shop" / "database.sqlite")
    with beside:
        beside.execute("INSERT INTO users (name) VALUES ('from beside')")
    beside.close()
    assert await db.prepare("SELECT name FROM users").first("name") == "from beside"


async def test_many_callers_at_once(db: D1Database) -> None:
    insert = db.prepare("INSERT INTO users (name) VALUES (?)")
    await asyncio.gather(*(insert.bind(f"n{number}").run() for number in range(40)))
    counts = await asyncio.gather(*(db.prepare("SELECT count(*) AS n FROM users").first("n") for _ in range(40)))
    assert counts == [40] * 40


async def test_migrations_apply_once_and_whole(tmp_path: Path) -> None:
    d1 = D1(tmp_path)
    caller = Bundle("w", "v", "/", "m.py")
    assert await d1.migrations(caller, "x", "d1_migrations") == []
    assert await d1.migrate(caller, "x", "d1_migrations", "0001_users.sql", USERS)
    assert not await d1.migrate(caller, "x", "d1_migrations", "0001_users.sql", USERS)
    with pytest.raises(Exception, match="Error in line 2: no such table: nope"):
        await d1.migrate(caller, "x", "d1_migrations", "0002.sql", "CREATE TABLE half (a);\nDROP TABLE nope;")
    assert [name for name, _ in await d1.migrations(caller, "x", "d1_migrations")] == ["0001_users.sql"]
    assert await d1.migrate(caller, "x", "d1_migrations", "0002.sql", "CREATE TABLE half (a)")
    await d1.close()


async def test_what_a_worker_does_to_the_table_of_migrations_is_held_like_all_it_does(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    d1, caller, table = D1(tmp_path, timeout_s=0.5), Bundle("w", "v", "/w", "w.py"), "d1_migrations"
    await d1.migrations(caller, "x", table)
    await d1.exec(caller, "x", f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN {endless}; END")
    with pytest.raises(InvalidInput, match=r"ran longer than 0\.5 s"):
        await d1.migrate(caller, "x", table, "0001.sql", USERS)
    await d1.exec(caller, "x", f"DROP TABLE {table}; CREATE VIEW {table} AS SELECT i AS id, i AS name FROM ({endless})")
    with pytest.raises(InvalidInput):
        await d1.migrations(caller, "x", table)
    await d1.close()


@pytest.mark.parametrize("text", ["'" + "a" * 90_000, "'" + "''" * 45_000, "[" + "a" * 90_000, '"a' * 32_768])
def test_splitting_takes_no_more_memory_than_the_text(text: str) -> None:
    tracemalloc.start()
    try:
        pieces = list(split_statements(text))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pieces == [(1, text)]
    assert peak_bytes < 4 * len(text) + 20_000


@pytest.mark.parametrize("piece", ["'", "''", "''a", "'a", "a", ".", "[", '"', "a'a'", "/", "-a", "- "])
def test_splitting_gives_up_at_a_statement_that_is_too_long(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    with pytest.raises(InvalidInput, match="statement too long: it has more than 100000 characters"):
        list(split_statements(text))
    assert next(split_statements(f"SELECT 1;{text}")) == (1, "SELECT 1"), "and not before"


@pytest.mark.parametrize("piece", ["--\n", "/**/", "/*/*/ ", "; ;--x\n", "/* " + "x" * 2000 + " */"])
async def test_splitting_gives_up_when_the_time_of_the_call_is_over(tmp_path: Path, piece: str) -> None:
    text = piece * (8_000_000 // len(piece))
    hasty = D1(tmp_path, timeout_s=0)
    with pytest.raises(InvalidInput, match="ran longer than 0 s"):
        await hasty.exec(Bundle("w", "v", "/", "m.py"), "x", text)
    await hasty.close()
    assert list(split_statements(f"{text}\nSELECT 1")) == [(text.count("\n") + 2, "SELECT 1")]


def test_splitting_keeps_strings_comments_and_triggers_whole() -> None:
    trigger = (
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN\n"
        "  UPDATE a SET x = CASE WHEN x > 1 THEN ';' ELSE 'end' END;\n  DELETE FROM b;\nEND"
    )
    text = f"SELECT 'a;''b' AS \"c;\";\n\n-- d;\n{trigger};;\nSELECT /* ; */ [e;f], `g;h` ; "
    assert list(split_statements(text)) == [
        (1, "SELECT 'a;''b' AS \"c;\""),
        (4, trigger),
        (8, "SELECT /* ; */ [e;f], `g;h`"),
    ]
    assert list(split_statements(" -- nothing\n ; /* open")) == []


@given(text=st.text(alphabet="ab;'\"`[]-/* \n", max_size=40))
def test_splitting_loses_nothing_but_blanks(text: str) -> None:
    pieces = [piece.sql for piece in split_statements(text)]
    at = 0
    for piece in pieces:
        at = text.index(piece, at) + len(piece)
    assert all(pieces)


@pytest.mark.parametrize(
    ("sql", "verb"), [("select 1", "SELECT"), ("--x\n /* y */ Insert", "INSERT"), ("", ""), ("(", "")]
)
def test_verb_of(sql: str, verb: str) -> None:
    assert verb_of(sql) == verb
