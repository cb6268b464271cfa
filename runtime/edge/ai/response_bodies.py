"""Bodies of OpenAI's Responses: from what callers send to what the gate takes, or all that is wrong with it.

Nothing is stored between two calls: a caller sends the whole conversation; what refers to an earlier one is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from edge.ai import schemas
from edge.ai.fields import Custom, Fields, Ignored, Integer, ObjectOf, Table, Unsupported, is_unicode, shown
from edge.ai.messages import MAX_MESSAGES, read_call, read_content, read_message
from edge.ai.schemas import CHAT, OPENAI_SAMPLING, TextGeneration
from edge.ai.tools import read_tools
from edge.frames import MAX_LOGPROBS

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_LOGPROBS = "message.output_text.logprobs"
_SHOWN = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)
"""What a response tells of its body."""


class ResponseBody(msgspec.Struct, frozen=True):
    """A valid Responses body."""

    model: str
    request: TextGeneration
    shown: dict[str, Any]
    """Those of `_SHOWN` that were sent, as they came."""


def read_response(body: Any) -> ResponseBody:
    """The model and the request in a Responses `body`.

    Raises:
        InvalidJson: it is no object.
        InvalidInput: all that is wrong with it.
    """
    fields = Fields(body, "the body", RESPONSE)
    messages = fields["input"] or []
    if fields["instructions"]:
        messages = [{"role": "system", "content": fields["instructions"]}, *messages]
    num_top, include = fields["top_logprobs"], fields["include"]
    has_logprobs = num_top is not None or _LOGPROBS in include
    offer = read_tools(fields)
    form, json_schema = schemas.form_of(fields, offer, fields["text"])
    effort = (fields["reasoning"] or {}).get("effort")
    request = TextGeneration(
        messages=messages,
        prompt=None,
        raw=False,
        sampling=schemas.sampling(fields, logprobs=(num_top or 0) if has_logprobs else None),
        max_tokens=fields["max_output_tokens"],
        stop=[*fields["stop"], *schemas.single_call_stop(form, is_single=not fields["parallel_tool_calls"])],
        stream=fields["stream"],
        form=form,
        json_schema=json_schema,
        tools=schemas.for_template(offer),
        template_options={**schemas.reasoning_options(effort), **fields["chat_template_kwargs"]},
    )
    fields.raise_problems()
    return ResponseBody(fields["model"], request, {key: body[key] for key in _SHOWN if body.get(key) is not None})


# -- input -------------------------------------------------------------------------------------------------


def _read_input(fields: Fields, path: str, value: Any) -> list[dict[str, Any]]:
    """A text, or a list of items, as messages of a chat."""
    if isinstance(value, str) and value and is_unicode(value):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        fields.wrong(path, value, f"a text of at least one character, or a list of 1 to {MAX_MESSAGES} items")
        return []
    messages = _Messages()
    for i, item in enumerate(value):
        _read_item(fields, f"{path}[{i}]", item, messages)
    return messages.read


class _Messages:
    """Puts items together: an answer's reasoning, text and calls are one message of a chat, but several items."""

    def __init__(self) -> None:
        self.read: list[dict[str, Any]] = []
        self._reasoning = ""

    def add(self, message: dict[str, Any]) -> None:
        """The next message."""
        if message.get("role") == "assistant" and self._reasoning:
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""
        self.read.append(message)

    def add_call(self, call: dict[str, Any]) -> None:
        """A call, of the assistant's message before it, if there is one."""
        if not self.read or self.read[-1].get("role") != "assistant" or self._reasoning:
            self.add({"role": "assistant", "content": ""})
        self.read[-1].setdefault("tool_calls", []).append(call)

    def reason(self, text: str) -> None:
        """Reasoning of the assistant's message that comes next."""
        self._reasoning += text


