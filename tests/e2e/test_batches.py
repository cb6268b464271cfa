"""Asynchronous batches on a node that is killed while they run, with the packaged model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import EDGE, wait_for

from edge.weights.manifest import DEFAULT_NAME as MODEL

pytestmark = [pytest.mark.model, pytest.mark.slow]

HANG_S = 240
AI = "/client/v4/accounts/dev/ai"
NUM_NATIVE, NUM_LINES = 8, 6
NUM_REQUESTS = NUM_NATIVE + NUM_LINES

WORKER = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        inputs = await request.json()
        return Response.json(await self.env.AI.run("smollm2-135m-instruct", inputs, {"queueRequest": True}))
"""
CONFIG = """
name = "batches"
main = "src/worker.py"
[ai]
binding = "AI"
[batches]
concurrency = 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "worker.py").write_text(WORKER)
    (folder / "wrangler-like.toml").write_text(CONFIG)
    return folder


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=HANG_S, headers={"authorization": "Bearer dev"})


def usage(state_dir: Path) -> list[dict[str, Any]]:
    command = [*EDGE, "usage", "--json", "--limit", "1000", "--state-dir", str(state_dir)]
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout
    )
    return found


def inputs(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say the number {number} and tell a story about it."}]
    return {"messages": messages, "max_tokens": 16, "temperature": 0}


def lines() -> bytes:
    requests = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, **inputs(number)},
        }
        for number in range(NUM_LINES)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def test_every_request_is_answered_and_billed_once_though_the_node_is_killed_twice(
    edge_dev: Callable[..., Any], project: Path, state_dir: Path
) -> None:
    start = lambda: edge_dev(project, "--state-dir", str(state_dir))  # noqa: E731
    url, server = start()
    with client_of(url) as client:
        requests = [{**inputs(number), "external_reference": f"ref-{number}"} for number in range(NUM_NATIVE)]
        native = client.post("/", json={"requests": requests}).json()
        assert native["status"] == "queued"
        file = client.post(f"{AI}/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines())}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post(f"{AI}/v1/batches", json=body).json()

    answers = 0
    for _ in range(2):
        with client_of(url) as client:

            def num_answered(client: httpx.Client = client) -> int:
                first = client.get(f"{AI}/batches/{native['request_id']}").json()["result"]["request_counts"]
                second = client.get(f"{AI}/v1/batches/{batch['id']}").json()["request_counts"]
                return int(first["completed"] + second["completed"])

            wait_for(lambda before=answers, count=num_answered: count() > before, HANG_S)
            answers = num_answered()
            assert answers < NUM_REQUESTS, "too late to be killed in the middle"
        server.expected_code = -signal.SIGKILL
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(HANG_S)
        url, server = start()

    with client_of(url) as client:
        run = f"{AI}/run/{MODEL}"

        def poll() -> dict[str, Any] | None:
            result = client.post(run, json={"request_id": native["request_id"]}).json()["result"]
            return result if "responses" in result else None

        answered = wait_for(poll, HANG_S)
        assert [response["id"] for response in answered["responses"]] == list(range(NUM_NATIVE))
        assert [response["external_reference"] for response in answered["responses"]] == [
            f"ref-{number}" for number in range(NUM_NATIVE)
        ]
        assert all(response["success"] and response["result"]["response"] for response in answered["responses"])

        def over() -> dict[str, Any] | None:
            found = client.get(f"{AI}/v1/batches/{batch['id']}").json()
            return found if found["status"] == "completed" else None

        done = wait_for(over, HANG_S)
        assert done["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        output = client.get(f"{AI}/v1/files/{done['output_file_id']}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in output) == sorted(f"line-{n}" for n in range(NUM_LINES))

    charged = [record for record in usage(state_dir) if record["status"] != "error"]
    assert {record["trigger"] for record in charged} == {"batch"}
    assert [record["worker"] for record in charged].count("batches") == NUM_NATIVE
    # A record that was written when its answer was lost stays the only one.
    assert len({record["id"] for record in charged}) == len(charged) == NUM_REQUESTS
    assert len({record["request_id"] for record in charged}) == NUM_REQUESTS


def test_interactive_calls_go_before_a_batch(edge_dev: Callable[..., Any], project: Path, state_dir: Path) -> None:
    url, _ = edge_dev(project, "--state-dir", str(state_dir))
    with client_of(url) as client:
        queued = client.post("/", json={"requests": [inputs(number) for number in range(20)]}).json()
        asked = client.post(f"{AI}/run/{MODEL}", json=inputs(99) | {"max_tokens": 8}).json()
        assert asked["success"]
        counts = client.get(f"{AI}/batches/{queued['request_id']}").json()["result"]["request_counts"]
        assert counts["completed"] < counts["total"] == 20
        cancelled = client.post(f"{AI}/batches/{queued['request_id']}/cancel").json()["result"]
        assert cancelled["status"] in ("running", "cancelled")

        def over() -> dict[str, Any] | None:
            result = client.post(f"{AI}/run/{MODEL}", json={"request_id": queued["request_id"]}).json()["result"]
            return result if "responses" in result else None

        done = wait_for(over, HANG_S)
    assert done["status"] == "cancelled"
    num_done = sum(response["success"] for response in done["responses"])
    assert len([record for record in usage(state_dir) if record["trigger"] == "batch"]) == num_done < 20
