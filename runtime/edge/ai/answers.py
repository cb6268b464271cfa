"""What both dialects share on the way out: usage objects, error bodies and server-sent events.

An answer stream owns its generation: closing it cancels the call, even if nothing was read from it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from edge.ai.catalogue import Model
from edge.ai.gate import Event
from edge.errors import EdgeError
from edge.frames import Delta, Done, Started, Usage

_DONE = b"data: [DONE]\n\n"


class Answer(msgspec.Struct, frozen=True):
    """A complete generation."""

    text: str
    finish_reason: str
    usage: Usage


async def complete(events: AsyncGenerator[Event, None]) -> Answer:
    """All of `events` as one answer.

    Raises:
        EdgeError: the call failed.
    """
    parts: list[str] = []
    done: Done | None = None
    async for event in events:
        match event:
            case Delta(text=text):
                parts.append(text)
            case Done():
                done = event
    assert done is not None, "the gate ends with Done or raises"
    return Answer("".join(parts), done.finish_reason, done.usage)


async def accepted(events: AsyncGenerator[Event, None]) -> None:
    """Return once the engine has accepted the prompt.

    Raises:
        EdgeError: it has something against the call.
    """
    first = await anext(events)
    assert isinstance(first, Started), "a pool says Started before anything else"


class AnswerStream:
    """The bytes of an event stream: one event for each of `frames`, then `[DONE]`.

    A call that fails half-way ends with an event that holds the error in both dialects, and without `[DONE]`: no
    client takes it for complete.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        frames: AsyncGenerator[dict[str, Any], None],
        request_id: str,
        blank: dict[str, Any],
    ) -> None:
        """`frames` are made of `events`; `blank` is what an event must have at least."""
        self._events = events
        self._chunks = _encode(frames, request_id, blank)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Itself: a stream is read once."""
        return self

    async def __anext__(self) -> bytes:
        """The next event."""
        return await anext(self._chunks)

    async def aclose(self) -> None:
        """Cancel what is not finished. Not to be called while the next event is being waited for."""
        await self._chunks.aclose()
        await self._events.aclose()  # a generator that was never started does not run its own `finally`


async def _encode(
    frames: AsyncGenerator[dict[str, Any], None], request_id: str, blank: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(frames):
            async for frame in frames:
                yield _event(frame)
    except EdgeError as error:
        yield _event(blank | error_body(error, request_id))
    else:
        yield _DONE


def _event(frame: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"


def error_body(error: EdgeError, request_id: str) -> dict[str, Any]:
    """The error as Cloudflare's clients read it (`errors`) and as OpenAI's do (`error`), in one object."""
    message = error_message(error, request_id)
    return {
        "success": False,
        "result": None,
        "errors": [{"code": error.code, "message": message}],
        "messages": [],
        "error": {"message": message, "type": error.openai_type, "param": error.param, "code": str(error.code)},
    }


def error_message(error: EdgeError, request_id: str) -> str:
    """Workers AI's form: who says so, the reason, and the id to ask about."""
    return f"AiError: {error.message} ({request_id})"


def usage_object(usage: Usage, model: Model) -> dict[str, Any]:
    """`usage` as both dialects have it; `neurons` is there if the model has a price.

    `prompt_tokens` includes the cached ones. `neurons` is for display: a float of at most six decimals, as
    Workers AI sends it; what is billed is the ledger's integer.
    """
    prompt_tokens = usage.input_tokens + usage.cached_input_tokens
    shown: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
    }
    if model.price is not None:
        micro_neurons = model.price.micro_neurons(
            input_tokens=usage.input_tokens,
            cached_input_tokens=usage.cached_input_tokens,
            output_tokens=usage.output_tokens,
        )
        shown["neurons"] = micro_neurons / 10**6
    return shown
