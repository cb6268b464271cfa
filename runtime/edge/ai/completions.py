"""OpenAI's older dialect: completions of a prompt, whole and in chunks.

Format: OpenAI's API reference, `text_completion`. The prompt is continued as it is, without the chat template.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from edge.ai import schemas
from edge.ai.answers import (
    Answer,
    AnswerStream,
    Tariff,
    complete,
    error_body,
    sse,
    tariff_of,
    usage_object,
)
from edge.ai.catalogue import TEXT_GENERATION, Model
from edge.ai.choices import ChoiceEvent, run_prompts
from edge.ai.fields import Boolean, Custom, Fields, Integer, String, Table, Unsupported, is_unicode
from edge.ai.gate import Gate, Principal
from edge.ai.inputs import with_options
from edge.ai.schemas import MAX_CHOICES, TextGeneration
from edge.ai.tools import Offer
from edge.errors import EdgeError
from edge.frames import MAX_LOGPROBS, Delta, Done, Started, TokenLogprob, Usage

MAX_PROMPTS = 64
_MAX_ANSWERS = 512
"""Choices of all prompts together."""
_MAX_TOKEN_ID = 2**31 - 1
_DEFAULT_MAX_TOKENS = 16


class Completion(msgspec.Struct, frozen=True):
    """A valid completion body: one request for each prompt."""

    model: str
    requests: list[TextGeneration]
    echo: bool

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.requests[0].num_choices


def read_completion(body: Any) -> Completion:
    """The model and the requests in a completion `body`.

    Raises:
        InvalidJson: it is no object.
        InvalidInput: all that is wrong with it.
    """
    fields = Fields(body, "the body", COMPLETION)
    prompts = fields["prompt"] or []
    if len(prompts) * fields["n"] > _MAX_ANSWERS:
        fields.problem("$.n", f"is {fields['n']} for {len(prompts)} prompts: {_MAX_ANSWERS} answers are the most")
    if fields["echo"] and not all(isinstance(prompt, str) for prompt in prompts):
        fields.problem("$.echo", "is true, which is not supported for prompts of token ids: send the text")
    return _read(fields, prompts, raw=True)


def read_prompt_inputs(model: str, inputs: dict[str, Any]) -> Completion:
    """The request in `inputs` of `/ai/run` with a prompt, where the path names the `model`.

    Raises:
        InvalidInput: all that is wrong with them.
    """
    fields = Fields({**inputs, "model": model}, "inputs", PROMPT_INPUTS)
    options = schemas.template_options(fields)
    return _read(fields, [fields["prompt"] or ""], raw=fields["raw"], template_options=options)


def _read(fields: Fields, prompts: list[str | list[int]], **more: Any) -> Completion:
    num_choices, best_of = fields["n"], fields["best_of"]
    if best_of is not None and best_of != num_choices:
        fields.problem("$.best_of", f"is {best_of}, which is not supported yet: leave it out, or make it the same as n")
    if fields["echo"] and fields["logprobs"] is not None:
        fields.problem("$.echo", "is true, which is not supported together with logprobs: leave one of them out")
    schemas.check_choices(fields, num_choices, fields["logprobs"])
    form, json_schema = schemas.form_of(fields, Offer(), schemas.json_mode(fields))
    request = TextGeneration(
        messages=None,
        prompt="",
        sampling=schemas.sampling(fields, logprobs=fields["logprobs"]),
        max_tokens=fields["max_completion_tokens"] or fields["max_tokens"],
        stop=fields["stop"],
        stream=fields["stream"],
        form=form,
        json_schema=json_schema,
        num_choices=num_choices,
        include_usage=schemas.include_usage(fields),
        **more,
    )
    fields.raise_problems()
    return Completion(fields["model"], [replace(request, prompt=prompt) for prompt in prompts], fields["echo"])


async def completion(gate: Gate, principal: Principal, body: Any) -> dict[str, Any] | AnswerStream:
    """The answer to a completion `body`: a `text_completion`, or a stream of them.

    A stream is returned once the engine has accepted the first prompt; close it when its reader goes away.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    asked = read_completion(body)
    principal = with_options(principal, body.get("options"))
    return await answer_prompts(gate, principal, gate.catalogue.resolve(asked.model, TEXT_GENERATION), asked)


async def answer_prompts(
    gate: Gate, principal: Principal, model: Model, asked: Completion, *, shows_usage: bool = False
) -> dict[str, Any] | AnswerStream:
    """The answer of `model`, as `completion` gives it. `shows_usage` is as in `openai.answer_chat`."""
    head = {
        "id": f"cmpl-{principal.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.id,
    }
    tariff = tariff_of(gate, principal, model)
    events = run_prompts(gate, principal, model, asked.requests)
    if asked.requests[0].stream:
        chunks = _Chunks(tariff, head, asked, shows_usage=shows_usage)
        return await AnswerStream(events, chunks, principal.request_id).accepted()
    answers = await complete(events)
    return {
        **head,
        "choices": [_choice(index, answer, asked) for index, answer in enumerate(answers)],
        "usage": usage_object([answer.usage for answer in answers], tariff, asked.num_choices),
    }


