from __future__ import annotations

import asyncio
import io
import os
import pty
import subprocess
import sys
import termios

from edge.node.hot_keys import HotKey, hot_keys

PROGRAM = """
import asyncio, sys
from edge.node.hot_keys import HotKey, hot_keys

async def main():
    end = asyncio.Event()
    keys = [HotKey("t", "fire", lambda: print("fired", flush=True)), HotKey("x", "exit", end.set)]
    with hot_keys(sys.stdin, keys) as lines:
        print(*lines, flush=True)
        await end.wait()
    print("ended", flush=True)

asyncio.run(main())
"""


def test_keys_are_obeyed_in_a_terminal_which_is_left_as_it_was() -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{PROGRAM}"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "Keys      t: fire, x: exit\n"
        os.write(ours, b"tz\xff")
        assert process.stdout.readline() == "fired\n"
        assert termios.tcgetattr(theirs) != before
        os.write(ours, b"x")
        assert process.stdout.readline() == "ended\n"
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
        os.close(theirs)


async def test_where_there_is_no_terminal_nothing_is_read() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as pipe, hot_keys(pipe, [HotKey("x", "exit", lambda: None)]) as lines:
        assert lines == []
    os.close(write)
    with hot_keys(io.StringIO(), []) as lines:
        assert lines == []
    await asyncio.sleep(0)
