"""The API layer alone: a node whose engine takes no time, beside litellm's proxy with the same stub behind it.

Each server has one core of the machine, and stub and client the others. So what is measured is what a request costs
before and after the model: HTTP, authentication, checks, the frames to the engine, metering, and the way back.
A token counts as late when it comes more than one interval after it was due; how many of them the stub itself, which
needs a core like everybody else, wrote that late is told beside.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from bench import servers, wire_load
from bench.http_load import post
from bench.peers import Peer, PeerUnavailable, install
from bench.report import Row, Target, compared, measured, missing
from bench.servers import Server
from bench.settings import Settings
from bench.wire_load import Load, Result
from edge.weights.manifest import FILE_NAME, Manifest

LITELLM = Peer("litellm", "", ("litellm[proxy]==1.106.12",), "folder")
LITELLM_START_TIMEOUT_S = 240.0
"""It imports for long."""
LITELLM_TOKEN = "sk-bench"
MODEL = "stub"
NUM_CLIENTS = 64
NUM_TOKENS = 16
NUM_STREAMS = 64
WARM_UP_S = 5.0
"""litellm imports much of itself with its first requests."""
TOKENS_PER_S = 100
STAGGER_S = 0.01
"""Between the beginnings of streams: that many requests in one instant are more than a core can begin before the first
of them is to have its next token."""
_ACCOUNT = "/client/v4/accounts/dev/ai"
_CHAT, _RUN = f"{_ACCOUNT}/v1/chat/completions", f"{_ACCOUNT}/run/{MODEL}"
_PEERS = Path(__file__).parent / "peers"
_MESSAGES = [{"role": "user", "content": "Say something of sixteen tokens."}]
_CONFIG = 'name = "bench"\nmain = "worker.py"\nstate_dir = "state"\n[ai]\n[engine]\nmax_batch_size = 256\n'
_WORKER = "from workers import WorkerEntrypoint\n\n\nclass Default(WorkerEntrypoint):\n    pass\n"
_LITELLM_CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
general_settings: {{master_key: {token}}}
litellm_settings: {{telemetry: false, set_verbose: false}}
"""
_LITELLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "NO_DOCS": "True",
}
"""What its own guide for production says, and what keeps it off the network."""


