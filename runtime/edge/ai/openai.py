"""The OpenAI dialect: chat completions, whole and in chunks, and the list of models.

Formats: OpenAI's API reference, `chat.completion` and `chat.completion.chunk`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from edge.ai import schemas
from edge.ai.answers import (
    Answer,
    AnswerStream,
    Tariff,
    complete,
    error_body,
    finish_reason,
    logprob_object,
    read,
    reader_of,
    sse,
    tariff_of,
    usage_object,
)
from edge.ai.catalogue import TEXT_GENERATION, Catalogue, Model
from edge.ai.choices import ChoiceEvent, run_choices
from edge.ai.gate import Gate, Principal
from edge.ai.inputs import with_options
from edge.ai.schemas import TextGeneration
from edge.ai.tool_calls import CallArguments, CallStart, Piece, Thought
from edge.errors import EdgeError
from edge.frames import Delta, Done, Started, TokenLogprob, Usage

_NO_TEXT = b'{"content":""}'
"""Cannot be a part of another value: quotes inside of JSON strings are escaped."""


async def chat_completion(gate: Gate, principal: Principal, body: Any) -> dict[str, Any] | AnswerStream:
    """The answer to an OpenAI chat `body`: a `chat.completion`, or a stream of chunks.

    A stream is returned once the engine has accepted the prompt; close it when its reader goes away.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    asked = schemas.chat(body)
    principal = with_options(principal, body.get("options"))
    return await answer_chat(gate, principal, gate.catalogue.resolve(asked.model, TEXT_GENERATION), asked.request)


async def answer_chat(
    gate: Gate, principal: Principal, model: Model, request: TextGeneration, *, shows_usage: bool = False
) -> dict[str, Any] | AnswerStream:
    """The answer of `model` to a chat `request`, as `chat_completion` gives it.

    `shows_usage`: a stream has the usage unasked, as on `/ai/run`, in the chunk that ends it: of the clients there some
    leave chunks without choices unread, and some add up what they find. If asked for, it is where OpenAI has it.
    """
    head = {"id": f"chatcmpl-{principal.request_id}", "created": int(time.time()), "model": model.id}
    tariff = tariff_of(gate, principal, model)
    events = run_choices(gate, principal, model, request)
    if request.stream:
        chunks = _Chunks(tariff, head, request, shows_usage=shows_usage)
        return await AnswerStream(events, chunks, principal.request_id).accepted()
    answers = await complete(events)
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(index, answer, request) for index, answer in enumerate(answers)],
        "usage": usage_object([answer.usage for answer in answers], tariff, request.num_choices),
    }


