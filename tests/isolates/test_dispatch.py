"""Versions of a worker and the processes that serve them: deploying, reloading, and processes that die."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from edge.errors import IsolateLost, UnknownWorker
from edge.isolates.dispatch import Bundle, WorkerStartFailed

from .conftest import is_alive, until

# -- processes that die ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os._exit(7)", r"it exited with status 7"),
        ("os.kill(os.getpid(), 11)", r"it was killed by signal SIGSEGV"),
        ("os.close(self_fd())", r"it closed its connection|it was killed by signal SIGKILL"),
        ("os.write(self_fd(), b'\\xff' * 8)", r"it broke the rules of the connection and was killed: frame of"),
    ],
)
async def test_a_process_that_dies_in_a_request(worker, code, reason):
    await worker.deploy(
        f"""
        async def fetch(self, request):
            import os
            def self_fd():
                return max(fd for fd in range(3, 64) if os.path.lexists(f"/proc/self/fd/{{fd}}")
                           and os.readlink(f"/proc/self/fd/{{fd}}") == SOCKET)
            import gc, socket
            (sock,) = [s for s in gc.get_objects() if isinstance(s, socket.socket) and s.type == socket.SOCK_STREAM
                       and s.family == socket.AF_UNIX and s.fileno() > 2 and s.getsockopt(1, 17) != os.getpid()]
            SOCKET = os.readlink(f"/proc/self/fd/{{sock.fileno()}}")
            if "die" in request.url:
                {code}
                await asyncio.sleep(60)
            return Response("ok")
        """
    )
    with pytest.raises(IsolateLost, match=reason):
        await worker.get("/die")
    assert await worker.get() == "ok"


async def test_kill_9_of_the_isolate_in_a_stream(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            async def endless():
                while True:
                    yield "x"
                    await asyncio.sleep(0.001)
            return Response(endless() if "endless" in request.url else "ok")
        """
    )
    response = await worker.open("/endless")
    await anext(response.body)
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(IsolateLost, match="killed by signal SIGKILL"):
        async for _ in response.body:
            pass
    assert await worker.get() == "ok"
    assert worker.pid not in (None, pid)


async def test_kill_9_of_the_zygote(worker):
    await worker.deploy("async def fetch(self, request): return Response('ok')")
    zygote, pid = worker.isolates.zygote_pid, worker.pid
    os.kill(zygote, signal.SIGKILL)
    await until(lambda: not is_alive(pid) and worker.pid is None)
    assert await worker.get() == "ok"
    assert worker.isolates.zygote_pid not in (None, zygote)


@pytest.mark.parametrize("start", ["subprocess.Popen(['sleep', '60']).pid", "os.fork() or time.sleep(60)"])
async def test_what_a_handler_started_ends_with_its_process(unsandboxed, start):
    worker = unsandboxed
    await worker.deploy(f"def fetch(self):\n    import os, subprocess, time\n    return Response(str({start}))")
    started = int(await worker.get())
    assert is_alive(started)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: not is_alive(started) and worker.pid is None)


async def test_many_requests_after_a_death_share_one_new_process(worker):
    await worker.deploy("def fetch(self):\n    import os\n    return Response(str(os.getpid()))")
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: worker.pid is None)
    assert len(set(await asyncio.gather(*(worker.get() for _ in range(10))))) == 1


async def test_close_ends_requests_in_flight(alone):
    await alone.deploy("async def fetch(self, request):\n    print('in')\n    await asyncio.sleep(60)")
    request = asyncio.create_task(alone.get())
    await alone.log_text("in")
    zygote = alone.isolates.zygote_pid
    await alone.isolates.close()
    with pytest.raises(IsolateLost, match="the node is stopping"):
        await request
    with pytest.raises(IsolateLost, match="the node is stopping"):
        await alone.get()
    assert not is_alive(zygote)


async def test_close_kills_a_wedged_process(alone):
    await alone.deploy("def fetch(self):\n    print('in')\n    while True: pass")
    request = asyncio.create_task(alone.get())
    await alone.log_text("in")
    pid = alone.pid
    await alone.isolates.close()
    with pytest.raises(IsolateLost):
        await request
    assert not is_alive(pid)


# -- deploying ---------------------------------------------------------------------------------------------


