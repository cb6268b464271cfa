"""The project's acceptance scripts: real clients, unmodified, against a real node with real models."""

from __future__ import annotations

import pytest
from clients.checks import Clients

pytestmark = [pytest.mark.model, pytest.mark.slow]

NOT_SERVED = {"workers_lifecycle"}
"""Checks of what there is not: routes that deploy workers."""
LEFT_TO_CHANCE = {"openai responses"}
"""Checks that ask at temperature 1 for an answer that ends within 64 tokens, which that of a small model may not;
`others/use_openai_node.mjs` checks the same greedily."""


@pytest.mark.parametrize(
    ("environment", "script", "may_fail"),
    [
        ("sdk", "accept_cloudflare_sdk.py", NOT_SERVED),
        ("sdk", "accept_openai_sdk.py", set()),
        ("litellm", "accept_litellm.py", set()),
        ("langchain", "accept_langchain_cloudflare.py", set()),
        ("js", "accept_workers_ai_provider.mjs", set()),
        ("js", "accept_openai_node.mjs", LEFT_TO_CHANCE),
    ],
)
def test_acceptance(clients: Clients, environment: str, script: str, may_fail: set[str]) -> None:
    outcome = clients.run(environment, f"accept/{script}")
    assert outcome.failed.keys() <= may_fail, outcome.text
    assert outcome.passed, outcome.text
