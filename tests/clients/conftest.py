"""A node for real clients, with the real models under the names that the clients ask for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.checks import Clients

from edge.weights.manifest import DEFAULT_NAME
from edge.weights.store import ModelStore

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "golden"
CACHE = TESTS.parent / ".edge" / "cache"
"""With the compiled kernels, which take long to make."""
WORKER = """\
from workers import WorkerEntrypoint


class Default(WorkerEntrypoint): ...
"""
ENCODER, CLASSIFIER = "minilm", "sentiment"
STAND_INS = {
    "@cf/meta/llama-3.2-1b-instruct": DEFAULT_NAME,
    "@cf/qwen/qwen3-30b-a3b-fp8": DEFAULT_NAME,
    "@cf/openai/gpt-oss-20b": DEFAULT_NAME,
    "@cf/baai/bge-small-en-v1.5": ENCODER,
    "@cf/baai/bge-reranker-base": ENCODER,
    "@cf/huggingface/distilbert-sst-2-int8": CLASSIFIER,
}
"""The ids of Workers AI that the scripts use when nothing else is said, and the installed model behind each."""
WITHOUT_MODEL = (
    *("IMAGE_CLASS", "ASR", "ASR_TURBO", "ASR_NOVA", "TTS", "TTS_BINARY", "IMAGE", "IMAGE_BINARY", "TRANSLATE"),
    *("SUMMARIZE", "OPENAI_ASR", "OPENAI_TTS", "OPENAI_IMAGE", "DECISION", "DECISION_FULL"),
)
"""The tasks for which there is no model; the scripts skip them."""


@pytest.fixture(scope="module")
def clients(
    shared_edge_dev: Callable[..., tuple[str, Any]],
    model_path: Path,
    encoder_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Clients:
    """Real clients of a running node; skipped where `CLIENTS=0` says so."""
    if os.environ.get("CLIENTS") == "0":
        pytest.skip("CLIENTS=0")
    folder = tmp_path_factory.mktemp("clients")
    (folder / "state").mkdir()
    CACHE.mkdir(parents=True, exist_ok=True)
    (folder / "state" / "cache").symlink_to(CACHE)
    store = ModelStore.in_state_dir(folder / "state")
    store.add(str(model_path), DEFAULT_NAME)
    store.add(str(encoder_path), ENCODER)
    store.add(str(_sentiment(encoder_path, folder / "sentiment")), CLASSIFIER)
    stand_ins = "".join(f'"{name}" = "{model}"\n' for name, model in STAND_INS.items())
    (folder / "wrangler-like.toml").write_text(f'name = "clients"\nmain = "worker.py"\n[ai.models]\n{stand_ins}')
    (folder / "worker.py").write_text(WORKER)
    url, _ = shared_edge_dev(folder, "--no-reload", "--state-dir", str(folder / "state"))
    base = f"{url}/client/v4"
    return Clients(
        {
            "WAI_BASE_URL": base,
            "WAI_ACCOUNT_ID": "dev",
            "WAI_TOKEN": "dev",
            "WAI_OPENAI_URL": f"{base}/accounts/dev/ai/v1",
            "WAI_MODEL_TEXT": "@cf/meta/llama-3.2-1b-instruct",
            "WAI_MODEL_EMBED": "@cf/baai/bge-small-en-v1.5",
            "WAI_SEMANTIC": "0",
            **{f"WAI_MODEL_{task}": "-" for task in WITHOUT_MODEL},
        }
    )


def _sentiment(encoder: Path, folder: Path) -> Path:
    """The encoder with a head that tells positive from negative."""
    shutil.copytree(encoder, folder)
    shutil.copyfile(GOLDEN / "sentiment_head_minilm_linear.safetensors", folder / "classification_head.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
