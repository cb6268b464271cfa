"""The native kernels, built once and kept where an `edge dev` in this folder finds them too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from edge.engine.kernels import FLAGS, Kernels, compiler, load, sources

CACHE = Path(__file__).parent.parent.parent / ".edge" / "cache" / "kernels"


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels with two threads."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    kernels = load(CACHE)
    kernels.num_threads = 2
    return kernels


LESSER = [("-mno-avx512f",), ("-mno-avx512vnni", "-mno-avx512bf16", "-mno-avxvnni"), ("-march=x86-64",)]
"""Compiler options that leave out this processor's best instructions."""


@pytest.fixture(scope="session", params=LESSER, ids=" ".join)
def lesser_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels as other machines compile them, with two threads."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    command = [str(compiler()), *FLAGS, "-O1", *request.param, *map(str, sources()), "-o", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode != 0:
        pytest.skip(f"the compiler knows no {' '.join(request.param)}: {result.stderr[-500:]}")
    kernels = Kernels(path)
    kernels.num_threads = 2
    return kernels
