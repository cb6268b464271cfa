"""Notices saves: of any file below a worker's root, of its configuration file and of what stands beside that.

Many editors save by renaming a new file over the old one. A watch on the file itself would go with the old one after
a single save, so it is the file's folder that is watched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import watchfiles

from edge.node.bundle import SKIPPED_FOLDERS

BESIDE_CONFIG = ("pyproject.toml", "requirements.txt", "pylock.toml", "uv.lock", ".dev.vars", ".env")
"""Files that say what a worker depends on, and its secrets; of the last two also those with one more ending."""
DEBOUNCE_MS = 50
STEP_MS = 20


async def saves(
    root: Path, config_file: Path | None, state_dir: Path, stop: asyncio.Event
) -> AsyncGenerator[None, None]:
    """One item for each burst of saves, until `stop` is set.

    What happens in `state_dir` and in folders of tools and caches below `root` is no save.

    Raises:
        OSError: the files cannot be watched, for example because the system's limit of watches is reached.
    """
    saved = asyncio.Event()
    watchers = [asyncio.create_task(_watch(root, _Sources(root, state_dir), saved, stop))]
    if config_file is not None and not config_file.is_relative_to(root):
        beside = _Beside(config_file)
        watchers.append(asyncio.create_task(_watch(config_file.parent, beside, saved, stop, recursive=False)))
    try:
        while True:
            await saved.wait()
            saved.clear()
            for watcher in watchers:
                if watcher.done():
                    watcher.result()
            if stop.is_set():
                return
            yield None
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def _watch(
    folder: Path,
    watch_filter: watchfiles.BaseFilter,
    saved: asyncio.Event,
    stop: asyncio.Event,
    *,
    recursive: bool = True,
) -> None:
    """Set `saved` at every change that `watch_filter` lets pass, and at the end."""
    try:
        async for _ in watchfiles.awatch(
            folder,
            watch_filter=watch_filter,
            stop_event=stop,
            debounce=DEBOUNCE_MS,
            step=STEP_MS,
            recursive=recursive,
        ):
            saved.set()
    finally:
        saved.set()


class _Sources(watchfiles.DefaultFilter):
    """Files below `root`, judged by their path from there: `root` itself may be in a folder of any name."""

    def __init__(self, root: Path, state_dir: Path) -> None:
        super().__init__(ignore_dirs=sorted(SKIPPED_FOLDERS))
        self._root = str(root)
        self._state_dir = f"{state_dir}{os.sep}"

    def __call__(self, change: watchfiles.Change, path: str) -> bool:
        return not path.startswith(self._state_dir) and super().__call__(change, path.removeprefix(self._root))


class _Beside(watchfiles.BaseFilter):
    """The configuration file, and files beside it that belong to it."""

    def __init__(self, config_file: Path) -> None:
        super().__init__()
        self._name = config_file.name

    def __call__(self, change: watchfiles.Change, path: str) -> bool:
        name = os.path.basename(path)
        return name == self._name or name in BESIDE_CONFIG or name.startswith((".dev.vars.", ".env."))
