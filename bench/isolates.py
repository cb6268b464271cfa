"""Handlers through the product's own HTTP, under the sandbox policy `standard`: cold starts, speed, memory, leaks.

Product and peers take turns, round by round, with the same client; figures are medians of the rounds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from bench import http_load, servers
from bench.http_load import Load
from bench.peers import PeerUnavailable
from bench.report import Row, Target, compared, measured, missing
from bench.servers import Server
from bench.settings import Settings

NUM_CLIENTS = 32
ROUND_S = 3.0
NUM_ISOLATES = 9
IDLE_S = 0.2
"""After which a process is ended where cold starts are measured."""
SETTLE_S = 0.1
"""What the node needs, at most, to have everything as it was before a cold start."""
MEMORY_GROWTH_MB = 1.0
"""What counts as no growth: the allocator's own grain, for all processes together."""

HELLO = """\
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("hello")
"""
WAITING = """\
import asyncio
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        await asyncio.sleep(1)
        return Response("hello")
"""
FASTAPI = """\
from fastapi import FastAPI
from pydantic import BaseModel
from workers import asgi


class Greeting(BaseModel):
    hello: str


app = FastAPI()


@app.get("/")
async def hello() -> Greeting:
    return Greeting(hello="world")


Default = asgi.entrypoint(app)
"""


