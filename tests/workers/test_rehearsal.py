"""What a process does before it knows what it is for leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from workers import _runtime
from workers._rehearsal import rehearse


def test_nothing_stays_of_it() -> None:
    before = set(sys.modules), list(sys.path), sys.stdout, os.listdir("/proc/self/fd")
    rehearse()
    assert (set(sys.modules), list(sys.path), sys.stdout, os.listdir("/proc/self/fd")) == before
    assert _runtime.runtime is None


@pytest.mark.parametrize("package", ["", "fastapi"])
def test_a_request_is_served(package: str) -> None:
    if package:
        pytest.importorskip(package)
    code = f"""
        import sys
        from workers import asgi
        from workers._channel import Channel
        from workers._rehearsal import rehearse
        from workers._wire import ResponseHead
        {f"import {package}" if package else ""}
        send = Channel.send
        def noted(self, *frames):
            print(*[(frame.status, frame.content) for frame in frames if isinstance(frame, ResponseHead)])
            send(self, *frames)
        Channel.send = noted
        rehearse()
        modules = set(sys.modules)
        rehearse()
        print(set(sys.modules) - modules, asgi._lifespans)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    answers = ["(200, b'hello')", """(200, b'{"name":"","price":null}')"""] if package else ["(200, b'hello')"]
    *served, left = filter(None, done.stdout.split("\n"))
    assert (served, left, done.stderr) == (answers * 2, "set() {}", "")


def test_several_threads_can_do_it_in_turn() -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(rehearse).result()
            rehearse()


def test_a_loop_can_be_run_afterwards() -> None:
    rehearse()
    assert asyncio.run(asyncio.sleep(0, "done")) == "done"