async def test_requests_in_flight_finish_on_the_old_version(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            print("in")
            await request.text()
            return Response("old")
        """
    )
    go_on = asyncio.Event()

    async def body():
        yield b"a"
        await go_on.wait()

    request = asyncio.create_task(worker.get("/", method="POST", body=body()))
    await worker.log_text("in")
    pid = worker.pid
    await worker.deploy("def fetch(self): return Response('new')")
    assert await worker.get() == "new"
    assert is_alive(pid)
    go_on.set()
    assert await request == "old"
    await until(lambda: not is_alive(pid))


async def test_an_idle_old_version_is_stopped(worker):
    await worker.deploy("def fetch(self): return Response('old')")
    pid = worker.pid
    await worker.deploy("def fetch(self): return Response('new')")
    await until(lambda: not is_alive(pid))
    await until(lambda: worker.children() == [worker.pid])


@pytest.mark.parametrize(
    ("source", "message", "traceback"),
    [
        (
            "import nope_nope\n",
            "ModuleNotFoundError: No module named 'nope_nope'",
            'worker_main.py", line 1, in <module>',
        ),
        ("def f(:\n", "SyntaxError: invalid syntax", "def f(:"),
        ("1/0\n", "ZeroDivisionError: division by zero", "1/0"),
        ("raise SystemExit(3)\n", "SystemExit: 3", "raise SystemExit(3)"),
        ("import os; os._exit(4)\n", "died while it imported worker_main.py: it exited with status 4", ""),
        ("x = 1\n", "TypeError: worker_main.py has no handler", "class Default(WorkerEntrypoint)"),
    ],
)
async def test_a_version_that_cannot_be_imported(worker, source, message, traceback):
    await worker.deploy("def fetch(self): return Response('old')")
    with pytest.raises(WorkerStartFailed) as caught:
        await worker.deploy(source, indented=False)
    assert message in caught.value.message
    assert traceback in caught.value.traceback
    assert "importlib" not in caught.value.traceback
    assert "_load.py" not in caught.value.traceback
    assert await worker.get() == "old"
    await until(lambda: worker.children() == [worker.pid])


async def test_a_failure_after_much_output_is_not_lost(worker):
    with pytest.raises(WorkerStartFailed, match="ZeroDivisionError"):
        await worker.deploy("for _ in range(20_000):\n    print('x' * 100)\n1/0\n", indented=False)
    assert worker.logs[0] == (0, "log", "x" * 100)


async def test_an_import_that_does_not_end(hasty):
    with pytest.raises(WorkerStartFailed, match=r"not imported within 1 s \(limits\.timeout_s\)"):
        await hasty.deploy("while True: pass\n", indented=False)
    await until(lambda: hasty.children() == [])


async def test_without_a_version_that_works(worker):
    with pytest.raises(UnknownWorker, match="no worker 'test' is deployed in account 'dev'"):
        await worker.get()
    with pytest.raises(WorkerStartFailed, match="ZeroDivisionError"):
        await worker.deploy("1/0\n", indented=False)
    with pytest.raises(WorkerStartFailed, match="ZeroDivisionError"):
        await worker.get()
    await worker.deploy("def fetch(self): return Response('ok')")
    assert await worker.get() == "ok"


async def test_a_worker_that_cannot_be_imported_again(worker):
    await worker.deploy("def fetch(self): return Response('ok')")
    (worker.root / "worker_main.py").write_text("1/0\n")
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: worker.pid is None)
    with pytest.raises(WorkerStartFailed, match="ZeroDivisionError"):
        await worker.get()
    (worker.root / "worker_main.py").write_text(
        "from workers import Response\ndef on_fetch(): return Response('again')\n"
    )
    assert await worker.get() == "again"


async def test_edits_within_the_same_second_are_seen(worker):
    for text in ("aa", "bb", "cc"):
        await worker.deploy(f"def fetch(self): return Response('{text}')")
        assert await worker.get() == text
    assert not (worker.root / "__pycache__").exists()


async def test_vars_that_cannot_be_sent(worker):
    with pytest.raises(WorkerStartFailed, match="the variables of test cannot be handed to it"):
        await worker.deploy("def fetch(self): return Response('ok')", vars={"A": 2**70})


async def test_a_main_file_that_is_missing(worker):
    with pytest.raises(WorkerStartFailed, match=r"missing\.py is not in"):
        await worker.isolates.deploy(Bundle("test", "v1", str(worker.root), "missing.py"))
