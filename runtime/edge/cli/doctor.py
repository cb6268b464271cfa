"""`edge doctor`: looks at the machine and the project, and says what is missing, why it matters and what to do.

The checks read only. What needs torch or the sandbox is asked in a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from edge.cli.options import config_options, json_option, read_config
from edge.cli.output import format_bytes, line_width
from edge.config import Config, DevConfig, EngineConfig
from edge.config.file import find
from edge.errors import ConfigError
from edge.isolates.sandbox.layers import LAYERS, Layer, SandboxReport, refusal
from edge.weights.manifest import DEFAULT_NAME, DEFAULT_SPEC
from edge.weights.store import ModelStore

GB = 1_000_000_000
PROBE_TIMEOUT_S = 120
_PIPE_WIDTH = 80


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at: `status` is ok, warn or fail; `fix` is what to do unless it is ok."""

    check: str
    status: str
    found: str
    fix: str = ""


class LayerState(msgspec.Struct, frozen=True):
    """A layer of the sandbox. `why` it is off, what `risk` that is, and its `fix`."""

    name: str
    on: bool
    demanded_by: str
    """The weakest policy that does; empty: none."""
    why: str = ""
    risk: str = ""
    fix: str = ""


class SandboxCheck(Check, frozen=True):
    """The sandbox: with what a handler process said about its own."""

    policy: str = ""
    bitmask: int = 0
    """As on usage records."""
    spawn_ms: float = 0.0
    """From asking for a process until its sandbox is on."""
    layers: list[LayerState] = []


