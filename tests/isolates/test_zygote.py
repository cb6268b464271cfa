"""The zygote and its children as processes: they come up, they report, and they never outlive the node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from edge.errors import IsolateLost
from edge.isolates.sandbox.cgroups import Groups
from edge.isolates.spawner import ForkSpec, Spawner
from workers._wire import FrameDecoder, Sandboxed, ToNode

from .conftest import children_of, is_alive, running, until

NODE = """
import asyncio, sys
from edge.isolates.dispatch import Bundle, InboundRequest, Isolates

async def main():
    isolates = Isolates(None, lambda *log: print(log[3], flush=True))
    await isolates.deploy(Bundle("test", "v1", sys.argv[1], "worker_main.py"))
    print(isolates.zygote_pid, isolates.status(("dev", "test")).pids[0], flush=True)
    await isolates.fetch(("dev", "test"), InboundRequest("GET", "http://test/", []))

asyncio.run(main())
"""


@pytest.fixture
async def spawner():
    spawner = Spawner()
    yield spawner
    await spawner.close()


@pytest.fixture
def _cleared():
    """A node that is killed leaves its control groups to the next one."""
    yield
    with contextlib.suppress(OSError):
        Groups().close()


@pytest.mark.usefixtures("_cleared")
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
        others = {name for name in ours if not name.startswith("edge.isolates.sandbox")}
        assert others == {"edge", "edge.isolates", "edge.isolates.zygote"}, ours
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
    pid, sock = await spawner.fork(ForkSpec(), exits.append)
    assert is_alive(pid)
    sock.close()
    await until(lambda: exits == [0])
    pid, sock = await spawner.fork(ForkSpec(), exits.append)
    spawner.kill(pid)
    spawner.kill(pid)
    await until(lambda: exits == [0, -signal.SIGKILL])
    spawner.kill(pid)  # harmless
    sock.close()


async def test_children_do_not_hold_each_others_sockets(spawner):
    exits: list[int] = []
    _, first = await spawner.fork(ForkSpec(), exits.append)
    _, second = await spawner.fork(ForkSpec(), exits.append)
    first.close()
    await until(lambda: exits == [0])
    second.close()


async def test_a_dead_zygote_is_replaced(spawner):
    exits: list[int] = []
    await spawner.start()
    zygote = spawner.pid
    child, sock = await spawner.fork(ForkSpec(), exits.append)
    os.kill(zygote, signal.SIGKILL)
    other, other_sock = await spawner.fork(ForkSpec(), exits.append)
    await until(lambda: not is_alive(child) and exits == [-signal.SIGKILL])
    assert spawner.pid != zygote
    assert is_alive(other)
    sock.close()
    other_sock.close()


async def test_many_forks_at_once(spawner):
    exits: list[int] = []
    children = await asyncio.gather(*(spawner.fork(ForkSpec(), exits.append) for _ in range(20)))
    pids = {pid for pid, _ in children}
    await until(lambda: pids == set(children_of(spawner.pid)) - {spawner.spare_pid})
    for _, sock in children:
        sock.close()
    await until(lambda: len(exits) == 20)


async def test_close_ends_everything_and_is_final(spawner):
    pid, sock = await spawner.fork(ForkSpec(), lambda _: None)
    zygote = spawner.pid
    await spawner.close()
    await spawner.close()
    assert not is_alive(zygote)
    assert not is_alive(pid)
    with pytest.raises(IsolateLost, match="the node is stopping"):
        await spawner.fork(ForkSpec(), lambda _: None)
    sock.close()


async def test_packages_are_preloaded_and_a_missing_one_ends_nothing(caplog):
    spawner = Spawner(preload=["sqlite3", "no_such_package"])
    await spawner.start()
    assert "libsqlite3" in Path(f"/proc/{spawner.pid}/maps").read_text()
    await spawner.close()
    assert "isolates.preload: no_such_package cannot be imported" in caplog.text


def control_groups() -> set[Path]:
    """Of the zygotes that this process has started."""
    return {path for path in Path("/sys/fs/cgroup").glob("**/edge-isolates-*") if f"-{os.getpid()}-" in path.name}


async def test_temporary_folders_and_control_groups_go_with_the_node(tmp_path):
    others = control_groups()
    spawner = Spawner(tmp_root=tmp_path / "tmp")
    _, sock = await spawner.fork(ForkSpec(), lambda _: None)
    assert list((tmp_path / "tmp").iterdir()) != []
    sock.close()
    await spawner.close()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert control_groups() <= others


async def test_paths_that_do_not_fit_into_a_message_are_refused(spawner):
    with pytest.raises(IsolateLost, match="paths that the process is to read take"):
        await spawner.fork(ForkSpec(search_paths=("x" * 70_000,)), lambda _: None)
    _, sock = await spawner.fork(ForkSpec(), lambda _: None)
    sock.close()


async def test_handlers_never_get_the_streams_of_the_node(tmp_path, caplog):
    """Whoever may write to a terminal may read what is typed there; and what they write must not steer it."""
    source = """
        async def fetch(self, request):
            import os, stat
            for _ in range(20):
                os.write(2, b"\\x1b[2J written past Python\\n" * 1000)
            return Response.json([stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (1, 2)])
    """
    async with running(tmp_path) as worker:
        await worker.deploy(source)
        assert json.loads(await worker.get()) == [True, True]
        await until(lambda: "?[2J written past Python" in caplog.text)
    assert "\x1b" not in caplog.text
    assert len(caplog.records) < 20


@pytest.mark.usefixtures("_cleared")
async def test_leftovers_of_a_killed_node_are_removed(tmp_path):
    code = f"""
