"""The task schema of text generation: from what callers send to what the gate takes, or all that is wrong with it.

Two dialects: the native inputs of `/ai/run` and `env.AI.run`, and OpenAI's chat body. Lenient where real clients
are careless (nulls, unknown keys, content as parts), strict where a wrong value would change the answer, and a
feature that is not there is refused rather than ignored. Everything that is wrong is said at once.

This module knows nothing about HTTP, models or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from edge.ai.fields import (
    Boolean,
    Choice,
    Custom,
    Fields,
    Ignored,
    Integer,
    Number,
    ObjectOf,
    String,
    Table,
    Unsupported,
    is_unicode,
    nullable,
    object_schema,
    shown,
    variants_schema,
)
from edge.ai.json_schema import closed
from edge.ai.messages import MAX_MESSAGES, read_messages
from edge.ai.tool_calls import HermesCalls
from edge.ai.tools import MAX_TOOLS, Offer, call_schema, read_functions, read_tools
from edge.frames import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_SCHEMA_CHARS, MAX_STOP_CHARS, MAX_STOPS, Sampling

DEFAULT_MAX_TOKENS = 256
"""Of the native dialect; OpenAI's has none, and generates up to the model's context."""
MAX_CHOICES = 128
"""As many of them run at a time as `choices` says."""
_MAX_LOGPROBS_OF_CHOICES = 8 * (1 + MAX_LOGPROBS)
"""How many log-probabilities all choices may have for each token: whole answers are held until they are complete."""
_DEFAULT_TEMPERATURE = 0.6
_OPENAI_DEFAULT_TEMPERATURE = 1.0
_MIN_TEMPERATURE = 1e-5
"""Less is 0: some clients send 1e-8 for it, and logits are divided by it."""
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_OPENAI_STOPS = 4
_MAX_ADAPTER_CHARS = 200

Form = Literal["text", "json", "tools", "call"]
"""What the answer is: text, JSON, text that may hold tool calls, or one tool call."""


class TextGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for text. Exactly one of `messages` (each a `role` and a `content`) and `prompt` is set."""

    messages: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    """Text, or token ids."""
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
    answers_function_call: bool = False
    """In OpenAI's chat dialect: a call is shown as `function_call`, as it was before there were tools."""
    adapter: str | None = None
    num_choices: int = 1
    include_usage: bool = False
    """In the OpenAI dialect: one more chunk with the usage."""
    template_options: dict[str, Any] = {}
    """More variables of the chat template, such as `enable_thinking`."""


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
    fields = Fields(inputs, "inputs", NATIVE)
    prompt, messages = fields["prompt"], fields["messages"]
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        given = "both are given" if fields.get("prompt") is not None else f"there is neither{fields.nearest('prompt')}"
        fields.problem("$", f"needs either prompt or messages: {given}")
    raw = fields["raw"]
    if raw and prompt is None:
        fields.problem("$.raw", "is true, which needs prompt: messages always go through the chat template")
    offer = read_tools(fields)
    if raw and offer.tools:
        fields.problem("$.tools", "need the chat template, which raw leaves out")
    form, json_schema = form_of(fields, offer, json_mode(fields))
    request = TextGeneration(
        messages=messages,
        prompt=prompt,
        raw=raw,
        sampling=sampling(fields),
        max_tokens=_max_tokens(fields),
        stop=fields["stop"],
        stream=fields["stream"],
        form=form,
        json_schema=json_schema,
        tools=for_template(offer),
        adapter=fields["lora"],
    )
    fields.raise_problems()
    return request


def chat(body: Any) -> ChatBody:
    """The model and the request in an OpenAI chat `body`.

    Raises:
        InvalidJson: it is no object.
        InvalidInput: all that is wrong with it.
    """
    fields = Fields(body, "the body", CHAT)
    model, messages = fields["model"], fields["messages"]
    is_old = _has_functions(fields)
    offer = read_functions(fields) if is_old else read_tools(fields)
    form, json_schema = form_of(fields, offer, json_mode(fields))
    logprobs = _logprobs(fields)
    check_choices(fields, fields["n"], logprobs)
    request = TextGeneration(
        messages=messages,
        prompt=None,
        raw=False,
        sampling=sampling(fields, logprobs=logprobs),
        max_tokens=_max_tokens(fields),
        stop=[*fields["stop"], *single_call_stop(form, is_single=is_old or not fields["parallel_tool_calls"])],
        stream=fields["stream"],
        form=form,
        json_schema=json_schema,
        tools=for_template(offer),
        answers_function_call=is_old,
        adapter=fields["lora"],
        num_choices=fields["n"],
        include_usage=include_usage(fields),
        template_options=template_options(fields),
    )
    fields.raise_problems()
    return ChatBody(model or "", request)