def _choice(index: int, answer: Answer, asked: Completion) -> dict[str, Any]:
    before = _echo(index, asked)
    has_logprobs = asked.requests[0].sampling.logprobs is not None
    return {
        "index": index,
        "text": before + answer.text,
        "logprobs": _logprobs(answer.logprobs, 0) if has_logprobs else None,
        "finish_reason": answer.finish_reason,
    }


def _echo(index: int, asked: Completion) -> str:
    prompt = asked.requests[index // asked.num_choices].prompt
    return prompt if asked.echo and isinstance(prompt, str) else ""


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """In lists beside each other, as this dialect has them; `offset` is that of the first token in the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{top.token: top.logprob for top in token.top} for token in tokens],
        "text_offset": offsets,
    }


class _Chunks:
    """Encodes the events of a call's choices."""

    def __init__(self, tariff: Tariff, head: dict[str, Any], asked: Completion, *, shows_usage: bool) -> None:
        self._tariff = tariff
        self._head = head
        self._asked = asked
        self._has_logprobs = asked.requests[0].sampling.logprobs is not None
        self._has_usage_chunk = asked.requests[0].include_usage
        self._include_usage = self._has_usage_chunk or shows_usage
        self._offsets = [0] * (len(asked.requests) * asked.num_choices)
        self._usages: dict[int, Usage] = {}

    def encode(self, choice_event: ChoiceEvent) -> bytes:
        """The server-sent events for one event of one choice."""
        index, event = choice_event
        match event:
            case Started():
                before = _echo(index, self._asked)
                return self._chunk(index, before) if before else b""
            case Delta(text=text, logprobs=logprobs):
                shown = None
                if self._has_logprobs and logprobs:
                    shown = _logprobs(logprobs, self._offsets[index])
                    self._offsets[index] += sum(len(token.token) for token in logprobs)
                return self._chunk(index, text, logprobs=shown) if text or shown else b""
            case Done():
                return self._end(index, event)

    def failed(self, error: EdgeError, request_id: str) -> bytes:
        """The error, for both families of clients."""
        return sse(error_body(error, request_id))

    def _end(self, index: int, done: Done) -> bytes:
        self._usages[index] = done.usage
        is_last = len(self._usages) == len(self._offsets)
        if not self._include_usage or not is_last:
            return self._chunk(index, "", finish_reason=done.finish_reason)
        usages = [usage for _, usage in sorted(self._usages.items())]
        usage = {"usage": usage_object(usages, self._tariff, self._asked.num_choices)}
        if not self._has_usage_chunk:
            return self._chunk(index, "", finish_reason=done.finish_reason, more=usage)
        end = self._chunk(index, "", finish_reason=done.finish_reason)
        return end + sse({**self._head, "choices": [], **usage})

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        finish_reason: str | None = None,
        logprobs: Any = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse({**self._head, "choices": [choice], **(more or {})})


# -- the table ---------------------------------------------------------------------------------------------


def _read_prompts(fields: Fields, path: str, value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        return [_read_prompt(fields, path, value)]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        fields.wrong(path, value, f"{_ONE_PROMPT}, or a list of 1 to {MAX_PROMPTS} of them")
        return []
    return [_read_prompt(fields, f"{path}[{i}]", each) for i, each in enumerate(value)]


def _read_prompt(fields: Fields, path: str, value: Any) -> str | list[int]:
    if isinstance(value, str) and value and is_unicode(value):
        return value
    if isinstance(value, list) and value:
        for i, token in enumerate(value):
            if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
                fields.wrong(f"{path}[{i}]", token, f"a token id, an integer from 0 to {_MAX_TOKEN_ID}")
                return ""
        return value
    fields.wrong(path, value, _ONE_PROMPT)
    return ""


_ONE_PROMPT = "a string of at least one character or a list of token ids"
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}

COMPLETION: Table = {
    "model": schemas.CHAT["model"],
    "prompt": Custom(
        "The text to continue, or its token ids in the model's own vocabulary; or several of them.",
        required=True,
        json={
            "anyOf": [
                *_PROMPT["anyOf"],
                {"type": "array", "items": _PROMPT, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        },
        reader=_read_prompts,
    ),
    "max_tokens": Integer("Tokens of the answer at most.", default=_DEFAULT_MAX_TOKENS, low=1, high=2**31 - 1),
    "max_completion_tokens": schemas.CHAT["max_completion_tokens"],
    **schemas.OPENAI_SAMPLING,
    **{
        key: schemas.CHAT[key]
        for key in (
            "n",
            "stream",
            "stream_options",
            "response_format",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "user",
        )
    },
    "logprobs": Integer("How many of the likeliest tokens to tell at each place.", low=0, high=MAX_LOGPROBS),
    "echo": Boolean("Begin the answer with the prompt."),
    "best_of": Integer("Only the same number as n.", low=1, high=MAX_CHOICES),
    "suffix": Unsupported("What comes after the text that is to be found."),
}
"""OpenAI's completion body."""

PROMPT_INPUTS: Table = {
    **COMPLETION,
    "prompt": String("The question; it goes through the chat template unless `raw` is true.", required=True),
    "raw": Boolean("Leave the chat template out."),
    "max_tokens": schemas.CHAT["max_tokens"],
    "tools": Unsupported("Functions that the model may call: they need messages."),
    **schemas.REASONING,
}
"""Inputs of `/ai/run` with a prompt, of the models that answer in OpenAI's dialect."""
