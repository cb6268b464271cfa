from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from edge.ai.json_schema import closed, moved

OPEN = {"properties": {"a": {"type": "integer"}}}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"items": OPEN, "$defs": {"x": OPEN}}, {"items": CLOSED, "$defs": {"x": CLOSED}}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"properties": {"properties": OPEN}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"properties": {"oneOf": {}}}, {"properties": {"oneOf": {}}, "additionalProperties": False}),
    ],
)
def test_objects_that_name_properties_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "string"}},
        {**OPEN, "patternProperties": {"^x": {}}},
        {**OPEN, "required": ["b"]},
        {**OPEN, "required": [{}]},
        {**OPEN, "minProperties": 2},
        {"$ref": "#/$defs/x", "required": ["b"], "$defs": {"x": OPEN}},
        {"const": OPEN, "enum": [OPEN], "default": OPEN},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {"items": {"oneOf": [OPEN, {"properties": {"b": {}}}]}},
        {"not": OPEN},
        {**OPEN, "$ref": "#/$defs/x", "$defs": {"x": OPEN}},
        {**OPEN, "anyOf": [{"properties": {"b": {}}}]},
    ],
)
def test_what_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_references_follow_a_schema() -> None:
    schema = {
        "properties": {"$ref": {"$ref": "#"}, "b": {"$ref": "#/$defs/x"}, "c": {"$ref": "https://x.test/y"}},
        "enum": [{"$ref": "#"}],
    }
    assert moved(schema, "#/$defs/0") == {
        "properties": {
            "$ref": {"$ref": "#/$defs/0"},
            "b": {"$ref": "#/$defs/0/$defs/x"},
            "c": {"$ref": "https://x.test/y"},
        },
        "enum": [{"$ref": "#"}],
    }


schemas = st.recursive(
    st.sampled_from(
        [{}, {"type": "integer"}, {"const": 1}, {"type": "object"}, {"required": ["a"]}, {"$ref": "#/$defs/d"}]
    ),
    lambda inner: (
        st.builds(lambda a, b: {"properties": {"a": a, "b": b}}, inner, inner)
        | st.builds(
            lambda a, names: {"properties": {"a": a}, "required": names}, inner, st.sampled_from([["a"], ["b"]])
        )
        | st.builds(lambda a: {"items": a}, inner)
        | st.builds(lambda key, a, b: {key: [a, b]}, st.sampled_from(["anyOf", "oneOf", "allOf"]), inner, inner)
        | st.builds(lambda a: {"not": a}, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
    ),
    max_leaves=6,
)
values = st.recursive(
    st.none() | st.integers(0, 2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(schemas, st.sampled_from([{}, OPEN]), values)
def test_what_fits_the_closed_schema_fits_the_given_one(schema: Any, definition: Any, value: Any) -> None:
    schema = {**schema, "$defs": {"d": definition}}
    if Draft202012Validator(closed(schema)).is_valid(value):
        assert Draft202012Validator(schema).is_valid(value)
