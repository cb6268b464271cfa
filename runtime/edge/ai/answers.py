"""What both dialects share on the way out: usage objects, error bodies and server-sent events.

An answer stream owns its generation: closing it cancels the call, even if nothing was read from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Self

import msgspec

from edge.ai.catalogue import Model
from edge.ai.choices import ChoiceEvent
from edge.ai.gate import Gate, Principal
from edge.ai.reasoning import Thinking
from edge.ai.schemas import Form
from edge.ai.tool_calls import Call, ForcedCall, HermesCalls, Reader, Thought, put_together
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


class Encoder(Protocol):
    """Makes server-sent events of what becomes of one call."""

    def encode(self, choice_event: ChoiceEvent) -> bytes:
        """Any number of server-sent events for one event."""
        ...

    def failed(self, error: EdgeError, request_id: str) -> bytes:
        """The last ones of a call that failed half-way."""
        ...


class AnswerStream:
    """The bytes of an event stream: what `encoder` makes of each event, then `[DONE]`.

    A call that fails half-way ends with an event that holds the error, and without `[DONE]`: no client takes it for
    complete.
    """

    def __init__(self, events: AsyncGenerator[ChoiceEvent, None], encoder: Encoder, request_id: str) -> None:
        self._events = events
        self._encoder = encoder
        self._request_id = request_id
        self._head = b""
        self._is_over = False

    async def accepted(self) -> Self:
        """Itself, once the engine has accepted the prompt.

        Raises:
            EdgeError: it has something against the call.
        """
        first = await anext(self._events)
        assert isinstance(first[1], Started), "a pool says Started before anything else"
        self._head = self._encoder.encode(first)
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
                if data := self._encoder.encode(event):
                    return data
        except EdgeError as error:
            self._is_over = True
            return self._encoder.failed(error, self._request_id)
        self._is_over = True
        return _DONE

    async def aclose(self) -> None:
        """Cancel what is not finished. Not to be called while the next event is being waited for."""
        self._is_over = True
        await self._events.aclose()


def sse(frame: dict[str, Any]) -> bytes:
    """`frame` as a server-sent event."""
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"


class Parts(msgspec.Struct):
    """What a whole answer is made of."""

    text: str
    calls: list[Call]
    reasoning: str = ""


def reader_of(form: Form, *, splits_reasoning: bool = False) -> Reader | None:
    """What takes answers of that form apart; None: they are shown as they are.

    Without `splits_reasoning`, reasoning is a part of the text, as in Workers AI's legacy dialect.
    """
    match form:
        case "call":
            return ForcedCall()
        case "tools":
            return Thinking(HermesCalls()) if splits_reasoning else HermesCalls()
        case "text" if splits_reasoning:
            return Thinking()
        case _:
            return None


def read(form: Form, text: str, *, splits_reasoning: bool = False) -> Parts:
    """The parts of the `text` of a whole answer."""
    reader = reader_of(form, splits_reasoning=splits_reasoning)
    if reader is None:
        return Parts(text, [])
    pieces = [*reader.feed(text), *reader.end()]
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return Parts(*put_together(pieces), reasoning)


def finish_reason(reason: str, num_calls: int) -> str:
    """The engine's `reason`, or that there are calls to be made, unless it was cut short."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def logprob_object(token: TokenLogprob) -> dict[str, Any]:
    """A token with its log-probability and those of its alternatives, as OpenAI's newer dialects have them."""
    return {**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes}


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


class Tariff(msgspec.Struct, frozen=True):
    """What the tokens of one call cost."""

    price: Price | None
    """None: the model is unpriced."""
    pico_dollars_per_micro_neuron: int

    def shown(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """`neurons` and `cost`, in dollars, of all choices together; nothing if there is no price.

        For display, as floats of at most six and twelve decimals, since clients add them up as numbers; what is billed
        are the ledger's integers.
        """
        if self.price is None:
            return {}
        micro_neurons = sum(
            self.price.micro_neurons(
                input_tokens=usage.input_tokens,
                cached_input_tokens=usage.cached_input_tokens,
                output_tokens=usage.output_tokens,
            )
            for usage in usages
        )
        return {
            "neurons": micro_neurons / 10**6,
            "cost": micro_neurons * self.pico_dollars_per_micro_neuron / 10**12,
        }


def tariff_of(gate: Gate, principal: Principal, model: Model) -> Tariff:
    """What a call of `principal` costs."""
    prices, price = gate.catalogue.prices, model.price
    if price is not None and principal.is_batch:
        price = prices.in_batch(price)
    return Tariff(price, prices.pico_dollars_per_micro_neuron)


def usage_object(usages: Sequence[Usage], tariff: Tariff, num_choices: int = 1) -> dict[str, Any]:
    """What the choices of a call, `num_choices` of each prompt, used, as both dialects have it.

    Each prompt is shown once, and `prompt_tokens` includes the cached ones.
    """
    prompts = usages[::num_choices]
    cached_tokens = sum(usage.cached_input_tokens for usage in prompts)
    prompt_tokens = sum(usage.input_tokens for usage in prompts) + cached_tokens
    completion_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **tariff.shown(usages),
    }
