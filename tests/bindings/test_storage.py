from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.bindings import storage
from edge.bindings.base import parse
from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.storage import Databases, folder_name
from edge.errors import InvalidInput, StorageUnavailable
from edge.isolates.base import Binding, Bundle

CALLER = Bundle("worker", "v1", "/", "main.py")


@given(names=st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_names_become_different_folders_that_go_nowhere_else(names: list[str]) -> None:
    one, other = map(folder_name, names)
    assert re.fullmatch(r"[a-z0-9~_-]+", one)
    assert one.lower() != other.lower()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "a\n", "~" + "0" * 32, "a" * 65])
def test_odd_names_are_hashed(name: str) -> None:
    assert re.fullmatch(r"~[0-9a-f]{32}", folder_name(name))
    assert folder_name(name) != name


def test_parse_takes_no_text_for_bytes() -> None:
    assert parse("here", [b"aGk="], tuple[bytes]) == (b"aGk=",)
    with pytest.raises(InvalidInput, match="here: Expected `bytes`, got `str`"):
        parse("here", ["aGk="], tuple[bytes])


def _m1(database: sqlite3.Connection) -> None:
    database.execute("CREATE TABLE t (n INTEGER)")


async def test_writes_that_wait_share_a_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    commit = storage._commit

    def counted(database: sqlite3.Connection, batch: Any) -> Any:
        batches.append(len(batch))
        return commit(database, batch)

    monkeypatch.setattr(storage, "_commit", counted)
    databases = Databases("test", tmp_path, [_m1])
    database = databases.of(CALLER, "x")

    def insert(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO t VALUES (1)")
        return int(connection.execute("SELECT count(*) FROM t").fetchone()[0])

    counts = await asyncio.gather(*(database.write(insert) for _ in range(200)))
    assert counts == list(range(1, 201)), "in the order of the calls"
    assert sum(batches) == 200
    assert len(batches) < 50
    await databases.close()
    await databases.close()


async def test_files_beyond_the_limit_are_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_MAX_OPEN", 2)
    kv = Kv(tmp_path)
    for _ in range(2):
        for number in range(5):
            await kv.call(CALLER, Binding("kv", {"id": f"n{number}"}), "put", ["k", b"v", {}], None)
    assert len(kv._databases._open) == 2
    answer: Any = await kv.call(CALLER, Binding("kv", {"id": "n0"}), "get", ["k"], None)
    assert answer.value["value"] == b"v"
    await kv.close()


async def test_state_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    newer = Databases("kv", tmp_path, [_m1] * 1 + [lambda _: None] * 8)
    await newer.of(CALLER, "x").write(lambda _: None)
    await newer.close()
    kv = Kv(tmp_path)
    with pytest.raises(StorageUnavailable, match="version 9 and this program knows up to 1: upgrade"):
        await kv.call(CALLER, Binding("kv", {"id": "x"}), "get", ["k"], None)
    await kv.close()


async def test_a_broken_file_says_nothing_of_its_path(tmp_path: Path) -> None:
    file = tmp_path / "kv" / "dev" / "x" / "index.sqlite"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"this is no database" * 1000)
    kv = Kv(tmp_path)
    for method, args in (("get", ["k"]), ("put", ["k", b"v", {}])):
        with pytest.raises(StorageUnavailable) as failed:
            await kv.call(CALLER, Binding("kv", {"id": "x"}), method, args, None)
        assert str(tmp_path) not in failed.value.message
    await kv.close()


async def test_several_may_make_the_same_file_at_once(tmp_path: Path) -> None:
    for attempt in range(5):
        caller = msgspec.structs.replace(CALLER, account=f"a{attempt}")
        providers: list[Any] = [Kv(tmp_path), Kv(tmp_path), D1(tmp_path), D1(tmp_path)]
        calls = []
        for provider in providers[:2]:
            for method, args in (("get", ["k"]), ("put", ["k", b"v", {}])):
                calls.append(provider.call(caller, Binding("kv", {"id": "x"}), method, args, None))
        for provider in providers[2:]:
            for method, argument in (("exec", "CREATE TABLE IF NOT EXISTS t (a)"), ("query", [["SELECT 1", []]])):
                calls.append(provider.call(caller, Binding("d1", {"id": "x"}), method, [argument], None))
        await asyncio.gather(*calls)
        for provider in providers:
            await provider.close()