def run(settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """Measure the sections that `settings` names; the rows, and the peers' versions."""
    rows = []
    for section in settings.sections:
        _log(f"measuring: {section}")
        rows += SECTIONS[section](settings)
    versions = {"workerd": servers.WORKERD_VERSION, "litserve": servers.LITSERVE.requirements[0].partition("==")[2]}
    return rows, versions if settings.peers else {}


def _kernels(settings: Settings) -> Path:
    return settings.state_dir / "bench" / "kernels"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- cold starts -------------------------------------------------------------------------------------------


def cold(settings: Settings) -> list[Row]:
    """From a request to the first byte of its answer, where no process is there for it."""
    num_starts = 15 if settings.quick else 60
    metric = "cold start: request to first byte of a worker scaled to zero, p50"
    times, pythons = _cold_starts(settings, HELLO, "", num_starts)
    note = f"{num_starts} starts, {_spread(times)} ms; python {_spread(pythons)} ms; {_load_average()}"
    p50, python = statistics.median(times), statistics.median(pythons)
    rows = [
        measured(metric, p50, "ms", target=Target("<=", 10, " ms"), note=note),
        compared(
            metric,
            p50,
            "ms",
            peer="python -c pass",
            peer_value=python,
            target=Target(">=", 2, "x faster"),
            note="one of each in turn",
            is_less_better=True,
        ),
    ]
    metric = "cold start of a FastAPI application with a pydantic model, both in isolates.preload, p50"
    try:
        times, pythons = _cold_starts(settings, FASTAPI, 'preload = ["fastapi", "pydantic"]\n', num_starts)
    except RuntimeError as error:
        return [*rows, missing(metric, "ms", f"it does not run here: {error}", target=Target("<=", 25, " ms"))]
    note = f"{num_starts} starts, {_spread(times)} ms; {_load_average()}"
    return [*rows, measured(metric, statistics.median(times), "ms", target=Target("<=", 25, " ms"), note=note)]


def _cold_starts(settings: Settings, source: str, config: str, num_starts: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each cold start, and of an interpreter that was started after each."""
    times, pythons = [], []
    node = servers.edge(source, _kernels(settings), f"idle_s = {IDLE_S}\n{config}")
    with node as server, http_load.connect(server.port) as sock:
        for _ in range(num_starts + 2):
            while server.health()["pids"]:
                time.sleep(IDLE_S / 4)
            time.sleep(SETTLE_S)
            first_s, data = http_load.exchange(sock, server.request.encode())
            if not data.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the answer was {data[:500]!r}")
            times.append(1000 * first_s)
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            pythons.append(1000 * (time.perf_counter() - began))
    return times[2:], pythons[2:]


# -- against the peers -------------------------------------------------------------------------------------


class _Race:
    """The product and its peers, all running, that take turns."""

    def __init__(self, settings: Settings, stack: contextlib.ExitStack) -> None:
        folder = settings.state_dir / "bench" / "peers"
        self.absent: dict[str, str] = {}
        """Peers that are not here, and why."""
        self.servers = {"edge": stack.enter_context(servers.edge(HELLO, _kernels(settings)))}
        starters: dict[str, Callable[[], AbstractContextManager[Server]]] = {
            "starlette": servers.starlette,
            "workerd": lambda: servers.workerd(folder),
            "litserve": lambda: servers.litserve(folder),
        }
        for name, start in starters.items():
            if name != "starlette" and not settings.peers:
                self.absent[name] = "ask for it with --peers"
                continue
            try:
                self.servers[name] = stack.enter_context(start())
            except (PeerUnavailable, RuntimeError) as error:
                self.absent[name] = str(error)

    def run(
        self, num_rounds: int, num_clients: int, figure: Callable[[http_load.Result], float]
    ) -> dict[str, list[float]]:
        """The figures of each server, round by round; a first round does not count."""
        figures: dict[str, list[float]] = {name: [] for name in self.servers}
        for _ in range(1 + num_rounds):
            for name, server in self.servers.items():
                result = http_load.run(Load(server.port, server.request, num_clients, seconds=ROUND_S))
                figures[name].append(figure(result))
                share = 100 * result.cpu_s / result.elapsed_s
                _log(f"  {name}, {num_clients} clients: {figures[name][-1]:.4g} (client: {share:.0f}% of a core)")
        return {name: each[1:] for name, each in figures.items()}


def warm(settings: Settings) -> list[Row]:
    """Requests per second of a hello in a process that is there."""
    metric = f"warm hello, {NUM_CLIENTS} clients"
    with contextlib.ExitStack() as stack:
        race = _Race(settings, stack)
        figures = race.run(settings.num_repetitions, NUM_CLIENTS, lambda result: result.per_s)
    targets = {"starlette": Target(">=", 0.6, "x")}
    rows = [
        compared(
            metric,
            statistics.median(figures["edge"]),
            "requests/s",
            peer=name,
            peer_value=statistics.median(each),
            target=targets.get(name),
            note=f"{_spread(figures['edge'])} against {_spread(each)}; {_load_average()}"
            + ("; the stretch goal is 1x" if name == "workerd" else ""),
        )
        for name, each in figures.items()
        if name != "edge"
    ]
    value = statistics.median(figures["edge"])
    return rows + [
        missing(metric, "requests/s", why, value=value, peer=name, target=targets.get(name))
        for name, why in race.absent.items()
    ]


def latency(settings: Settings) -> list[Row]:
    """What a request takes longer than with a bare server in one process."""
    metric = "added latency of a warm hello against starlette, 1 client, p50"
    target = Target("<=", 0.3, " ms")
    with contextlib.ExitStack() as stack:
        race = _Race(settings, stack)
        figures = race.run(settings.num_repetitions, 1, lambda result: result.p50_ms)
    medians = {name: statistics.median(each) for name, each in figures.items()}
    others = ", ".join(f"{name} {each:.3f} ms" for name, each in medians.items())
    if "starlette" not in medians:
        return [missing(metric, "ms", race.absent["starlette"], peer="starlette", target=target)]
    added = medians["edge"] - medians["starlette"]
    return [measured(metric, added, "ms", target=target, note=f"p50: {others}; {_load_average()}")]


# -- the product alone -------------------------------------------------------------------------------------


def memory(settings: Settings) -> list[Row]:
    """What each further process that serves takes, counted with what it shares."""
    metric = "memory per extra warm isolate, after a request each (proportional set size)"
    target = Target("<=", 8, " MB")
    config = f"max_per_worker = {NUM_ISOLATES}\n[limits]\nconcurrency = 1\n"
    with servers.edge(WAITING, _kernels(settings), config) as server:
        try:
            http_load.run(Load(server.port, server.request, 1, num_requests=2))
            one = _memory_mb(server)
            http_load.run(Load(server.port, server.request, NUM_ISOLATES, num_requests=NUM_ISOLATES))
            http_load.run(Load(server.port, server.request, NUM_ISOLATES, num_requests=NUM_ISOLATES))
            all_of_them = _memory_mb(server)
        except PermissionError as error:
            why = f"the memory of processes that are not dumpable is for root to read: {error}"
            return [missing(metric, "MB", why, target=target)]
        num_isolates = len(server.health()["pids"])
    if num_isolates != NUM_ISOLATES:
        return [missing(metric, "MB", f"there were {num_isolates} isolates, not {NUM_ISOLATES}", target=target)]
    note = f"all processes of the node: {one:.1f} MB with 1, {all_of_them:.1f} MB with {NUM_ISOLATES}"
    return [measured(metric, (all_of_them - one) / (NUM_ISOLATES - 1), "MB", target=target, note=note)]


def soak(settings: Settings) -> list[Row]:
    """What is there after many requests that was not there before them."""
    num_requests = 5_000 if settings.quick else 50_000
    metric = f"after {num_requests:,} requests: more"
    with servers.edge(HELLO, _kernels(settings)) as server:
        http_load.run(Load(server.port, server.request, NUM_CLIENTS, num_requests=num_requests // 10))
        before = _counts(server)
        result = http_load.run(Load(server.port, server.request, NUM_CLIENTS, num_requests=num_requests))
        after = _counts(server)
    limits = {"memory": (MEMORY_GROWTH_MB, "MB"), "descriptors": (0, ""), "processes": (0, "")}
    return [
        measured(
            f"{metric} {name}",
            after[name] - before[name],
            unit,
            target=Target("<=", limit),
            note=f"{before[name]:.6g} before, {after[name]:.6g} after; {result.per_s:.0f} requests/s",
        )
        for name, (limit, unit) in limits.items()
        if name in before
    ]


def _counts(server: Server) -> dict[str, float]:
    """What the node and its processes hold, once its connections are closed."""
    time.sleep(SETTLE_S)
    pids = server.processes()
    return {
        "memory": sum(_resident_mb(pid) for pid in pids),
        "descriptors": sum(_num_descriptors(pid) for pid in pids),
        "processes": len(pids),
    }


def _resident_mb(pid: int) -> float:
    """Of memory that is not pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) / 1024


def _num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _memory_mb(server: Server) -> float:
    """Proportional set size of all its processes."""
    return sum(_proportional_mb(pid) for pid in server.processes())


def _proportional_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _spread(values: list[float]) -> str:
    return f"{min(values):.4g}-{max(values):.4g}"


def _load_average() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


SECTIONS: dict[str, Callable[[Settings], list[Row]]] = {
    "cold": cold,
    "warm": warm,
    "latency": latency,
    "memory": memory,
    "soak": soak,
}
