"""Which dialect `/ai/run` and `env.AI.run` speak: by the family of the model whose id the caller wrote.

What installed model stands in for it does not matter: code that was written for an id finds the answers that it knows.
Source: the catalogue of Workers AI, where older families have `response`, newer ones OpenAI's objects.
"""

from __future__ import annotations

from typing import Literal

Dialect = Literal["legacy", "chat", "responses"]
"""`response` and flat tool calls; OpenAI's chat completions; those, or OpenAI's Responses, as the input asks for."""

_FAMILIES: tuple[tuple[str, Dialect], ...] = (
    ("@cf/moonshotai/kimi-", "chat"),
    ("@cf/zai-org/glm-", "chat"),
    ("@cf/nvidia/nemotron-", "chat"),
    ("@cf/google/gemma-4-", "chat"),
    ("@cf/deepseek-ai/deepseek-v4-", "chat"),
    ("@cf/qwen/qwen3.8-", "chat"),
    ("@cf/qwen/qwen3-30b-", "chat"),
    ("@cf/openai/gpt-oss-", "responses"),
)
"""How ids begin; all others are legacy."""


def dialect_of(model: str) -> Dialect:
    """The dialect of the model that callers call `model`."""
    return next((dialect for start, dialect in _FAMILIES if model.startswith(start)), "legacy")
