"""Tools on the way in: the definitions that a caller offers, which of them must be called, and the schema of a call.

Both shapes are read in both dialects: OpenAI's `{"type": "function", "function": {...}}` and Workers AI's flat
`{"name", "description", "parameters"}`. How calls are found in an answer is in `edge.ai.tool_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from edge.ai.fields import Fields, is_unicode, shown
from edge.ai.json_schema import closed, moved
from edge.frames import MAX_SCHEMA_CHARS

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "a name of 1 to 64 letters, digits, _, - and dots"
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates get it, which is OpenAI's shape."""
        return {"type": "function", "function": msgspec.structs.asdict(self)}


class Offer(msgspec.Struct, frozen=True):
    """What a caller wants of tools."""

    tools: list[Tool] = []
    """What the model is told of."""
    forced: list[Tool] = []
    """One of these must be called; empty: the model decides."""


def read_tools(fields: Fields) -> Offer:
    """The offer in `tools` and `tool_choice`; what is wrong becomes problems of `fields`.

    A choice is read in the shape of chat bodies and in that of OpenAI's Responses, which has no object within.
    """
    tools = _tools(fields, "tools")
    choice = fields.get("tool_choice")
    match choice:
        case "none":
            return Offer()
        case None | "auto":
            return Offer(tools)
        case "required":
            forced = tools
        case {"type": "function", "function": {"name": str(name)}}:
            forced = _named(fields, tools, [name], "$.tool_choice.function.name")
        case {"type": "function", "name": str(name)}:
            forced = _named(fields, tools, [name], "$.tool_choice.name")
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            tools = _named(fields, tools, [_name_of(each) for each in allowed], "$.tool_choice.allowed_tools.tools")
            forced = tools if mode == "required" else []
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            tools = _named(fields, tools, [_name_of(each) for each in allowed], "$.tool_choice.tools")
            forced = tools if mode == "required" else []
        case _:
            fields.wrong("$.tool_choice", choice, _CHOICES)
            return Offer()
    if not fields.get("tools"):
        fields.problem("$.tool_choice", "asks for a call, but there are no tools")
    return Offer(tools, forced)


def read_functions(fields: Fields) -> Offer:
    """The offer in `functions` and `function_call`, which OpenAI had before there were tools; else as `read_tools`."""
    functions = _tools(fields, "functions")
    choice = fields.get("function_call")
    match choice:
        case "none":
            return Offer()
        case None | "auto":
            return Offer(functions)
        case {"name": str(name)}:
            forced = _named(fields, functions, [name], "$.function_call.name", "functions")
        case _:
            fields.wrong("$.function_call", choice, '"none", "auto" or {"name": "…"}')
            return Offer()
    if not fields.get("functions"):
        fields.problem("$.function_call", "asks for a call, but there are no functions")
    return Offer(functions, forced)


def _named(fields: Fields, tools: list[Tool], names: list[Any], path: str, key: str = "tools") -> list[Tool]:
    """Those of `tools` with one of `names`, each of which must be there."""
    known = [tool.name for tool in tools]
    for name in names:
        if tools and name not in known:
            fields.wrong(path, name, f"one of {key}: {' or '.join(known[:10])}")
    return [tool for tool in tools if tool.name in names]


def _name_of(tool: Any) -> Any:
    match tool:
        case {"function": {"name": name}} | {"name": name}:
            return name
        case _:
            return tool


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of `{"name": …, "arguments": …}`, a call of one of `tools`.

    Their parameters, closed, are definitions of it, with references that follow them there.
    """
    calls: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    definitions = {str(i): moved(_arguments(tool), f"#/$defs/{i}") for i, tool in enumerate(tools)}
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _arguments(tool: Tool) -> dict[str, Any]:
    schema = {key: value for key, value in tool.parameters.items() if key not in ("$schema", "$id")}
    return closed({**schema, "type": "object"})


def _tools(fields: Fields, key: str) -> list[Tool]:
    value, path = fields.get(key), f"$.{key}"
    if not value and value in (None, []):
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        fields.wrong(path, value, f"a list of up to {MAX_TOOLS} {key}")
        return []
    if fields.json_text(path, value, MAX_SCHEMA_CHARS) is None:
        return []
    tools = [tool for i, each in enumerate(value) if (tool := _tool(fields, each, f"{path}[{i}]")) is not None]
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            fields.problem(f"{path}[{i}]", f"has the name {shown(tool.name)}, as another one has")
        seen.add(tool.name)
    return tools


def _tool(fields: Fields, value: Any, path: str) -> Tool | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "object"):
        fields.problem(f"{path}.type", f"is {shown(kind)}, which is not supported yet: only functions are")
        return None
    if isinstance(value, dict) and "function" in value:
        value, path = value["function"], f"{path}.function"
    if not isinstance(value, dict):
        fields.wrong(path, value, "an object with name, description and parameters")
        return None
    name, description = value.get("name"), value.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fields.wrong(f"{path}.name", name, _NAME_RULE)
        return None
    if description is not None and not (isinstance(description, str) and is_unicode(description)):
        fields.wrong(f"{path}.description", description, "a string")
    return Tool(name, description or "", _parameters(fields, value.get("parameters"), f"{path}.parameters"))


def _parameters(fields: Fields, value: Any, path: str) -> dict[str, Any]:
    if value is None or value == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        fields.wrong(path, value, "a JSON schema of an object")
    elif value.get("type", "object") != "object":
        fields.wrong(f"{path}.type", value["type"], '"object": arguments are named')
    elif not isinstance(value.get("properties", {}), dict):
        fields.wrong(f"{path}.properties", value["properties"], "an object of JSON schemas by name")
    elif not isinstance(value.get("required") or [], list):
        fields.wrong(f"{path}.required", value["required"], "a list of names")
    else:
        return value
    return {}
