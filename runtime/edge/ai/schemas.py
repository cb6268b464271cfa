"""The task schema of text generation: from what callers send to what the gate takes, or all that is wrong with it.

Two dialects: the native inputs of `/ai/run` and `env.AI.run`, and OpenAI's chat body. Lenient where real clients
are careless (nulls, unknown keys, content as parts), strict where a wrong value would change the answer, and a
feature that is not there is refused rather than ignored. Everything that is wrong is said at once.

This module knows nothing about HTTP, models or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from edge.ai.fields import Fields, Harmless, is_unicode, shown
from edge.ai.json_schema import closed
from edge.ai.messages import read_messages
from edge.ai.tools import Offer, call_schema, read_tools
from edge.frames import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_SCHEMA_CHARS, MAX_STOP_CHARS, MAX_STOPS, Sampling

DEFAULT_MAX_TOKENS = 256
"""Of the native dialect; OpenAI's has none, and generates up to the model's context."""
MAX_CHOICES = 8
_DEFAULT_TEMPERATURE = 0.6
_OPENAI_DEFAULT_TEMPERATURE = 1.0
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_OPENAI_STOPS = 4
_MAX_ADAPTER_CHARS = 200

Form = Literal["text", "json", "tools", "call"]
"""What the answer is: text, JSON, text that may hold tool calls, or one tool call."""


class TextGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for text. Exactly one of `messages` (each a `role` and a `content`) and `prompt` is set."""

    messages: list[dict[str, Any]] | None
    prompt: str | None
    raw: bool
    sampling: Sampling
    max_tokens: int | None
    """None: up to the model's context."""
    stop: list[str]
    stream: bool
    form: Form = "text"
    json_schema: str | None = None
    """JSON text of the schema that the answer must fit."""
    tools: list[dict[str, Any]] | None = None
    """For the chat template."""
    adapter: str | None = None
    num_choices: int = 1
    include_usage: bool = False
    """In the OpenAI dialect: one more chunk with the usage."""


class ChatBody(msgspec.Struct, frozen=True):
    """A valid OpenAI chat body."""

    model: str
    request: TextGeneration


def native(inputs: Any) -> TextGeneration:
    """The request in native `inputs`.

    Raises:
        InvalidJson: they are no object.
        InvalidInput: all that is wrong with them.
    """
    fields = Fields(inputs, "inputs")
    fields.refuse_unsupported(_UNSUPPORTED | _UNSUPPORTED_NATIVE)
    prompt, messages = fields.string("prompt"), read_messages(fields, _ROLES)
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        given = "both are given" if fields.get("prompt") is not None else f"there is neither{fields.nearest('prompt')}"
        fields.problem("$", f"needs either prompt or messages: {given}")
    raw = fields.boolean("raw")
    if raw and prompt is None:
        fields.problem("$.raw", "is true, which needs prompt: messages always go through the chat template")
    offer = read_tools(fields)
    if raw and offer.tools:
        fields.problem("$.tools", "need the chat template, which raw leaves out")
    form, json_schema = _form(fields, offer)
    request = TextGeneration(
        messages=messages,
        prompt=prompt,
        raw=raw,
        sampling=Sampling(
            temperature=fields.number("temperature", 0, 5, default=_DEFAULT_TEMPERATURE),
            top_p=fields.number("top_p", 0.001, 1),
            top_k=fields.integer("top_k", 1, 50),
            seed=fields.integer("seed", 1, 9_999_999_999),
            **_common_sampling(fields),
        ),
        max_tokens=_max_tokens(fields) or DEFAULT_MAX_TOKENS,
        stop=_stop(fields, MAX_STOPS),
        stream=fields.boolean("stream"),
        form=form,
        json_schema=json_schema,
        tools=_for_template(offer),
        adapter=_adapter(fields),
    )
    fields.raise_problems()
    return request


