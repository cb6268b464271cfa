"""No store opens a file of SQLite's by other means: with the first close, its process would lose all locks on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from doubles import catalogue, usage_record

from edge.ai.batch_store import BatchStore
from edge.ai.finetunes import Finetunes
from edge.auth.store import TokenStore
from edge.billing.ledger import Ledger, latest_records
from edge.bindings.queue_store import QueueStore
from edge.weights.store import ModelStore

_noted: list[list[str]] = []
"""Where the paths go that are opened; empty: nobody looks."""
_databases: set[str] = set()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook, which nothing removes."""
    if not _noted or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if event == "sqlite3.connect":
        _databases.add(os.path.abspath(os.fsdecode(arguments[0])))
    elif event == "open":
        path = os.path.abspath(os.fsdecode(arguments[0]))
        is_ours = path.removesuffix("-wal").removesuffix("-shm") in _databases
        if is_ours and not (isinstance(arguments[2], int) and arguments[2] & os.O_EXCL):
            _noted[0].append(path)


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The database files that are opened within, but for those that SQLite opens itself."""
    found: list[str] = []
    _noted.append(found)
    try:
        yield found
    finally:
        _noted.clear()


async def ledger(folder: Path) -> None:
    with_records = Ledger(folder / "ledger.sqlite")
    await with_records.record(usage_record())
    assert len(latest_records(folder / "ledger.sqlite", limit=5)) == 1
    await with_records.close()


async def tokens(folder: Path) -> None:
    with (
        closing(TokenStore(folder / "tokens.sqlite")) as first,
        closing(TokenStore(folder / "tokens.sqlite")) as second,
    ):
        first.create("ci", "acme", frozenset({"ai.run"}))
        assert len(second.tokens()) == 1


async def batches(folder: Path) -> None:
    store = BatchStore(folder, max_account_bytes=1 << 30)
    assert await store.become_runner()
    async with store.files.scratch() as scratch:
        (scratch / "a").write_bytes(b"a")
        await store.files.add("acme", "a", "batch", 0, scratch / "a")
    await store.remove_older(1, 1 << 40)
    assert await store.files.page("acme", purpose=None, after=None, limit=9) == []
    await store.close()


async def finetunes(folder: Path) -> None:
    for _ in range(2):
        Finetunes(folder, catalogue(), ModelStore(folder / "models")).close()


async def queues(folder: Path) -> None:
    store = QueueStore(folder)
    await store.send("q", [(b"x", 0)], 0)
    assert (await store.look("q", 9, 1)).num_visible == 1
    await store.close()


@pytest.mark.parametrize("use", [ledger, tokens, batches, finetunes, queues])
async def test_stores_of_the_node(use: Callable[[Path], Awaitable[None]], tmp_path: Path) -> None:
    _databases.clear()
    with watched() as opened:
        await use(tmp_path)
    assert opened == []
    assert _databases, "the store is in a file, and the hook is there"


async def test_bindings(open_kv: Any, open_r2: Any, open_d1: Any) -> None:
    _databases.clear()
    with watched() as opened:
        kv, r2, d1 = await open_kv(), await open_r2(), await open_d1()
        await kv.put("a", "1" * 100_000)
        assert await kv.get("a") == "1" * 100_000
        await r2.put("a", b"1")
        assert (await (await r2.get("a")).text()) == "1"
        await d1.exec("CREATE TABLE t (a)")
        assert (await d1.prepare("SELECT count(*) AS n FROM t").first("n")) == 0
        await open_kv(again=True)
    assert opened == []
    assert len(_databases) >= 3


def test_one_that_does_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tokens.sqlite"
    with watched() as opened, closing(TokenStore(path)):
        path.read_bytes()
        os.close(os.open(f"{path}-wal", os.O_RDWR))
    assert opened == [str(path), f"{path}-wal"]
