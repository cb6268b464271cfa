"""The OpenAI dialect: chat completions, whole and in chunks, and the list of models.

Formats: OpenAI's API reference, `chat.completion` and `chat.completion.chunk`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from edge.ai import schemas
from edge.ai.answers import AnswerStream, accepted, complete, usage_object
from edge.ai.catalogue import Catalogue, Model
from edge.ai.gate import Event, Gate, Principal
from edge.frames import Delta, Done


async def chat_completion(gate: Gate, principal: Principal, body: Any) -> dict[str, Any] | AnswerStream:
    """The answer to an OpenAI chat `body`: a `chat.completion`, or a stream of chunks.

    A stream is returned once the engine has accepted the prompt; close it when its reader goes away.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    asked = schemas.chat(body)
    model = gate.catalogue.resolve(asked.model)
    head = {"id": f"chatcmpl-{principal.request_id}", "created": int(time.time()), "model": model.id}
    events = gate.run(principal, model, asked.request)
    if asked.request.stream:
        await accepted(events)
        frames = _chunks(events, model, head, include_usage=asked.request.include_usage)
        return AnswerStream(events, frames, principal.request_id, {})
    async with aclosing(events):
        answer = await complete(events)
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage_object(answer.usage, model)}


async def _chunks(
    events: AsyncGenerator[Event, None], model: Model, head: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "object": "chat.completion.chunk", "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    async for event in events:
        match event:
            case Delta(text=text) if text:
                yield chunk({"content": text})
            case Done(finish_reason=reason, usage=usage):
                yield chunk({}, reason)
                if include_usage:
                    shown = usage_object(usage, model)
                    yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": shown}


def model_list(catalogue: Catalogue) -> dict[str, Any]:
    """All models as OpenAI lists them."""
    return {"object": "list", "data": [model_object(model) for model in catalogue.models()]}


def model_object(model: Model) -> dict[str, Any]:
    """One model as OpenAI describes it."""
    created = int(model.manifest.created_at.timestamp())
    return {"id": model.id, "object": "model", "created": created, "owned_by": model.author}
