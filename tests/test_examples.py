"""Each example, and the worker of `edge init`, as a user runs it: `edge dev` in its folder, called over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from helpers import sse_events

from edge.cli import cli

EXAMPLES = Path(__file__).parent.parent / "examples"
CALL_TIMEOUT_S = 300

pytestmark = pytest.mark.slow
EdgeDev = Callable[..., tuple[str, Any]]


def usage(state_dir: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, ["usage", "--json", "--state-dir", str(state_dir)])
    records: list[dict[str, Any]] = json.loads(result.stdout)
    return records


@pytest.mark.model
@pytest.mark.parametrize("example", ["hello", "chat", "summarize"])
@pytest.mark.skipif(shutil.which("curl") is None, reason="the READMEs' commands use curl, which is not installed")
def test_the_commands_of_its_readme_work(edge_dev: EdgeDev, state_dir: Path, example: str) -> None:
    readme = (EXAMPLES / example / "README.md").read_text()
    commands = re.findall(r"^    (curl .*(?:\n    (?!curl).*)*)", readme, re.MULTILINE) + re.findall(
        "`(curl [^`]*)`", readme
    )
    assert len(commands) >= 2
    url, _ = edge_dev(EXAMPLES / example, "--no-reload", "--state-dir", str(state_dir))
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command.replace("localhost:8787", url).replace("curl ", "curl -sS --fail-with-body ", 1)],
            cwd=EXAMPLES / example,
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert len(done.stdout.split()) > 1


def test_hello(edge_dev: EdgeDev, tmp_path: Path) -> None:
    url, _ = edge_dev(EXAMPLES / "hello", "--no-reload", "--state-dir", str(tmp_path))
    with httpx.Client(base_url=url) as client:
        hello = client.get("/", params={"name": "Ada"})
        assert (hello.status_code, hello.text) == (200, "Hello, Ada!\n")
        assert hello.headers["content-type"] == "text/plain;charset=UTF-8"
        assert client.get("/").text == "Hello, world!\n"
        echo = client.post("/echo", json={"numbers": [1, 2.5, None], "text": "ä"})
        assert (echo.status_code, echo.json()) == (200, {"you_sent": {"numbers": [1, 2.5, None], "text": "ä"}})
        home = client.get("/home")
        assert (home.status_code, home.headers["location"]) == (302, f"{url}/")
        missing = client.get("/nowhere")
        assert (missing.status_code, missing.text) == (404, "There is nothing at /nowhere\n")


@pytest.mark.model
def test_chat(edge_dev: EdgeDev, state_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "chat", tmp_path / "chat")
    config = folder / "wrangler-like.toml"
    config.write_text(config.read_text().replace("MAX_TOKENS = 256", "MAX_TOKENS = 32"))
    url, _ = edge_dev(folder, "--no-reload", "--state-dir", str(state_dir))
    with httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S) as client:
        assert f"curl '{url}/?q=What" in client.get("/").text
        answer = client.get("/", params={"q": "What is the capital of France"})
        assert (answer.status_code, answer.text) == (200, "The capital of France is Paris.\n")

        with client.stream("GET", "/", params={"q": "Count from 1 to 9.", "stream": "1"}) as words:
            pieces = list(words.iter_text())
        assert words.headers["content-type"] == "text/plain;charset=UTF-8"
        assert len(pieces) > 2
        assert pieces[-1].endswith("\n")

        events = client.get("/", params={"q": "Count from 1 to 9.", "stream": "sse"})
        assert events.headers["content-type"] == "text/event-stream"
        *frames, done = sse_events(events.text)
        assert done == "[DONE]"
        num_tokens = frames[-1]["usage"]["completion_tokens"]
        assert 0 < num_tokens <= 32
    records = usage(state_dir)
    assert [(record["worker"], record["status"], record["trigger"]) for record in records] == [
        ("chat", "ok", "binding")
    ] * 3
    assert records[0]["output_tokens"] == num_tokens


@pytest.mark.model
def test_summarize(edge_dev: EdgeDev, state_dir: Path) -> None:
    text = (
        "The meeting of the gardening club was moved from Tuesday to Thursday, because the hall is being painted. "
        "Everyone is asked to bring seeds to share, and a cup for tea."
    )
    url, _ = edge_dev(EXAMPLES / "summarize", "--no-reload", "--state-dir", str(state_dir))
    with httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S) as client:
        first, second = (client.post("/", content=text).json() for _ in range(2))
        assert first["num_words"] == 31
        assert len(first["summary"]) > 0
        assert first == second
        assert client.get("/").status_code == 405
        empty = client.post("/", content="")
        assert (empty.status_code, empty.json()) == (400, {"error": "expected 1 to 2000 words, found 0"})
    [one, other] = usage(state_dir)
    assert one["model"] == other["model"] == "smollm2-135m-instruct"
    tokens = [
        record["input_tokens"] + record["cached_input_tokens"] + record["output_tokens"] for record in (one, other)
    ]
    assert tokens == [first["num_tokens"]] * 2


@pytest.mark.parametrize("mode", ["inprocess", "subprocess"])
def test_tested(tmp_path: Path, mode: str) -> None:
    """The example of the test kit: the same tests pass in both modes."""
    folder = shutil.copytree(EXAMPLES / "tested", tmp_path / "tested")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "--edge-mode", mode]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False)
    num_tests = (folder / "tests" / "test_worker.py").read_text().count("\ndef test_")
    assert re.search(rf"^{num_tests} passed in", done.stdout, re.MULTILINE), done.stdout + done.stderr
    worker = folder / "src" / "worker.py"
    worker.write_text(worker.read_text().replace('note["summary"]', 'note["text"]'))
    failed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False)
    assert re.search(r"^3 failed, ", failed.stdout, re.MULTILINE), failed.stdout


@pytest.mark.model
def test_a_new_worker(edge_dev: EdgeDev, state_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-worker"
    assert CliRunner().invoke(cli, ["init", "my-worker", "--dir", str(folder)]).exit_code == 0
    url, _ = edge_dev(folder, "--no-reload", "--state-dir", str(state_dir))
    with httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S) as client:
        assert client.get("/").text.startswith("Ask me something: /?q=")
        answer = client.get("/", params={"q": "What is the capital of France?"}).json()
    assert answer == {"answer": "The capital of France is Paris."}
    [record] = usage(state_dir)
    assert (record["worker"], record["model"]) == ("my-worker", "@cf/meta/llama-3.2-1b-instruct")
