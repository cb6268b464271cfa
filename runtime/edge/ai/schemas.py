"""The task schema of text generation: from what callers send to what the gate takes, or all that is wrong with it.

Two dialects: the native inputs of `/ai/run` and `env.AI.run`, and OpenAI's chat body. Lenient where real clients
are careless (nulls, unknown keys, content as parts), strict where a wrong value would change the answer, and a
feature that is not there is refused rather than ignored. Everything that is wrong is said at once.

This module knows nothing about HTTP, models or tokens.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from edge.errors import InvalidInput, InvalidJson
from edge.frames import MAX_STOP_CHARS, MAX_STOPS, Sampling

DEFAULT_MAX_TOKENS = 256
"""Of the native dialect; OpenAI's has none, and generates up to the model's context."""
_DEFAULT_TEMPERATURE = 0.6
_OPENAI_DEFAULT_TEMPERATURE = 1.0
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_MESSAGES = 10_000
_MAX_OPENAI_STOPS = 4
_MAX_PROBLEMS = 20
_MAX_SHOWN_CHARS = 60


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
    fields = _Fields(inputs, "inputs")
    fields.refuse_unsupported(_UNSUPPORTED | _UNSUPPORTED_NATIVE)
    prompt, messages = fields.string("prompt"), fields.messages(_ROLES)
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        given = "both are given" if fields.get("prompt") is not None else f"there is neither{fields.nearest('prompt')}"
        fields.problem("$", f"needs either prompt or messages: {given}")
    raw = fields.boolean("raw")
    if raw and prompt is None:
        fields.problem("$.raw", "is true, which needs prompt: messages always go through the chat template")
    request = TextGeneration(
        messages=messages,
        prompt=prompt,
        raw=raw,
        sampling=Sampling(
            temperature=fields.number("temperature", 0, 5, default=_DEFAULT_TEMPERATURE),
            top_p=fields.number("top_p", 0.001, 1),
            top_k=fields.integer("top_k", 1, 50),
            seed=fields.integer("seed", 1, 9_999_999_999),
            repetition_penalty=fields.number("repetition_penalty", 0, 2) or None,  # by 0 nothing can be divided: off
            frequency_penalty=fields.number("frequency_penalty", -2, 2),
            presence_penalty=fields.number("presence_penalty", -2, 2),
        ),
        max_tokens=fields.max_tokens() or DEFAULT_MAX_TOKENS,
        stop=fields.stop(MAX_STOPS),
        stream=fields.boolean("stream"),
    )
    fields.raise_problems()
    return request


def chat(body: Any) -> ChatBody:
    """The model and the request in an OpenAI chat `body`.

    Raises:
        InvalidJson: it is no object.
        InvalidInput: all that is wrong with it.
    """
    fields = _Fields(body, "the body")
    fields.refuse_unsupported(_UNSUPPORTED | _UNSUPPORTED_CHAT)
    model = fields.string("model")
    for key in ("model", "messages"):
        if fields.get(key) is None:
            fields.problem(f"$.{key}", "is missing")
    stream = fields.boolean("stream")
    request = TextGeneration(
        messages=fields.messages({**_ROLES, "developer": "system"}),
        prompt=None,
        raw=False,
        sampling=Sampling(
            temperature=fields.number("temperature", 0, 2, default=_OPENAI_DEFAULT_TEMPERATURE),
            top_p=fields.number("top_p", 0, 1),
            top_k=fields.integer("top_k", 1, _INT32_MAX),
            seed=fields.integer("seed", _INT64_MIN, _INT64_MAX),
            repetition_penalty=fields.number("repetition_penalty", 0, 2) or None,
            frequency_penalty=fields.number("frequency_penalty", -2, 2),
            presence_penalty=fields.number("presence_penalty", -2, 2),
        ),
        max_tokens=fields.max_tokens(),
        stop=fields.stop(_MAX_OPENAI_STOPS),
        stream=stream,
        include_usage=fields.include_usage(stream),
    )
    fields.raise_problems()
    return ChatBody(model or "", request)


# -- features that are not there ---------------------------------------------------------------------------

Harmless = Callable[[Any], bool]
"""Whether a value asks for nothing, so that the key may be there."""

_ROLES: Mapping[str, str] = {"system": "system", "user": "user", "assistant": "assistant"}
"""Role as sent to role as the chat template gets it."""


def _is_empty(value: Any) -> bool:
    return value in (None, False, 0, "") or value == [] or value == {}


def _is_text_format(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


_UNSUPPORTED: dict[str, Harmless] = {
    "tools": _is_empty,
    "functions": _is_empty,
    "tool_choice": lambda value: value in (None, "none", "auto"),
    "function_call": lambda value: value in (None, "none", "auto"),
    "response_format": _is_text_format,
    "guided_json": _is_empty,
    "lora": _is_empty,
    "image": _is_empty,
    "logprobs": _is_empty,
    "top_logprobs": _is_empty,
    "logit_bias": _is_empty,
    "n": lambda value: value is None or value == 1,
}
_UNSUPPORTED_NATIVE: dict[str, Harmless] = {"requests": _is_empty}
_UNSUPPORTED_CHAT: dict[str, Harmless] = {
    "modalities": lambda value: value is None or value == ["text"],
    "audio": _is_empty,
    "prediction": _is_empty,
    "web_search_options": lambda value: value is None,
}
_UNSUPPORTED_IN_MESSAGE: dict[str, Harmless] = {"tool_calls": _is_empty, "function_call": _is_empty}
_UNSUPPORTED_ROLES = frozenset({"tool", "function"})


# -- the fields of one object ------------------------------------------------------------------------------


class _Fields:
    """Reads the fields of one object and gathers what is wrong with them. A null is as good as an absent key."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise InvalidJson(f"{what} must be a JSON object, not {_shown(value)}")
        self._values = value
        self._problems: list[tuple[str, str]] = []

    def get(self, key: str) -> Any:
        """The value of `key`, as it came."""
        return self._values.get(key)

    def nearest(self, key: str) -> str:
        """A hint if one of the keys that are there may be a misspelt `key`; else empty."""
        close = difflib.get_close_matches(key, [name for name in self._values if len(name) < 2 * len(key)], n=1)
        return f" ({close[0]} is not {key})" if close else ""

    def problem(self, path: str, text: str) -> None:
        """Note that what is at `path` is wrong."""
        self._problems.append((path, text))
        if len(self._problems) == _MAX_PROBLEMS:  # a body of megabytes can hold millions
            self.raise_problems()

    def raise_problems(self) -> None:
        """Raise `InvalidInput` with all problems, if there are any."""
        if not self._problems:
            return
        texts = [f"{path} {text}" for path, text in self._problems]
        if len(texts) == _MAX_PROBLEMS:
            texts.append("and perhaps more")
        raise InvalidInput(f"bad input: {'; '.join(texts)}", param=self._problems[0][0].removeprefix("$."))

    def refuse_unsupported(self, features: Mapping[str, Harmless]) -> None:
        """Refuse each of `features` that is asked for."""
        self._refuse(self._values, "$", features)

    def _refuse(self, values: dict[str, Any], path: str, features: Mapping[str, Harmless]) -> None:
        for key, is_harmless in features.items():
            if key in values and not is_harmless(values[key]):
                self.problem(f"{path}.{key}", f"is {_shown(values[key])}, which is not supported yet: leave it out")

    def _wrong(self, path: str, value: Any, allowed: str) -> None:
        self.problem(path, f"is {_shown(value)}, must be {allowed}")

    def boolean(self, key: str) -> bool:
        """True or false; false by default."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self._wrong(f"$.{key}", value, "true or false")
        return value is True

    def string(self, key: str) -> str | None:
        """A string that is not empty."""
        value = self.get(key)
        if value is None or (isinstance(value, str) and value and _is_unicode(value)):
            return value
        self._wrong(f"$.{key}", value, "a string of at least one character")
        return None

    def number(self, key: str, low: float, high: float, default: Any = None) -> Any:
        """A number from `low` to `high` as a float, else `default`."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        self._wrong(f"$.{key}", value, f"a number from {low:g} to {high:g}")
        return default

    def integer(self, key: str, low: int, high: int) -> int | None:
        """An integer from `low` to `high`; 3.0 is one too, as in JSON Schema."""
        value = self.get(key)
        if value is None:
            return None
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if is_whole and not isinstance(value, bool) and low <= value <= high:
            return int(value)
        self._wrong(f"$.{key}", value, f"an integer from {low} to {high}")
        return None

    def max_tokens(self) -> int | None:
        """`max_completion_tokens`, or `max_tokens` as it was called before."""
        old, new = (self.integer(key, 1, _INT32_MAX) for key in ("max_tokens", "max_completion_tokens"))
        return new or old

    def stop(self, max_stops: int) -> list[str]:
        """A string, or up to `max_stops` of them."""
        value = self.get("stop")
        if value is None or value == "":
            return []
        stops = [value] if isinstance(value, str) else value
        if (
            isinstance(stops, list)
            and len(stops) <= max_stops
            and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS and _is_unicode(stop) for stop in stops)
        ):
            return list(stops)
        self._wrong("$.stop", value, f"a string of 1 to {MAX_STOP_CHARS} characters, or a list of up to {max_stops}")
        return []

    def include_usage(self, is_stream: bool) -> bool:
        """`stream_options.include_usage`."""
        options = self.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, dict):
            self._wrong("$.stream_options", options, "an object")
            return False
        if not is_stream:
            self.problem("$.stream_options", "is given, but stream is not true")
        wanted = options.get("include_usage")
        if wanted is not None and not isinstance(wanted, bool):
            self._wrong("$.stream_options.include_usage", wanted, "true or false")
        return wanted is True

    def messages(self, roles: Mapping[str, str]) -> list[dict[str, Any]] | None:
        """The messages as the chat template gets them: role and text, and nothing else."""
        value = self.get("messages")
        if value is None:
            return None
        if not isinstance(value, list) or not 0 < len(value) <= _MAX_MESSAGES:
            self._wrong("$.messages", value, f"a list of 1 to {_MAX_MESSAGES} messages")
            return None
        return [self._message(message, f"$.messages[{i}]", roles) for i, message in enumerate(value)]

    def _message(self, message: Any, path: str, roles: Mapping[str, str]) -> dict[str, Any]:
        if not isinstance(message, dict):
            self._wrong(path, message, "an object with role and content")
            return {}
        self._refuse(message, path, _UNSUPPORTED_IN_MESSAGE)
        role = message.get("role")
        if isinstance(role, str) and role in _UNSUPPORTED_ROLES:
            self.problem(f"{path}.role", f"is {_shown(role)}, which is not supported yet: leave such messages out")
        elif not isinstance(role, str) or role not in roles:
            self._wrong(f"{path}.role", role, " or ".join(roles))
        else:
            role = roles[role]
        return {"role": role, "content": self._content(message.get("content"), f"{path}.content")}

    def _content(self, content: Any, path: str) -> str:
        """A string, null (no text), or a list of text parts, which become its lines."""
        if content is None:
            return ""
        if isinstance(content, str) and _is_unicode(content):
            return content
        if isinstance(content, list):
            return "\n".join(self._part(part, f"{path}[{i}]") for i, part in enumerate(content))
        self._wrong(path, content, "a string or a list of text parts")
        return ""

    def _part(self, part: Any, path: str) -> str:
        if isinstance(part, dict) and part.get("type") == "text":
            text = part.get("text")
            if isinstance(text, str) and _is_unicode(text):
                return text
            self._wrong(f"{path}.text", text, "a string")
        elif isinstance(part, dict) and isinstance(part.get("type"), str):
            self.problem(f"{path}.type", f"is {_shown(part['type'])}, which is not supported yet: only text parts are")
        else:
            self._wrong(path, part, 'a part such as {"type": "text", "text": "…"}')
        return ""


def _is_unicode(text: str) -> bool:
    """Whether `text` can be sent on: a lone surrogate, which Python allows, is in no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """`value` in a few words, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return "not a finite number"
        case int() | float():
            return str(value) if abs(value) < 10**20 else "a huge number"
        case str():
            return f'"{_short(value)}"'
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _short(text: str) -> str:
    printable = "".join(character if character.isprintable() else "�" for character in text[:_MAX_SHOWN_CHARS])
    return printable if len(text) <= _MAX_SHOWN_CHARS else printable + "…"
