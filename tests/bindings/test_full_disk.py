"""What happens on a disk that has no room left: a small file system of its own, filled by somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.bindings import kv, storage
from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.queue_store import QueueStore
from edge.bindings.r2 import R2
from edge.errors import EdgeError, StorageUnavailable
from edge.isolates.base import Binding, Bundle, StreamAnswer

CALLER = Bundle("worker", "v1", "/", "main.py")
LONG = 1 << 20
FLOOR_BYTES = 8 << 20


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here, which takes root: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "24m") as folder:
        yield folder


def fill(disk: Path, but_bytes: int = 0) -> Path:
    """Somebody else's file, which leaves so much."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        left = storage.free_bytes(disk) - but_bytes
        if but_bytes:
            os.posix_fallocate(file.fileno(), 0, left)
            return filler
        for piece in (65_536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece))
    return filler


async def long_body() -> AsyncIterator[bytes]:
    for _ in range(LONG // 65_536):
        yield b"x" * 65_536


class Stores:
    """All kinds of stores on one disk, each with something in it."""

    def __init__(self, disk: Path) -> None:
        self.kv, self.d1, self.r2 = Kv(disk), D1(disk), R2(disk)
        self.queue = QueueStore(disk / "queues")

    async def call(self, provider: Any, method: str, *args: Any, body: AsyncIterator[bytes] | None = None) -> Any:
        answer = await provider.call(CALLER, Binding("x", {"id": "x"}), method, list(args), body)
        if isinstance(answer, StreamAnswer):
            return b"".join([piece async for piece in answer.body])
        return answer.value

    async def read(self) -> list[Any]:
        """Everything that is there."""
        rows = await self.call(self.d1, "query", [["SELECT a, length(b) FROM t ORDER BY a", []]])
        found: list[Any] = [rows["results"][0]["rows"], (await self.queue.look("q", 100, 10)).num_visible]
        for provider, options in ((self.kv, ()), (self.r2, ({},))):
            listed = await self.call(provider, "list", {})
            names = [each.get("name", each.get("key")) for each in listed.get("keys", listed.get("objects"))]
            for name in names:
                got = await self.call(provider, "get", name, *options)
                data = got.get("value", got.get("data"))
                if data is None:
                    version = (got["record"]["version"], 0, LONG) if options else ()
                    data = await self.call(provider, "read", name, *version)
                found.append((name, len(data)))
        return found

    async def close(self) -> None:
        for each in (self.kv, self.d1, self.r2, self.queue):
            await each.close()


Write = Callable[[Stores, str], Awaitable[Any]]
WRITES: dict[str, Write] = {
    "kv short": lambda stores, name: stores.call(stores.kv, "put", f"{name}-short", b"x" * 9000, {}),
    "kv long": lambda stores, name: stores.call(stores.kv, "put", name, None, {}, body=long_body()),
    "d1": lambda stores, name: stores.call(stores.d1, "query", [["INSERT INTO t VALUES (?, ?)", [name, "x" * 9000]]]),
    "r2 short": lambda stores, name: stores.call(stores.r2, "put", f"{name}-short", b"x" * 9000, {}),
    "r2 long": lambda stores, name: stores.call(stores.r2, "put", name, None, {}, body=long_body()),
    "r2 upload": lambda stores, name: stores.call(stores.r2, "create_upload", name, {}),
    "queue": lambda stores, name: stores.queue.send("q", [(b"x" * 9000, 0)], 0),
}


@pytest.fixture
async def stores(disk: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stores]:
    monkeypatch.setattr(storage, "MIN_FREE_BYTES", FLOOR_BYTES)
    opened = Stores(disk)
    await opened.call(opened.d1, "exec", "CREATE TABLE t (a, b)")
    for write in WRITES.values():
        await write(opened, "before")
    yield opened
    await opened.close()


async def refusals(stores: Stores) -> dict[str, str]:
    found = {}
    for kind, write in WRITES.items():
        with pytest.raises(StorageUnavailable) as refused:
            await write(stores, "refused")
        found[kind] = refused.value.message
    return found


@pytest.mark.parametrize("is_empty", [False, True])
async def test_reads_go_on_writes_are_refused_and_nothing_is_lost(stores: Stores, disk: Path, is_empty: bool) -> None:
    before = await stores.read()
    filler = fill(disk, 0 if is_empty else FLOOR_BYTES // 2)
    for _ in range(2):
        assert await stores.read() == before
        for kind, message in (await refusals(stores)).items():
            assert "the disk of the node has less than 8 MiB left" in message, kind
            assert "--state-dir" in message, kind
    filler.unlink()
    for write in WRITES.values():
        await write(stores, "after")
    assert len(await stores.read()) > len(before)


async def test_what_reaches_the_end_of_the_disk_is_told_so(
    stores: Stores, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when others fill it while a write goes on: what has passed the first look."""
    before = await stores.read()
    monkeypatch.setattr(storage, "MIN_FREE_BYTES", 0)
    filler = fill(disk)
    for kind in WRITES.keys() - {"r2 upload"}:  # which needs so little that it may find room
        with pytest.raises(StorageUnavailable, match="the disk of the node is full"):
            await WRITES[kind](stores, "refused")
    filler.unlink()
    assert await stores.read() == before
    for write in WRITES.values():
        await write(stores, "after")


async def test_consumers_work_off_a_queue_though_nothing_may_be_sent(stores: Stores, disk: Path) -> None:
    fill(disk, FLOOR_BYTES // 2)
    (message,) = await stores.queue.take("q", 10, 10)
    await stores.queue.settle([message.seq], [], [], "", 10)
    assert (await stores.queue.look("q", 10, 10)).num_visible == 0


async def test_what_is_deleted_goes_though_nothing_may_be_written(stores: Stores, disk: Path) -> None:
    fill(disk, FLOOR_BYTES // 2)
    await stores.call(stores.kv, "delete", "before")
    free_before = storage.free_bytes(disk)
    await stores.call(stores.r2, "delete", ["before", "before-short"])
    assert storage.free_bytes(disk) > free_before + LONG // 2
    assert (await stores.read())[2:] == [("before-short", 9000)]


async def test_memory_for_long_values_is_bounded_on_a_full_disk(
    stores: Stores, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "MAX_COPIED_BYTES", 2 * LONG)
    fill(disk, FLOOR_BYTES // 2)

    async def read() -> StreamAnswer:
        answer = await stores.kv.call(CALLER, Binding("kv", {"id": "x"}), "read", ["before"], None)
        assert isinstance(answer, StreamAnswer)
        return answer

    first, second = await read(), await read()
    with pytest.raises(StorageUnavailable, match="one after the other"):
        await read()
    assert len(b"".join([piece async for piece in first.body])) == LONG, "which lets go of it"
    await second.body.aclose()  # type: ignore[attr-defined]
    third, fourth = await read(), await read()
    del third, fourth
    await read()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT hex(randomblob(400000)) AS a FROM n"


@pytest.mark.parametrize("where", ["temporary files", "the database"])
async def test_one_call_does_not_fill_a_disk(tmp_path: Path, where: str) -> None:
    with mounted(tmp_path / "disk", f"{storage.MIN_FREE_BYTES + (64 << 20)}") as disk:
        (tmp_path / "state").mkdir()
        is_sort = where == "temporary files"
        state, sql = (tmp_path / "state", f"{ENDLESS} ORDER BY a") if is_sort else (disk, f"INSERT INTO t {ENDLESS}")
        # SQLite reads this once, when it is loaded.
        environment = {**os.environ, "SQLITE_TMPDIR": str(disk if is_sort else tmp_path)}
        command = [sys.executable, __file__, str(state), sql]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert "StorageUnavailable D1_ERROR: a disk filled while the call ran" in done.stdout, done
        assert done.stdout.endswith("and goes on\n")


async def run(state_dir: Path, sql: str) -> None:
    provider = D1(state_dir)

    async def query(sql: str) -> None:
        await provider.call(CALLER, Binding("d1", {"id": "x"}), "query", [[[sql, []]]], None)

    await query("CREATE TABLE t (a)")
    try:
        await query(sql)
    except EdgeError as error:
        print(error.name, error.message)
    await query("SELECT * FROM t ORDER BY a")
    print("and goes on")
    await provider.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2]))
