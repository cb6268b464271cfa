"""The native dialect: `env.AI.run(model, inputs)`, and the REST route `/ai/run/{model}`, which is the same call.

Formats: Cloudflare Workers AI, text generation in its legacy form, `{"response", "usage"}` and its event stream.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from edge.ai import schemas
from edge.ai.answers import AnswerStream, accepted, complete, usage_object
from edge.ai.catalogue import Model
from edge.ai.gate import Event, Gate, Principal
from edge.errors import InvalidInput
from edge.frames import Delta, Done

_PADDING = "abdefghijklmnopqrstuvwxyz0123456789"
_UNSUPPORTED_OPTIONS = ("queueRequest", "websocket")


async def run_binding(
    gate: Gate, principal: Principal, model: str, inputs: Any, options: Mapping[str, Any]
) -> dict[str, Any] | AnswerStream:
    """The result of one call: a JSON value or, if `inputs` ask to `stream`, the bytes of an event stream.

    A stream is returned once the engine has accepted the prompt, so that what is wrong with the call is raised
    here; close it when its reader goes away. Unknown `options` have no effect.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    for option in _UNSUPPORTED_OPTIONS:
        if options.get(option):
            raise InvalidInput(f"the option {option} is not supported yet: leave it out", param=f"options.{option}")
    resolved = gate.catalogue.resolve(model)
    request = schemas.native(inputs)
    events = gate.run(principal, resolved, request)
    if request.stream:
        await accepted(events)
        return AnswerStream(events, _frames(events, resolved), principal.request_id, {"response": ""})
    async with aclosing(events):
        answer = await complete(events)
    return {
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": usage_object(answer.usage, resolved),
    }


async def _frames(events: AsyncGenerator[Event, None], model: Model) -> AsyncGenerator[dict[str, Any], None]:
    async for event in events:
        match event:
            case Delta(text=text) if text:
                yield {"response": text, "p": _padding()}
            case Done(finish_reason=reason, usage=usage):
                yield {"response": "", "finish_reason": reason, "usage": usage_object(usage, model)}


def _padding() -> str:
    """Of random length, so that the sizes of encrypted packets do not tell the lengths of tokens."""
    return _PADDING[: secrets.randbelow(len(_PADDING))]
