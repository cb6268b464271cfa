"""Other clients of the same families, driven by scripts of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.checks import Clients

FOLDER = Path(__file__).parent / "others"

pytestmark = [pytest.mark.model, pytest.mark.slow]

ENVIRONMENTS = {
    "use_ai_sdk_openai.mjs": "js",
    "use_cloudflare_ts.mjs": "js",
    "use_instructor.py": "instructor",
    "use_langchain_cloudflare.mjs": "js",
    "use_langchain_openai.py": "others",
    "use_openai_agents.py": "others",
    "use_openai_node.mjs": "js",
    "use_pydantic_ai.py": "others",
}


def test_every_script_has_an_environment() -> None:
    assert {each.name for each in FOLDER.glob("use_*")} == ENVIRONMENTS.keys()


@pytest.mark.parametrize("script", ENVIRONMENTS)
def test_client(clients: Clients, script: str) -> None:
    outcome = clients.run(ENVIRONMENTS[script], f"others/{script}")
    assert outcome.failed == {}, outcome.text
    assert outcome.passed, outcome.text
