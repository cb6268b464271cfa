"""Messages as callers send them, made into what chat templates take: role, text, and calls with arguments as objects.

This module knows nothing about templates or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.ai.fields import Fields, is_deep, is_unicode, shown
from edge.ai.tool_calls import json_object

MAX_MESSAGES = 10_000
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts of a message that are text, in chat bodies and in OpenAI's Responses, and where they have it."""


def read_messages(fields: Fields, roles: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """The `messages`, or None if there are none; what is wrong becomes problems of `fields`.

    `roles` maps roles as they are sent to those that the template gets.
    """
    value = fields.get("messages")
    if value is None:
        return None
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        fields.wrong("$.messages", value, f"a list of 1 to {MAX_MESSAGES} messages")
        return None
    return [read_message(fields, message, f"$.messages[{i}]", roles) for i, message in enumerate(value)]


def read_message(fields: Fields, message: Any, path: str, roles: Mapping[str, str]) -> dict[str, Any]:
    """One message, which is at `path`, as `read_messages` reads them."""
    if not isinstance(message, dict):
        fields.wrong(path, message, "an object with role and content")
        return {}
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        fields.wrong(f"{path}.role", role, " or ".join(roles))
    else:
        role = roles[role]
    read: dict[str, Any] = {"role": role, "content": read_content(fields, message.get("content"), f"{path}.content")}
    if message.get("tool_calls"):
        read["tool_calls"] = _calls(fields, message["tool_calls"], f"{path}.tool_calls")
    elif message.get("function_call"):
        read["tool_calls"] = [read_call(fields, message["function_call"], f"{path}.function_call")]
    for key in ("name", "tool_call_id") if role == "tool" else ():
        value = message.get(key)
        if isinstance(value, str) and is_unicode(value):
            read[key] = value
        elif value is not None:
            fields.wrong(f"{path}.{key}", value, "a string")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str) and is_unicode(reasoning):
        read["reasoning_content"] = reasoning  # as templates call it
    return read


def read_content(fields: Fields, content: Any, path: str) -> str:
    """A string, null (no text), or a list of text parts, which become its lines."""
    if content is None:
        return ""
    if isinstance(content, str) and is_unicode(content):
        return content
    if isinstance(content, list):
        return "\n".join(_part(fields, part, f"{path}[{i}]") for i, part in enumerate(content))
    fields.wrong(path, content, "a string or a list of text parts")
    return ""


def _part(fields: Fields, part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if isinstance(text, str) and is_unicode(text):
            return text
        fields.wrong(f"{path}.{_TEXT_PARTS[kind]}", text, "a string")
    elif isinstance(kind, str):
        fields.problem(f"{path}.type", f"is {shown(kind)}, which is not supported yet: only text parts are")
    else:
        fields.wrong(path, part, 'a part such as {"type": "text", "text": "…"}')
    return ""


def _calls(fields: Fields, value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        fields.wrong(path, value, "a list of tool calls")
        return []
    return [read_call(fields, call, f"{path}[{i}]") for i, call in enumerate(value)]


def read_call(fields: Fields, call: Any, path: str) -> dict[str, Any]:
    """A call in OpenAI's shape, or in the flat one in which Workers AI answers."""
    function, at = call, path
    if isinstance(call, dict) and "function" in call:
        function, at = call["function"], f"{path}.function"
    if not isinstance(function, dict):
        fields.wrong(at, function, "an object with name and arguments")
        return {}
    name, id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name or not is_unicode(name):
        fields.wrong(f"{at}.name", name, "the name of a function")
    read = {"type": "function", "function": {"name": name, "arguments": _arguments(fields, function, at)}}
    if isinstance(id, str) and is_unicode(id):
        read["id"] = id
    elif id is not None:
        fields.wrong(f"{path}.id", id, "a string")
    return read


def _arguments(fields: Fields, function: dict[str, Any], path: str) -> dict[str, Any]:
    value = function.get("arguments")
    if value is None or value == "":
        return {}
    arguments = json_object(value) if isinstance(value, str) and is_unicode(value) else value
    if isinstance(arguments, dict) and not is_deep(arguments):
        return arguments
    fields.wrong(f"{path}.arguments", value, "an object or its JSON text, and not nested too deeply")
    return {}