def chat(body: Any) -> ChatBody:
    """The model and the request in an OpenAI chat `body`.

    Raises:
        InvalidJson: it is no object.
        InvalidInput: all that is wrong with it.
    """
    fields = Fields(body, "the body")
    fields.refuse_unsupported(_UNSUPPORTED | _UNSUPPORTED_CHAT)
    model = fields.string("model")
    for key in ("model", "messages"):
        if fields.get(key) is None:
            fields.problem(f"$.{key}", "is missing")
    stream = fields.boolean("stream")
    offer = read_tools(fields)
    form, json_schema = _form(fields, offer)
    request = TextGeneration(
        messages=read_messages(fields, {**_ROLES, "developer": "system"}),
        prompt=None,
        raw=False,
        sampling=Sampling(
            temperature=fields.number("temperature", 0, 2, default=_OPENAI_DEFAULT_TEMPERATURE),
            top_p=fields.number("top_p", 0, 1),
            top_k=fields.integer("top_k", 1, _INT32_MAX),
            seed=fields.integer("seed", _INT64_MIN, _INT64_MAX),
            logprobs=_logprobs(fields),
            **_common_sampling(fields),
        ),
        max_tokens=_max_tokens(fields),
        stop=_stop(fields, _MAX_OPENAI_STOPS),
        stream=stream,
        form=form,
        json_schema=json_schema,
        tools=_for_template(offer),
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        include_usage=_include_usage(fields, stream),
    )
    fields.raise_problems()
    return ChatBody(model or "", request)


# -- features that are not there ---------------------------------------------------------------------------

_ROLES: Mapping[str, str] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role as sent to role as the chat template gets it."""


def _is_empty(value: Any) -> bool:
    return value in (None, False, 0, "") or value == [] or value == {}


_UNSUPPORTED: dict[str, Harmless] = {
    "functions": _is_empty,
    "function_call": lambda value: value in (None, "none", "auto"),
    "guided_regex": _is_empty,
    "guided_choice": _is_empty,
    "guided_grammar": _is_empty,
    "image": _is_empty,
}
_UNSUPPORTED_NATIVE: dict[str, Harmless] = {
    "requests": _is_empty,
    "logprobs": _is_empty,
    "top_logprobs": _is_empty,
    "n": lambda value: value is None or value == 1,
}
_UNSUPPORTED_CHAT: dict[str, Harmless] = {
    "lora": _is_empty,
    "modalities": lambda value: value is None or value == ["text"],
    "audio": _is_empty,
    "prediction": _is_empty,
    "web_search_options": lambda value: value is None,
}


# -- fields that both dialects have ------------------------------------------------------------------------


def _common_sampling(fields: Fields) -> dict[str, Any]:
    return {
        "min_p": fields.number("min_p", 0, 1) or None,
        "repetition_penalty": fields.number("repetition_penalty", 0, 2) or None,  # by 0 nothing can be divided: off
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "logit_bias": _logit_bias(fields),
    }


def _max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens`, or `max_tokens` as it was called before."""
    old, new = (fields.integer(key, 1, _INT32_MAX) for key in ("max_tokens", "max_completion_tokens"))
    return new or old


def _stop(fields: Fields, max_stops: int) -> list[str]:
    """A string, or up to `max_stops` of them."""
    value = fields.get("stop")
    if value is None or value == "":
        return []
    stops = [value] if isinstance(value, str) else value
    if (
        isinstance(stops, list)
        and len(stops) <= max_stops
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS and is_unicode(stop) for stop in stops)
    ):
        return list(stops)
    fields.wrong("$.stop", value, f"a string of 1 to {MAX_STOP_CHARS} characters, or a list of up to {max_stops}")
    return []


def _logit_bias(fields: Fields) -> dict[int, float]:
    """Token ids, which are strings in JSON, to what is added to their logits."""
    value = fields.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        given = f"is an object of {len(value)}" if isinstance(value, dict) else f"is {shown(value)}"
        fields.problem("$.logit_bias", f"{given}, must be an object of up to {MAX_LOGIT_BIASES} token ids")
        return {}
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = str(key)
        path = f"$.logit_bias[{shown(token)}]"
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            fields.problem(path, "is no token id")
        elif isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            fields.wrong(path, bias, "a number from -100 to 100")
        else:
            biases[int(token)] = float(bias)
    return biases


