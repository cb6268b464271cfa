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
    """The calls that `edge serve` makes of the node, which is not started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text("")
    (tmp_path / "edge.toml").write_text('name = "a"\nmain = "worker.py"\n[dev]\nip = "0.0.0.0"\nport = 1234\n')
    seen: list[dict[str, Any]] = []
    node = types.ModuleType("edge.node.serve")
    node.run = lambda configs, **options: seen.append({"configs": configs, **options})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "edge.node.serve", node)
    return seen


def test_what_is_of_edge_dev_has_no_effect(calls: list[dict[str, Any]]) -> None:
    assert CliRunner().invoke(cli, ["serve"]).exit_code == 0
    [call] = calls
    assert (call["ip"], call["port"], call["drain_s"], call["without_tokens"]) == ("localhost", 8787, 30, False)
    [config] = call["configs"]
    assert (config.isolates.sandbox, config.api.rate_limits) == ("standard", "on")


def test_what_the_file_and_the_options_say_goes_first(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "edge.toml").write_text(
        'name = "a"\nmain = "worker.py"\n[isolates]\nsandbox = "strict"\n[api]\nrate_limits = "off"\n'
    )
    options = ["--port", "0", "--ip", "::", "--drain", "5", "--without-tokens", "-c", "edge.toml", "-c", "edge.toml"]
    assert CliRunner().invoke(cli, ["serve", *options]).exit_code == 0
    [call] = calls
    assert (call["ip"], call["port"], call["drain_s"], call["without_tokens"]) == ("::", 0, 5, True)
    assert [(each.isolates.sandbox, each.api.rate_limits) for each in call["configs"]] == [("strict", "off")] * 2


def test_to_be_without_a_sandbox_is_to_be_confirmed(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["serve", "--insecure-no-sandbox"]).exit_code == 0
    assert calls[0]["configs"][0].isolates.sandbox == "none"
    (tmp_path / "edge.toml").write_text('name = "a"\nmain = "worker.py"\n[isolates]\nsandbox = "none"\n')
    refused = CliRunner().invoke(cli, ["serve"])
    assert (refused.exit_code, len(calls)) == (2, 1)
    assert "confirm it with --insecure-no-sandbox" in refused.stderr