@click.command()
@json_option
@config_options
def doctor(as_json: bool, config_path: Path | None, state_dir: Path | None) -> None:
    """Check that this machine has what is needed.

    The exit code is 1 if something fails that is needed; warnings are about speed or comfort.
    """
    checks = list(examine(config_path, state_dir))
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    if as_json:
        print(json.dumps(msgspec.to_builtins(checks), ensure_ascii=False, indent=2))
    else:
        for check in checks:
            click.echo("\n".join(_for_people(check, line_width() or _PIPE_WIDTH)))
        click.echo(f"{counts['ok']} ok, {_number(counts['warn'], 'warning')}, {_number(counts['fail'], 'failure')}")
    if counts["fail"]:
        click.get_current_context().exit(1)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _for_people(check: Check, width: int) -> Iterator[str]:
    """What was found, and in lines of its own the fix."""
    head = f"{check.check:<8}  {check.status:<4}  "
    texts = [*check.found.splitlines(), *([f"Fix: {check.fix}"] if check.fix else [])]
    for text in texts:
        # Paths and commands stay whole, to be copied, however long they are.
        yield from textwrap.wrap(
            text,
            width,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
        head = " " * len(head)


def examine(config_path: Path | None, state_dir: Path | None) -> Iterator[Check]:
    """All checks, of the machine first and then of the project."""
    project, config = _config(config_path, state_dir)
    yield _python()
    yield _system()
    yield _cores()
    yield _memory()
    yield _torch(config.engine if config else EngineConfig())
    yield _cpu_features()
    yield _openmp()
    yield _compiler(config)
    yield _sandbox(config)
    yield project
    if project.status == "fail":
        return  # it says where the models are and what the port is
    folder = config.state_dir if config else (state_dir or Path(".edge")).absolute()
    yield _disk(folder)
    yield _models(ModelStore.in_state_dir(folder), config.ai.models if config and config.ai else {})
    yield _port(config.dev if config else DevConfig())


# -- the machine -------------------------------------------------------------------------------------------


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _system() -> Check:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Check("system", "warn", found, "nodes are tested on Linux; the sandbox's layers exist only there")
    return Check("system", "ok", found)


def _cores() -> Check:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_cores < 2:
        return Check("cores", "warn", str(num_cores), "one core is shared by node, handlers and engine: expect it slow")
    return Check("cores", "ok", str(num_cores))


def _memory() -> Check:
    try:
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(meminfo["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return Check("memory", "ok", "unknown: this system has no /proc/meminfo")
    found = f"{format_bytes(available)} available"
    if available < GB:
        return Check("memory", "fail", found, "the default model needs about 1 GB: close something")
    if available < 3 * GB:
        return Check("memory", "warn", found, "enough for the default model only")
    return Check("memory", "ok", found)


_TORCH_PROBE = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}))
"""


def _torch(engine: EngineConfig) -> Check:
    answer, why = _ask([sys.executable, "-c", _TORCH_PROBE])
    if answer is None:
        return Check("torch", "fail", f"cannot be imported: {why}", "pip install torch==2.13.0 (README: CPU and CUDA)")
    build, devices = answer["version"], answer["devices"]
    if engine.device == "cpu":
        unused = f'; with device = "cuda" under [engine] they would run on {devices[0]}' if devices else ""
        return Check("torch", "ok", f"{build}; models run on the CPU{unused}")
    wanted = f'the configuration says device = "{engine.device}"'
    instead = 'or set device = "cpu" under [engine]'
    if answer["cuda"] is None:
        found = f"{build} is a build for the CPU; {wanted}"
        return Check("torch", "fail", found, f"install the CUDA build of torch (README), {instead}")
    number = int(engine.device.partition(":")[2] or 0)
    if number >= len(devices):
        found = f"{build} finds {len(devices)} CUDA devices; {wanted}"
        return Check("torch", "fail", found, f"nvidia-smi shows whether driver and device work; repair them, {instead}")
    return Check("torch", "ok", f"{build}; {engine.device} is {devices[number]}")


_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


def _cpu_features() -> Check:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return Check("cpu", "ok", "unknown: this system has no /proc/cpuinfo")
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    found = [feature for feature in _FEATURES if feature in flags]
    if not {"avx2", "asimd"} & set(found):
        return Check("cpu", "warn", " ".join(found) or "no vector extensions", "models will be slow on this CPU")
    return Check("cpu", "ok", " ".join(found))


def _openmp() -> Check:
    policy = os.environ.get("OMP_WAIT_POLICY")
    if policy is not None and policy.upper() != "PASSIVE":
        fix = "unset OMP_WAIT_POLICY: threads that spin while they wait slow down everything else"
        return Check("openmp", "warn", f"OMP_WAIT_POLICY={policy}", fix)
    return Check(
        "openmp", "ok", "OMP_WAIT_POLICY=PASSIVE" if policy else "OMP_WAIT_POLICY not set; engines set PASSIVE"
    )


def _compiler(config: Config | None) -> Check:
    """Whether there are native kernels, or can be. Which compiler engines take: `edge.engine.kernels`."""
    engine = config.engine if config else EngineConfig()
    if engine.device != "cpu" or not engine.kernels:
        return Check(
            "kernels", "ok", f"not used with device = {engine.device!r}, kernels = {str(engine.kernels).lower()}"
        )
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["c++", "g++", "clang++"])), None)
    if compiler is None:
        found = "no C++ compiler: models run on torch's operators, several times slower"
        return Check("kernels", "warn", found, "install g++ (Debian: apt install g++), or name a compiler in CXX")
    built = config is not None and any((config.state_dir / "cache" / "kernels").glob("kernels-*.so"))
    when = "compiled ones are kept" if built else "the first engine compiles them, and serves meanwhile"
    return Check("kernels", "ok", f"{compiler}; {when}")


def _sandbox(config: Config | None) -> Check:
    """What a handler process says of its sandbox: for the configured policy, and for `standard`, which nodes need."""
    policy = (config.isolates.sandbox if config else None) or "best-effort"
    answer, why = _ask([sys.executable, "-P", "-m", "edge.isolates.probe", policy])
    if answer is None:
        return Check("sandbox", "fail", f"handlers cannot start: {why}", "use Linux 3.5 or later, with /proc mounted")
    report = SandboxReport(answer["layers"], answer["missing"], answer["escapes"])
    states = [_layer_state(layer, report) for layer in LAYERS]
    off = [state for state in states if not state.on]
    num_on = len(states) - len(off)
    lines = [
        f"policy {policy}: {num_on} of {len(states)} layers on; a process starts in {answer['spawn_ms']} ms",
        f"on: {', '.join(state.name for state in states if state.on)}",
        *(f"off: {state.name}, because: {state.why}. Without it {state.risk}" for state in off),
    ]
    refused, substandard = refusal(policy, report), refusal("standard", report)
    status = "fail" if refused else "warn" if substandard else "ok"
    if refused or substandard:
        lines.append(refused or "Run only code that you trust: this is less than policy standard demands")
    fixes = "; ".join(dict.fromkeys(state.fix for state in off if state.fix)) if status != "ok" else ""
    return SandboxCheck(
        *("sandbox", status, "\n".join(lines), fixes),
        policy=policy,
        bitmask=answer["bitmask"],
        spawn_ms=answer["spawn_ms"],
        layers=states,
    )


def _layer_state(layer: Layer, report: SandboxReport) -> LayerState:
    demanded_by = {"base": "best-effort", "extra": ""}.get(layer.level, layer.level)
    if layer.name in report.layers:
        return LayerState(layer.name, True, demanded_by)
    why = report.missing.get(layer.name, "the process did not say")
    return LayerState(layer.name, False, demanded_by, why, layer.without, layer.fix)


def _ask(command: list[str]) -> tuple[dict[str, Any] | None, str]:
    """The JSON object that a process prints, or None and why not."""
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=env, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {PROBE_TIMEOUT_S} s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer, ""


# -- the project -------------------------------------------------------------------------------------------


def _config(config_path: Path | None, state_dir: Path | None) -> tuple[Check, Config | None]:
    if config_path is None and find(Path.cwd()) is None:
        return Check("config", "warn", "no configuration file here or above", "edge init NAME makes a worker"), None
    try:
        config = read_config(config_path, state_dir)
    except ConfigError as error:
        return Check("config", "fail", error.message, "correct the file; wrangler-like.toml explains every key"), None
    return Check("config", "ok", str(config.path)), config


def _disk(folder: Path) -> Check:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{format_bytes(free)} free for {folder}"
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"{existing} cannot be written", "change its owner, or set state_dir elsewhere")
    if free < GB // 2:
        return Check("disk", "fail", found, "free some, or set state_dir in the configuration to another disk")
    if free < 5 * GB:
        return Check("disk", "warn", found, "room for small models only")
    return Check("disk", "ok", found)


def _models(store: ModelStore, stand_ins: dict[str, str]) -> Check:
    installed = [manifest.name for manifest in store.list()]
    names = ", ".join(installed)
    broken = store.broken()
    if broken:
        return Check("models", "warn", "; ".join(broken.values()), f"edge models rm {next(iter(broken))}, then add it")
    if not names:
        return Check("models", "warn", f"none in {store.root}", f"edge models add {DEFAULT_SPEC}")
    for id, name in stand_ins.items():
        if name not in installed:
            found = f"{names}; but not {name!r}, which [ai.models] has stand in for {id!r}"
            spec = DEFAULT_SPEC if name == DEFAULT_NAME else f"SPEC --name {name}"
            return Check("models", "warn", found, f"edge models add {spec}; or name an installed one in [ai.models]")
    return Check("models", "ok", names)


def _port(dev: DevConfig) -> Check:
    where = f"{dev.ip}:{dev.port}"
    try:
        addresses = socket.getaddrinfo(dev.ip, dev.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        fix = "set ip under [dev] to an address of this machine"
        return Check("port", "warn", f"{dev.ip} has no address: {error.strerror}", fix)
    # All of them, as `edge dev` does: "localhost" is 127.0.0.1 and ::1, and not every machine has the second.
    errors = [_why_not_bound(family, address) for family, _, _, _, address in addresses]
    failed = [error for error in errors if error is not None]
    reason = next((error for error in failed if error.errno == errno.EADDRINUSE), None)
    if reason is None and len(failed) == len(errors):
        reason = failed[0]
    if reason is None:
        return Check("port", "ok", f"{where} is free")
    other = dev.port + 1 if 1024 <= dev.port < 65535 else DevConfig().port
    return Check("port", "warn", f"{where}: {reason.strerror}", f"stop what listens there, or: edge dev --port {other}")


def _why_not_bound(family: int, address: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError as error:
        return error
    return None
