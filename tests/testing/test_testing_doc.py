"""What docs/testing.md shows works as it is written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edge.errors import OutOfCapacity
from edge.testing.plugin import AI_MODES, MODES, MODULES

DOC = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
WORKER = """
    import json
    from workers import Response, WorkerEntrypoint

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            note = await self.env.NOTES.get(request.url.rpartition("/")[2])
            result = await self.env.AI.run("@cf/meta/llama-3.2-1b-instruct", {"prompt": note})
            return Response.json({"advice": result["response"]})
"""
CONFIG = """
    name = "doc"
    main = "src/doc_worker.py"

    [ai]

    [[kv_namespaces]]
    binding = "NOTES"
"""


@pytest.mark.slow
def test_the_first_example(run_tests: Any) -> None:
    files = {"doc_dot_toml": CONFIG, "src__doc_worker_dot_py": WORKER, "test_it_dot_py": BLOCKS[0]}
    done = run_tests("--edge-config", "doc.toml", **files)
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.edge(config="project/wrangler-like.toml")
def test_canned_answers(ai: Any) -> None:
    [block] = [block for block in BLOCKS if block.startswith("ai.answers(")]
    exec(block, {"ai": ai, "MODEL": "m", "OutOfCapacity": OutOfCapacity})
    assert block.count("ai.answers(") == 7


def test_every_option_is_there() -> None:
    for option in ("mode", "ai", "config", "modules", "cassettes"):
        assert f"`--edge-{option}`" in DOC
    for value in (*MODES, *AI_MODES, *MODULES):
        assert f"`{value}`" in DOC
