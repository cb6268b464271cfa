"""What the requests of a batch are: for each endpoint the call that is made, and how it is checked beforehand.

A request is checked by making its call up to the gate, so that a batch refuses at once what a single call would. This
module knows nothing about storage or about when calls are made.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from edge.ai import completions, embeddings, native, openai, responses
from edge.ai.answers import AnswerStream
from edge.ai.batch_rows import NATIVE
from edge.ai.catalogue import Model
from edge.ai.gate import Classifications, Embeddings, Event, Gate, Principal
from edge.ai.schemas import TextGeneration
from edge.errors import EdgeError, InvalidInput

MAX_PROBLEMS = 20
SLICE_S = 0.005
"""How long checking many requests keeps the event loop at a time."""

Call = Callable[[Gate, Principal, str, Any], Awaitable[Any]]
"""Makes the call of one request: gate, principal, model (of native batches) and body."""


async def _native(gate: Gate, principal: Principal, model: str, body: Any) -> Any:
    return await native.run_binding(gate, principal, model, body, {})


async def _chat_completions(gate: Gate, principal: Principal, model: str, body: Any) -> Any:
    return await openai.chat_completion(gate, principal, body)


async def _completions(gate: Gate, principal: Principal, model: str, body: Any) -> Any:
    return await completions.completion(gate, principal, body)


async def _responses(gate: Gate, principal: Principal, model: str, body: Any) -> Any:
    return await responses.response(gate, principal, body)


async def _embeddings(gate: Gate, principal: Principal, model: str, body: Any) -> Any:
    return await embeddings.openai(gate, principal, body)


CALLS: dict[str, Call] = {
    NATIVE: _native,
    "/v1/chat/completions": _chat_completions,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/v1/embeddings": _embeddings,
}
"""By endpoint."""


async def make(gate: Gate, principal: Principal, endpoint: str, model: str, body: Any) -> Any:
    """The result of one request.

    Raises:
        EdgeError: the call is wrong, was refused or failed.
    """
    result = await CALLS[endpoint](gate, principal, model, body)
    if isinstance(result, AnswerStream):
        await result.aclose()
        raise InvalidInput("$.stream is true: answers of a batch cannot be streamed", param="stream")
    return result


async def problem_of(gate: Gate, principal: Principal, endpoint: str, model: str, body: Any) -> EdgeError | None:
    """What is wrong with a request, as far as that can be told without an engine; None: nothing."""
    if not isinstance(body, dict):
        return InvalidInput("bad input: $ must be an object")
    if body.get("stream"):
        return InvalidInput("bad input: $.stream is true: answers of a batch cannot be streamed", param="stream")
    if "requests" in body or "request_id" in body:
        return InvalidInput("bad input: $ is itself a batch, or asks for one")
    try:
        await make(_UpToTheGate(gate), principal, endpoint, model, body)
    except _Accepted:
        return None
    except EdgeError as error:
        return error
    raise AssertionError(f"a call of {endpoint} did not pass the gate")


def problem_text(error: EdgeError, path: str) -> str:
    """The message of `error` about a request that is at `path` of what the caller has sent."""
    text = error.message.removeprefix("bad input: ")
    return re.sub(r"(^|; )\$(?=[.\[ ])", lambda found: f"{found[1]}{path}", text)


def usage_sum(usages: list[Any]) -> dict[str, Any]:
    """The usage objects of many answers as one: numbers are added up, objects within it likewise."""
    total: dict[str, Any] = {}
    for usage in usages:
        if isinstance(usage, dict):
            _add(total, usage)
    return total


def _add(total: dict[str, Any], usage: dict[str, Any]) -> None:
    for key, value in usage.items():
        match value:
            case bool():
                continue
            case int():
                total[key] = total.get(key, 0) + value
            case float():  # neurons have at most six decimals, dollars twelve
                total[key] = round(total.get(key, 0) + value, 12)
            case dict():
                _add(total.setdefault(key, {}), value)


class Slices:
    """Cuts long work on the event loop into slices, between which everything else that waits has its turn."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + SLICE_S

    async def next(self) -> None:
        """Let others have their turn, if this slice was long enough."""
        if time.monotonic() >= self._ends_at:
            await asyncio.sleep(0)
            self._ends_at = time.monotonic() + SLICE_S


class _Accepted(Exception):
    """The call has reached the gate: nothing is wrong with it."""


class _UpToTheGate(Gate):
    """The gate as it is now, where calls end as soon as they come to it."""

    def __init__(self, gate: Gate) -> None:
        vars(self).update(vars(gate))

    def run(
        self, principal: Principal, model: Model, request: TextGeneration, **kwargs: Any
    ) -> AsyncGenerator[Event, None]:
        if request.adapter is not None and self.finetunes is not None:
            self.finetunes.check(principal.account, model, request.adapter)
        raise _Accepted

    async def embed(self, *args: Any, **kwargs: Any) -> Embeddings:
        raise _Accepted

    async def classify(self, *args: Any, **kwargs: Any) -> Classifications:
        raise _Accepted


def decoded(body: bytes) -> Any:
    """The JSON value in `body`."""
    return msgspec.json.decode(body)


def encoded(value: Any) -> bytes:
    """`value` as JSON.

    Raises:
        InvalidInput: a handler sent what is none.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the request cannot be written as JSON: {error}") from error


_encoder = msgspec.json.Encoder(decimal_format="number")