async def count_chat_tokens(gate: Gate, principal: Principal, body: Any) -> dict[str, Any]:
    """How many tokens the prompt of an OpenAI chat `body` has; nothing is generated, and nothing charged.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    asked = schemas.chat(body)
    model = gate.catalogue.resolve(asked.model, TEXT_GENERATION)
    num_tokens = await gate.count_tokens(principal, model, asked.request)
    return {"object": "chat.completion.input_tokens", "model": model.id, "input_tokens": num_tokens}


def _choice(index: int, answer: Answer, request: TextGeneration) -> dict[str, Any]:
    parts = read(request.form, answer.text, splits_reasoning=True)
    message: dict[str, Any] = {"role": "assistant", "content": parts.text, "refusal": None}
    if parts.reasoning:
        message |= _reasoning(parts.reasoning)
    if parts.calls:
        message["content"] = parts.text or None
        if request.answers_function_call:
            message["function_call"] = {"name": parts.calls[0].name, "arguments": parts.calls[0].arguments}
        else:
            message["tool_calls"] = [_tool_call(call.name, call.arguments) for call in parts.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": None if request.sampling.logprobs is None else _logprobs(answer.logprobs),
        "finish_reason": _finish_reason(answer.finish_reason, len(parts.calls), request),
    }


def _finish_reason(reason: str, num_calls: int, request: TextGeneration) -> str:
    shown = finish_reason(reason, num_calls)
    return "function_call" if shown == "tool_calls" and request.answers_function_call else shown


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    return {"content": [logprob_object(token) for token in tokens], "refusal": None}


class _Chunks:
    """Encodes the events of a call's choices. Most chunks differ in their text only, and only that is encoded anew."""

    def __init__(self, tariff: Tariff, head: dict[str, Any], request: TextGeneration, *, shows_usage: bool) -> None:
        self._tariff = tariff
        self._head = {**head, "object": "chat.completion.chunk"}
        self._request = request
        self._has_logprobs = request.sampling.logprobs is not None
        self._has_usage_chunk = request.include_usage
        self._include_usage = request.include_usage or shows_usage
        self._readers = [reader_of(request.form, splits_reasoning=True) for _ in range(request.num_choices)]
        self._around_text = [self._chunk(i, {"content": ""}).split(_NO_TEXT) for i in range(request.num_choices)]
        self._usages: dict[int, Usage] = {}

    def encode(self, choice_event: ChoiceEvent) -> bytes:
        """The server-sent events for one event of one choice."""
        index, event = choice_event
        match event:
            case Delta():
                return self._delta(index, event)
            case Started():
                return self._chunk(index, {"role": "assistant", "content": ""})
            case Done():
                return self._end(index, event)

    def _text(self, index: int, text: str) -> bytes:
        before, after = self._around_text[index]
        return b'%b{"content":%b}%b' % (before, msgspec.json.encode(text), after)

    def _delta(self, index: int, delta: Delta) -> bytes:
        reader = self._readers[index]
        pieces: list[Piece] = [delta.text] if reader is None else reader.feed(delta.text)
        if not self._has_logprobs or not delta.logprobs:
            return self._pieces(index, pieces)
        logprobs = _logprobs(delta.logprobs)
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if len(texts) == len(pieces):
            return self._chunk(index, {"content": "".join(texts)}, logprobs=logprobs)
        # They belong to tokens, which are not cut where calls are: beside calls they have a chunk of their own.
        return self._pieces(index, pieces) + self._chunk(index, {"content": ""}, logprobs=logprobs)

    def _pieces(self, index: int, pieces: list[Piece]) -> bytes:
        data = b""
        for piece in pieces:
            match piece:
                case CallStart(index=call, name=name):
                    data += self._call(index, call, _tool_call(name, ""))
                case CallArguments(index=call, text=text):
                    data += self._call(index, call, {"function": {"arguments": text}})
                case Thought(text=text):
                    data += self._chunk(index, _reasoning(text))
                case str() if piece:
                    data += self._text(index, piece)
        return data

    def _call(self, index: int, call: int, part: dict[str, Any]) -> bytes:
        """A `part` of a tool call, the `call`-th of the choice."""
        if self._request.answers_function_call:
            return self._chunk(index, {"function_call": part["function"]})
        return self._chunk(index, {"tool_calls": [{"index": call, **part}]})

    def _end(self, index: int, done: Done) -> bytes:
        reader = self._readers[index]
        data = self._pieces(index, reader.end()) if reader is not None else b""
        num_calls = reader.num_calls if reader is not None else 0
        self._usages[index] = done.usage
        reason = _finish_reason(done.finish_reason, num_calls, self._request)
        if not self._include_usage or len(self._usages) < len(self._readers):
            return data + self._chunk(index, {}, finish_reason=reason)
        usage = {
            "usage": usage_object(
                [usage for _, usage in sorted(self._usages.items())], self._tariff, len(self._readers)
            )
        }
        if not self._has_usage_chunk:
            return data + self._chunk(index, {}, finish_reason=reason, more=usage)
        data += self._chunk(index, {}, finish_reason=reason)
        return data + sse({**self._head, "choices": [], **usage})

    def failed(self, error: EdgeError, request_id: str) -> bytes:
        """The error, for both families of clients."""
        return sse(error_body(error, request_id))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Any = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse({**self._head, "choices": [choice], **more})


def model_list(catalogue: Catalogue) -> dict[str, Any]:
    """All models as OpenAI lists them."""
    return {"object": "list", "data": [model_object(model) for model in catalogue.models()]}


def model_object(model: Model) -> dict[str, Any]:
    """One model as OpenAI describes it."""
    created = int(model.manifest.created_at.timestamp())
    return {"id": model.id, "object": "model", "created": created, "owned_by": model.author}
