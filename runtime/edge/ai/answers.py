"""What both dialects share on the way out: usage objects, error bodies and server-sent events.

An answer stream owns its generation: closing it cancels the call, even if nothing was read from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

import msgspec

from edge.ai.catalogue import Model
from edge.ai.choices import ChoiceEvent
from edge.ai.schemas import Form
from edge.ai.tool_calls import Call, ForcedCall, HermesCalls, Reader, put_together
from edge.billing.prices import Price
from edge.errors import EdgeError
from edge.frames import Delta, Done, Started, TokenLogprob, Usage

_DONE = b"data: [DONE]\n\n"


class Answer(msgspec.Struct):
    """One complete choice."""

    text: str
    finish_reason: str
    usage: Usage
    logprobs: list[TokenLogprob]


async def complete(events: AsyncGenerator[ChoiceEvent, None]) -> list[Answer]:
    """All choices in `events`, complete, by index.

    Raises:
        EdgeError: the call failed.
    """
    texts: defaultdict[int, list[str]] = defaultdict(list)
    logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
    ends: dict[int, Done] = {}
    async with aclosing(events):
        async for index, event in events:
            match event:
                case Delta():
                    texts[index].append(event.text)
                    logprobs[index] += event.logprobs
                case Done():
                    ends[index] = event
    return [
        Answer("".join(texts[index]), end.finish_reason, end.usage, logprobs[index])
        for index, end in sorted(ends.items())
    ]


class AnswerStream:
    """The bytes of an event stream: what `encode` makes of each event, then `[DONE]`.

    A call that fails half-way ends with an event that holds the error in both dialects, and without `[DONE]`: no
    client takes it for complete.
    """

    def __init__(
        self,
        events: AsyncGenerator[ChoiceEvent, None],
        encode: Callable[[ChoiceEvent], bytes],
        request_id: str,
        blank: dict[str, Any],
    ) -> None:
        """`encode` gives any number of server-sent events; `blank` is what one must have at least."""
        self._events = events
        self._encode = encode
        self._request_id = request_id
        self._blank = blank
        self._head = b""
        self._is_over = False

    async def accepted(self) -> Self:
        """Itself, once the engine has accepted the prompt.

        Raises:
            EdgeError: it has something against the call.
        """
        first = await anext(self._events)
        assert isinstance(first[1], Started), "a pool says Started before anything else"
        self._head = self._encode(first)
        return self

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Itself: a stream is read once."""
        return self

    async def __anext__(self) -> bytes:
        """The next events."""
        if self._head:
            head, self._head = self._head, b""
            return head
        if self._is_over:
            raise StopAsyncIteration
        try:
            async for event in self._events:
                if data := self._encode(event):
                    return data
        except EdgeError as error:
            self._is_over = True
            return sse(self._blank | error_body(error, self._request_id))
        self._is_over = True
        return _DONE

    async def aclose(self) -> None:
        """Cancel what is not finished. Not to be called while the next event is being waited for."""
        self._is_over = True
        await self._events.aclose()


def sse(frame: dict[str, Any]) -> bytes:
    """`frame` as a server-sent event."""
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"


def reader_of(form: Form) -> Reader | None:
    """What takes answers of that form apart; None: they are shown as they are."""
    match form:
        case "call":
            return ForcedCall()
        case "tools":
            return HermesCalls()
        case _:
            return None


def read(form: Form, text: str) -> tuple[str, list[Call]]:
    """The text to show and the tool calls in the `text` of a whole answer."""
    reader = reader_of(form)
    return (text, []) if reader is None else put_together([*reader.feed(text), *reader.end()])


def finish_reason(reason: str, num_calls: int) -> str:
    """The engine's `reason`, or that there are calls to be made, unless it was cut short."""
    return "tool_calls" if num_calls and reason == "stop" else reason


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


def usage_object(usages: Sequence[Usage], model: Model) -> dict[str, Any]:
    """What the choices of a call used, as both dialects have it; `neurons` is there if the model has a price.

    The prompt is shown once, and `prompt_tokens` includes the cached ones. `neurons` is what all choices cost, for
    display: a float of at most six decimals, as Workers AI sends it; what is billed are the ledger's integers.
    """
    prompt_tokens = usages[0].input_tokens + usages[0].cached_input_tokens
    completion_tokens = sum(usage.output_tokens for usage in usages)
    shown: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_input_tokens},
    }
    if model.price is not None:
        shown["neurons"] = sum(_micro_neurons(usage, model.price) for usage in usages) / 10**6
    return shown


def _micro_neurons(usage: Usage, price: Price) -> int:
    return price.micro_neurons(
        input_tokens=usage.input_tokens,
        cached_input_tokens=usage.cached_input_tokens,
        output_tokens=usage.output_tokens,
    )
