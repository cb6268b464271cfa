"""The native route: `env.AI.run(model, inputs)`, and the REST route `/ai/run/{model}`, which is the same call.

Formats: Cloudflare Workers AI. Text generation in its legacy form, `{"response", "tool_calls", "usage"}` and its event
stream, is here; newer families of models answer in OpenAI's dialects (`edge.ai.dialects`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from edge.ai import catalogue, classification, embeddings, schemas
from edge.ai.answers import (
    Answer,
    AnswerStream,
    Tariff,
    complete,
    error_body,
    finish_reason,
    read,
    reader_of,
    sse,
    tariff_of,
    usage_object,
)
from edge.ai.catalogue import Model
from edge.ai.choices import ChoiceEvent, run_choices
from edge.ai.completions import answer_prompts, read_prompt_inputs
from edge.ai.dialects import dialect_of
from edge.ai.fields import from_texts, is_deep
from edge.ai.gate import Gate, Principal
from edge.ai.inputs import FormInputs, check_inputs, is_asked, with_options
from edge.ai.openai import answer_chat
from edge.ai.response_bodies import read_response
from edge.ai.responses import answer_response
from edge.ai.schemas import Form
from edge.ai.task_schemas import table_of
from edge.ai.tool_calls import Call, Piece, Reader, put_together
from edge.errors import EdgeError, InvalidInput, NotSupported
from edge.frames import Delta, Done

_PADDING = "abdefghijklmnopqrstuvwxyz0123456789"
_FORMS = ("messages", "prompt", "input")
"""What models that answer in OpenAI's dialects are asked by, the last one those alone that speak Responses."""
_OF_BATCHES = ("requests", "request_id")
"""Inputs that make a batch or ask for one."""


async def run_binding(
    gate: Gate, principal: Principal, model: str, inputs: Any, options: Mapping[str, Any]
) -> dict[str, Any] | list[dict[str, Any]] | AnswerStream:
    """The result of one call: a JSON value or, if `inputs` ask to `stream`, the bytes of an event stream.

    In JSON mode `response` is the parsed value; in a stream, or where the answer was cut short, its text. A stream is
    returned once the engine has accepted the prompt, so that what is wrong with the call is raised here; close it when
    its reader goes away. Unknown `options` have no effect.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    if is_asked(options, "websocket"):
        raise InvalidInput("the option websocket is not supported yet: leave it out", param="options.websocket")
    if isinstance(inputs, FormInputs):
        inputs = from_texts(table_of(gate.catalogue.resolve(model)), inputs)
    if is_asked(options, "queueRequest") or (
        isinstance(inputs, dict) and any(inputs.get(key) is not None for key in _OF_BATCHES)
    ):
        if gate.batches is None:
            raise NotSupported("this node keeps no batches: leave queueRequest out")
        return await gate.batches.answer(principal, model, inputs)
    principal = with_options(principal, options)
    resolved = gate.catalogue.resolve(model)
    check_inputs(resolved, inputs)
    match resolved.manifest.task:
        case catalogue.TEXT_EMBEDDINGS:
            return await embeddings.run(gate, principal, resolved, inputs)
        case catalogue.TEXT_CLASSIFICATION:
            return await classification.run(gate, principal, resolved, inputs)
    return await _generate_text(gate, principal, resolved, inputs)


async def _generate_text(gate: Gate, principal: Principal, model: Model, inputs: Any) -> dict[str, Any] | AnswerStream:
    """The answer in the dialect of the model's family. The path names the model, whatever `inputs` say."""
    dialect = dialect_of(model.id)
    given = {key: value for key, value in inputs.items() if value is not None} if isinstance(inputs, dict) else {}
    if dialect != "legacy":
        _check_one_form(given)
    if dialect == "responses" and "input" in given:
        return await answer_response(gate, principal, model, read_response({**inputs, "model": model.id}))
    if dialect != "legacy" and "prompt" in given:
        asked = read_prompt_inputs(model.id, inputs)
        return await answer_prompts(gate, principal, model, asked, shows_usage=True)
    if dialect != "legacy":
        body = {**inputs, "model": model.id} if isinstance(inputs, dict) else inputs
        return await answer_chat(gate, principal, model, schemas.chat(body).request, shows_usage=True)
    request, tariff = schemas.native(inputs), tariff_of(gate, principal, model)
    events = run_choices(gate, principal, model, request)
    if request.stream:
        return await AnswerStream(events, _Frames(tariff, request.form), principal.request_id).accepted()
    (answer,) = await complete(events)
    return _result(answer, tariff, request.form)


