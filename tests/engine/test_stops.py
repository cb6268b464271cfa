from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.stops import StopStrings
from edge.errors import InvalidInput
from edge.frames import MAX_STOP_CHARS, MAX_STOPS


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    text = "".join(finder.add(piece) for piece in pieces)
    return text + finder.rest(), finder.found


def test_text_up_to_the_stop_string_is_shown() -> None:
    assert shown(["END"], ["one ", "two E", "N", "D three"]) == ("one two ", True)


def test_what_only_looks_like_a_stop_string_is_shown_late() -> None:
    finder = StopStrings(["END"])
    assert [finder.add(piece) for piece in ("E", "N", "E", "ND?"[0:1], "x")] == ["", "", "EN", "", "ENx"]


def test_nothing_is_shown_after_a_stop_string() -> None:
    finder = StopStrings(["."])
    assert finder.add("a.b") == "a"
    assert (finder.add("c"), finder.rest(), finder.found) == ("", "", True)


def test_without_stop_strings_everything_passes_at_once() -> None:
    finder = StopStrings([])
    assert (finder.add("abc"), finder.rest()) == ("abc", "")


@pytest.mark.parametrize("stops", [[""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * (MAX_STOPS + 1)])
def test_impossible_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidInput, match="stop string"):
        StopStrings(stops)


@given(
    text=st.text("abc", max_size=40),
    cuts=st.sets(st.integers(0, 40)),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_how_the_text_was_cut_makes_no_difference(text: str, cuts: set[int], stops: list[str]) -> None:
    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    assert shown(stops, pieces) == shown(stops, list(text))
    result, found = shown(stops, pieces)
    assert text.startswith(result)
    assert found == any(stop in text for stop in stops)
    assert not any(stop in result for stop in stops)
