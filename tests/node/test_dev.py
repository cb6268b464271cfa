from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import EDGE, wait_for
from msgspec.structs import replace

from edge.config import AiConfig, Config, EngineConfig, IsolatesConfig
from edge.node.dev import _only_at_start


def test_what_only_a_new_start_takes_over_is_named(tmp_path: Path) -> None:
    running = Config("demo", tmp_path / "worker.py", ai=AiConfig(models={"@cf/a": "b"}))
    taken_over = replace(running, name="other", vars={"A": 1}, ai=AiConfig("LLM", {"@cf/a": "c"}))
    assert _only_at_start(running, taken_over) == []
    changed = replace(running, isolates=IsolatesConfig(idle_s=1.0), engine=EngineConfig(weights="bfloat16"), ai=None)
    assert _only_at_start(running, changed) == ["isolates", "engine"]


WORKER = """
import asyncio
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(self.forever()) if request.url.endswith("/forever") else Response("{answer}")

    async def forever(self):
        while True:
            yield b"x"
            await asyncio.sleep(0.01)
"""
EdgeDev = Callable[..., tuple[str, Any]]
HANGS = "import time\nprint('hangs')\ntime.sleep(600)\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a worker that answers "one"."""
    (tmp_path / "edge.toml").write_text('name = "demo"\nmain = "worker.py"\n')
    (tmp_path / "worker.py").write_text(WORKER.format(answer="one"))
    return tmp_path


@pytest.mark.slow
def test_an_import_that_hangs_holds_up_neither_the_next_save_nor_the_end(project: Path, edge_dev: EdgeDev) -> None:
    url, server = edge_dev(project)
    assert httpx.get(url).text == "one"
    (project / "worker.py").write_text(HANGS)
    wait_for(lambda: "hangs" in server.output)
    (project / "worker.py").write_text(WORKER.format(answer="two"))
    wait_for(lambda: httpx.get(url).text == "two")
    num_hanging = server.output.count("hangs")
    (project / "worker.py").write_text(HANGS)
    wait_for(lambda: server.output.count("hangs") > num_hanging)


@pytest.mark.slow
def test_a_reload_that_takes_the_name_of_another_worker(project: Path, edge_dev: EdgeDev) -> None:
    (project / "b").mkdir()
    (project / "b" / "edge.toml").write_text('name = "b"\nmain = "worker.py"\n')
    (project / "b" / "worker.py").write_text(WORKER.format(answer="b"))
    url, server = edge_dev(project, "-c", "edge.toml", "-c", "b/edge.toml")
    (project / "edge.toml").write_text('name = "b"\nmain = "worker.py"\n')
    wait_for(lambda: "name: 'b' is the name of another worker on this node" in server.output)
    assert "worker.py could not be started; the version before it goes on serving. The next save" in server.output
    assert httpx.get(url).text == "one"
    (project / "edge.toml").write_text('name = "c"\nmain = "worker.py"\n')
    (project / "worker.py").write_text(WORKER.format(answer="c"))
    wait_for(lambda: httpx.get(url).text == "c")


def test_an_import_that_hangs_at_the_start_can_be_interrupted(project: Path) -> None:
    (project / "worker.py").write_text(HANGS)
    server = subprocess.Popen([*EDGE, "dev", "--port", "0"], cwd=project, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert server.stderr.readline() == "hangs\n"
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
    finally:
        server.kill()
    assert (server.returncode, errors) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_answer_without_end_is_cut_at_the_end_without_noise(project: Path, edge_dev: EdgeDev, number: int) -> None:
    url, server = edge_dev(project)
    with httpx.stream("GET", f"{url}/forever") as response:
        os.killpg(server.process.pid, number)
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in response.iter_bytes():
                pass
    server.process.wait(30)
    server.stop()
    assert "/forever 200, cut short" in server.output
    assert "Traceback" not in server.output
