"""The whole product as its users meet it: `edge dev` in a process of its own, called over HTTP, billed by the CLI."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import EDGE, is_alive, sse_events, wait_for

from edge.weights.manifest import DEFAULT_NAME as MODEL
from edge.weights.manifest import DEFAULT_SPEC

pytestmark = [pytest.mark.model, pytest.mark.slow]

HANG_S = 120
REST = "/client/v4/accounts/dev/ai"
AUTH = {"authorization": "Bearer dev"}

WORKER = """
import asyncio, os, time
from urllib.parse import parse_qs, urlsplit
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        url = urlsplit(request.url)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        match url.path:
            case "/ask":
                inputs = {"prompt": query["q"], "temperature": 0, "max_tokens": int(query.get("n", 24))}
                if "stream" in query:
                    stream = await self.env.AI.run("smollm2-135m-instruct", {**inputs, "stream": True})
                    return Response(stream, headers={"content-type": "text/event-stream"})
                return Response.json(await self.env.AI.run("smollm2-135m-instruct", inputs))
            case "/raise":
                return Response(1 / 0)
            case "/sleep":
                await asyncio.sleep(600)
            case "/wedge":
                while True:
                    time.sleep(0.01)
            case "/pid":
                return Response(str(os.getpid()))
        return Response("GREETING")
"""

CONFIG = """
name = "main-job"
main = "src/worker.py"
compatibility_date = "2026-11-30"
[ai]
binding = "AI"
[limits]
timeout_s = 120
# Answers are compared: they must not change when the model goes over to kernels that have just been compiled.
[engine]
weights = "float32"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "wrangler-like.toml").write_text(CONFIG)
    write_worker(folder, "hello")
    return folder


def write_worker(folder: Path, greeting: str) -> None:
    (folder / "src" / "worker.py").write_text(WORKER.replace("GREETING", greeting))


@pytest.fixture
def dev(edge_dev: Callable[..., Any], project: Path, state_dir: Path) -> Iterator[tuple[httpx.Client, Any]]:
    url, server = edge_dev(project, "--state-dir", str(state_dir))
    with httpx.Client(base_url=url, timeout=HANG_S) as client:
        yield client, server


def edge(*arguments: str) -> Any:
    """What `edge ... --json` prints."""
    command = [*EDGE, *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout)


def engine_pid(client: httpx.Client) -> int | None:
    return client.get("/healthz").json()["engine"]["pid"]