def _check_one_form(given: dict[str, Any]) -> None:
    forms = [key for key in _FORMS if key in given]
    if len(forms) > 1:
        raise InvalidInput(f"bad input: $ needs one of {', '.join(_FORMS)}: {' and '.join(forms)} are given")


def _result(answer: Answer, tariff: Tariff, form: Form) -> dict[str, Any]:
    parts = read(form, answer.text)
    text, shown = parts.text, _tool_calls(parts.calls)
    if shown is None:  # cut short
        text, shown = answer.text, []
    is_json = form == "json" and answer.finish_reason == "stop"
    return {
        "response": _parsed(text) if is_json else text,
        **({"tool_calls": shown} if shown else {}),
        "finish_reason": finish_reason(answer.finish_reason, len(shown)),
        "usage": usage_object([answer.usage], tariff),
    }


def _parsed(text: str) -> Any:
    """The JSON value in `text`; `text` itself if it is none, or nested too deeply to be handed on."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return text if is_deep(value) else value


def _tool_calls(calls: list[Call]) -> list[dict[str, Any]] | None:
    """`calls` with their arguments as objects; None if one is not complete."""
    shown = []
    for call in calls:
        arguments = call.parsed()
        if arguments is None:
            return None
        shown.append({"name": call.name, "arguments": arguments})
    return shown


class _Frames:
    """Encodes the events of one answer."""

    def __init__(self, tariff: Tariff, form: Form) -> None:
        self._tariff = tariff
        self._reader = reader_of(form)
        self._pieces: list[Piece] = []
        self._unread = ""

    def encode(self, choice_event: ChoiceEvent) -> bytes:
        """The server-sent events for one event; calls come whole, before the last one."""
        event = choice_event[1]
        match event:
            case Delta(text=text) if text:
                return self._text(text if self._reader is None else self._read(self._reader, text))
            case Done():
                return self._end(event)
            case _:
                return b""

    def failed(self, error: EdgeError, request_id: str) -> bytes:
        """The error, for both families of clients; all events have a `response`."""
        return sse({"response": "", **error_body(error, request_id)})

    def _text(self, text: str) -> bytes:
        # `p` has a random length, so that the sizes of encrypted packets do not tell the lengths of tokens.
        padding = _PADDING[: int(random.random() * len(_PADDING))]
        return b'data: {"response":%b,"p":"%b"}\n\n' % (msgspec.json.encode(text), padding.encode()) if text else b""

    def _end(self, done: Done) -> bytes:
        data = self._text(self._keep_calls(self._reader.end())) if self._reader is not None else b""
        calls = put_together(self._pieces)[1]
        shown = _tool_calls(calls)
        if shown is None:  # cut short
            data += self._text(self._unread)
        elif shown:
            data += sse({"response": "", "tool_calls": shown})
        reason = finish_reason(done.finish_reason, len(shown or ()))
        usage = usage_object([done.usage], self._tariff)
        return data + sse({"response": "", "finish_reason": reason, "usage": usage})

    def _read(self, reader: Reader, text: str) -> str:
        self._unread += text
        return self._keep_calls(reader.feed(text))

    def _keep_calls(self, pieces: list[Piece]) -> str:
        """The text in `pieces`; what belongs to calls is kept for the end."""
        self._pieces += [piece for piece in pieces if not isinstance(piece, str)]
        return "".join(piece for piece in pieces if isinstance(piece, str))
