"""What a process does before it knows what it is for leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

from workers import _runtime
from workers._rehearsal import rehearse


def test_nothing_stays_of_it() -> None:
    before = set(sys.modules), list(sys.path), sys.stdout, os.listdir("/proc/self/fd")
    rehearse()
    assert (set(sys.modules), list(sys.path), sys.stdout, os.listdir("/proc/self/fd")) == before
    assert _runtime.runtime is None


def test_a_request_is_served() -> None:
    code = """
        from workers import response
        from workers._rehearsal import rehearse
        init = response.Response.__init__
        def noted(self, *args, **options):
            print(args)
            init(self, *args, **options)
        response.Response.__init__ = noted
        rehearse()
        rehearse()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("('hello',)\n('hello',)\n", "")


def test_several_threads_can_do_it_in_turn() -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(rehearse).result()
            rehearse()


def test_a_loop_can_be_run_afterwards() -> None:
    rehearse()
    assert asyncio.run(asyncio.sleep(0, "done")) == "done"
