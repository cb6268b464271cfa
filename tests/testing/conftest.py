"""Runs pytest, with the kit, in another process on small projects."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_S = 120


@pytest.fixture
def run_tests(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Writes files and runs pytest on them. Arguments of pytest, and files: `src__a_dot_py` is `src/a.py`."""

    def run(*arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
        (tmp_path / "wrangler-like.toml").write_text('name = "w"\nmain = "src/my_worker.py"\n')
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "edge.testing.plugin",
            *arguments,
        ]
        environment = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
        }  # others take longer to load than a test takes
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    return run
