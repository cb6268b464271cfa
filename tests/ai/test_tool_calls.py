import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.ai.tool_calls import Call, CallArguments, CallStart, ForcedCall, HermesCalls, Reader, put_together

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
ARGUMENTS = '{"a": [1, "}"]}'


def read(reader: Reader, *texts: str) -> tuple[str, list[tuple[str, str]]]:
    pieces = [piece for text in texts for piece in reader.feed(text)] + reader.end()
    text, calls = put_together(pieces)
    assert len(calls) == reader.num_calls
    return text, [(call.name, call.arguments) for call in calls]


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


# -- Hermes and Qwen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("plain <b>text</b> \n", "plain <b>text</b> \n", []),
        (CALL, "", [("f", ARGUMENTS)]),
        (f"Let me see. \n{CALL}\n", "Let me see.", [("f", ARGUMENTS)]),
        (f"{CALL}\n{CALL}", "", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
        (f"{CALL} and then", " and then", [("f", ARGUMENTS)]),
        (CALL.removesuffix("</tool_call>"), "", [("f", ARGUMENTS)]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"x": "</tool_call>"}')],
        ),
        ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ("a <tool_c", "a <tool_c", []),
    ],
)
def test_hermes_calls(text: str, shown: str, calls: list[Any]) -> None:
    assert read(HermesCalls(), text) == (shown, calls)
    assert read(HermesCalls(), *text) == (shown, calls)


hermes_texts = st.lists(
    st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<", " ", "\n", "text", '{"name": "f"}', '"', "é"]),
    max_size=8,
).map("".join)


@given(hermes_texts, st.lists(st.integers(0, 300), max_size=6))
def test_it_does_not_matter_where_an_answer_is_cut(text: str, places: list[int]) -> None:
    assert read(HermesCalls(), *cut(text, places)) == read(HermesCalls(), text)


@given(hermes_texts)
def test_no_text_is_invented_and_without_calls_none_is_lost(text: str) -> None:
    shown, calls = read(HermesCalls(), text)
    assert calls or shown == text
    assert len(shown) <= len(text)


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    reader = HermesCalls()
    assert reader.feed("Hello <") == ["Hello"]
    assert reader.feed("b>") == [" <b>"]
    assert reader.feed(" <tool_call>{") == []
    assert reader.feed('"name": "f"}</tool_') == []
    assert reader.feed("call>") == [CallStart(0, "f"), CallArguments(0, "{}")]


def test_a_bomb_of_closing_tags_and_one_of_brackets_are_text() -> None:
    tags = '<tool_call>{"name": "' + "</tool_call>" * 20_000
    deep = '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100_000 + "</tool_call>"
    for bomb in (tags, deep):
        assert read(HermesCalls(), bomb) == (bomb, [])


# -- forced ------------------------------------------------------------------------------------------------

objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@given(objects, st.sampled_from([None, 1]), st.booleans(), st.lists(st.integers(0, 500), max_size=6))
def test_a_forced_call_is_read_as_it_comes(value: Any, indent: int | None, ascii: bool, places: list[int]) -> None:
    text = json.dumps({"name": "get_x", "arguments": value}, indent=indent, ensure_ascii=ascii)
    shown, calls = read(ForcedCall(), *cut(text, places))
    assert (shown, [name for name, _ in calls]) == ("", ["get_x"])
    assert json.loads(calls[0][1]) == value


def test_the_pieces_of_a_forced_call() -> None:
    reader = ForcedCall()
    assert reader.feed('{"name": "f"') == []
    assert reader.feed(', "arguments": ') == []
    assert reader.feed('{"a"') == [CallStart(0, "f"), CallArguments(0, '{"a"')]
    assert reader.feed(': "}') == [CallArguments(0, ': "}')]
    assert reader.feed('\\""} ') == [CallArguments(0, '\\""}')]
    assert reader.feed("}\n") == reader.end() == []


def test_what_is_cut_short() -> None:
    assert read(ForcedCall(), '{"name": "f", "argum') == ('{"name": "f", "argum', [])
    assert read(ForcedCall(), '{"name": "f", "arguments": {"a": 1') == ("", [("f", '{"a": 1')])
    assert Call("f", '{"a": 1').parsed() is None
    assert Call("f", '{"a": 1}').parsed() == {"a": 1}
    assert Call("f", '{"a": ' * 100 + "1" + "}" * 100).parsed() is None
