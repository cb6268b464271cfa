from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.sampler import Row, Sampler, sample
from edge.errors import InvalidInput
from edge.frames import Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def row(tokens: list[int] | None = None, num_prompt_tokens: int = 0, **sampling: Any) -> Row:
    return Row(Sampler(Sampling(**sampling)), tokens or [], num_prompt_tokens)


def draws(number: int, logits: torch.Tensor = LOGITS, **sampling: Any) -> Counter[int | None]:
    one = row(**sampling)
    return Counter(sample(logits.clone()[None], [one])[0] for _ in range(number))


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert draws(5, temperature=temperature) == {1: 5}


def test_a_small_temperature_does_not_overflow() -> None:
    assert draws(5, 1e4 * LOGITS, temperature=2e-6) == {1: 5}


def test_draws_follow_the_probabilities() -> None:
    counts = draws(4000, temperature=2.0, seed=1)
    probabilities = (LOGITS / 2).softmax(0).tolist()
    for token, probability in enumerate(probabilities):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_top_k_keeps_the_k_most_likely() -> None:
    assert draws(300, temperature=5.0, top_k=2, seed=1).keys() == {1, 2}
    assert draws(20, temperature=5.0, top_k=1, seed=1) == {1: 20}
    assert draws(600, temperature=50.0, top_k=500, seed=1).keys() == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Probabilities 0.64, 0.24, 0.09, 0.03, 0.01.
    assert draws(20, temperature=1.0, top_p=0.6, seed=1) == {1: 20}
    assert draws(300, temperature=1.0, top_p=0.7, seed=1).keys() == {1, 2}
    assert draws(20, temperature=1.0, top_p=0.0, seed=1) == {1: 20}
    assert draws(300, temperature=1.0, top_k=3, top_p=0.95, seed=1).keys() == {0, 1, 2}


def test_the_same_seed_draws_the_same_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone = row(temperature=1.0, seed=7)
    first = [sample(logits[1:2].clone(), [alone])[0] for _ in range(20)]
    rows = [row(temperature=1.0), row(temperature=1.0, seed=7), row(temperature=0)]
    second = [sample(logits.clone(), rows)[1] for _ in range(20)]
    assert first == second
    assert len(set(first)) > 3


def test_penalties() -> None:
    def greedy(logits: list[float], tokens: list[int], num_prompt_tokens: int, **sampling: float) -> int | None:
        return sample(torch.tensor([logits]), [row(tokens, num_prompt_tokens, temperature=0, **sampling)])[0]

    # Repetition counts the prompt as well, and lowers negative logits too.
    assert greedy([3.0, 2.0, 0.0], [0], 1, repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5, -9.0], [0], 1, repetition_penalty=2.0) == 1
    # Frequency and presence look at the answer alone.
    assert greedy([3.0, 2.0, 0.0], [0, 0], 2, frequency_penalty=2.0) == 0
    assert greedy([3.0, 2.0, 0.0], [0, 0], 0, frequency_penalty=0.6) == 1
    assert greedy([3.0, 2.0, 0.0], [0, 0], 0, frequency_penalty=0.4) == 0
    assert greedy([3.0, 2.0, 0.0], [0, 0], 0, presence_penalty=0.9) == 0
    assert greedy([3.0, 2.0, 0.0], [0, 0], 0, presence_penalty=1.1) == 1
    assert greedy([3.0, 2.0, 2.5], [], 0, presence_penalty=1.1, repetition_penalty=1.5) == 0


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_logits_that_are_no_numbers_spoil_only_their_own_row(bad: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0], bad, [2.0, 1.0]])
    assert sample(logits, [row(temperature=0), row(temperature=1.0), row(temperature=0)]) == [1, None, 0]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert draws(200, logits, temperature=1.0, seed=3).keys() == {1, 3}
    last = row(temperature=1.0)
    last.sampler.draw = lambda: 1 - 2**-53  # type: ignore[method-assign]
    assert sample(logits[None].clone(), [last]) == [3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"top_k": 0},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": math.inf},
        {"presence_penalty": -1000.0},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidInput, match=name) as caught:
        Sampler(Sampling(**wrong))
    assert caught.value.param == name


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=8),
    temperature=st.floats(0, 5),
    top_p=st.none() | st.floats(0, 1),
    top_k=st.none() | st.integers(1, 10),
    seed=st.integers(0, 2**63),
)
def test_what_is_drawn_is_allowed(
    logits: list[float], temperature: float, top_p: float | None, top_k: int | None, seed: int
) -> None:
    one = row(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    token = sample(torch.tensor([logits]), [one])[0]
    assert token is not None
    rank = sum(value > logits[token] for value in logits)
    assert rank < (top_k or len(logits))
