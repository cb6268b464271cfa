import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.ai.answers import read
from edge.ai.reasoning import Thinking
from edge.ai.tool_calls import HermesCalls, Thought, put_together

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def parts(*texts: str) -> tuple[str, str, list[str]]:
    """Reasoning, text, and names of calls."""
    reader = Thinking(HermesCalls())
    pieces = [piece for text in texts for piece in reader.feed(text)] + reader.end()
    text, calls = put_together(pieces)
    assert reader.num_calls == len(calls)
    return "".join(piece.text for piece in pieces if isinstance(piece, Thought)), text, [call.name for call in calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain <think>x</think>", ("", "plain <think>x</think>", [])),
        ("<think>\nI  see. </think>\n\nHi <b> ", ("I  see.", "Hi <b> ", [])),
        ("  \n<think>no end \n", ("no end", "", [])),
        ("<think>\n\n</think>\n\nHi", ("", "Hi", [])),
        ("<think>a</thin></think>b</think>", ("a</thin>", "b</think>", [])),
        (f"<think>I call.</think>\n{CALL}", ("I call.", "", ["f"])),
        (" <thin", ("", " <thin", [])),
        (" \n a", ("", " \n a", [])),
        ("", ("", "", [])),
    ],
)
@given(places=st.lists(st.integers(0, 50)))
def test_reasoning_is_taken_off_wherever_the_text_is_cut(
    text: str, expected: tuple[str, str, list[str]], places: list[int]
) -> None:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    assert parts(*(text[start:end] for start, end in itertools.pairwise(borders))) == expected


def test_what_is_held_back_is_no_more_than_what_may_belong_to_a_tag() -> None:
    reader = Thinking()
    assert reader.feed("<think>I s") == [Thought("I s")]
    assert reader.feed("ee </th") == [Thought("ee")]
    assert reader.feed("ere") == [Thought(" </there")]
    assert reader.feed("</think>") == []
    assert reader.feed("\n") == []
    assert reader.feed(" Hi") == ["Hi"]
    assert reader.feed(" there ") == [" there "]


def test_only_free_text_has_reasoning() -> None:
    text = "<think>a</think>b"
    assert (read("text", text).text, read("text", text).reasoning) == (text, "")
    split = read("text", text, splits_reasoning=True)
    assert (split.text, split.reasoning) == ("b", "a")
    assert read("json", text, splits_reasoning=True).text == text
