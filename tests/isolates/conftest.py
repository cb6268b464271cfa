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
from zygotes import shared_spawner

from edge.config import EgressConfig, IsolatesConfig, LimitsConfig
from edge.isolates.base import Binding, InboundEvent, InvocationUsage, WorkerKey
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

    async def call(self, bundle: Bundle, binding: str, method: str, args: list[Any], body: Any) -> Any:
        """By default the arguments, and the whole body."""
        answer = self.answer_call(binding, method, args, body)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def answer_call(self, binding: str, method: str, args: list[Any], body: Any) -> Any:
        content = b"".join([chunk async for chunk in body]) if body is not None else None
        return JsonAnswer([binding, method, args, content])


class Harness:
    """One `Isolates` and shorthands for it. `logs` is a list of (invocation, level, text).

    Args:
        isolates: as `[isolates]`; limits: as `[limits]`, besides `timeout_s`.
        is_alone: whether it has a zygote of its own, as a node has.
    """

    key: WorkerKey = ("dev", "test")

    def __init__(
        self,
        root: Path,
        timeout_s: float = 20.0,
        *,
        isolates: IsolatesConfig | None = None,
        is_alone: bool = False,
        **limits: Any,
    ) -> None:
        self.root = root
        self.logs: list[tuple[int, str, str]] = []
        self.usage: list[InvocationUsage] = []
        self.limits = LimitsConfig(timeout_s=timeout_s, **limits)
        self.bindings = ScriptedBindings()
        self.egress = EgressConfig()
        self.isolates = Isolates(
            self.bindings,
            self._on_log,
            isolates or IsolatesConfig(),
            on_invocation=self.usage.append,
            spawner=None if is_alone else shared_spawner(isolates),
        )

    @property
    def pids(self) -> list[int]:
        """The processes that serve now, oldest first."""
        return self.isolates.status(self.key).pids if self.key in self.isolates.workers() else []

    @property
    def pid(self) -> int | None:
        """The oldest of them, or None."""
        return next(iter(self.pids), None)

    def children(self) -> list[int]:
        """The living children of the zygote, but for the spare one."""
        return sorted(set(children_of(self.isolates.zygote_pid or 0)) - {self.isolates.spare_pid})

    @property
    def status(self) -> Any:
        return self.isolates.status(self.key)

    async def deploy(
        self,
        source: str,
        *,
        vars: dict[str, Any] | None = None,
        indented: bool = True,
        bindings: dict[str, Binding] | None = None,
        worker: str = "test",
        **bundle: Any,
    ) -> None:
        """Deploy a worker: the methods of class Default, or a whole file unless `indented`."""
        text = textwrap.dedent(source).strip() + "\n"
        if indented:
            text = HANDLER + textwrap.indent(text, "    ")
        main = "worker_main.py" if worker == "test" else f"{worker}.py"
        (self.root / main).write_text(text)
        bundle.setdefault("limits", self.limits)
        bundle.setdefault("version", "v1")
        bundle.setdefault("egress", self.egress)
        all_bindings = {"AI": Binding("ai"), **(bindings or {})}
        await self.isolates.deploy(
            Bundle(worker=worker, root=str(self.root), main=main, vars=vars or {}, bindings=all_bindings, **bundle)
        )

    async def open(
        self,
        path: str = "/",
        method: str = "GET",
        body: Any = None,
        headers: Any = (),
        *,
        worker: str = "test",
        entrypoint: str = "",
        props: dict[str, Any] | None = None,
    ) -> OutboundResponse:
        request = InboundRequest(method, f"http://test{path}", list(headers), body, {"colo": "DEV"})
        return await self.isolates.fetch(("dev", worker), request, entrypoint=entrypoint, props=props)

    async def event(self, kind: str, payload: Any, **event: Any) -> Any:
        """What the worker makes of an event."""
        return await self.isolates.event(self.key, InboundEvent(kind, payload, **event))

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


@pytest.fixture(autouse=True)
def _zygotes(shared_zygotes: None) -> None:
    """Each module has its zygotes."""


@pytest.fixture
async def worker(tmp_path: Path):
    """A harness; afterwards no process may be left."""
    async with running(tmp_path) as harness:
        yield harness


@pytest.fixture
async def alone(tmp_path: Path):
    """The same with a zygote of its own."""
    async with running(tmp_path, is_alone=True) as harness:
        zygote = harness.isolates.zygote_pid
        yield harness
    assert not is_alive(zygote)


@pytest.fixture
async def hasty(tmp_path: Path):
    """The same with a time limit of one second."""
    async with running(tmp_path, timeout_s=1.0) as harness:
        yield harness


@pytest.fixture
async def unsandboxed(tmp_path: Path):
    """The same without a sandbox: handlers may start processes."""
    async with running(tmp_path, isolates=IsolatesConfig(sandbox="none")) as harness:
        yield harness


@contextlib.asynccontextmanager
async def running(root: Path, timeout_s: float = 20.0, **options: Any):
    """A harness that runs; `options` as of `Harness`."""
    harness = Harness(root, timeout_s, **options)
    await harness.isolates.start()
    pids = []
    try:
        yield harness
        pids = harness.pids
    finally:
        await harness.isolates.close()
        await until(lambda: not any(map(is_alive, pids)))


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
