"""The native kernels, built once and kept where an `edge dev` in this folder finds them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.engine.kernels import Kernels, compiler, load

CACHE = Path(__file__).parent.parent.parent / ".edge" / "cache" / "kernels"


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels with two threads."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    kernels = load(CACHE)
    kernels.num_threads = 2
    return kernels
