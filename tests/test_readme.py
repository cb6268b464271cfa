"""Runs the code blocks of the README."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.config.file import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCK_TIMEOUT_S = 600

pytestmark = [pytest.mark.model, pytest.mark.slow]
EdgeDev = Callable[..., tuple[str, Any]]

# The README's commands with this test's server, state and Python; curl fails on an HTTP error.
_SHELL = r"""
set -euo pipefail
curl() { command curl -sS --fail-with-body "$@"; echo; }
edge() { "$PYTHON" -c 'from edge.cli import main; main()' "$@" --state-dir "$STATE"; }
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_handler_answers(edge_dev: EdgeDev, state_dir: Path, tmp_path: Path) -> None:
    [handler], [config] = blocks("python"), blocks("toml")
    (tmp_path / "worker.py").write_text(handler)
    (tmp_path / "wrangler-like.toml").write_text(config)
    url, _ = edge_dev(tmp_path, "--no-reload", "--state-dir", str(state_dir))
    answer = httpx.get(url, params={"q": "What is the capital of France?"}, timeout=BLOCK_TIMEOUT_S)
    assert (answer.status_code, answer.text) == (200, "The capital of France is Paris.\n")


def test_both_forms_of_the_configuration_say_the_same(tmp_path: Path) -> None:
    [config], [ai] = blocks("toml"), re.findall(r'^or `wrangler.jsonc`: `("ai": .*)`\.$', README, re.MULTILINE)
    (tmp_path / "worker.py").write_text("")
    (tmp_path / "wrangler-like.toml").write_text(config)
    (tmp_path / "wrangler.jsonc").write_text(f'{{"name": "ask", "main": "worker.py", {ai}}}')
    toml, jsonc = (load(tmp_path / name, tmp_path) for name in ("wrangler-like.toml", "wrangler.jsonc"))
    assert toml.ai == jsonc.ai
    assert jsonc.ai is not None
    assert jsonc.ai.models == {"@cf/meta/llama-3.2-1b-instruct": "smollm2-135m-instruct"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="the README's commands use curl, which is not installed")
def test_the_commands_work_on_the_demo(edge_dev: EdgeDev, state_dir: Path) -> None:
    url, server = edge_dev(ROOT, "--state-dir", str(state_dir))
    welcome = next(block for block in blocks("text") if "Ready on" in block)
    shown = welcome.replace("http://localhost:8787", url).splitlines()
    assert [line for line in server.output.splitlines() if line in shown] == shown

    asking, calling, looking = (run(block, url, state_dir) for block in blocks("bash"))
    assert asking.startswith("The capital of France is Paris.\n")
    assert len(asking.split()) > 12
    native, chat, models = (json.loads(line) for line in calling.strip().splitlines())
    assert native["success"] is True
    assert native["result"]["usage"]["completion_tokens"] <= 20
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert any("smollm2-135m-instruct" in json.dumps(model) for model in models["result"])
    table = [line.split() for line in looking.splitlines() if re.match(r"\d\d-\d\d \d\d:\d\d", line)]
    assert [("rest" in row, "openai" in row, "binding" in row, "ok" in row) for row in table[:4]] == [
        (False, True, False, True),
        (True, False, False, True),
        (False, False, True, True),
        (False, False, True, True),
    ]
    assert "Total" in looking
    assert "pypi:" in looking or "file:" in looking
    assert re.search(r"\d+ ok, \d+ warnings?, 0 failures", looking)


def run(block: str, url: str, state_dir: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", _SHELL + block.replace("http://localhost:8787", url)],
        env=os.environ | {"PYTHON": sys.executable, "STATE": str(state_dir)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout
