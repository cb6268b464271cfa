"""The zygote and its children as processes: they come up, they report, and they never outlive the node."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from edge.errors import IsolateLost
from edge.isolates.spawner import Spawner

from .conftest import children_of, is_alive, until

NODE = """
import asyncio, sys
from edge.config import LimitsConfig
from edge.isolates.dispatch import Bundle, InboundRequest, Isolates

async def main():
    isolates = Isolates(None, LimitsConfig(), lambda *log: print(log[3], flush=True))
    await isolates.deploy(Bundle("test", "v1", sys.argv[1], "worker_main.py"))
    print(isolates.zygote_pid, isolates.pid, flush=True)
    await isolates.fetch(InboundRequest("GET", "http://test/", []))

asyncio.run(main())
"""


@pytest.fixture
async def spawner():
    spawner = Spawner()
    yield spawner
    await spawner.close()


@pytest.mark.parametrize("in_handler", ["while True: pass", "import time; time.sleep(60)"])
async def test_nothing_outlives_a_node_that_is_killed(tmp_path, in_handler):
    source = f"def on_fetch():\n    print('in the handler')\n    {in_handler}\n"
    (tmp_path / "worker_main.py").write_text(source)
    command = [sys.executable, "-c", NODE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:  # noqa: ASYNC220
        assert node.stdout is not None
        zygote, isolate = map(int, node.stdout.readline().split())
        assert node.stdout.readline() == "in the handler\n"
        assert is_alive(zygote)
        assert is_alive(isolate)
        node.kill()
        await until(lambda: not is_alive(zygote) and not is_alive(isolate))


async def test_the_zygote_is_single_threaded_and_knows_only_the_sdk(spawner):
    await spawner.start()
    assert len(os.listdir(f"/proc/{spawner.pid}/task")) == 1
    code = """
        import sys, edge.isolates.zygote
        ours = {name for name in sys.modules if name.startswith("edge")}
        assert ours == {"edge", "edge.isolates", "edge.isolates.sandbox", "edge.isolates.zygote"}, ours
        heavy = {"httpx", "starlette", "uvicorn", "torch", "numpy", "sqlite3"} & set(sys.modules)
        assert heavy == set(), heavy
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert (done.returncode, done.stderr) == (0, "")


async def test_its_environment_holds_no_secret(spawner, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    await spawner.start()
    assert b"SECRET_TOKEN" not in Path(f"/proc/{spawner.pid}/environ").read_bytes()


async def test_exits_are_reported(spawner):
    exits: list[int] = []
    pid, sock = await spawner.fork(exits.append)
    assert is_alive(pid)
    sock.close()
    await until(lambda: exits == [0])
    pid, sock = await spawner.fork(exits.append)
    spawner.kill(pid)
    spawner.kill(pid)
    await until(lambda: exits == [0, -signal.SIGKILL])
    spawner.kill(pid)  # harmless
    sock.close()


async def test_children_do_not_hold_each_others_sockets(spawner):
    exits: list[int] = []
    _, first = await spawner.fork(exits.append)
    _, second = await spawner.fork(exits.append)
    first.close()
    await until(lambda: exits == [0])
    second.close()


async def test_a_dead_zygote_is_replaced(spawner):
    exits: list[int] = []
    await spawner.start()
    zygote = spawner.pid
    child, sock = await spawner.fork(exits.append)
    os.kill(zygote, signal.SIGKILL)
    other, other_sock = await spawner.fork(exits.append)
    await until(lambda: not is_alive(child) and exits == [-signal.SIGKILL])
    assert spawner.pid != zygote
    assert is_alive(other)
    sock.close()
    other_sock.close()


async def test_many_forks_at_once(spawner):
    exits: list[int] = []
    children = await asyncio.gather(*(spawner.fork(exits.append) for _ in range(20)))
    assert sorted(pid for pid, _ in children) == sorted(children_of(spawner.pid))
    for _, sock in children:
        sock.close()
    await until(lambda: len(exits) == 20)


async def test_close_ends_everything_and_is_final(spawner):
    pid, sock = await spawner.fork(lambda _: None)
    zygote = spawner.pid
    await spawner.close()
    await spawner.close()
    assert not is_alive(zygote)
    assert not is_alive(pid)
    with pytest.raises(IsolateLost, match="the node is stopping"):
        await spawner.fork(lambda _: None)
    sock.close()
