from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from edge.node.saves import saves

HANG_S = 20
QUIET_S = 0.2


class Saves:
    """A running watch; `root` is in a folder whose name, further down, would be skipped."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "venv" / "src"
        self.config = folder / "venv" / "edge.toml"
        self.state_dir = self.root / "state"
        self.state_dir.mkdir(parents=True)
        self.config.write_text("0")
        self.stop = asyncio.Event()
        self.num_seen = 0

    async def watch(self) -> None:
        async for _ in saves(self.root, self.config, self.state_dir, self.stop):
            self.num_seen += 1

    async def are_noticed(self, save: Callable[[], object]) -> None:
        """`save` is noticed; it is repeated as long as the watch is not in place yet."""
        before = self.num_seen
        async with asyncio.timeout(HANG_S):
            while self.num_seen == before:
                save()
                await asyncio.sleep(0.1)
        await asyncio.sleep(QUIET_S)  # the rest of the burst


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Saves]:
    watched = Saves(tmp_path)
    watching = asyncio.create_task(watched.watch())
    await watched.are_noticed(lambda: (watched.root / "worker.py").write_text("x"))
    yield watched
    watched.stop.set()
    async with asyncio.timeout(HANG_S):
        await watching


def replace(file: Path) -> None:
    """Save as many editors do: a new file is renamed over the old one."""
    (file.parent / "new.tmp").write_text("new")
    os.replace(file.parent / "new.tmp", file)


@pytest.mark.slow
async def test_every_save_is_noticed_however_it_is_written(watched: Saves) -> None:
    for _ in range(3):
        await watched.are_noticed(lambda: replace(watched.config))
        await watched.are_noticed(lambda: watched.config.write_text("in place"))
        await watched.are_noticed(lambda: replace(watched.root / "worker.py"))
    for name in (".dev.vars", ".env.local", "requirements.txt"):
        await watched.are_noticed(lambda name=name: (watched.root.parent / name).write_text("x"))
    (watched.root / "package").mkdir()
    await watched.are_noticed(lambda: (watched.root / "package" / "helper.py").write_text("x"))


async def test_what_is_no_save_is_not_noticed(watched: Saves) -> None:
    before = watched.num_seen
    for folder in (".venv", "__pycache__", "state", ".pytest_cache"):
        (watched.root / folder).mkdir(exist_ok=True)
        await asyncio.sleep(QUIET_S / 4)  # so that the new folder is watched
        (watched.root / folder / "file.py").write_text("x")
    (watched.root.parent / "other.toml").write_text("x")
    await asyncio.sleep(QUIET_S)
    assert watched.num_seen == before


async def test_a_folder_that_cannot_be_watched_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No path was found"):
        async with asyncio.timeout(HANG_S):
            await anext(saves(tmp_path / "gone", None, tmp_path, asyncio.Event()))
