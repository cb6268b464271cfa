from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from click.testing import CliRunner, Result

from edge.cli import cli
from edge.weights.conversion import HELDOUT_TEXT
from edge.weights.store import ModelStore


def edge(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["models", *map(str, arguments)])


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with the model `tiny`; texts are short, since its tokens are bytes."""
    monkeypatch.setenv("CXX", "/no/compiler")
    short = tmp_path / "short.txt"
    short.write_text(HELDOUT_TEXT.read_text()[:1000])
    for name in ("CALIBRATION_TEXT", "HELDOUT_TEXT"):
        monkeypatch.setattr(f"edge.cli.quantize.{name}", short)
    tiny_models.save_folder(tmp_path / "tiny")
    state = tmp_path / "state"
    ModelStore.in_state_dir(state).add(str(tmp_path / "tiny"))
    return state


@pytest.mark.slow
def test_a_model_is_quantized_measured_and_installed(state: Path) -> None:
    done = edge("quantize", "tiny", "--weights", "int8", "--group", "32", "--json", "--state-dir", state)
    assert done.exit_code == 0, done.stderr
    [row] = json.loads(done.stdout)
    assert (row["name"], row["passed"], row["missed"]) == ("tiny-int8", True, [])
    assert row["recipe"] == {"bits": 8, "group": 32, "symmetric": False, "search": True}
    assert row["report"]["top1"] > 0.97
    store = ModelStore.in_state_dir(state)
    manifest = next(each for each in store.list() if each.name == "tiny-int8")
    assert (manifest.source, manifest.context_length) == ("quantize:tiny", 512)
    report = json.loads((store.path("tiny-int8") / "report.json").read_bytes())
    assert report == {key: row[key] for key in report}
    again = edge("quantize", "tiny", "--weights", "int8", "--state-dir", state)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "a model 'tiny-int8' is installed already" in again.stderr


@pytest.mark.slow
def test_a_miss_is_refused_unless_forced(state: Path) -> None:
    command = ("quantize", "tiny", "--plain", "--name", "rough", "--state-dir", state)
    refused = edge(*command)
    assert refused.exit_code == 1
    assert refused.stdout.splitlines()[2].split()[0] == "rough"
    assert "error: rough is not installed: the mean KL divergence is" in refused.stderr
    assert "times the limit of 0.03" in refused.stderr
    assert "--force" in refused.stderr
    store = ModelStore.in_state_dir(state)
    assert [each.name for each in store.list()] == ["tiny"]
    forced = edge(*command, "--force")
    assert (forced.exit_code, "warning: the mean KL divergence is" in forced.stderr) == (0, True)
    assert [each.name for each in store.list()] == ["rough", "tiny"]
    assert {path.name for path in store.root.iterdir()} == {".lock", ".workshop.lock", "rough", "tiny"}


@pytest.mark.slow
def test_what_cannot_be_quantized(state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    unknown = edge("quantize", "tinny", "--state-dir", state)
    assert (unknown.exit_code, "did you mean tiny?" in unknown.stderr) == (1, True)
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    broken = edge("quantize", tmp_path / "tiny", "--name", "b", "--state-dir", state)
    assert broken.exit_code == 1
    assert "tokenizer.json: is missing" in capfd.readouterr().err
    assert [each.name for each in ModelStore.in_state_dir(state).list()] == ["tiny"]
