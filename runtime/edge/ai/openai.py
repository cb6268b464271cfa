"""The OpenAI dialect: chat completions, whole and in chunks, and the list of models.

Formats: OpenAI's API reference, `chat.completion` and `chat.completion.chunk`.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from edge.ai import schemas
from edge.ai.answers import Answer, AnswerStream, complete, finish_reason, read, reader_of, sse, usage_object
from edge.ai.catalogue import Catalogue, Model
from edge.ai.choices import ChoiceEvent, run_choices
from edge.ai.gate import Gate, Principal
from edge.ai.schemas import TextGeneration
from edge.ai.tool_calls import CallArguments, CallStart, Piece
from edge.frames import Delta, Done, Started, TokenLogprob, Usage

_NO_TEXT = b'{"content":""}'
"""Cannot be a part of another value: quotes inside of JSON strings are escaped."""
"""What OpenAI shows for a token that is impossible: JSON has no infinity."""


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
    events = run_choices(gate, principal, model, asked.request)
    if asked.request.stream:
        encode = _Chunks(model, head, asked.request).encode
        return await AnswerStream(events, encode, principal.request_id, {}).accepted()
    answers = await complete(events)
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(index, answer, asked.request) for index, answer in enumerate(answers)],
        "usage": usage_object([answer.usage for answer in answers], model),
    }


def _choice(index: int, answer: Answer, request: TextGeneration) -> dict[str, Any]:
    text, calls = read(request.form, answer.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [_tool_call(call.name, call.arguments) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": None if request.sampling.logprobs is None else _logprobs(answer.logprobs),
        "finish_reason": finish_reason(answer.finish_reason, len(calls)),
    }


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    content = [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes}


class _Chunks:
    """Encodes the events of a call's choices. Most chunks differ in their text only, and only that is encoded anew."""

    def __init__(self, model: Model, head: dict[str, Any], request: TextGeneration) -> None:
        self._model = model
        self._head = {**head, "object": "chat.completion.chunk"}
        self._has_logprobs = request.sampling.logprobs is not None
        self._include_usage = request.include_usage
        self._readers = [reader_of(request.form) for _ in range(request.num_choices)]
        self._is_plain = self._readers[0] is None and not self._has_logprobs
        self._around_text = [self._chunk(i, {"content": ""}).split(_NO_TEXT) for i in range(request.num_choices)]
        self._usages: dict[int, Usage] = {}

    def encode(self, choice_event: ChoiceEvent) -> bytes:
        """The server-sent events for one event of one choice."""
        index, event = choice_event
        match event:
            case Delta(text=text) if self._is_plain:
                return self._text(index, text) if text else b""
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
        data = self._pieces(index, pieces)
        if not self._has_logprobs or not delta.logprobs:
            return data
        # They belong to tokens, which are not cut where calls are: beside calls they have a chunk of their own.
        text = delta.text if reader is None else ""
        return (b"" if text else data) + self._chunk(index, {"content": text}, logprobs=_logprobs(delta.logprobs))

    def _pieces(self, index: int, pieces: list[Piece]) -> bytes:
        data = b""
        for piece in pieces:
            match piece:
                case CallStart(index=call, name=name):
                    data += self._chunk(index, {"tool_calls": [{"index": call, **_tool_call(name, "")}]})
                case CallArguments(index=call, text=text):
                    data += self._chunk(index, {"tool_calls": [{"index": call, "function": {"arguments": text}}]})
                case str() if piece:
                    data += self._text(index, piece)
        return data

    def _end(self, index: int, done: Done) -> bytes:
        reader = self._readers[index]
        data = self._pieces(index, reader.end()) if reader is not None else b""
        num_calls = reader.num_calls if reader is not None else 0
        data += self._chunk(index, {}, finish_reason=finish_reason(done.finish_reason, num_calls))
        self._usages[index] = done.usage
        if self._include_usage and len(self._usages) == len(self._readers):
            usages = [usage for _, usage in sorted(self._usages.items())]
            data += sse({**self._head, "choices": [], "usage": usage_object(usages, self._model)})
        return data

    def _chunk(
        self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse({**self._head, "choices": [choice]})


def model_list(catalogue: Catalogue) -> dict[str, Any]:
    """All models as OpenAI lists them."""
    return {"object": "list", "data": [model_object(model) for model in catalogue.models()]}


def model_object(model: Model) -> dict[str, Any]:
    """One model as OpenAI describes it."""
    created = int(model.manifest.created_at.timestamp())
    return {"id": model.id, "object": "model", "created": created, "owned_by": model.author}
