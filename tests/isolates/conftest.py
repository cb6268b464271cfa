"""Real zygotes and real handler processes on small worker files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers import is_alive

from edge.config import LimitsConfig
from edge.isolates.base import Binding
from edge.isolates.dispatch import Bundle, InboundRequest, Isolates, JsonAnswer, OutboundResponse

HANDLER = """
import asyncio
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
"""


class ScriptedBindings:
    """Answers `env.AI.run` with what `ai_run` is set to; by default with its own arguments."""

    def __init__(self) -> None:
        self.answer: Any = lambda model, inputs, options: JsonAnswer([model, inputs, options], {"requestId": "r1"})

    async def ai_run(self, bundle: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> Any:
        answer = self.answer(model, inputs, options)
        return await answer if asyncio.iscoroutine(answer) else answer


class Harness:
    """One `Isolates` and shorthands for it. `logs` is a list of (invocation, level, text)."""

    def __init__(self, root: Path, timeout_s: float = 20.0) -> None:
        self.root = root
        self.logs: list[tuple[int, str, str]] = []
        self.bindings = ScriptedBindings()
        self.isolates = Isolates(self.bindings, LimitsConfig(timeout_s=timeout_s), self._on_log)

    async def deploy(self, source: str, *, vars: dict[str, Any] | None = None, indented: bool = True) -> None:
        """Deploy a worker: the methods of class Default, or a whole file unless `indented`."""
        text = textwrap.dedent(source).strip() + "\n"
        if indented:
            text = HANDLER + textwrap.indent(text, "    ")
        (self.root / "worker_main.py").write_text(text)
        bundle = Bundle("test", "v1", str(self.root), "worker_main.py", vars=vars or {}, bindings={"AI": Binding("ai")})
        await self.isolates.deploy(bundle)

    async def open(self, path: str = "/", method: str = "GET", body: Any = None, headers: Any = ()) -> OutboundResponse:
        request = InboundRequest(method, f"http://test{path}", list(headers), body, {"colo": "DEV"})
        return await self.isolates.fetch(request)

    async def get(self, path: str = "/", **request: Any) -> str:
        """The whole body of the answer."""
        response = await self.open(path, **request)
        if response.body is None:
            return ""
        return b"".join([chunk async for chunk in response.body]).decode()

    async def log_text(self, text: str) -> tuple[int, str, str]:
        """The first log entry that contains `text`, once there is one."""
        await until(lambda: any(text in entry[2] for entry in self.logs))
        return next(entry for entry in self.logs if text in entry[2])

    def _on_log(self, _bundle: Bundle, invocation: int, level: str, text: str) -> None:
        self.logs.append((invocation, level, text))


@pytest.fixture
async def worker(tmp_path: Path):
    """A harness; afterwards no process may be left."""
    async with running(tmp_path) as harness:
        yield harness


@pytest.fixture
async def hasty(tmp_path: Path):
    """The same with a time limit of one second."""
    async with running(tmp_path, timeout_s=1.0) as harness:
        yield harness


@contextlib.asynccontextmanager
async def running(root: Path, timeout_s: float = 20.0):
    harness = Harness(root, timeout_s)
    await harness.isolates.start()
    pids = {harness.isolates.zygote_pid}
    try:
        yield harness
        pids |= {harness.isolates.zygote_pid, harness.isolates.pid}
    finally:
        await harness.isolates.close()
        await until(lambda: not any(is_alive(pid) for pid in pids if pid))


async def until(condition: Any) -> None:
    """Wait for `condition` to hold, with a generous limit."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is about other processes
            await asyncio.sleep(0.005)


def children_of(pid: int) -> list[int]:
    """Pids of the living children of a process."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(name))
    return found
