"""The native dialect: `env.AI.run(model, inputs)`, and the REST route `/ai/run/{model}`, which is the same call.

Formats: Cloudflare Workers AI, text generation in its legacy form, `{"response", "tool_calls", "usage"}` and its event
stream.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from edge.ai import schemas
from edge.ai.answers import Answer, AnswerStream, complete, finish_reason, read, reader_of, sse, usage_object
from edge.ai.catalogue import Catalogue, Model, catalogue_item
from edge.ai.choices import ChoiceEvent, run_choices
from edge.ai.fields import is_deep
from edge.ai.gate import Gate, Principal
from edge.ai.schemas import Form
from edge.ai.tool_calls import Call, Piece, Reader, put_together
from edge.errors import InvalidInput
from edge.frames import Delta, Done

_PADDING = "abdefghijklmnopqrstuvwxyz0123456789"
_UNSUPPORTED_OPTIONS = ("queueRequest", "websocket")


async def run_binding(
    gate: Gate, principal: Principal, model: str, inputs: Any, options: Mapping[str, Any]
) -> dict[str, Any] | AnswerStream:
    """The result of one call: a JSON value or, if `inputs` ask to `stream`, the bytes of an event stream.

    In JSON mode `response` is the parsed value; in a stream, or where the answer was cut short, its text. A stream is
    returned once the engine has accepted the prompt, so that what is wrong with the call is raised here; close it when
    its reader goes away. Unknown `options` have no effect.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    for option in _UNSUPPORTED_OPTIONS:
        if options.get(option):
            raise InvalidInput(f"the option {option} is not supported yet: leave it out", param=f"options.{option}")
    resolved = gate.catalogue.resolve(model)
    request = schemas.native(inputs)
    events = run_choices(gate, principal, resolved, request)
    if request.stream:
        encode = _Frames(resolved, request.form).encode
        return await AnswerStream(events, encode, principal.request_id, {"response": ""}).accepted()
    (answer,) = await complete(events)
    return _result(answer, resolved, request.form)


def _result(answer: Answer, model: Model, form: Form) -> dict[str, Any]:
    text, calls = read(form, answer.text)
    shown = _tool_calls(calls)
    if shown is None:  # cut short
        text, shown = answer.text, []
    is_json = form == "json" and answer.finish_reason == "stop"
    return {
        "response": _parsed(text) if is_json else text,
        **({"tool_calls": shown} if shown else {}),
        "finish_reason": finish_reason(answer.finish_reason, len(shown)),
        "usage": usage_object([answer.usage], model),
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

    def __init__(self, model: Model, form: Form) -> None:
        self._model = model
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
        usage = usage_object([done.usage], self._model)
        return data + sse({"response": "", "finish_reason": reason, "usage": usage})

    def _read(self, reader: Reader, text: str) -> str:
        self._unread += text
        return self._keep_calls(reader.feed(text))

    def _keep_calls(self, pieces: list[Piece]) -> str:
        """The text in `pieces`; what belongs to calls is kept for the end."""
        self._pieces += [piece for piece in pieces if not isinstance(piece, str)]
        return "".join(piece for piece in pieces if isinstance(piece, str))


def list_models(catalogue: Catalogue, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `env.AI.models(params)` gives: one page of the models, as `models/search` of the REST API shows them.

    Raises:
        InvalidInput: a parameter is of the wrong type or out of range.
    """
    try:
        asked = msgspec.convert(params, _ModelsParams)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"env.AI.models(): {error}") from error
    found = catalogue.models(search=asked.search, task=asked.task, author=asked.author)
    shown = found[(asked.page - 1) * asked.per_page :][: asked.per_page]
    items = [catalogue_item(model, catalogue.prices) for model in shown]
    return msgspec.json.decode(_models_encoder.encode(items), type=list[dict[str, Any]])  # prices as numbers


class _ModelsParams(msgspec.Struct):
    """`source` and `hide_experimental` choose among what a node does not have."""

    search: str = ""
    task: str = ""
    author: str = ""
    page: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    per_page: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000


_models_encoder = msgspec.json.Encoder(decimal_format="number")
