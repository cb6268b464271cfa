"""Text classification: how much each of a model's labels fits a text.

Format: Workers AI's distilbert, `text` to a list of `label` and `score`, in the order of the model's labels.
"""

from __future__ import annotations

from typing import Any

from edge.ai.catalogue import Model
from edge.ai.fields import Fields, String, Table
from edge.ai.gate import Gate, Principal

MAX_TEXT_CHARS = 10 << 20

NATIVE: Table = {
    "text": String("The text. What is longer than the model reads is cut.", max_chars=MAX_TEXT_CHARS, required=True)
}
"""Inputs of `ai/run`."""


async def run(gate: Gate, principal: Principal, model: Model, inputs: Any) -> list[dict[str, Any]]:
    """The native result: each label and its score, from 0 to 1.

    Raises:
        InvalidJson, InvalidInput: the inputs are wrong.
        EdgeError: the call was refused or failed.
    """
    fields = Fields(inputs, "inputs", NATIVE)
    text = fields["text"]
    fields.raise_problems()
    (scores,) = (await gate.classify(principal, model, [text])).scores
    return [{"label": label, "score": score} for label, score in scores]
