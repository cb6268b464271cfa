from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from edge.isolates import tmp_folders

PAGE = 4096


def nest(folder: Path, depth: int, name: str = "d") -> None:
    """Folders in each other, deeper than a path can say; in the last one a file."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


def test_what_a_folder_takes(tmp_path: Path) -> None:
    assert tmp_folders.num_bytes(str(tmp_path)) == 0
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("/usr")
    (tmp_path / "gone").symlink_to("nowhere")
    assert tmp_folders.num_bytes(str(tmp_path)) == 3 * PAGE
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(1 << 20))
    assert tmp_folders.num_bytes(str(tmp_path)) >= (1 << 20) + 5 * PAGE
    assert tmp_folders.num_bytes(str(tmp_path / "link")) == 0
    assert tmp_folders.num_bytes(str(tmp_path / "nowhere")) == 0


@pytest.mark.parametrize("name", ["d", "d" * 255])
def test_folders_that_are_too_deep_count_as_too_much(tmp_path: Path, name: str) -> None:
    nest(tmp_path, tmp_folders.MAX_DEPTH, name)
    assert tmp_folders.num_bytes(str(tmp_path)) < 1 << 20
    deep = tmp_path / "deep"
    deep.mkdir()
    nest(deep, tmp_folders.MAX_DEPTH, name)
    assert tmp_folders.num_bytes(str(tmp_path)) == math.inf
    tmp_folders.remove(str(tmp_path))


def test_folders_that_cannot_be_read_count_as_too_much(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may read every folder")
    (tmp_path / "closed").mkdir(0o300)
    assert tmp_folders.num_bytes(str(tmp_path)) == math.inf


@pytest.mark.parametrize("mode", [0o700, 0o300, 0o100, 0])
def test_everything_is_removed(tmp_path: Path, mode: int) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder.mkdir()
    nest(folder, 20, "e" * 255)
    (folder / "link").symlink_to(outside)
    for path in ("a", "a/b", "a/b/c", "x"):
        (folder / path).mkdir()
        (folder / path / "file").touch()
        (folder / path / "link").symlink_to(outside)
    for path in ("a/b/c", "a/b", "a", "x"):
        (folder / path).chmod(mode)
    tmp_folders.remove(str(folder))
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert os.listdir(outside) == ["kept"]


def test_folders_deeper_than_python_can_call_are_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    nest(tmp_path / "folder", sys.getrecursionlimit() + 100)
    tmp_folders.remove(str(tmp_path / "folder"))
    assert os.listdir(tmp_path) == []


def test_a_link_and_nothing_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "nothing"):
        tmp_folders.remove(str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["kept", "link"]
