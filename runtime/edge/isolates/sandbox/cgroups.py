"""Control groups for isolates: a hard limit on memory and on threads, where this user may make groups.

The node's side: it makes groups below its own (version 2, or version 1 with `memory` and `pids`), keeps some in store
because making one takes milliseconds, and puts each new process into one. It never moves the node itself.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "edge-isolates-"
_STORE = 2
_CONTROLLERS = ("memory", "pids")


class Group:
    """One control group: a folder, or one for each controller."""

    def __init__(self, folders: dict[str, Path], limit_file: str) -> None:
        self._folders = folders
        self._limit_file = limit_file

    def limit_memory(self, num_bytes: int) -> None:
        """Limit what its processes may have together. Raises OSError."""
        (self._folders["memory"] / self._limit_file).write_text(str(num_bytes))

    def admit(self, pid: int, num_threads: int) -> None:
        """Limit the threads of the group and put the process into it. Raises OSError."""
        (self._folders["pids"] / "pids.max").write_text(str(num_threads))
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove it, once its process is gone."""
        for folder in set(self._folders.values()):
            _remove_folder(folder)


class Groups:
    """Makes groups and keeps some in store. Its methods may be called from any thread.

    Raises:
        OSError: this user may make none here, or the kernel lacks a controller; the message says which.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        own = _own_folders()
        self._is_v2 = own["memory"] == own["pids"]
        for folder in set(own.values()):
            _remove_leftovers(folder)
        self._tops = {name: folder / f"{_PREFIX}{os.getpid()}-{id(self):x}" for name, folder in own.items()}
        self._store: list[Group] = []
        for folder in set(self._tops.values()):
            folder.mkdir()
        try:
            if self._is_v2:
                (self._tops["memory"] / "cgroup.subtree_control").write_text("+memory +pids")
            self.fill()
        except OSError:
            self.close()
            raise

    def take(self) -> Group:
        """A group for one process. Raises OSError."""
        with self._lock:
            return self._store.pop() if self._store else self._make()

    def fill(self) -> None:
        """Make groups until enough are in store. Raises OSError."""
        with self._lock:
            while len(self._store) < _STORE and not self._is_closed:
                self._store.append(self._make())

    def close(self) -> None:
        """Remove all groups; the processes in them have to be gone."""
        with self._lock:
            self._is_closed = True
            for top in set(self._tops.values()):
                _remove_top(top)

    def _make(self) -> Group:
        name = str(next(self._numbers))
        folders = {controller: top / name for controller, top in self._tops.items()}
        for folder in set(folders.values()):
            folder.mkdir()
        return Group(folders, "memory.max" if self._is_v2 else "memory.limit_in_bytes")


def _own_folders() -> dict[str, Path]:
    """Where this process is in the hierarchies of the controllers that are needed."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(",") if controllers else ["v2"], path)
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    v1 = {name: _folder(mounts, "cgroup", name, paths[name]) for name in _CONTROLLERS if name in paths}
    folders = {name: folder for name, folder in v1.items() if folder is not None}
    if len(folders) == len(_CONTROLLERS):
        return folders
    v2 = _folder(mounts, "cgroup2", None, paths["v2"]) if "v2" in paths else None
    if v2 is None:
        raise OSError("no cgroups are mounted")
    lacking = set(_CONTROLLERS) - set((v2 / "cgroup.controllers").read_text().split())
    if lacking:
        raise OSError(f"{v2} lacks the controllers {', '.join(sorted(lacking))}")
    return dict.fromkeys(_CONTROLLERS, v2)


def _folder(mounts: list[list[str]], kind: str, option: str | None, path: str) -> Path | None:
    for _, target, mounted, options, *_ in mounts:
        if mounted == kind and (option is None or option in options.split(",")):
            folder = Path(target) / path.lstrip("/")
            return folder if folder.is_dir() else Path(target)
    return None


def _remove_leftovers(own: Path) -> None:
    """Of nodes that had no time to clear away."""
    for top in own.glob(f"{_PREFIX}*"):
        if not Path("/proc", top.name.removeprefix(_PREFIX).split("-")[0]).exists():
            _remove_top(top)


def _remove_top(top: Path) -> None:
    with suppress(OSError):
        for folder in top.iterdir():
            if folder.is_dir():
                _remove_folder(folder)
    _remove_folder(top)


def _remove_folder(folder: Path) -> None:
    """The kernel may take a moment to notice that a process is gone."""
    for _ in range(20):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)
