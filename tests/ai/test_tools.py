import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from edge.ai.fields import Fields
from edge.ai.tools import Offer, Tool, call_schema, read_tools
from edge.errors import InvalidInput

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TREE = {
    "type": "object",
    "properties": {"$ref": {"type": "string"}, "leaf": {"$ref": "#/$defs/Leaf"}, "left": {"$ref": "#"}},
    "required": ["leaf"],
    "$defs": {"Leaf": {"enum": [{"$ref": "#"}, 1]}},
}


def offer(tools: Any, choice: Any = None) -> Offer:
    fields = Fields({"tools": tools, "tool_choice": choice}, "the body")
    read = read_tools(fields)
    fields.raise_problems()
    return read


def test_both_shapes_are_one_tool() -> None:
    flat = {"name": "get_weather", "description": "Weather", "parameters": CITY}
    for given in (flat, {"type": "function", "function": {**flat, "strict": True}}):
        [tool] = offer([given]).tools
        assert tool == Tool("get_weather", "Weather", CITY)
        assert tool.for_template() == {"type": "function", "function": flat}
    [bare] = offer([{"name": "f", "description": None, "parameters": None}]).tools
    assert bare == Tool("f", "", {"type": "object", "properties": {}})


def test_choices() -> None:
    tools = [{"name": "a"}, {"name": "b"}]
    assert offer(None) == offer([]) == offer(tools, "none") == Offer()
    assert [tool.name for tool in offer(tools, "auto").tools] == ["a", "b"]
    assert offer(tools, "auto").forced == offer(tools).forced == []
    assert [tool.name for tool in offer(tools, "required").forced] == ["a", "b"]
    named = offer(tools, {"type": "function", "function": {"name": "b"}})
    assert ([tool.name for tool in named.tools], [tool.name for tool in named.forced]) == (["a", "b"], ["b"])


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("f", None, r'\$\.tools is "f", must be a list of up to 128 tools'),
        ([{"name": "f"}] * 129, None, r"\$\.tools is a list of 129"),
        ([5], None, r"\$\.tools\[0\] is 5, must be an object with name, description and parameters"),
        ([{"type": "web_search"}], None, r'\$\.tools\[0\]\.type is "web_search", which is not supported yet'),
        ([{"type": "function"}], None, r"\$\.tools\[0\]\.name is null, must be a name of 1 to 64 letters"),
        ([{"name": "a b"}], None, r'\$\.tools\[0\]\.name is "a b"'),
        ([{"name": "f"}, {"type": "function", "function": {"name": "f"}}], None, r"\$\.tools\[1\] has the name \"f\""),
        ([{"function": {"name": "f", "description": False}}], None, r"\[0\]\.function\.description is false"),
        ([{"name": "f", "parameters": []}], None, r"\$\.tools\[0\]\.parameters is an empty list"),
        (
            [{"name": "f", "parameters": {"type": "string"}}],
            None,
            r"parameters\.type is \"string\", must be \"object\"",
        ),
        ([{"name": "f", "parameters": {"properties": [1]}}], None, r"parameters\.properties is a list of 1"),
        ([{"name": "f", "parameters": {"required": "x"}}], None, r"parameters\.required is \"x\""),
        ([{"name": "f", "parameters": {"const": "x" * (1 << 18)}}], None, r"\$\.tools has \d+ characters as JSON"),
        ([{"name": "f"}], "any", r'\$\.tool_choice is "any", must be "none", "auto", "required" or'),
        ([{"name": "f"}], {"type": "function", "function": {"name": "g"}}, "must be one of tools: f"),
        (None, "required", r"\$\.tool_choice asks for a call, but there are no tools"),
    ],
)
def test_wrong_tools_are_refused_with_their_path(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        offer(tools, choice)


def accepts(schema: dict[str, Any], text: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert LLMatcher.validate_grammar(grammar) == ""
    tokenizer = LLTokenizer("byte")
    matcher, tokens = LLMatcher(tokenizer, grammar), tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('{"name": "tree", "arguments": {"leaf": 1, "left": {"leaf": 1}}}', True),
        ('{"name": "tree", "arguments": {"$ref": "x", "leaf": {"$ref": "#"}}}', True),
        ('{"name": "weather", "arguments": {"city": "Paris"}}', True),
        ('{"name": "now", "arguments": {}}', True),
        ('{"name": "now", "arguments": {"city": "Paris"}}', False),
        ('{"name": "weather", "arguments": {"town": "Paris"}}', False),
        ('{"name": "weather", "arguments": {"city": "Paris", "town": "Paris"}}', False),
        ('{"name": "tree", "arguments": {"leaf": 2}}', False),
        ('{"name": "other", "arguments": {}}', False),
        ('{"name": "now"}', False),
    ],
)
def test_the_schema_of_a_call_holds_for_each_tool_with_its_own_references(text: str, is_call: bool) -> None:
    tools = [Tool("tree", "", TREE), Tool("weather", "", CITY), Tool("now", "", {"type": "object", "properties": {}})]
    assert accepts(call_schema(tools), text) is is_call


def test_data_and_the_names_of_properties_are_no_references() -> None:
    moved = call_schema([Tool("tree", "", TREE)])["$defs"]["0"]
    assert moved["$defs"] == TREE["$defs"]
    assert moved["properties"] == {
        "$ref": {"type": "string"},
        "leaf": {"$ref": "#/$defs/0/$defs/Leaf"},
        "left": {"$ref": "#/$defs/0"},
    }
