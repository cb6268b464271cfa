"""Control groups, where this user may make some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.isolates.sandbox import cgroups
from edge.isolates.sandbox.cgroups import Groups


@pytest.fixture
def others():
    """Groups of zygotes that other tests have left running."""
    return folders(os.getpid())


@pytest.fixture
def groups(others):
    try:
        groups = Groups()
    except OSError as error:
        pytest.skip(f"no control groups can be made here: {error}")
    yield groups
    groups.close()


def folders(pid: int) -> list[Path]:
    own = set(cgroups._own_folders().values())
    return [path for folder in own for path in folder.glob(f"edge-isolates-{pid}-*")]


def test_a_process_over_its_memory_is_killed(groups):
    code = "import sys; sys.stdin.read(1); data = bytearray(200 << 20); data[::4096] = b'x' * len(data[::4096])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        group = groups.take()
        group.admit(process.pid, 10)
        group.limit_memory(64 << 20)
        process.communicate(b"g")
    assert process.returncode == -9
    group.remove()


def test_threads_are_limited(groups):
    code = """
import sys, threading
sys.stdin.read(1)
done, number = threading.Event(), 0
try:
    while number < 100:
        threading.Thread(target=done.wait, daemon=True).start()
        number += 1
except RuntimeError:
    pass
print(number)
done.set()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        group = groups.take()
        group.admit(process.pid, 10)
        output, _ = process.communicate(b"g")
    assert int(output) == 9
    group.remove()


def test_groups_are_removed_and_none_is_made_afterwards(groups, others):
    assert len(folders(os.getpid())) - len(others) in (1, 2)
    groups.take()
    groups.close()
    groups.fill()
    assert set(folders(os.getpid())) <= set(others)


def test_leftovers_of_a_killed_node_are_removed(groups):
    code = "from edge.isolates.sandbox.cgroups import Groups; import os; Groups(); os._exit(0)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        process.wait()
    assert folders(process.pid) != []
    Groups().close()
    assert folders(process.pid) == []


def test_a_machine_without_control_groups_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroups, "_CONTROLLERS", ("memory", "no-such-controller"))
    with pytest.raises(OSError, match=r"lacks the controllers .*no-such-controller|no cgroups are mounted"):
        Groups()
