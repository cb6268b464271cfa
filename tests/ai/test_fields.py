import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from edge.ai.fields import (
    Boolean,
    Choice,
    Custom,
    Field,
    Fields,
    Ignored,
    Integer,
    ListOf,
    Number,
    ObjectOf,
    String,
    Strings,
    Table,
    Unsupported,
    nullable,
    object_schema,
)
from edge.errors import InvalidInput, InvalidJson

PAIR = ObjectOf("", table={"text": String("", required=True), "id": Integer("", low=0, high=9)})
KINDS: list[Field] = [
    Boolean("yes or no"),
    Boolean("", default=True, required=True),
    String("a name", max_chars=3),
    String(""),
    Strings("", max_items=2, max_chars=3),
    Choice("", values=("mean", "cls"), default="mean"),
    Number("", low=-1.5, high=2),
    Integer("", low=-2, high=3, default=1),
    ListOf("", item=Integer("", low=0, high=5), min_items=0, max_items=2),
    ListOf("", item=PAIR, max_items=2),
    PAIR,
    Unsupported("", harmless=("none", 1, False, [])),
    Unsupported(""),
    Ignored(""),
]
scalars = (
    st.none() | st.booleans() | st.integers(-4, 7) | st.integers() | st.sampled_from([0.0, 1.0, 2.5, -1.5, 1e300])
) | (st.text(max_size=4) | st.sampled_from(["mean", "cls", "none", ""]))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "id", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(KINDS), values)
def test_a_value_is_accepted_if_and_only_if_it_fits_the_schema(field: Field, value: Any) -> None:
    fields = Fields({"key": value}, "the body", {"key": field})
    refusal = None
    try:
        fields.raise_problems()
    except InvalidInput as error:
        refusal = error
    schema = field.schema()
    Draft202012Validator.check_schema(schema)
    assert (refusal is None) == Draft202012Validator(schema).is_valid(value), refusal
    assert refusal is None or refusal.message.startswith("bad input: $.key")


TABLE: Table = {
    "query": String("What to look for.", required=True),
    "contexts": ListOf("The texts.", item=PAIR, max_items=2),
    "top_k": Integer("How many.", low=1, high=3, default=2),
    "ratio": Number("", low=0, high=1),
    "later": Unsupported("Not yet."),
    "note": Ignored("Whatever."),
}


def test_fields_are_read_by_their_table_and_defaults_are_for_what_is_absent_or_null() -> None:
    fields = Fields(
        {"query": "q", "contexts": [{"text": "a", "more": 1}], "ratio": 1, "top_k": None, "else": 1}, "", TABLE
    )
    assert fields["query"] == "q"
    assert fields["contexts"] == [{"text": "a", "id": None}]
    assert (fields["top_k"], fields["ratio"], fields["later"], fields["note"]) == (2, 1.0, None, None)
    fields.raise_problems()


def test_everything_is_checked_once_read_or_not_and_named_by_its_path() -> None:
    wrong = {"contexts": [{"text": ""}, {"id": 10, "text": "a"}], "top_k": 9, "ratio": math.nan, "later": {"a": 1}}
    fields = Fields(wrong, "inputs", TABLE)
    assert (fields["top_k"], fields["top_k"]) == (2, 2)
    with pytest.raises(InvalidInput) as caught:
        fields.raise_problems()
    assert caught.value.message.removeprefix("bad input: ").split("; ") == [
        "$.top_k is 9, must be an integer from 1 to 3",
        "$.query is missing",
        '$.contexts[0].text is "", must be a string of at least one character',
        "$.contexts[1].id is 10, must be an integer from 0 to 9",
        "$.ratio is not a finite number, must be a number from 0 to 1",
        "$.later is an object, which is not supported yet: leave it out",
    ]
    assert caught.value.param == "top_k"


def test_a_field_that_is_missing_in_the_table_is_a_bug_and_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(KeyError):
        Fields({}, "", TABLE)["tpo_k"]
    with pytest.raises(InvalidJson, match="inputs must be a JSON object, not a list of 1"):
        Fields([1], "inputs", TABLE)


def test_custom_fields_are_read_by_a_function_or_come_as_they_are() -> None:
    def read(fields: Fields, path: str, value: Any) -> int:
        if value != "one":
            fields.wrong(path, value, '"one"')
        return 1

    table = {"a": Custom("", json={"const": "one"}, reader=read), "b": Custom("", json={})}
    fields = Fields({"a": "one", "b": [2]}, "", table)
    assert (fields["a"], fields["b"]) == (1, [2])
    with pytest.raises(InvalidInput, match='a is "two", must be "one"'):
        Fields({"a": "two"}, "", table).raise_problems()


def test_the_schema_of_an_object() -> None:
    assert object_schema({key: TABLE[key] for key in ("query", "top_k", "later")}) == {
        "type": "object",
        "properties": {
            "query": {"description": "What to look for.", "type": "string", "minLength": 1},
            "top_k": {
                "description": "How many.",
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": 3,
                "default": 2,
            },
            "later": {"description": "Not yet.", "enum": [False, 0, "", [], {}, None]},
        },
        "required": ["query"],
    }


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": ["string", "array"]},
        {"type": "integer", "enum": [1]},
        {"type": "string", "anyOf": [{"minLength": 1}, {"const": ""}]},
        {"type": "string", "const": "a"},
        {"enum": [1]},
        {"anyOf": [{"type": "string"}]},
        {"not": {"type": "null"}},
        {"type": "string", "not": {"const": None}},
    ],
)
def test_nullable(schema: dict[str, Any]) -> None:
    validator = Draft202012Validator(nullable(schema))
    assert validator.is_valid(None)
    assert [validator.is_valid(value) for value in (1, "a", [])] == [
        Draft202012Validator(schema).is_valid(value) for value in (1, "a", [])
    ]
