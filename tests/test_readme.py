"""Runs the code blocks of the README, and commands of the documents that it points to."""

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
import torch
from helpers import wait_for
from safetensors.torch import save_file

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

    clients = dict(re.findall(r'`base_url="http://localhost:8787(\S*)",\s+api_(key|token)="dev"`', README))
    for base, key in clients.items():
        path = {"key": "models", "token": "user/tokens/verify"}[key]
        answer = httpx.get(f"{url}{base}/{path}", headers={"authorization": "Bearer dev"}, timeout=BLOCK_TIMEOUT_S)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert set(clients.values()) == {"key", "token"}


def test_a_node_for_others_takes_the_token_that_was_made(edge_serve: EdgeDev, state_dir: Path) -> None:
    [create] = re.findall(r"^    (edge tokens create .*)$", README, re.MULTILINE)
    token = run(create, "", state_dir).strip()
    url, server = edge_serve(ROOT, "--insecure-no-sandbox", "--state-dir", str(state_dir))
    assert "Tokens 1 of acme" in server.output
    assert f"REST      {url}/client/v4/accounts/acme/ai/run/MODEL\n" in server.output
    call = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    routes = [f"{url}/client/v4/accounts/acme/ai/v1/chat/completions", f"{url}/v1/chat/completions"]
    assert httpx.post(routes[0], json=call).status_code == 401
    with httpx.Client(headers={"authorization": f"Bearer {token}"}, timeout=BLOCK_TIMEOUT_S) as client:
        for route in routes:
            assert client.post(route, json=call).json()["usage"]["completion_tokens"] <= 4
        assert client.post(routes[0].replace("acme", "dev"), json=call).status_code == 404
        [command] = re.findall(r"`(edge bill\s+--account\s+acme)`", README)
        [line] = json.loads(run(f"{' '.join(command.split())} --by account --json", "", state_dir))["lines"]
        assert (line["account"], line["requests"]) == ("acme", 2)
        run(f"edge tokens revoke {token}", "", state_dir)
        wait_for(lambda: client.post(routes[0], json=call).status_code == 401)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the document's commands use curl, which is not installed")
def test_the_commands_of_finetunes(edge_dev: EdgeDev, state_dir: Path, tmp_path: Path) -> None:
    [block] = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/finetunes.md").read_text(), re.MULTILINE | re.DOTALL)
    folder = tmp_path / "pirate"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{stem}.lora_A.weight": torch.ones(2, 576), f"{stem}.lora_B.weight": torch.ones(576, 2)}
    save_file(weights, folder / "adapter_model.safetensors")
    url, _ = edge_dev(ROOT, "--no-reload", "--state-dir", str(state_dir))
    settings = f"BASE={url}/client/v4/accounts/dev TOKEN=dev\n"
    lines = run(settings + block, url, state_dir, folder=tmp_path).strip().splitlines()
    created, *uploaded, answer = (json.loads(line) for line in lines)
    assert created["result"]["name"] == "pirate"
    assert [each["result"]["file_name"] for each in uploaded] == sorted(path.name for path in folder.iterdir())
    assert answer["result"]["response"]


def run(block: str, url: str, state_dir: Path, folder: Path = ROOT) -> str:
    done = subprocess.run(
        ["bash", "-c", _SHELL + block.replace("http://localhost:8787", url)],
        env=os.environ | {"PYTHON": sys.executable, "STATE": str(state_dir)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout
