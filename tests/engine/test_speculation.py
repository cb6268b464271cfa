from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.engine.speculation import LONGEST, SHORTEST, NgramIndex


def test_what_followed_the_last_tokens_is_proposed() -> None:
    index = NgramIndex([1, 2, 3, 4, 5, 9, 8, 2, 3])
    assert index.propose(3) == [4, 5, 9]
    index.add(4)
    assert index.propose(2) == [5, 9]
    index.add(7)
    assert index.propose(2) == []


def test_the_longest_run_decides_and_of_equals_the_latest() -> None:
    assert NgramIndex([1, 2, 3, 5, 6, 2, 3, 7, 8, 1, 2, 3]).propose(1) == [5]
    assert NgramIndex([2, 3, 5, 6, 2, 3, 7, 8, 2, 3]).propose(2) == [7, 8]


def test_a_repetition_goes_on() -> None:
    assert NgramIndex([5, 6, 7, 5, 6, 7, 5, 6]).propose(7) == [7, 5, 6, 7, 5, 6, 7]
    assert NgramIndex([9, 4, 4, 4]).propose(3) == [4, 4, 4]


def test_short_sequences_have_no_proposal() -> None:
    for tokens in ([], [1], [1, 1], [1, 2, 3]):
        assert NgramIndex(tokens).propose(4) == []


@given(tokens=st.lists(st.integers(0, 3), max_size=40), num_tokens=st.integers(0, 6))
def test_proposals_are_those_of_a_search_from_the_end(tokens: list[int], num_tokens: int) -> None:
    def search() -> list[int]:
        for size in range(LONGEST, SHORTEST - 1, -1):
            for start in range(len(tokens) - 1, size - 1, -1):
                if size <= len(tokens) and tokens[start - size : start] == tokens[-size:]:
                    grown = list(tokens)
                    for place in range(num_tokens):
                        grown.append(grown[start + place])
                    return grown[len(tokens) :]
        return []

    assert NgramIndex(tokens).propose(num_tokens) == search()