def run(settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """The rows of all sections that `settings` ask for, and the versions of the peers."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return [missing("the wire", "", "it takes two cores: one for the server, one for the client")], {}
    race = _Race(settings, cores[:1], cores[1:])
    rows = [row for name in settings.sections for row in SECTIONS[name](race)]
    return rows, {"litellm": LITELLM.requirements[0].partition("==")[2]}


class _Race:
    """The servers, each started when it is first needed and for one load after the other."""

    def __init__(self, settings: Settings, cores: list[int], client_cores: list[int]) -> None:
        self.settings = settings
        self.client_cores = client_cores
        self._cores = cores
        self.absent = "" if settings.peers else "measured with --peers"
        """Why there is no litellm."""

    @contextlib.contextmanager
    def edge(self) -> Iterator[Server]:
        """The node."""
        with _edge(self._cores, self.client_cores) as server:
            yield server

    @contextlib.contextmanager
    def litellm(self) -> Iterator[Server | None]:
        """The proxy, or None where it is `absent`."""
        if self.absent:
            yield None
            return
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(_litellm(self.settings, self._cores, self.client_cores))
            except (PeerUnavailable, RuntimeError) as error:
                self.absent = str(error)
                server = None
            yield server

    def load(self, server: Server, request: str, num_clients: int) -> Result:
        """That load, after one to warm up."""
        load = partial(Load, server.port, server.pid, request, num_clients, self.client_cores)
        wire_load.run(load(seconds=1.0 if self.settings.quick else WARM_UP_S))
        return wire_load.run(load(seconds=2.0 if self.settings.quick else 10.0))

    def stream(self, server: Server, token: str, path: str) -> tuple[Result, Result]:
        """Streams that all begin at once, after others to warm up; then longer ones that begin one by one."""
        warm_up_s, seconds = (1, 5) if self.settings.quick else (WARM_UP_S, 20)
        self._stream(server, token, path, warm_up_s)
        burst = self._stream(server, token, path, warm_up_s)
        return burst, self._stream(server, token, path, seconds, STAGGER_S)

    def _stream(self, server: Server, token: str, path: str, seconds: float, stagger_s: float = 0) -> Result:
        num_tokens = int(TOKENS_PER_S * seconds)
        request = _stream(token, path, num_tokens)
        load = partial(Load, server.port, server.pid, request, NUM_STREAMS, self.client_cores)
        return wire_load.run(load(num_tokens=num_tokens, stagger_s=stagger_s))


# -- sections ----------------------------------------------------------------------------------------------


def requests(race: _Race) -> list[Row]:
    """Whole chat completions: how many a second, and what one takes."""
    with race.edge() as server:
        many = race.load(server, _chat("dev"), NUM_CLIENTS)
        one = race.load(server, _chat("dev"), 1)
        native = race.load(server, _post(_RUN, "dev", {"messages": _MESSAGES, "max_tokens": NUM_TOKENS}), NUM_CLIENTS)
    with race.litellm() as proxy:
        peer_many = proxy and race.load(proxy, _chat(LITELLM_TOKEN, "/v1/chat/completions"), NUM_CLIENTS)
        peer_one = proxy and race.load(proxy, _chat(LITELLM_TOKEN, "/v1/chat/completions"), 1)
    each = f"{NUM_CLIENTS} clients"
    return [
        _row(f"chat completions, {each}, one core", "req/s", _per_s, many, peer_many, race, Target(">=", 3, "x")),
        _row(f"chat completions, {each}, p50", "ms", _p50, many, peer_many, race),
        _row(f"chat completions, {each}, p99", "ms", _p99, many, peer_many, race, Target(">=", 1, "x")),
        _row("the server's CPU time for a chat completion", "ms", _cpu_ms, many, peer_many, race),
        _row("added to a chat completion, 1 client, p50", "ms", _p50, one, peer_one, race),
        _row("added to a chat completion, 1 client, p99", "ms", _p99, one, peer_one, race),
        measured(f"ai/run, {each}, one core", _per_s(native), "req/s"),
    ]


def streams(race: _Race) -> list[Row]:
    """Streams that all get a token at the same moment, over and over."""
    with race.edge() as server:
        burst, ours = race.stream(server, "dev", _CHAT)
    with race.litellm() as proxy:
        their_burst, theirs = race.stream(proxy, LITELLM_TOKEN, "/v1/chat/completions") if proxy else (None, None)
    load = f"{NUM_STREAMS} streams of {TOKENS_PER_S} tokens/s, one core"
    return [
        _late_row(f"{load}: late tokens", ours, theirs, race, Target("<=", 0)),
        _late_row(f"{load}: late tokens if all begin in one instant", burst, their_burst, race),
        _row(f"{load}: delay of a token, p50", "ms", lambda r: _percentile(r.delays_ms, 50), ours, theirs, race),
        _row(f"{load}: delay of a token, p99", "ms", lambda r: _percentile(r.delays_ms, 99), ours, theirs, race),
        _row(f"{load}: gap between tokens, p99", "ms", lambda r: _percentile(r.gaps_ms, 99), ours, theirs, race),
        _row(f"{load}: the server's CPU time for a token", "us", _cpu_us_of_token, ours, theirs, race),
    ]


def _late_row(metric: str, ours: Result, theirs: Result | None, race: _Race, target: Target | None = None) -> Row:
    num_late = _num_late(ours.delays_ms)
    note = (
        f"of {len(ours.delays_ms)}, of which the stub was late with {_num_late(ours.stub_delays_ms)}; "
        f"the latest {max(ours.delays_ms):.1f} ms after it was due"
    )
    peer = {} if theirs is None else {"peer": "litellm", "peer_value": float(_num_late(theirs.delays_ms))}
    return Row(
        metric=metric,
        value=float(num_late),
        unit="",
        target=None if target is None else str(target),
        ok=None if target is None else target.holds(num_late),
        note=note if theirs is not None else f"{note}; litellm: {race.absent}",
        **peer,
    )


def _row(
    metric: str,
    unit: str,
    figure: Callable[[Result], float],
    ours: Result,
    theirs: Result | None,
    race: _Race,
    target: Target | None = None,
) -> Row:
    if theirs is None:
        return missing(metric, unit, race.absent, value=figure(ours), peer="litellm", target=target)
    return compared(
        metric,
        figure(ours),
        unit,
        peer="litellm",
        peer_value=figure(theirs),
        target=target,
        is_less_better=unit != "req/s",
    )


def _per_s(result: Result) -> float:
    return len(result.latencies_ms) / result.elapsed_s


def _p50(result: Result) -> float:
    return statistics.median(result.latencies_ms)


def _p99(result: Result) -> float:
    return _percentile(result.latencies_ms, 99)


def _cpu_ms(result: Result) -> float:
    return 1000 * result.server_cpu_s / len(result.latencies_ms)


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _cpu_us_of_token(result: Result) -> float:
    return 1e6 * result.server_cpu_s / len(result.delays_ms)


def _num_late(delays_ms: list[float]) -> int:
    return sum(delay > 1000 / TOKENS_PER_S for delay in delays_ms)


# -- what is sent ------------------------------------------------------------------------------------------


def _chat(token: str, path: str = _CHAT) -> str:
    return _post(path, token, {"model": MODEL, "messages": _MESSAGES, "max_tokens": NUM_TOKENS})


def _stream(token: str, path: str, num_tokens: int) -> str:
    """The stub takes `seed` for the rate."""
    options = {"max_tokens": num_tokens, "seed": TOKENS_PER_S, "stream": True}
    return _post(path, token, {"model": MODEL, "messages": _MESSAGES, **options})


def _post(path: str, token: str, body: dict[str, object]) -> str:
    head, _, rest = post(path, json.dumps(body)).partition("\r\n")
    return f"{head}\r\nAuthorization: Bearer {token}\r\n{rest}"


# -- servers -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _edge(cores: list[int], engine_cores: list[int]) -> Iterator[Server]:
    """A node with the stub as its engine. Raises RuntimeError: it does not start."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "worker.py").write_text(_WORKER)
        (folder / "edge.toml").write_text(_CONFIG)
        _install_stub(folder / "state" / "models" / MODEL)
        command = [sys.executable, str(_PEERS / "stub_node.py"), _list(cores), _list(engine_cores)]
        with servers.started([*command, "dev", "--port", "0", "--no-reload"], folder) as (process, log):
            server = Server(servers.port_of_edge(process, log), process.pid, _chat("dev"))
            yield servers.answering(server, process, log)


def _install_stub(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"")
    manifest = Manifest(
        name=MODEL,
        file="model.gguf",
        source="bench",
        sha256="0" * 64,
        size_bytes=0,
        architecture="stub",
        context_length=1 << 20,
        created_at=datetime.now(UTC),
    )
    manifest.write(folder / FILE_NAME)


@contextlib.contextmanager
def _litellm(settings: Settings, cores: list[int], stub_cores: list[int]) -> Iterator[Server]:
    """litellm's proxy with one worker process and the stub behind it.

    Raises:
        PeerUnavailable: it cannot be installed here.
        RuntimeError: it does not start.
    """
    python = install(LITELLM, settings.state_dir / "bench")
    stub_port, port = servers.free_port(), servers.free_port()
    stub = [sys.executable, str(_PEERS / "stub_openai.py"), str(stub_port), _list(stub_cores)]
    proxy = [str(python.with_name("litellm")), "--config", "litellm.yaml", "--port", str(port), "--num_workers", "1"]
    pinned = ["taskset", "--cpu-list", _list(cores), *proxy, "--host", "127.0.0.1"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        config = _LITELLM_CONFIG.format(model=MODEL, port=stub_port, token=LITELLM_TOKEN)
        (folder / "litellm.yaml").write_text(config)
        (folder / "stub").mkdir()
        process, log = stack.enter_context(servers.started(stub, folder / "stub"))
        servers.answering(Server(stub_port, process.pid, _chat("none")), process, log)
        process, log = stack.enter_context(servers.started(pinned, folder, _LITELLM_ENVIRONMENT))
        server = Server(port, process.pid, _chat(LITELLM_TOKEN, "/v1/chat/completions"))
        yield servers.answering(server, process, log, LITELLM_START_TIMEOUT_S)


def _list(cores: list[int]) -> str:
    return ",".join(map(str, cores))


SECTIONS: dict[str, Callable[[_Race], list[Row]]] = {
    "requests": requests,
    "streams": streams,
}