import asyncio, os
from pathlib import Path
from edge.isolates.spawner import Spawner
async def main():
    await Spawner(tmp_root=Path({str(tmp_path)!r})).start()
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9  # noqa: ASYNC221
    (leftover,) = tmp_path.iterdir()
    spawner = Spawner(tmp_root=tmp_path)
    await spawner.start()
    assert not leftover.exists()
    await spawner.close()


async def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IsolateLost, match="no folder for the temporary files of handlers can be made"):
        await Spawner(tmp_root=tmp_path / "file" / "tmp").start()


async def test_a_spare_process_waits_for_its_use(spawner):
    exits: list[int] = []
    first, sock = await spawner.fork(ForkSpec(), exits.append)
    await until(lambda: spawner.spare_pid is not None)
    spare = spawner.spare_pid
    assert spare != first
    assert exits == []
    second, other_sock = await spawner.fork(ForkSpec(), exits.append)
    assert second == spare
    assert spawner.spare_pid is None
    sandboxed = await asyncio.to_thread(first_frame, other_sock)
    assert sandboxed.escapes == []
    assert sandboxed.layers == (await asyncio.to_thread(first_frame, sock)).layers
    await until(lambda: spawner.spare_pid not in (None, spare))
    sock.close()
    other_sock.close()
    await until(lambda: exits == [0, 0])


async def test_a_spare_process_that_died_is_not_used(spawner):
    _, sock = await spawner.fork(ForkSpec(), lambda _: None)
    await until(lambda: spawner.spare_pid is not None)
    spare = spawner.spare_pid
    os.kill(spare, signal.SIGKILL)
    await until(lambda: spawner.spare_pid is None)
    pid, other_sock = await spawner.fork(ForkSpec(), lambda _: None)
    assert pid != spare
    assert is_alive(pid)
    sock.close()
    other_sock.close()


async def test_a_spare_process_ends_with_its_zygote(spawner):
    _, sock = await spawner.fork(ForkSpec(), lambda _: None)
    await until(lambda: spawner.spare_pid is not None)
    spare = spawner.spare_pid
    os.kill(spawner.pid, signal.SIGKILL)
    await until(lambda: spawner.spare_pid is None and not is_alive(spare))
    sock.close()


def first_frame(sock: socket.socket) -> Sandboxed:
    """What a new process says."""
    sock.setblocking(True)
    decoder = FrameDecoder(ToNode)
    while not (frames := decoder.feed(sock.recv(1 << 16))):
        pass
    return frames[0]


async def test_without_room_for_temporary_folders_there_is_no_process(tmp_path):
    spawner = Spawner("none", tmp_root=tmp_path / "tmp")
    try:
        await spawner.start()
        shutil.rmtree(tmp_path / "tmp")
        with pytest.raises(IsolateLost, match=r"no temporary folder for a handler process can be made: .*No such file"):
            await spawner.fork(ForkSpec(), lambda _: None)
    finally:
        await spawner.close()
