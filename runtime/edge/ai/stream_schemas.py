"""What the events of streams hold, as JSON Schemas: of the JSON in each event's `data`.

Events are described here, and tests hold real ones against this.
"""

from __future__ import annotations

from typing import Any

from edge.ai.task_schemas import FINISH_REASON, USAGE, described, list_of

_STRING = {"type": "string"}
_INTEGER = {"type": "integer", "minimum": 0}
_NULLABLE_OBJECT = {"type": ["object", "null"]}
_FINISH_REASON = {"anyOf": [FINISH_REASON, {"type": "null"}]}

ERROR_EVENT = described(
    {
        "success": {"const": False},
        "errors": list_of(described({"code": _INTEGER, "message": _STRING})),
        "error": described({"message": _STRING, "type": _STRING, "code": _STRING}),
    }
)
"""The last event of a stream that failed half-way; `[DONE]` does not follow."""

GENERATED_EVENT = described(
    {"response": _STRING},
    {
        "p": {"description": "Padding.", **_STRING},
        "tool_calls": list_of(described({"name": _STRING, "arguments": {"type": "object"}})),
        "finish_reason": FINISH_REASON,
        "usage": USAGE,
    },
)
"""A part of the native result of text generation."""

_CALL_PART = described(
    {"index": _INTEGER, "function": described({"arguments": _STRING}, {"name": _STRING})},
    {"id": _STRING, "type": {"const": "function"}},
)
_DELTA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        **dict.fromkeys(("content", "reasoning_content", "reasoning"), _STRING),
        "tool_calls": list_of(_CALL_PART),
    },
}


def _chunk(object: str, of_choice: dict[str, Any]) -> dict[str, Any]:
    common = {"index": _INTEGER, "logprobs": _NULLABLE_OBJECT, "finish_reason": _FINISH_REASON}
    return described(
        {
            "id": _STRING,
            "object": {"const": object},
            "created": _INTEGER,
            "model": _STRING,
            "choices": list_of(described({**common, **of_choice})),
        },
        {"usage": USAGE},
    )


CHAT_CHUNK = _chunk("chat.completion.chunk", {"delta": _DELTA})
"""OpenAI's `chat.completion.chunk`."""

TEXT_CHUNK = _chunk("text_completion", {"text": _STRING})
"""A part of OpenAI's completion of a prompt."""

_WHOLE = ("created", "in_progress", "completed", "incomplete", "failed")
_ITEM = ("output_item.added", "output_item.done")
_PART = ("content_part.added", "content_part.done")
_DELTAS = ("output_text.delta", "reasoning_text.delta", "function_call_arguments.delta")
_ENDS = ("output_text.done", "reasoning_text.done")
_IN_ITEM = {"item_id": _STRING, "output_index": _INTEGER}


def _typed(names: tuple[str, ...], fields: dict[str, Any]) -> dict[str, Any]:
    types = {"enum": [f"response.{name}" for name in names]}
    return described({"type": types, "sequence_number": _INTEGER, **fields})


RESPONSE_EVENT = {
    "oneOf": [
        _typed(_WHOLE, {"response": described({"id": _STRING, "object": {"const": "response"}, "status": _STRING})}),
        _typed(_ITEM, {"output_index": _INTEGER, "item": described({"id": _STRING, "type": _STRING})}),
        _typed(_PART, {**_IN_ITEM, "content_index": _INTEGER, "part": described({"type": _STRING, "text": _STRING})}),
        _typed(_DELTAS, {**_IN_ITEM, "delta": _STRING}),
        _typed(_ENDS, {**_IN_ITEM, "content_index": _INTEGER, "text": _STRING}),
        _typed(("function_call_arguments.done",), {**_IN_ITEM, "name": _STRING, "arguments": _STRING}),
    ]
}
"""An event of OpenAI's Responses."""

EVENTS = {
    "TextGeneratedEvent": GENERATED_EVENT,
    "ChatChunk": CHAT_CHUNK,
    "TextChunk": TEXT_CHUNK,
    "ResponseEvent": RESPONSE_EVENT,
    "ErrorEvent": ERROR_EVENT,
}
"""Events by name."""
