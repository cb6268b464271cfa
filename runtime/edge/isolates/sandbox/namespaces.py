"""Namespaces: of users, the network, IPC, names and mounts.

The zygote enters its own once, so that every isolate is born into a user namespace whose privileges reach nothing
outside, a network without interfaces and a view of the files that cannot be written; that costs a fork nothing. Each
isolate then has mounts of its own, with a temporary folder in memory that ends with it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from edge.isolates.sandbox import linux

_OF_THE_ZYGOTE = {
    "network-namespace": linux.CLONE_NEWNET,
    "ipc-namespace": linux.CLONE_NEWIPC,
    "uts-namespace": linux.CLONE_NEWUTS,
}


def open_proc() -> int:
    """A descriptor of /proc as it is now: it stays writable when the mounts of a new namespace do not."""
    return os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def enter_as_zygote() -> tuple[list[str], dict[str, str]]:
    """Enter namespaces of its own, for this process and its children.

    Returns:
        The layers that are on, and those that are off with the reason.
    """
    try:
        _enter_user_namespace()
    except OSError as error:
        why = f"no user namespace: {error.strerror}"
        return [], dict.fromkeys(("user-namespace", *_OF_THE_ZYGOTE, "mount-namespace"), why)
    layers, missing = ["user-namespace"], {}
    for name, flag in _OF_THE_ZYGOTE.items():
        try:
            linux.unshare(flag)
            layers.append(name)
            if name == "uts-namespace":
                socket.sethostname("edge")
        except OSError as error:
            missing[name] = str(error)
    try:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.make_mounts_read_only()
        layers.append("mount-namespace")
    except OSError as error:
        missing["mount-namespace"] = str(error)
    return layers, missing


def enter_own_user_namespace(proc_fd: int) -> None:
    """For one isolate: the kernel then counts its threads apart from those of others of this user. Raises OSError."""
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER)
    _map_only(uid, gid, proc_fd)


def mount_tmp(folder: str, size_bytes: int, uid: int) -> None:
    """Mounts of its own, among them a folder in memory at `folder` that is gone with the process. Raises OSError."""
    linux.unshare(linux.CLONE_NEWNS)
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("edge", folder, "tmpfs", flags, f"size={size_bytes},nr_inodes=4096,mode=0700,uid={uid}")


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    if uid != 0:
        linux.unshare(linux.CLONE_NEWUSER)
        _map_only(uid, gid)
        return
    # Mapping other users, which isolates are to become, takes the privileges of outside: a child has kept them.
    maps = {name: _whole_range(name) for name in ("uid_map", "gid_map")}
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go_write)
            if os.read(go_read, 1):
                for name, text in maps.items():
                    Path(f"/proc/{os.getppid()}/{name}").write_text(text)
                status = 0
        finally:
            os._exit(status)
    os.close(go_read)
    try:
        linux.unshare(linux.CLONE_NEWUSER)
        os.write(go_write, b"g")
    finally:
        os.close(go_write)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise PermissionError(1, "the users could not be mapped")


def _whole_range(name: str) -> str:
    """Every user that there is here, as itself."""
    lines = [line.split() for line in Path("/proc/self", name).read_text().splitlines()]
    return "".join(f"{first} {first} {count}\n" for first, _, count in lines)


def _map_only(uid: int, gid: int, proc_fd: int | None = None) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        path = f"self/{name}" if proc_fd is not None else f"/proc/self/{name}"
        fd = os.open(path, os.O_WRONLY, dir_fd=proc_fd)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
