"""What each handler process gets from the node besides its socket: a temporary folder, a user and a control group."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from edge.isolates.sandbox import NUM_THREADS, ForkSpec
from edge.isolates.sandbox.cgroups import Group, Groups
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
        self._free: list[int] = []
        self._num_made = 0
        self._taken: dict[int, Place] = {}
        self.abilities = 0
        """What the zygote says it can do."""

    def take(self) -> Place:
        """A place for a process that is about to be forked."""
        if not self._free:
            self._free.append(self._num_made)
            self._num_made += 1
        number = self._free.pop()
        uid = _uid_of(number) if self.abilities & CAN_CHANGE_USER else 0
        if self.has_own_mounts:  # each process mounts a folder of its own there
            return Place(self, number, str(self._mount_point), uid)
        folder = self._folder / str(number)
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
        return [pid for pid, place in list(self._taken.items()) if place.tmp_bytes < _num_bytes(place.tmp_dir)]

    async def admit(self, place: Place, pid: int, spec: ForkSpec) -> None:
        """Put a process that was just forked into a control group. Raises OSError."""
        place.pid, place.tmp_bytes = pid, spec.tmp_mb << 20
        self._taken[pid] = place
        if self._groups is None:
            return
        memory_bytes = (spec.memory_mb + spec.tmp_mb << 20) + GROUP_HEADROOM_BYTES
        async with self._admitting:
            place.group = await asyncio.to_thread(self._admit, pid, memory_bytes)

    def _admit(self, pid: int, memory_bytes: int) -> Group:
        assert self._groups is not None
        group = self._groups.take()
        group.admit(pid, memory_bytes, NUM_THREADS)
        return group

    def give_back(self, place: Place) -> None:
        """What is in its folder is left by code that nobody trusts; `rmtree` follows no link."""
        if place.tmp_dir != str(self._mount_point):
            shutil.rmtree(place.tmp_dir, ignore_errors=True)
        self._free.append(place.number)
        self._taken.pop(place.pid, None)
        if self._groups is not None and place.group is not None:
            asyncio.get_running_loop().run_in_executor(None, self._replace, place.group)

    def _replace(self, group: Group) -> None:
        assert self._groups is not None
        group.remove()
        with suppress(OSError):
            self._groups.fill()

    def remove(self) -> None:
        """Remove all folders and groups; the processes have to be gone."""
        if self._groups is not None:
            self._groups.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Place:
    """One process's share of `Places`."""

    def __init__(self, places: Places, number: int, tmp_dir: str, uid: int) -> None:
        self._places = places
        self.number = number
        self.tmp_dir = tmp_dir
        self.uid = uid
        self.group: Group | None = None
        self.pid = 0
        self.tmp_bytes = 0

    def give_back(self) -> None:
        """Its process is gone."""
        self._places.give_back(self)


def _remove_leftovers(parent: Path) -> None:
    """Folders of nodes of this user that had no time to clear away."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _num_bytes(folder: str) -> int:
    """What a folder takes on the disk, as far as it can be seen while somebody changes it; each file counts a page."""
    total = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += _num_bytes(entry.path)
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
    return total


def _groups() -> tuple[Groups | None, str]:
    try:
        return Groups(), ""
    except OSError as error:
        return None, str(error)


def _uid_of(number: int) -> int:
    """Users differ among the nodes of a host as well."""
    return FIRST_UID + os.getpid() % 4096 * UIDS_PER_NODE + number % UIDS_PER_NODE