def _read_item(fields: Fields, path: str, item: Any, messages: _Messages) -> None:
    if not isinstance(item, dict):
        fields.wrong(path, item, "an item: an object with a type, or a role and content")
        return
    match item.get("type"):
        case None | "message":
            messages.add(read_message(fields, {"role": item.get("role"), "content": item.get("content")}, path, _ROLES))
        case "function_call":
            call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
            messages.add_call(read_call(fields, call, path))
        case "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str) or not is_unicode(call_id):
                fields.wrong(f"{path}.call_id", call_id, "the call_id of a function_call")
            content = read_content(fields, item.get("output"), f"{path}.output")
            messages.add({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning":
            parts = item.get("content")
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            messages.reason("".join(text for text in texts if isinstance(text, str) and is_unicode(text)))
        case "item_reference":
            fields.problem(path, "is a reference to what an earlier response held: nothing is stored, send the item")
        case str() as kind:
            fields.problem(
                f"{path}.type", f"is {shown(kind)}, which is not supported yet: only messages and function calls are"
            )
        case kind:
            fields.wrong(f"{path}.type", kind, '"message", "function_call" or "function_call_output"')


def _read_text(fields: Fields, path: str, value: Any) -> str | None:
    """The schema that the answer must fit, as JSON text; None: it may be any text."""
    if not isinstance(value, dict):
        fields.wrong(path, value, 'an object such as {"format": {"type": "text"}}')
        return None
    wanted = value.get("format")
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return schemas.read_schema(fields, f"{path}.format", {"type": "object"})
        case {"type": "json_schema"}:
            return schemas.read_schema(fields, f"{path}.format.schema", wanted.get("schema"))
        case _:
            kind = wanted.get("type") if isinstance(wanted, dict) else wanted
            fields.wrong(f"{path}.format.type", kind, '"text", "json_object" or "json_schema"')
            return None


def _read_instructions(fields: Fields, path: str, value: Any) -> str:
    if isinstance(value, str) and is_unicode(value):
        return value
    fields.wrong(path, value, "a text")
    return ""


def _read_include(fields: Fields, path: str, value: Any) -> list[str]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    fields.wrong(path, value, "a list of names")
    return []


def _refuse_earlier(fields: Fields, path: str, value: Any) -> None:
    fields.problem(path, f"is {shown(value)}, but nothing is stored: send the whole conversation as input")


def _read_object(fields: Fields, path: str, value: Any) -> None:
    if not isinstance(value, dict):
        fields.wrong(path, value, "an object")
    fields.json_text(path, value, _MAX_METADATA_CHARS)


# -- the table ---------------------------------------------------------------------------------------------

_MAX_METADATA_CHARS = 1 << 14
_OBJECT = {"type": "object"}
_STRING = {"type": "string"}
_FORMAT = {
    "type": "object",
    "anyOf": [
        {"properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {"properties": {"type": {"const": "json_schema"}, "schema": _OBJECT}, "required": ["type", "schema"]},
    ],
}

RESPONSE: Table = {
    "model": CHAT["model"],
    "input": Custom(
        "A text, or the items of the conversation so far: messages, function calls and what they gave.",
        required=True,
        json={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": _OBJECT, "minItems": 1, "maxItems": MAX_MESSAGES},
            ]
        },
        reader=_read_input,
    ),
    "instructions": Custom("A system message before the input.", json=_STRING, reader=_read_instructions),
    "max_output_tokens": CHAT["max_tokens"],
    "text": Custom(
        "The form of the answer.",
        json={"type": "object", "properties": {"format": {"anyOf": [_FORMAT, {"type": "null"}]}}},
        reader=_read_text,
    ),
    "tools": CHAT["tools"],
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "stream": CHAT["stream"],
    "reasoning": ObjectOf(
        "How much to reason.", table={"effort": CHAT["reasoning_effort"], "summary": Ignored("Has no effect.")}
    ),
    "include": Custom(
        f"{_LOGPROBS}: the log-probabilities of tokens. Others have no effect.",
        default=[],
        json={"type": "array", "items": _STRING},
        reader=_read_include,
    ),
    "top_logprobs": Integer("How many alternatives to tell for each token.", low=0, high=MAX_LOGPROBS),
    **OPENAI_SAMPLING,
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "metadata": Custom("Comes back with the response.", json=_OBJECT, reader=_read_object),
    "previous_response_id": Custom("Nothing is stored.", json={"not": {}}, reader=_refuse_earlier),
    "conversation": Custom("Nothing is stored.", json={"not": {}}, reader=_refuse_earlier),
    "prompt": Unsupported("A stored prompt."),
    "background": Unsupported("Answers that are fetched later."),
    "truncation": Unsupported("What to leave out of a conversation that is too long.", harmless=("disabled",)),
    "store": Ignored("Has no effect: nothing is stored."),
    "user": Ignored("Has no effect."),
    "service_tier": Ignored("Has no effect."),
    "safety_identifier": Ignored("Has no effect."),
    "prompt_cache_key": Ignored("Has no effect."),
    "stream_options": Ignored("Has no effect."),
    "max_tool_calls": Ignored("Has no effect: it is for tools that OpenAI runs."),
}
"""OpenAI's Responses body."""
