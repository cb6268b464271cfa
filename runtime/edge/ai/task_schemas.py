"""What models take and give, as JSON Schemas: the answers of each task, and Workers AI's `models/schema`.

Inputs come from the tables that validate them. Answers are described here, and tests hold real ones against this.
"""

from __future__ import annotations

from typing import Any

from edge.ai import classification, completions, embeddings, response_bodies, schemas
from edge.ai.catalogue import Model
from edge.ai.dialects import dialect_of
from edge.ai.fields import Table, object_schema, variants_schema

_STRING = {"type": "string"}
_INTEGER = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}


def described(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The schema of an object with `required` and `optional` properties, and perhaps others."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required), **more}


def list_of(item: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list of `item`s."""
    return {"type": "array", "items": item}


USAGE = described(
    {"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER},
    {
        "prompt_tokens_details": described({"cached_tokens": _INTEGER}),
        "cost": {"description": "The same in dollars."},
        "neurons": {"description": "What it cost. Absent if the model has no price.", "type": "number", "minimum": 0},
    },
)
FINISH_REASON = {"type": "string", "enum": ["stop", "length", "tool_calls", "cancelled"]}
_CHAT_FINISH_REASON = {"type": "string", "enum": [*FINISH_REASON["enum"], "function_call"]}

GENERATED = described(
    {"response": {"description": "The text; in JSON mode the value."}, "usage": USAGE},
    {
        "tool_calls": list_of(described({"name": _STRING, "arguments": {"type": "object"}})),
        "finish_reason": FINISH_REASON,
    },
)
"""The native result of text generation."""

_LOGPROB = described({"token": _STRING, "logprob": _NUMBER, "bytes": {"type": ["array", "null"], "items": _INTEGER}})
_TOOL_CALL = described(
    {"id": _STRING, "type": {"const": "function"}, "function": described({"name": _STRING, "arguments": _STRING})}
)
CHAT_COMPLETION = described(
    {
        "id": _STRING,
        "object": {"const": "chat.completion"},
        "created": _INTEGER,
        "model": _STRING,
        "choices": list_of(
            described(
                {
                    "index": _INTEGER,
                    "message": described(
                        {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}},
                        {
                            "refusal": {"type": ["string", "null"]},
                            "tool_calls": list_of(_TOOL_CALL),
                            "function_call": described({"name": _STRING, "arguments": _STRING}),
                        },
                    ),
                    "finish_reason": _CHAT_FINISH_REASON,
                },
                {
                    "logprobs": {
                        "type": ["object", "null"],
                        "properties": {"content": list_of(_LOGPROB)},
                    }
                },
            )
        ),
        "usage": USAGE,
    }
)
"""OpenAI's chat completion."""

TEXT_COMPLETION = described(
    {
        "id": _STRING,
        "object": {"const": "text_completion"},
        "created": _INTEGER,
        "model": _STRING,
        "choices": list_of(described({"index": _INTEGER, "text": _STRING, "finish_reason": FINISH_REASON})),
        "usage": USAGE,
    }
)
"""OpenAI's completion of a prompt."""

RESPONSE = described(
    {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": _INTEGER,
        "model": _STRING,
        "status": {"enum": ["completed", "incomplete"]},
        "output": list_of(
            described({"id": _STRING, "type": {"enum": ["message", "reasoning", "function_call"]}, "status": _STRING})
        ),
        "usage": described({"input_tokens": _INTEGER, "output_tokens": _INTEGER, "total_tokens": _INTEGER}),
    }
)
"""OpenAI's response."""

EMBEDDED = described(
    {
        "shape": {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2},
        "data": list_of(list_of(_NUMBER)),
    },
    {"pooling": {"type": "string", "enum": ["mean", "cls"]}, "usage": {"type": "object"}},
)
"""The native result of text embeddings."""

EMBEDDING_LIST = described(
    {
        "object": {"const": "list"},
        "data": list_of(
            described(
                {
                    "object": {"const": "embedding"},
                    "index": _INTEGER,
                    "embedding": {"anyOf": [list_of(_NUMBER), _STRING]},
                }
            )
        ),
        "model": _STRING,
        "usage": described({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
    }
)
"""OpenAI's list of embeddings; base64 of little-endian float32 if that was asked for."""

RANKED = described({"response": list_of(described({"id": _INTEGER, "score": _NUMBER}))}, {"usage": {"type": "object"}})
"""The native result of ranking contexts by a query; `id` is the index of a context, the best one is first."""

CLASSIFIED = list_of(described({"label": _STRING, "score": _NUMBER}))
"""The native result of text classification."""


VECTORS = described(
    {
        "response": list_of(list_of(_NUMBER)),
        "shape": {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2},
    },
    {"pooling": {"type": "string", "enum": ["mean", "cls"]}, "usage": {"type": "object"}},
)
"""The native result of text embeddings of contexts without a query."""

_COUNTS = described(dict.fromkeys(("total", "completed", "failed"), _INTEGER))
BATCH_STATE = described({"status": _STRING, "request_id": _STRING, "model": _STRING}, {"request_counts": _COUNTS})
"""A batch that is not done."""
BATCH_DONE = described(
    {
        "responses": list_of(
            described({"id": _INTEGER, "success": {"type": "boolean"}}, {"external_reference": _STRING})
        )
    },
    {"usage": {"type": "object"}},
)
"""A batch that is done: the result of each request, by its index."""
ASYNC_BATCH = described(
    {"requests": {"description": "Inputs, each perhaps with an `external_reference`.", **list_of({"type": "object"})}},
    title="Async Batch",
)
"""What a batch is made of, with the option `queueRequest`."""
_POLL = described({"request_id": {"description": "Of the batch.", **_STRING}}, title="Async Batch poll")


def input_schemas() -> dict[str, dict[str, Any]]:
    """The inputs of `ai/run` by the kind of model."""
    return {
        "TextGeneration": schemas.native_schema(),
        "ChatInputs": _without_model(schemas.CHAT, "Messages"),
        "PromptInputs": _without_model(completions.PROMPT_INPUTS, "Prompt"),
        "ResponsesInputs": _without_model(response_bodies.RESPONSE, "Responses"),
        "TextEmbeddings": variants_schema(embeddings.NATIVE, {"text": "Texts", "contexts": "Contexts"}),
        "TextClassification": object_schema(classification.NATIVE),
        "AsyncBatch": ASYNC_BATCH,
        "AsyncBatchPoll": _POLL,
    }


RESULTS = {
    "TextGenerated": GENERATED,
    "ChatCompletion": CHAT_COMPLETION,
    "TextCompletion": TEXT_COMPLETION,
    "Response": RESPONSE,
    "TextEmbedded": EMBEDDED,
    "ContextsEmbedded": VECTORS,
    "Ranked": RANKED,
    "TextClassified": CLASSIFIED,
    "BatchState": BATCH_STATE,
    "BatchDone": BATCH_DONE,
}
"""The results of `ai/run`."""


def table_of(model: Model) -> Table:
    """Every input that `model` may take, in whichever form of its call."""
    match model.manifest.task, dialect_of(model.id):
        case "text-embeddings", _:
            return embeddings.NATIVE
        case "text-classification", _:
            return classification.NATIVE
        case _, "legacy":
            return schemas.NATIVE
    return {**response_bodies.RESPONSE, **completions.PROMPT_INPUTS, **schemas.CHAT}


def schemas_of(model: Model) -> dict[str, Any]:
    """What `run` takes and gives for `model`: `input` and `output`."""
    inputs = input_schemas()
    stream = {**_STRING, "title": "Stream", "contentType": "text/event-stream", "format": "binary"}
    match model.manifest.task, dialect_of(model.id):
        case "text-embeddings", _:
            return {"input": inputs["TextEmbeddings"], "output": _any_of(EMBEDDED, VECTORS, RANKED)}
        case "text-classification", _:
            return {"input": inputs["TextClassification"], "output": _any_of(CLASSIFIED)}
        case _, "legacy":
            return {"input": inputs["TextGeneration"], "output": _any_of(GENERATED, stream)}
        case _, dialect:
            kinds, results = ["PromptInputs", "ChatInputs"], [TEXT_COMPLETION, CHAT_COMPLETION]
            if dialect == "responses":
                kinds.append("ResponsesInputs")
                results.append(RESPONSE)
            return {
                "input": {"type": "object", "oneOf": [inputs[kind] for kind in kinds]},
                "output": _any_of(*results, stream),
            }


def _without_model(table: Table, title: str) -> dict[str, Any]:
    """Of a body whose model the path names."""
    return {"title": title, **object_schema({key: field for key, field in table.items() if key != "model"})}


def _any_of(*outputs: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"contentType": "application/json", **output} for output in outputs]}
