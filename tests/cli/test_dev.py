from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edge.cli import cli


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls that `edge dev` makes of the node, which is not started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text("")
    (tmp_path / "edge.toml").write_text('name = "a"\nmain = "worker.py"\n[dev]\nip = "127.0.0.1"\nport = 1234\n')
    seen: list[dict[str, Any]] = []
    node = types.ModuleType("edge.node.dev")
    node.run = lambda configs, **options: seen.append({"configs": configs, **options})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "edge.node.dev", node)
    return seen


def test_the_configuration_says_where_to_listen(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["dev"]).exit_code == 0
    [call] = calls
    assert (call["ip"], call["port"], call["reload"]) == ("127.0.0.1", 1234, True)
    assert [(config.name, config.state_dir) for config in call["configs"]] == [("a", tmp_path / ".edge")]


def test_options_go_first(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    options = ["--port", "0", "--ip", "0.0.0.0", "--no-reload", "--state-dir", "elsewhere", "--config", "edge.toml"]
    assert CliRunner().invoke(cli, ["dev", *options]).exit_code == 0
    [call] = calls
    assert (call["ip"], call["port"], call["reload"]) == ("0.0.0.0", 0, False)
    assert call["configs"][0].state_dir == tmp_path / "elsewhere"


def test_several_workers_share_what_is_the_node_s(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text('name = "b"\nmain = "worker.py"\nstate_dir = "b"\n[isolates]\nsandbox = "none"\n')
    assert CliRunner().invoke(cli, ["dev", "-c", "edge.toml", "-c", "b.toml"]).exit_code == 0
    [call] = calls
    assert [config.name for config in call["configs"]] == ["a", "b"]
    assert {config.state_dir for config in call["configs"]} == {tmp_path / ".edge"}
    assert {config.isolates.sandbox for config in call["configs"]} == {None}
    assert call["port"] == 1234


def test_to_be_without_a_sandbox_is_to_be_confirmed(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text('name = "b"\nmain = "worker.py"\n[isolates]\nsandbox = "none"\n')
    refused = CliRunner().invoke(cli, ["dev", "-c", "b.toml"])
    assert (refused.exit_code, calls) == (2, [])
    assert "confirm it with --insecure-no-sandbox" in refused.stderr
    for options in (["-c", "b.toml"], []):
        assert CliRunner().invoke(cli, ["dev", "--insecure-no-sandbox", *options]).exit_code == 0
    assert [call["configs"][0].isolates.sandbox for call in calls] == ["none", "none"]


def test_wrong_use_starts_nothing(calls: list[dict[str, Any]]) -> None:
    for wrong in (["--port", "99999"], ["--port", "x"], ["--config", "nope.toml"]):
        result = CliRunner().invoke(cli, ["dev", *wrong])
        assert (result.exit_code, result.stdout) == (2, "")
    assert calls == []
