"""The project's acceptance scripts: real clients, unmodified, against a real node with real models."""

from __future__ import annotations

import pytest
from clients.checks import Clients

pytestmark = [pytest.mark.model, pytest.mark.slow]

NOT_SERVED = {"workers_lifecycle": "NotFoundError"}
"""Checks of what there is not, routes that deploy workers, and how the reason begins for which they fail. They must."""
LEFT_TO_CHANCE = {"openai responses": "Error text"}
"""Checks that ask at temperature 1 for an answer that ends within 64 tokens, which that of a small model may not, and
the reason for which they may fail; `others/use_openai_node.mjs` checks the same greedily."""


@pytest.mark.parametrize(
    ("environment", "script"),
    [
        ("sdk", "accept_cloudflare_sdk.py"),
        ("sdk", "accept_openai_sdk.py"),
        ("litellm", "accept_litellm.py"),
        ("langchain", "accept_langchain_cloudflare.py"),
        ("js", "accept_workers_ai_provider.mjs"),
        ("js", "accept_openai_node.mjs"),
    ],
)
def test_acceptance(clients: Clients, environment: str, script: str) -> None:
    outcome = clients.run(environment, f"accept/{script}")
    excuses = NOT_SERVED | LEFT_TO_CHANCE
    unexcused = {
        name: why for name, why in outcome.failed.items() if name not in excuses or not why.startswith(excuses[name])
    }
    assert unexcused == {}, outcome.text
    assert NOT_SERVED.keys().isdisjoint(outcome.passed), "served by now: take it off the list"
    assert outcome.passed, outcome.text
