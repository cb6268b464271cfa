"""The native kernels, built once and kept where an `edge dev` in this folder finds them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.engine.kernels import FLAGS, Kernels, KernelsUnavailable, compiler, load

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
def lesser_kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels as other machines compile them, with two threads."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.engine.kernels.FLAGS", (*FLAGS, "-O1", *request.param))
        try:
            kernels = load(CACHE / "lesser")
        except KernelsUnavailable as error:
            pytest.skip(f"the compiler knows no {' '.join(request.param)}: {str(error)[-500:]}")
    kernels.num_threads = 2
    return kernels