def check_choices(fields: Fields, num_choices: int, logprobs: int | None) -> None:
    """Have so many choices with so many log-probabilities refused if they would hold too much."""
    if logprobs is not None and num_choices * (1 + logprobs) > _MAX_LOGPROBS_OF_CHOICES:
        fields.problem(
            "$.n",
            f"makes {num_choices} choices with {1 + logprobs} log-probabilities a token: at most "
            f"{_MAX_LOGPROBS_OF_CHOICES} are possible together",
        )


def sampling(fields: Fields, **more: Any) -> Sampling:
    """How tokens are chosen, from the fields that all bodies have, and `more`."""
    temperature = fields["temperature"]
    return Sampling(
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0,
        top_p=fields["top_p"],
        top_k=fields["top_k"],
        seed=fields["seed"],
        min_p=fields["min_p"] or None,
        repetition_penalty=fields["repetition_penalty"] or None,  # by 0 nothing can be divided: off
        frequency_penalty=fields["frequency_penalty"],
        presence_penalty=fields["presence_penalty"],
        logit_bias=fields["logit_bias"],
        **more,
    )


def _max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens`, or `max_tokens` as it was called before."""
    max_tokens: int | None = fields["max_completion_tokens"] or fields["max_tokens"]
    return max_tokens


def for_template(offer: Offer) -> list[dict[str, Any]] | None:
    """The tools that the chat template gets."""
    return [tool.for_template() for tool in offer.tools] or None


def single_call_stop(form: Form, *, is_single: bool) -> list[str]:
    """What ends the answer after its first call, if it may have a single one."""
    return [HermesCalls.CLOSE] if form == "tools" and is_single else []


def _has_functions(fields: Fields) -> bool:
    """Whether calls are offered the way they were before there were tools."""
    functions, choice = fields.get("functions"), fields.get("function_call")
    if functions in (None, []) and choice in (None, "none", "auto"):
        return False
    if fields.get("tools"):
        fields.problem("$.functions", "are given, and so are tools: send one of them")
    return True


def template_options(fields: Fields) -> dict[str, Any]:
    """Variables of the chat template, from `reasoning_effort`, where null is none, and `chat_template_kwargs`."""
    is_null = "reasoning_effort" in fields and fields.get("reasoning_effort") is None
    effort = "none" if is_null else fields["reasoning_effort"]
    return {**reasoning_options(effort), **fields["chat_template_kwargs"]}


def reasoning_options(effort: str | None) -> dict[str, Any]:
    """The variables by which chat templates know how much to reason; None: as they do by themselves."""
    if effort in ("none", "off"):
        return {"enable_thinking": False}
    return {} if effort is None else {"reasoning_effort": effort}


# -- the form of the answer --------------------------------------------------------------------------------

_ANY_OBJECT = {"type": "object"}
_WRAPPER = frozenset({"name", "description", "schema", "strict"})
"""Keys of the object around a schema at OpenAI; Workers AI takes the bare schema."""


def form_of(fields: Fields, offer: Offer, schema: str | None) -> tuple[Form, str | None]:
    """What the answer is to be, and the schema that it must fit; `schema` is that of JSON mode.

    A forced call goes before JSON mode, as at OpenAI. With tools that may be called and JSON mode the answer is JSON.
    """
    if offer.forced:
        return "call", fields.json_text("$.tools", call_schema(offer.forced), MAX_SCHEMA_CHARS)
    if schema is not None:
        return "json", schema
    return ("tools" if offer.tools else "text"), None


def json_mode(fields: Fields) -> str | None:
    """The schema in `response_format` or `guided_json`, as JSON text; None: the answer may be any text."""
    wanted, guided = fields.get("response_format"), fields.get("guided_json")
    is_text = wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text")
    if guided is not None and not is_text:
        fields.problem("$.guided_json", "is given, and so is response_format: send one of them")
    elif guided is not None:
        return read_schema(fields, "$.guided_json", _parsed(guided))
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
        return read_schema(fields, f"{path}.schema", schema.get("schema", _ANY_OBJECT))
    return read_schema(fields, path, schema)


def _parsed(guided: Any) -> Any:
    """`guided_json`, which may be JSON text."""
    if isinstance(guided, str):
        try:
            return msgspec.json.decode(guided)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return guided
    return guided


def read_schema(fields: Fields, path: str, schema: Any) -> str | None:
    """The `schema` at `path` as JSON text, closed against properties that it does not name."""
    if not isinstance(schema, dict):
        fields.wrong(path, schema, "a JSON schema, an object")
        return None
    if fields.json_text(path, schema, MAX_SCHEMA_CHARS) is None:
        return None
    return fields.json_text(path, closed(schema), MAX_SCHEMA_CHARS)


# -- fields of the OpenAI dialect --------------------------------------------------------------------------


def _logprobs(fields: Fields) -> int | None:
    """How many alternatives to report with each token; None: no log-probabilities."""
    num_top: int | None = fields["top_logprobs"]
    if fields["logprobs"]:
        return num_top or 0
    if num_top:
        fields.problem("$.top_logprobs", "is given, but logprobs is not true")
    return None


def include_usage(fields: Fields) -> bool:
    """`stream_options.include_usage`."""
    options = fields["stream_options"]
    if options is not None and not fields["stream"]:
        fields.problem("$.stream_options", "is given, but stream is not true")
    return options is not None and options["include_usage"] is True


# -- the tables --------------------------------------------------------------------------------------------

_ROLES: Mapping[str, str] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role as sent to role as the chat template gets it."""
_OPENAI_ROLES = {**_ROLES, "developer": "system", "function": "tool"}


def _messages(roles: Mapping[str, str], *, required: bool = False) -> Custom:
    text = {"type": "string"}
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": text},
        "required": ["type", "text"],
    }
    function = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "arguments": {"description": "An object, or its JSON text.", "type": ["object", "string", "null"]},
        },
        "required": ["name"],
    }
    call = {
        "type": "object",
        "properties": {"id": {"type": ["string", "null"]}},
        "anyOf": [
            {"properties": {"function": function}, "required": ["function"]},
            {**function, "not": {"required": ["function"]}},
        ],
    }
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": list(roles)},
            "content": {
                "description": "Text, or its parts.",
                "anyOf": [text, {"type": "null"}, {"type": "array", "items": part}],
            },
            "tool_calls": {"anyOf": [{"type": "array", "items": call}, {"enum": [None, False, 0, "", {}]}]},
            "function_call": {"anyOf": [call, {"enum": [None, False, 0, "", [], {}]}]},
        },
        "required": ["role"],
    }
    return Custom(
        "The conversation so far.",
        required=required,
        json={"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES},
        reader=lambda fields, _path, _value: read_messages(fields, roles),
    )


def _stop(max_stops: int) -> Custom:
    """A string, or up to `max_stops` of them; empty ones, which no text ends with more than another, mean nothing."""

    def read(fields: Fields, path: str, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if (
            isinstance(stops, list)
            and len(stops) <= max_stops
            and all(isinstance(stop, str) and len(stop) <= MAX_STOP_CHARS and is_unicode(stop) for stop in stops)
        ):
            return [stop for stop in stops if stop]
        fields.wrong(path, value, f"a string of at most {MAX_STOP_CHARS} characters, or a list of up to {max_stops}")
        return []

    string = {"type": "string", "maxLength": MAX_STOP_CHARS}
    strings = {"type": "array", "items": string, "maxItems": max_stops}
    return Custom("Texts that end the answer.", default=[], json={"anyOf": [string, strings]}, reader=read)


def _read_logit_bias(fields: Fields, path: str, value: Any) -> dict[int, float]:
    """Token ids, which are strings in JSON, to what is added to their logits."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        given = f"is an object of {len(value)}" if isinstance(value, dict) else f"is {shown(value)}"
        fields.problem(path, f"{given}, must be an object of up to {MAX_LOGIT_BIASES} token ids")
        return {}
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = str(key)
        at = f"{path}[{shown(token)}]"
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            fields.problem(at, "is no token id")
        elif isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            fields.wrong(at, bias, "a number from -100 to 100")
        else:
            biases[int(token)] = float(bias)
    return biases


_OBJECT = {"type": "object"}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {
            "description": "The JSON Schema of the arguments, an object.",
            "type": ["object", "null"],
            "properties": {
                "type": {"const": "object"},
                "properties": _OBJECT,
                "required": {"anyOf": [{"type": "array"}, {"enum": [None, False, 0, "", {}]}]},
            },
        },
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"anyOf": [{"enum": ["function", "object"]}, {"not": {"type": "string"}}]}},
    "anyOf": [
        {"title": "OpenAI", "properties": {"function": _FUNCTION}, "required": ["function"]},
        {"title": "Flat", **_FUNCTION, "not": {"required": ["function"]}},
    ],
}
_NAMED_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_NAMED_FLAT = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
    "not": {"required": ["function"]},
}
_ALLOWED = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": {"type": "object"}}}
_ALLOWED_TOOLS = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {"type": "object", "properties": _ALLOWED, "required": list(_ALLOWED)},
    },
    "required": ["type", "allowed_tools"],
}
_ALLOWED_FLAT = {
    "type": "object",
    "properties": {"type": {"const": "allowed_tools"}, **_ALLOWED},
    "required": ["type", *_ALLOWED],
    "not": {"required": ["allowed_tools"]},
}
_SCHEMA = {
    "description": "A JSON Schema, bare or within `name`, `schema` and `strict`.",
    "type": "object",
    "properties": {"schema": _OBJECT},
}
_RESPONSE_FORMAT = {
    "anyOf": [
        {"properties": {"type": {"const": "text"}}, "required": ["type"]},
        {"properties": {"type": {"const": "json_object"}, "json_schema": nullable(_SCHEMA)}, "required": ["type"]},
        {"properties": {"type": {"const": "json_schema"}, "json_schema": _SCHEMA}, "required": ["type", "json_schema"]},
    ],
    "type": "object",
}

_GENERATION: Table = {
    "stream": Boolean("Answer with an event stream."),
    "max_completion_tokens": Integer("The same as max_tokens, and goes before it.", low=1, high=_INT32_MAX),
    "min_p": Number("Only tokens at least this likely, relative to the likeliest one.", low=0, high=1),
    "repetition_penalty": Number("Divides the logits of tokens that were there; 1 changes nothing.", low=0, high=2),
    "frequency_penalty": Number("Subtracted from a token's logit for each time that it was there.", low=-2, high=2),
    "presence_penalty": Number("Subtracted from the logits of tokens that were there.", low=-2, high=2),
    "logit_bias": Custom(
        "Token ids to what is added to their logits.",
        default={},
        json={
            "type": "object",
            "patternProperties": {"^[0-9]{1,10}$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MAX_LOGIT_BIASES,
        },
        reader=_read_logit_bias,
    ),
    "tools": Custom(
        "Functions that the model may call.", json={"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}
    ),
    "tool_choice": Custom(
        "Whether the model may, must or must not call tools.",
        json={
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                _NAMED_TOOL,
                _NAMED_FLAT,
                _ALLOWED_TOOLS,
                _ALLOWED_FLAT,
            ]
        },
    ),
    "response_format": Custom("Text, any JSON object, or JSON of a schema.", json=_RESPONSE_FORMAT),
    "guided_json": Custom(
        "The JSON Schema that the answer must fit, or its text. Older than response_format.",
        json={"type": ["object", "string"]},
    ),
    "guided_regex": Unsupported("A regular expression that the answer must fit."),
    "guided_choice": Unsupported("Texts one of which the answer must be."),
    "guided_grammar": Unsupported("A grammar that the answer must fit."),
    "image": Unsupported("A picture."),
}

_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of chat templates that are not a caller's to set."""
_VARIABLE = re.compile("[A-Za-z_][A-Za-z_0-9]*")
_MAX_OPTIONS_CHARS = 1 << 14


def _read_template_options(fields: Fields, path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        fields.wrong(path, value, "an object of variables of the chat template")
        return {}
    for key in value:
        if not _VARIABLE.fullmatch(str(key)) or key in _RESERVED:
            fields.problem(f"{path}[{shown(key)}]", "is no variable that can be set")
    return value if fields.json_text(path, value, _MAX_OPTIONS_CHARS) is not None else {}


REASONING: Table = {
    "reasoning_effort": Choice(
        "How much to reason; null or none: not at all. Has no effect where the chat template knows no efforts.",
        values=("none", "off", "minimal", "low", "medium", "high", "xhigh", "max"),
    ),
    "chat_template_kwargs": Custom(
        "Variables of the chat template, such as enable_thinking.",
        default={},
        json={
            "type": "object",
            "propertyNames": {"pattern": f"^{_VARIABLE.pattern}$", "not": {"enum": list(_RESERVED)}},
        },
        reader=_read_template_options,
    ),
}

NATIVE: Table = {
    "prompt": String("The text to go on from; it goes through the chat template unless `raw` is true."),
    "messages": _messages(_ROLES),
    "raw": Boolean("Leave the chat template out."),
    "max_tokens": Integer("Tokens of the answer at most.", default=DEFAULT_MAX_TOKENS, low=1, high=_INT32_MAX),
    "temperature": Number("0 always takes the likeliest token.", default=_DEFAULT_TEMPERATURE, low=0, high=5),
    "top_p": Number("Only the likeliest tokens that have this probability together.", low=0.001, high=1),
    "top_k": Integer("Only this many of the likeliest tokens.", low=1, high=50),
    "seed": Integer("The same seed and input give the same answer.", low=1, high=9_999_999_999),
    "stop": _stop(MAX_STOPS),
    "lora": String("The name of an adapter.", max_chars=_MAX_ADAPTER_CHARS),
    **_GENERATION,
    "functions": Unsupported("Older than tools."),
    "function_call": Unsupported("Older than tool_choice.", harmless=("none", "auto")),
    "requests": Unsupported("A batch of inputs."),
    "logprobs": Unsupported("The log-probabilities of tokens."),
    "top_logprobs": Unsupported("The log-probabilities of alternatives."),
    "n": Unsupported("The number of answers.", harmless=(1,)),
}
"""The inputs of text generation in the native dialect."""

CHAT: Table = {
    "model": String("The model's id.", required=True),
    "messages": _messages(_OPENAI_ROLES, required=True),
    "max_tokens": Integer("Tokens of the answer at most; else what the context has room for.", low=1, high=_INT32_MAX),
    "temperature": Number("0 always takes the likeliest token.", default=_OPENAI_DEFAULT_TEMPERATURE, low=0, high=2),
    "top_p": Number("Only the likeliest tokens that have this probability together.", low=0, high=1),
    "top_k": Integer("Only this many of the likeliest tokens.", low=1, high=_INT32_MAX),
    "seed": Integer("The same seed and input give the same answer.", low=_INT64_MIN, high=_INT64_MAX),
    "stop": _stop(_MAX_OPENAI_STOPS),
    "n": Integer("The number of answers.", default=1, low=1, high=MAX_CHOICES),
    "logprobs": Boolean("Tell the log-probabilities of tokens."),
    "top_logprobs": Integer("How many alternatives to tell for each token; needs logprobs.", low=0, high=MAX_LOGPROBS),
    "stream_options": ObjectOf(
        "Of an event stream; needs stream.",
        table={"include_usage": Boolean("One more event at the end, with the usage.")},
    ),
    **_GENERATION,
    **REASONING,
    "functions": Custom(
        "Older than tools: an answer has one call at most, as function_call.",
        json={"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
    ),
    "function_call": Custom(
        "Older than tool_choice.",
        json={
            "anyOf": [
                {"enum": ["none", "auto"]},
                {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            ]
        },
    ),
    "parallel_tool_calls": Boolean("Whether one answer may have several calls.", default=True),
    "lora": String("The name of an adapter.", max_chars=_MAX_ADAPTER_CHARS),
    "modalities": Unsupported("Kinds of answers.", harmless=(["text"],)),
    "audio": Unsupported("Answers that are heard."),
    "prediction": Unsupported("What the answer is likely to be."),
    "web_search_options": Unsupported("Searches of the web.", harmless=()),
    "user": Ignored("Has no effect."),
    "metadata": Ignored("Has no effect."),
    "store": Ignored("Has no effect: nothing is stored."),
    "service_tier": Ignored("Has no effect."),
}
"""OpenAI's chat body."""
OPENAI_SAMPLING: Table = {
    key: CHAT[key]
    for key in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "stop",
    )
}
"""How tokens are chosen, which OpenAI's other bodies have too."""


def native_schema() -> dict[str, Any]:
    """The JSON Schema of native inputs: with a prompt, or with messages."""
    return variants_schema(NATIVE, {"prompt": "Prompt", "messages": "Messages"})


def chat_schema() -> dict[str, Any]:
    """The JSON Schema of a chat body."""
    return object_schema(CHAT)
