"""What each handler process gets from the node besides its socket: a temporary folder, a user and a control group."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from edge.isolates import tmp_folders
from edge.isolates.sandbox import NUM_THREADS
from edge.isolates.sandbox.cgroups import Group, Groups
from edge.isolates.sandbox.layers import TMP_MB
from edge.isolates.zygote import CAN_CHANGE_USER, HAS_OWN_MOUNTS

_PREFIX = "edge-isolates-"
FIRST_UID = 0x7000_0000
"""Users of isolates: above those of people, services and containers, by convention."""
UIDS_PER_NODE = 1 << 16
GROUP_HEADROOM_BYTES = 64 << 20
"""What a process is born with and the kernel needs for it; the node's own watch on `memory_mb` is to act first."""


class Places:
    """What the processes of one zygote get from the node: a temporary folder and a user each."""

    def __init__(self, tmp_root: Path | None, policy: str) -> None:
        if tmp_root is not None:
            tmp_root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(Path(tmp_root or tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=tmp_root))
        self._mount_point = self._folder / "tmp"
        self._mount_point.mkdir(0o700)
        self._groups, self.why_no_cgroup = _groups() if policy != "none" else (None, "the policy is none")
        self._admitting = asyncio.Lock()
        self._clearing = ThreadPoolExecutor(1, "places")
        self._folder_numbers = itertools.count()
        self._free: list[int] = []
        self._num_made = 0
        self._taken: dict[int, Place] = {}
        self.abilities = 0
        """What the zygote says it can do."""

    def take(self) -> Place:
        """A place for a process that is about to be forked. Raises OSError."""
        if not self._free:
            self._free.append(self._num_made)
            self._num_made += 1
        number = self._free.pop()
        uid = _uid_of(number) if self.abilities & CAN_CHANGE_USER else 0
        if self.has_own_mounts:  # each process mounts a folder of its own there
            return Place(self, number, str(self._mount_point), uid)
        folder = self._folder / str(next(self._folder_numbers))
        folder.mkdir(0o700)
        if uid:
            os.chown(folder, uid, uid)
        return Place(self, number, str(folder), uid)

    @property
    def has_own_mounts(self) -> bool:
        """Whether each process has its temporary folder in memory, where its size is limited."""
        return bool(self.abilities & HAS_OWN_MOUNTS)

    def over_their_size(self) -> list[int]:
        """The processes with more in their folders than they may have."""
        return [pid for pid, place in list(self._taken.items()) if tmp_folders.num_bytes(place.tmp_dir) > TMP_MB << 20]

    async def admit(self, place: Place, pid: int) -> None:
        """Put a process that was just forked into a control group. Raises OSError."""
        place.pid = pid
        self._taken[pid] = place
        if self._groups is None:
            return
        async with self._admitting:
            place.group = await asyncio.to_thread(self._admit, pid)

    def _admit(self, pid: int) -> Group:
        assert self._groups is not None
        group = self._groups.take()
        try:
            group.admit(pid, NUM_THREADS)
        except OSError:
            group.remove()
            raise
        return group

    def give_back(self, place: Place) -> None:
        """Its process is gone: clear away what it had, which may take a while."""
        if place.tmp_dir != str(self._mount_point):
            self._clearing.submit(tmp_folders.remove, place.tmp_dir)
        self._free.append(place.number)
        self._taken.pop(place.pid, None)
        if self._groups is not None and place.group is not None:
            self._clearing.submit(self._replace, place.group)

    def _replace(self, group: Group) -> None:
        assert self._groups is not None
        group.remove()
        with suppress(OSError):
            self._groups.fill()

    def remove(self) -> None:
        """Remove all folders and groups; the processes have to be gone."""
        self._clearing.shutdown()
        if self._groups is not None:
            self._groups.close()
        tmp_folders.remove(str(self._folder))


class Place:
    """One process's share of `Places`."""

    def __init__(self, places: Places, number: int, tmp_dir: str, uid: int) -> None:
        self._places = places
        self.number = number
        self.tmp_dir = tmp_dir
        self.uid = uid
        self.group: Group | None = None
        self.pid = 0

    def limit_memory(self, memory_mb: int) -> None:
        """Let its process have that much, and its files. Raises OSError."""
        if self.group is not None:
            self.group.limit_memory((memory_mb + TMP_MB << 20) + GROUP_HEADROOM_BYTES)

    def give_back(self) -> None:
        """Its process is gone."""
        self._places.give_back(self)


def _remove_leftovers(parent: Path) -> None:
    """Folders of nodes of this user that had no time to clear away."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                tmp_folders.remove(str(folder))


def _groups() -> tuple[Groups | None, str]:
    try:
        return Groups(), ""
    except OSError as error:
        return None, str(error)


def _uid_of(number: int) -> int:
    """Users differ among the nodes of a host as well."""
    return FIRST_UID + os.getpid() % 4096 * UIDS_PER_NODE + number % UIDS_PER_NODE
