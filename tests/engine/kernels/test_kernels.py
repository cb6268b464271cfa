"""Compiling and loading; what is compiled here is a small file, not the kernels."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from edge.engine import kernels
from edge.engine.kernels import KernelsUnavailable, compiler, load

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\nconst char filling[100000] = {1};\n')
    monkeypatch.setattr(kernels, "sources", lambda: [path])
    return path


def answer(cache_dir: Path) -> int:
    found = load(cache_dir)
    assert isinstance(found.short, ctypes.PyDLL)
    return int(found.long.answer())


@needs_compiler
def test_what_is_compiled_is_found_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(tmp_path / "cache") == 42
    monkeypatch.setattr(kernels, "_build", None)
    assert answer(tmp_path / "cache") == 42


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut", "cut by one", "zeros at the end", "one bit", "grown"])
def test_a_damaged_file_is_compiled_again_and_never_loaded(source: Path, tmp_path: Path, damage: str) -> None:
    path = load(tmp_path / "cache").path
    content = path.read_bytes()
    half = len(content) // 2
    damaged = {
        "empty": b"",
        "cut": content[:half],
        "cut by one": content[:-1],
        "zeros at the end": content[:half] + bytes(half),
        "one bit": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        "grown": content + b"\0",
    }[damage]
    path.unlink()  # what is mapped must not change
    path.write_bytes(damaged)
    assert answer(tmp_path / "cache") == 42
    assert path.read_bytes()[:half] == content[:half]


@needs_compiler
def test_only_the_newest_results_are_kept(source: Path, tmp_path: Path) -> None:
    paths = []
    for version in range(kernels.KEPT + 2):
        source.write_text(f'extern "C" int answer() {{ return {version}; }}\n')
        assert answer(tmp_path / "cache") == version
        paths.append(load(tmp_path / "cache").path)
        os.utime(paths[-1], (version, version))
    assert [path for path in paths if path.exists()] == paths[2:]


@needs_compiler
def test_several_at_once_compile_it_once(source: Path, tmp_path: Path) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(answer(tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 4
    assert len(list((tmp_path / "cache").glob("kernels-*.so"))) == 1


@needs_compiler
def test_what_a_killed_one_left_goes(source: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "building-abc"
    left.mkdir(parents=True)
    (left / "kernels-1.so").write_bytes(b"half")
    assert answer(tmp_path / "cache") == 42
    assert sorted(path.name[:8] for path in (tmp_path / "cache").iterdir()) == ["build.lo", "kernels-"]


@needs_compiler
def test_a_folder_that_cannot_be_written_is_said(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KernelsUnavailable, match=f"cannot be compiled into {tmp_path / 'cache'}"):
        load(tmp_path / "cache")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, r"CXX is '.*/c\+\+', which is no program here; set it to the path of a C\+\+ compiler, or unset it"),
        ("echo broken >&2; exit 1", r"c\+\+ failed: broken"),
        (r"printf '\377' >&2; exit 1", r"c\+\+ failed: �"),
        ("exit 0", "cannot be compiled into"),
        (
            'for last; do :; done; [ $# = 1 ] || echo "no library" > "$last"',
            "remove .*kernels-.*so to have it compiled again",
        ),
    ],
)
def test_a_broken_compiler_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, reason: str
) -> None:
    path = tmp_path / "c++"
    if script is not None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(KernelsUnavailable, match=reason):
        load(tmp_path / "cache")


def test_a_compiler_that_hangs_is_given_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(kernels, "COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(KernelsUnavailable, match=r"did not finish within 0\.2 s"):
        load(tmp_path / "cache")
