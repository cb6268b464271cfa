"""HTTP servers to measure, each started as its users would start it: the product, and those it is compared with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import http_load
from bench.peers import Peer, PeerUnavailable, install

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
QUIET_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 600.0
WORKERD_VERSION = "1.20261117.1"
LITSERVE = Peer("litserve", "litserve_hello.py", ("litserve==0.2.19",), "folder")
_PEERS = Path(__file__).parent / "peers"
_READY = re.compile(r"^Ready on http://\S+?:(\d+)", re.MULTILINE)
_WORKERD_CONFIG = """\
using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (
  services = [(name = "main", worker = (
    modules = [(name = "worker.js", esModule = embed "worker.js")],
    compatibilityDate = "2026-01-01",
  ))],
  sockets = [(name = "http", address = "127.0.0.1:{port}", http = (), service = "main")],
);
"""
_WORKERD_HELLO = 'export default { async fetch(request) { return new Response("hello"); } };\n'


@dataclass(frozen=True)
class Server:
    """A server that runs, and the request that it says hello to."""

    port: int
    pid: int
    request: str = http_load.get()

    def health(self) -> Any:
        """What `/healthz` of the product says of its first worker."""
        with http_load.connect(self.port) as sock:
            _, data = http_load.exchange(sock, http_load.get("/healthz").encode())
        return json.loads(data.partition(b"\r\n\r\n")[2])["workers"][0]

    def processes(self) -> list[int]:
        """The product's node, its zygote and what that has forked; not its engine, which has nothing to do here."""
        return [self.pid, *(pid for pid in self.descendants() if "edge.isolates.zygote" in _command(pid))]

    def descendants(self) -> list[int]:
        """All processes that its own has started, and so on."""
        found, parents = [self.pid], _parents()
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]


@contextlib.contextmanager
def edge(source: str, kernels: Path, settings: str = "") -> Iterator[Server]:
    """`edge dev` under the sandbox policy `standard`, with a worker whose main file is `source`.

    Args:
        kernels: the folder of compiled kernels, which all nodes share.
        settings: lines of the configuration; the last section before them is `[isolates]`.

    Raises:
        RuntimeError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "worker.py").write_text(source)
        config = (
            f'name = "bench"\nmain = "worker.py"\nstate_dir = "state"\n[isolates]\nsandbox = "standard"\n{settings}'
        )
        (folder / "edge.toml").write_text(config)
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "state" / "cache").mkdir(parents=True)
        (folder / "state" / "cache" / "kernels").symlink_to(kernels)
        command = [sys.executable, "-c", "from edge.cli import main; main()", "dev", "--port", "0", "--no-reload"]
        with started(command, folder) as (process, log):
            server = Server(port_of_edge(process, log), process.pid)
            _wait_until_quiet(server)
            yield server


@contextlib.contextmanager
def starlette() -> Iterator[Server]:
    """A bare Starlette application on uvicorn. Raises RuntimeError: it does not start."""
    port = free_port()
    command = [sys.executable, str(_PEERS / "starlette_hello.py"), str(port)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name, started(command, Path(name)) as (process, log):
        yield answering(Server(port, process.pid), process, log)


@contextlib.contextmanager
def workerd(folder: Path) -> Iterator[Server]:
    """workerd from npm, installed below `folder`, with a hello in JavaScript.

    Raises:
        PeerUnavailable: it cannot be installed here.
        RuntimeError: it does not start.
    """
    program = _workerd_program(folder)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        Path(name, "worker.js").write_text(_WORKERD_HELLO)
        Path(name, "config.capnp").write_text(_WORKERD_CONFIG.format(port=port))
        with started([str(program), "serve", "config.capnp"], Path(name)) as (process, log):
            yield answering(Server(port, process.pid), process, log)


@contextlib.contextmanager
def litserve(folder: Path) -> Iterator[Server]:
    """LitServe in an environment of its own below `folder`, with one worker process.

    Raises:
        PeerUnavailable: it cannot be installed here.
        RuntimeError: it does not start.
    """
    python = install(LITSERVE, folder)
    port = free_port()
    command = [str(python), str(_PEERS / LITSERVE.script), str(port)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name, started(command, Path(name)) as (process, log):
        yield answering(Server(port, process.pid, http_load.post("/predict", "{}")), process, log)


def _workerd_program(folder: Path) -> Path:
    home = folder / "workerd"
    program = home / "node_modules" / "workerd" / "bin" / "workerd"
    stamp = home / "installed.txt"
    if stamp.exists() and stamp.read_text() == WORKERD_VERSION:
        return program
    npm = shutil.which("npm")
    if npm is None:
        raise PeerUnavailable("npm, which installs workerd, is not on the PATH; install Node.js")
    home.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefix", str(home), f"workerd@{WORKERD_VERSION}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise PeerUnavailable(f"npm could not install workerd: {done.stderr.strip()[-300:]}")
    stamp.write_text(WORKERD_VERSION)
    return program


@contextlib.contextmanager
def started(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process of its own session and the file with its output; ended, with all that it started, afterwards.

    `environment` is added to that of the bench.
    """
    log = folder / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def port_of_edge(process: subprocess.Popen[bytes], log: Path) -> int:
    """Where `edge dev` listens, once it says so in the file `log`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        found = _READY.search(log.read_text(errors="replace"))
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"`edge dev` did not get ready:\n{log.read_text(errors='replace')[-2000:]}")


def _wait_until_quiet(server: Server) -> None:
    """Let the engine come up, which takes seconds of every core, before anything is measured."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    before = -1
    while (now := sum(_cpu_ticks(pid) for pid in server.descendants())) > before + 1 and time.monotonic() < deadline:
        before = now
        time.sleep(1)


def answering(
    server: Server, process: subprocess.Popen[bytes], log: Path, timeout_s: float = START_TIMEOUT_S
) -> Server:
    """`server`, once it says hello. Raises RuntimeError: it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, RuntimeError), http_load.connect(server.port) as sock:
            _, data = http_load.exchange(sock, server.request.encode("latin-1"))
            if data.startswith(b"HTTP/1.1 200 "):
                return server
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _cpu_ticks(pid: int) -> int:
    """CPU time of a process so far, in hundredths of a second; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _parents() -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
    return found
