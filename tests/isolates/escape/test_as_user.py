"""The escape suite once more as an ordinary user, whom the kernel gives other rights than root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.isolates.sandbox import linux

UNUSED_UID = 12345
SUITE = Path(__file__).with_name("test_escape.py")
REPOSITORY = Path(__file__).parents[3]

# Becomes the user and runs the suite. Folders that only root may pass through, such as /root with an interpreter in it,
# are opened in a mount namespace of its own: covered with an empty folder in which only what is needed appears.
AS_USER = f"""
import os, sys, tempfile
from pathlib import Path
from edge.isolates.sandbox import linux

BIND = 4096
needed = [Path(path).resolve() for path in (sys.base_prefix, sys.prefix, {str(REPOSITORY)!r})]
linux.unshare(linux.CLONE_NEWNS)
linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
closed = {{}}
for path in needed:
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 1:
            closed.setdefault(parent, []).append(path)
            break
for parent, paths in closed.items():
    stash = Path(tempfile.mkdtemp(dir=os.environ["STASH"]))
    for number, path in enumerate(paths):
        (stash / str(number)).mkdir()
        linux.mount(str(path), str(stash / str(number)), "", BIND | linux.MS_REC)
    linux.mount("none", str(parent), "tmpfs", 0, "mode=755")
    for number, path in enumerate(paths):
        path.mkdir(parents=True)
        linux.mount(str(stash / str(number)), str(path), "", BIND | linux.MS_REC)
os.setgroups([])
os.setresgid({UNUSED_UID}, {UNUSED_UID}, {UNUSED_UID})
os.setresuid({UNUSED_UID}, {UNUSED_UID}, {UNUSED_UID})
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""


def can_mount() -> bool:
    """Whether root is root enough, tried in a process that ends at once."""
    child = os.fork()
    if child == 0:
        try:
            linux.unshare(linux.CLONE_NEWNS)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_nothing_escapes_from_a_node_of_an_ordinary_user(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("these tests run as an ordinary user already")
    if not can_mount():
        pytest.skip("root may not mount here, which it takes to let another user reach the interpreter")
    command = [sys.executable, "-c", AS_USER, "-q", "-p", "no:cacheprovider", str(SUITE)]
    env = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "STASH": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
