"""The native CPU kernels: C++ beside this file, compiled once per machine, kept on disk, called through ctypes.

The sources have a plain C interface and include no header of torch, so that they build in seconds and one object
file serves every version of it. Each kernel stands beside a torch function of the same meaning, which is its oracle
in the tests and what runs where there is no compiler.

This module knows how to build and load; the wrappers beside it know the kernels.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from edge.engine.kernels.memory import Arena

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-pthread",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""No -ffast-math: the order of every sum is part of what a kernel promises."""
COMPILE_TIMEOUT_S = 300.0

KEPT = 4
"""How many results a folder keeps: several versions and machines can share it."""

_BUILDING = "building-"
_DIGEST_BYTES = 32


class KernelsUnavailable(Exception):
    """The kernels cannot be built or loaded here, and why; everything works without them, more slowly."""


class Kernels:
    """The loaded library, twice: with and without letting go of Python's lock during a call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_threads = 1
        """How many threads a kernel may use; the engine sets it once, before the first call."""
        self.arena = Arena()
        """Where packed weights are."""
        self.long = ctypes.CDLL(str(path))
        """For calls that take longer than a few microseconds: other threads run meanwhile."""
        self.short = ctypes.PyDLL(str(path))
        """For the shortest calls, where handing the lock over costs more than the call."""


def sources() -> list[Path]:
    """The C++ files, in a fixed order."""
    return sorted(Path(__file__).parent.glob("*.cpp"))


def compiler() -> str | None:
    """The C++ compiler that is used: `CXX`, or the first of `COMPILERS` on the path."""
    named = os.environ.get("CXX")
    return next((found for name in ([named] if named else COMPILERS) if (found := shutil.which(name))), None)


def load(cache_dir: Path) -> Kernels:
    """The kernels, compiled into `cache_dir` unless they are there for these sources, flags, compiler and processor.

    Raises:
        KernelsUnavailable: there is no compiler, it fails, or its result cannot be loaded.
    """
    found = compiler()
    if found is None:
        raise KernelsUnavailable(_why_no_compiler())
    try:
        path = cache_dir / f"kernels-{_key(found)}.so"
        if not _is_whole(path):
            _build(found, path)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"{found} did not finish within {COMPILE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise KernelsUnavailable(f"they cannot be compiled into {cache_dir}: {error}") from error
    try:
        return Kernels(path)
    except OSError as error:
        raise KernelsUnavailable(f"{error}; remove {path} to have it compiled again") from error


def _why_no_compiler() -> str:
    if named := os.environ.get("CXX"):
        return f"CXX is {named!r}, which is no program here; set it to the path of a C++ compiler, or unset it"
    return "no C++ compiler was found; install one (on Debian: apt install g++)"


def _is_whole(path: Path) -> bool:
    """Whether `path` is there as `_build` left it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def _key(found: str) -> str:
    """What the object file depends on: another processor or compiler must not get this one's code."""
    key = hashlib.sha256()
    version = subprocess.run([found, "--version"], capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S).stdout
    for part in (version, " ".join(FLAGS).encode(), _processor().encode()):
        key.update(len(part).to_bytes(8, "little") + part)
    for source in [*sources(), *sorted(Path(__file__).parent.glob("*.h"))]:
        key.update(source.name.encode() + source.read_bytes())
    return key.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _build(found: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two engines that start at once build it once
        if _is_whole(path):
            return
        for leftover in path.parent.glob(f"{_BUILDING}*"):  # of one that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [found, *FLAGS, *map(str, sources()), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S)
            if result.returncode != 0:
                reason = result.stderr.decode(errors="replace").strip()
                raise KernelsUnavailable(f"{found} failed: {reason[-2000:]}")
            content = built.read_bytes()
            built.write_bytes(content + hashlib.sha256(content).digest())
            built.rename(path)
    others = sorted((other for other in path.parent.glob("kernels-*.so") if other != path), key=_age, reverse=True)
    for old in others[KEPT - 1 :]:
        old.unlink(missing_ok=True)
