import json
from typing import Any

import pytest

from edge.ai.fields import Fields
from edge.ai.messages import read_messages
from edge.errors import InvalidInput

ROLES = {role: role for role in ("system", "user", "assistant", "tool")}


def read(*messages: Any) -> Any:
    fields = Fields({"messages": list(messages)}, "the body")
    given = read_messages(fields, ROLES)
    fields.raise_problems()
    return given


def test_a_round_of_tools_is_given_to_the_template_with_arguments_as_objects() -> None:
    openai = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "index": 0}
    flat = {"name": "f", "arguments": {"a": 1}}
    bare = {"function": {"name": "f", "arguments": ""}}
    function = {"name": "f", "arguments": {"a": 1}}
    assert read(
        {"role": "assistant", "content": None, "tool_calls": [openai, flat, bare]},
        {"role": "tool", "tool_call_id": "call_1", "name": None, "content": [{"type": "text", "text": "sunny"}]},
        {"role": "tool", "name": "f", "content": ""},
        {"role": "user", "content": "hi", "name": "ada"},
    ) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": function, "id": "call_1"},
                {"type": "function", "function": function},
                {"type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "name": "f"},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (5, r"tool_calls\[0\] is 5, must be an object with name and arguments"),
        ({"function": []}, r"tool_calls\[0\]\.function is an empty list"),
        ({"id": "1"}, r"tool_calls\[0\]\.name is null, must be the name of a function"),
        (
            {"name": "f", "arguments": "[1]"},
            r'tool_calls\[0\]\.arguments is "\[1\]", must be an object or its JSON text',
        ),
        ({"function": {"name": "f", "arguments": 7}}, r"function\.arguments is 7"),
        ({"name": "f", "id": 7}, r"tool_calls\[0\]\.id is 7, must be a string"),
        ({"name": "f", "arguments": '{"a": ' * 65 + "1" + "}" * 65}, "not nested too deeply"),
        ({"name": "f", "arguments": '{"a": ' * 100_000}, "not nested too deeply"),
        ({"name": "f", "arguments": json.loads('{"a": ' * 65 + "1" + "}" * 65)}, "arguments is an object"),
    ],
)
def test_wrong_calls(call: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read({"role": "assistant", "content": None, "tool_calls": [call]})


def test_other_wrong_messages() -> None:
    with pytest.raises(InvalidInput, match=r"tool_calls is an object, must be a list of tool calls"):
        read({"role": "assistant", "content": "", "tool_calls": {"a": 1}})
    with pytest.raises(InvalidInput, match=r"messages\[0\]\.tool_call_id is 5, must be a string"):
        read({"role": "tool", "content": "", "tool_call_id": 5})