def test_a_day_in_the_life(dev: tuple[httpx.Client, Any], project: Path, state_dir: Path) -> None:
    client, server = dev
    assert client.get("/").text == "hello"

    # A call, whole and streamed: the same text, since it is greedy.
    whole = client.get("/ask", params={"q": "What is the capital of France?"}).json()
    assert whole["response"]
    body = client.get("/ask", params={"q": "What is the capital of France?", "stream": "1"}).text
    *events, done = sse_events(body)
    assert done == "[DONE]"
    assert "".join(event["response"] for event in events) == whole["response"]
    assert len(events) > 3
    usage, again = whole["usage"], events[-1]["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert again[key] == usage[key]
    assert (usage["prompt_tokens_details"], again["prompt_tokens_details"]) == (
        {"cached_tokens": 0},
        {"cached_tokens": 32},
    )

    # The same through REST and OpenAI's route.
    inputs = {"prompt": "What is the capital of France?", "temperature": 0, "max_tokens": 24}
    rest = client.post(f"{REST}/run/{MODEL}", json=inputs, headers=AUTH)
    assert rest.headers["content-type"] == "application/json"
    assert rest.json()["success"] is True
    assert rest.json()["result"]["response"] == whole["response"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.post(
        f"{REST}/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24},
        headers=AUTH,
    ).json()
    assert chat["choices"][0]["message"]["content"] == whole["response"]

    # The engine is killed in the middle of an answer: that call fails, the next one works.
    long = {"prompt": "Tell me a long story.", "max_tokens": 2000, "temperature": 0, "stream": True}
    with client.stream("POST", f"{REST}/run/{MODEL}", json=long, headers=AUTH) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        killed = engine_pid(client)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        rest_of_it = list(lines)
    last = json.loads([line for line in rest_of_it if line][-1].removeprefix("data: "))
    assert last["errors"][0]["code"] == 3043
    assert "data: [DONE]" not in rest_of_it
    assert client.get("/ask", params={"q": "What is the capital of France?"}).json() == whole
    assert engine_pid(client) not in (None, killed)

    # The handler is edited: the new answer comes without a restart, and nothing is refused meanwhile.
    old_pid = client.get("/pid").text
    write_worker(project, "edited")
    wait_for(lambda: client.get("/").raise_for_status().text == "edited")
    assert client.get("/pid").text != old_pid

    # A broken save leaves the old code serving, and says so; the next good save takes over.
    (project / "src" / "worker.py").write_text("def broken(:\n")
    wait_for(lambda: "SyntaxError" in server.output)
    assert client.get("/").text == "edited"
    write_worker(project, "mended")
    wait_for(lambda: client.get("/").text == "mended")

    # The ledger has exactly the calls made: two and one by the handler, one by REST, one by OpenAI's route, one lost.
    records = edge("usage", "--state-dir", str(state_dir))
    by_trigger = sorted((record["trigger"], record["status"]) for record in records)
    assert by_trigger == [("binding", "ok")] * 3 + [("openai", "ok"), ("rest", "error"), ("rest", "ok")]
    for record in records:
        assert record["model"] == MODEL
        if record["status"] == "ok":
            assert record["input_tokens"] + record["cached_input_tokens"] == usage["prompt_tokens"]
            assert record["output_tokens"] == usage["completion_tokens"]
            assert record["compute_us"] > 0
        else:
            assert record["output_tokens"] > 0
    bill = edge("bill", "--state-dir", str(state_dir))
    (line,) = bill["lines"]
    assert line["charged_requests"] == 5
    assert line["output_tokens"] == 5 * usage["completion_tokens"]


def test_a_client_that_hangs_up_stops_the_work(dev: tuple[httpx.Client, Any], state_dir: Path) -> None:
    client, _ = dev
    long = {"prompt": "Tell me a long story.", "max_tokens": 4000, "temperature": 0, "stream": True}
    with client.stream("POST", f"{REST}/run/{MODEL}", json=long, headers=AUTH) as response:
        next(response.iter_lines())
    with client.stream("GET", "/ask", params={"q": "Tell me a long story.", "n": 4000, "stream": 1}) as response:
        next(response.iter_lines())
    records = wait_for(lambda: len(found := edge("usage", "--state-dir", str(state_dir))) == 2 and found)
    assert [record["status"] for record in records] == ["cancelled"] * 2
    assert all(0 < record["output_tokens"] < 1000 for record in records)


def test_what_the_configuration_warns_about_is_said_once(
    edge_dev: Callable[..., Any], project: Path, state_dir: Path
) -> None:
    with (project / "wrangler-like.toml").open("a") as config:
        config.write("[observability]\nenabled = true\n")
    url, server = edge_dev(project, "--state-dir", str(state_dir))
    write_worker(project, "first")
    wait_for(lambda: httpx.get(url).text == "first")
    write_worker(project, "second")
    wait_for(lambda: httpx.get(url).text == "second")
    assert server.output.count("observability: accepted, has no effect yet") == 1
    with (project / "wrangler-like.toml").open("a") as config:
        config.write('[placement]\nmode = "smart"\n')
    wait_for(lambda: "placement: accepted, has no effect yet" in server.output)


def test_ctrl_c_while_a_stream_runs(dev: tuple[httpx.Client, Any], state_dir: Path) -> None:
    client, server = dev
    long = {"prompt": "Tell me a long story.", "max_tokens": 4000, "temperature": 0, "stream": True}
    with client.stream("POST", f"{REST}/run/{MODEL}", json=long, headers=AUTH) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "requests still running: 1" in server.output)
        server.process.send_signal(signal.SIGINT)
        assert "data: [DONE]" not in list(lines)
    server.process.wait(HANG_S)
    assert "Traceback" not in server.output
    (record,) = edge("usage", "--state-dir", str(state_dir))
    assert record["status"] in ("cancelled", "error")
    assert record["output_tokens"] > 0


def test_a_handler_that_fails(dev: tuple[httpx.Client, Any]) -> None:
    client, server = dev
    page = client.get("/raise", headers={"accept": "text/html"})
    assert page.status_code == 500
    assert page.headers["content-type"].startswith("text/html")
    assert "ZeroDivisionError: division by zero" in page.text
    assert "return Response(1 / 0)" in page.text
    plain = client.get("/raise")
    assert plain.status_code == 500
    assert "worker.py" in plain.text
    wait_for(lambda: plain.headers["x-edge-error-id"] in server.output)
    assert client.get("/").text == "hello"


@pytest.mark.parametrize("path", ["/sleep", "/wedge"])
def test_a_handler_that_never_answers(edge_dev: Callable[..., Any], project: Path, state_dir: Path, path: str) -> None:
    config = (project / "wrangler-like.toml").read_text().replace("timeout_s = 120", "timeout_s = 2")
    (project / "wrangler-like.toml").write_text(config)
    url, _ = edge_dev(project, "--state-dir", str(state_dir))
    answer = httpx.get(url + path, timeout=HANG_S)
    assert answer.status_code == 503
    assert "limits.timeout_s" in answer.text
    assert httpx.get(url, timeout=HANG_S).text == "hello"


def test_a_port_in_use(project: Path, state_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*EDGE, "dev", "--port", str(port), "--state-dir", str(state_dir)]
        result = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 1
    assert f"port {port} on localhost is in use" in result.stderr
    assert f"edge dev --port {port + 1}" in result.stderr
    assert "Traceback" not in result.stderr


def test_nothing_is_left_when_the_node_is_killed(dev: tuple[httpx.Client, Any]) -> None:
    client, server = dev
    wait_for(lambda: engine_pid(client))
    family = descendants(server.process.pid)
    assert len(family) >= 3, "zygote, isolate and engine"
    server.expected_code = -signal.SIGKILL
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in family))


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def test_a_model_that_is_added_while_the_node_runs(
    edge_dev: Callable[..., Any], project: Path, model_path: Path, tmp_path: Path
) -> None:
    state = str(tmp_path / "empty")
    url, server = edge_dev(project, "--state-dir", state)
    assert f"Models    none; the small default model: edge models add {DEFAULT_SPEC}" in server.output
    inputs = {"prompt": "Hello", "max_tokens": 4}
    with httpx.Client(base_url=url, timeout=HANG_S, headers=AUTH) as client:
        refused = client.post(f"{REST}/run/{MODEL}", json=inputs)
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (400, 5007)
        assert f"edge models add {DEFAULT_SPEC}" in refused.json()["errors"][0]["message"]
        add = [*EDGE, "models", "add", str(model_path), "--name", MODEL, "--state-dir", state]
        subprocess.run(add, check=True, capture_output=True, timeout=HANG_S)
        wait_for(lambda: f"Models    {MODEL}" in server.output)
        assert client.post(f"{REST}/run/{MODEL}", json=inputs).json()["result"]["response"]
        subprocess.run(
            [*EDGE, "models", "rm", MODEL, "--state-dir", state], check=True, capture_output=True, timeout=HANG_S
        )
        wait_for(lambda: client.post(f"{REST}/run/{MODEL}", json=inputs).status_code == 400)