def _adapter(fields: Fields) -> str | None:
    """`lora`, the name of an adapter."""
    name = fields.string("lora")
    if name is not None and len(name) > _MAX_ADAPTER_CHARS:
        fields.wrong("$.lora", name, f"a name of at most {_MAX_ADAPTER_CHARS} characters")
    return name


def _for_template(offer: Offer) -> list[dict[str, Any]] | None:
    return [tool.for_template() for tool in offer.tools] or None


# -- the form of the answer --------------------------------------------------------------------------------

_ANY_OBJECT = {"type": "object"}
_WRAPPER = frozenset({"name", "description", "schema", "strict"})
"""Keys of the object around a schema at OpenAI; Workers AI takes the bare schema."""


def _form(fields: Fields, offer: Offer) -> tuple[Form, str | None]:
    """What the answer is to be, and the schema that it must fit.

    A forced call goes before JSON mode, as at OpenAI. With tools that may be called and JSON mode the answer is JSON.
    """
    schema = _json_mode(fields)
    if offer.forced:
        return "call", fields.json_text("$.tools", call_schema(offer.forced), MAX_SCHEMA_CHARS)
    if schema is not None:
        return "json", schema
    return ("tools" if offer.tools else "text"), None


def _json_mode(fields: Fields) -> str | None:
    """The schema in `response_format` or `guided_json`, as JSON text."""
    wanted, guided = fields.get("response_format"), fields.get("guided_json")
    is_text = wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text")
    if guided is not None and not is_text:
        fields.problem("$.guided_json", "is given, and so is response_format: send one of them")
    elif guided is not None:
        return _schema(fields, "$.guided_json", _parsed(guided))
    if is_text:
        return None
    path = "$.response_format"
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in ("json_object", "json_schema"):
        at = f"{path}.type" if isinstance(wanted, dict) else path
        fields.wrong(at, kind if isinstance(wanted, dict) else wanted, '"text", "json_object" or "json_schema"')
        return None
    schema = wanted.get("json_schema")
    if schema is None and kind == "json_object":
        schema = _ANY_OBJECT
    path = f"{path}.json_schema"
    if isinstance(schema, dict) and ("schema" in schema or ("name" in schema and schema.keys() <= _WRAPPER)):
        return _schema(fields, f"{path}.schema", schema.get("schema", _ANY_OBJECT))
    return _schema(fields, path, schema)


def _parsed(guided: Any) -> Any:
    """`guided_json`, which may be JSON text."""
    if isinstance(guided, str):
        try:
            return msgspec.json.decode(guided)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return guided
    return guided


def _schema(fields: Fields, path: str, schema: Any) -> str | None:
    if not isinstance(schema, dict):
        fields.wrong(path, schema, "a JSON schema, an object")
        return None
    if fields.json_text(path, schema, MAX_SCHEMA_CHARS) is None:
        return None
    return fields.json_text(path, closed(schema), MAX_SCHEMA_CHARS)


# -- fields of the OpenAI dialect --------------------------------------------------------------------------


def _logprobs(fields: Fields) -> int | None:
    """How many alternatives to report with each token; None: no log-probabilities."""
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.boolean("logprobs"):
        return num_top or 0
    if num_top:
        fields.problem("$.top_logprobs", "is given, but logprobs is not true")
    return None


def _include_usage(fields: Fields, is_stream: bool) -> bool:
    """`stream_options.include_usage`."""
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        fields.wrong("$.stream_options", options, "an object")
        return False
    if not is_stream:
        fields.problem("$.stream_options", "is given, but stream is not true")
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        fields.wrong("$.stream_options.include_usage", wanted, "true or false")
    return wanted is True
