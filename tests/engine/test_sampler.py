from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.sampler import MIN_LOGPROB, Choice, Mask, Row, Sampler, sample
from edge.errors import InvalidInput
from edge.frames import Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def sampler(vocab_size: int = 50, prompt: tuple[int, ...] = (), **sampling: Any) -> Sampler:
    return Sampler(Sampling(**sampling), vocab_size, prompt)


def mask_of(*tokens: int, vocab_size: int = 5) -> Mask:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def draws(number: int, logits: torch.Tensor = LOGITS, mask: Mask | None = None, **sampling: Any) -> Counter[int]:
    """How often each token comes next in one answer, if the logits are always the same."""
    one, counts = sampler(len(logits), **sampling), Counter[int]()
    for _ in range(number):
        (choice,) = sample(logits.clone()[None], [Row(one, mask=mask)])
        assert choice is not None
        one.accept(choice.token)
        counts[choice.token] += 1
    return counts


def tokens(choices: list[Choice | None]) -> list[int | None]:
    return [None if choice is None else choice.token for choice in choices]


# -- temperature and filters -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert draws(5, temperature=temperature) == {1: 5}


def test_a_small_temperature_does_not_overflow() -> None:
    assert draws(5, 1e4 * LOGITS, temperature=2e-6) == {1: 5}


@pytest.mark.parametrize("vocab_size", [5, 300, 1000])
def test_draws_follow_the_probabilities(vocab_size: int) -> None:
    logits = torch.full((vocab_size,), -math.inf)
    places = torch.linspace(0, vocab_size - 1, 5).long()
    logits[places] = LOGITS
    counts = draws(4000, logits, temperature=2.0, seed=1)
    for token, probability in zip(places.tolist(), (LOGITS / 2).softmax(0).tolist(), strict=True):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)
    assert counts.total() == sum(counts[token] for token in places.tolist())


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


def test_min_p_is_a_share_of_the_most_likely() -> None:
    # 1, 0.37, 0.14, 0.05, 0.02 times the most likely one.
    assert draws(300, temperature=1.0, min_p=0.2, seed=1).keys() == {1, 2}
    assert draws(300, temperature=1.0, min_p=0.1, seed=1).keys() == {0, 1, 2}
    assert draws(300, temperature=1.0, top_p=0.7, min_p=0.1, seed=1).keys() == {1, 2}
    assert draws(20, temperature=1.0, min_p=1.0, seed=1) == {1: 20}


def reference(logits: np.ndarray[Any, Any], sampling: Sampling) -> set[int]:
    """The tokens that can be drawn, by definition and in double precision; those of equal probability together."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: sampling.top_k]
    if sampling.top_p is not None:
        before = np.concatenate([[0], weights[kept].cumsum()[:-1]])
        kept = kept[: max(1, int((before < sampling.top_p * weights[kept].sum()).sum()))]
    least = max(weights[kept].min(), sampling.min_p or 0)
    return set(np.flatnonzero((weights >= least) & (weights > 0)).tolist())


@settings(max_examples=num_examples(60), deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([40, 256, 700]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    min_p=st.none() | st.sampled_from([0.0, 0.01, 0.3]),
)
def test_what_can_be_drawn_is_what_the_definition_says(seed: int, vocab_size: int, **filters: Any) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    allowed = reference(logits.numpy(), Sampling(**filters))
    drawn = draws(60, logits, seed=seed, **filters)
    assert drawn.keys() <= allowed
    last = sampler(vocab_size, **filters)
    last.draw = lambda num_ahead=0: 1 - 2**-53  # type: ignore[method-assign]
    (choice,) = sample(logits[None].clone(), [Row(last)])
    assert choice is not None
    assert choice.token in allowed
    weights = (logits / filters["temperature"]).softmax(0)
    assert sum(weights[token] for token in allowed if token > choice.token) < 1e-6


# -- independence ------------------------------------------------------------------------------------------


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 40, "seed": 2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"temperature": 2.0, "min_p": 0.02, "seed": 4},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "seed": 5, "logprobs": 3},
    {"temperature": 0, "logprobs": 5, "logit_bias": {3: 5.0}},
]


@settings(max_examples=num_examples(40), deadline=None)
@given(
    own=st.sampled_from(KINDS),
    others=st.lists(st.sampled_from(KINDS), max_size=6),
    place=st.integers(0, 6),
    vocab_size=st.sampled_from([100, 777, 4099]),
)
def test_a_row_does_not_depend_on_the_batch(
    own: dict[str, Any], others: list[dict[str, Any]], place: int, vocab_size: int
) -> None:
    place = min(place, len(others))
    kinds = [*others[:place], own, *others[place:]]
    logits = torch.randn(len(kinds), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    alone, batched = sampler(vocab_size, (1, 2, 3), **own), sampler(vocab_size, (1, 2, 3), **own)
    rows = [Row(sampler(vocab_size, **kind)) for kind in kinds]
    rows[place] = Row(batched)
    for _ in range(3):
        (first,) = sample(logits[place : place + 1].clone(), [Row(alone)])
        second = sample(logits.clone(), rows)[place]
        assert first is not None
        assert first == second
        alone.accept(first.token)
        batched.accept(first.token)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafted_row_is_as_if_the_draft_had_been_accepted(kind: dict[str, Any]) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    ahead, after = sampler(200, (7,), **kind), sampler(200, (7,), **kind)
    for token in (7, 9):
        after.accept(token)
    assert sample(logits.clone(), [Row(ahead, [7, 9])]) == sample(logits.clone(), [Row(after)])
    after = sampler(200, (7,), **kind)
    assert sample(logits.clone(), [Row(ahead)]) == sample(logits.clone(), [Row(after)])


def test_a_seed_repeats_a_text_and_no_seed_does_not() -> None:
    logits = torch.zeros(5000)
    texts = [tuple(draws(5, logits, temperature=1.0, seed=seed)) for seed in (7, 7, 8, -7, None, None)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 5


# -- what changes the logits -------------------------------------------------------------------------------


def test_penalties() -> None:
    def greedy(logits: list[float], prompt: tuple[int, ...], answer: list[int], **sampling: float) -> int | None:
        one = sampler(len(logits), prompt, temperature=0, **sampling)
        for token in answer:
            one.accept(token)
        return tokens(sample(torch.tensor([logits]), [Row(one)]))[0]

    # Repetition counts the prompt as well, and lowers negative logits too.
    assert greedy([3.0, 2.0, 0.0], (0,), [], repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5, -9.0], (0,), [], repetition_penalty=2.0) == 1
    # Frequency and presence look at the answer alone.
    assert greedy([3.0, 2.0, 0.0], (0, 0), [], frequency_penalty=2.0) == 0
    assert greedy([3.0, 2.0, 0.0], (), [0, 0], frequency_penalty=0.6) == 1
    assert greedy([3.0, 2.0, 0.0], (), [0, 0], frequency_penalty=0.4) == 0
    assert greedy([3.0, 2.0, 0.0], (), [0, 0], presence_penalty=0.9) == 0
    assert greedy([3.0, 2.0, 0.0], (), [0, 0], presence_penalty=1.1) == 1
    assert greedy([3.0, 2.0, 2.5], (), [], presence_penalty=1.1, repetition_penalty=1.5) == 0


def test_penalties_of_a_long_text() -> None:
    one = sampler(500, tuple(range(100)), temperature=0, repetition_penalty=2.0, frequency_penalty=0.25)
    for token in [*range(50, 250), 60, 60]:
        one.accept(token)
    logits = np.full(500, 8.0, np.float32)
    one.adjust(logits, [])
    expected = np.full(500, 8.0, np.float32)
    expected[:250] = 4.0
    expected[50:250] -= 0.25
    expected[60] -= 0.5
    assert logits.tolist() == expected.tolist()


def test_biases_are_added() -> None:
    assert draws(3, temperature=0, logit_bias={4: 100.0}) == {4: 3}
    assert draws(3, temperature=0, logit_bias={1: -1.5}) == {2: 3}
    assert draws(200, temperature=1.0, logit_bias={1: -100.0}, seed=1).keys() <= {0, 2, 3, 4}


def test_a_mask_leaves_what_it_allows() -> None:
    assert draws(3, mask=mask_of(0, 3, 4), temperature=0) == {0: 3}
    assert draws(200, mask=mask_of(0, 3), temperature=2.0, seed=1).keys() == {0, 3}
    assert draws(50, mask=mask_of(3), temperature=1.0, top_p=0.9, top_k=3, min_p=0.5, seed=1) == {3: 50}
    # Not even a bias makes another token possible.
    assert draws(3, mask=mask_of(4), temperature=0, logit_bias={1: 100.0}) == {4: 3}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_first_allowed_token_is_taken_where_all_that_are_allowed_are_impossible(temperature: float) -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf, 0.0])
    assert draws(5, logits, mask_of(1, 3), temperature=temperature) == {1: 5}


# -- log-probabilities -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    own = LOGITS.log_softmax(0).tolist()
    one = sampler(5, temperature=0, logprobs=2, logit_bias={0: 50.0})
    (choice,) = sample(LOGITS.clone()[None], [Row(one, mask=mask_of(0, 4))])
    assert choice is not None
    assert choice.token == 0
    assert choice.logprob == pytest.approx(own[0], abs=1e-5)
    assert [token for token, _ in choice.top] == [1, 2]
    assert [value for _, value in choice.top] == pytest.approx([own[1], own[2]], abs=1e-5)


def test_logprobs_without_and_with_more_top_than_there_are_tokens() -> None:
    (choice,) = sample(LOGITS.clone()[None], [Row(sampler(5, temperature=0, logprobs=0))])
    assert choice is not None
    assert choice.top == []
    assert choice.logprob == pytest.approx(LOGITS.log_softmax(0)[1].item(), abs=1e-5)
    impossible = torch.tensor([0.0, 1.0, -math.inf])
    (choice,) = sample(impossible[None], [Row(sampler(3, temperature=0, logprobs=20))])
    assert choice is not None
    assert [token for token, _ in choice.top] == [1, 0, 2]
    assert choice.top[2][1] == MIN_LOGPROB


def test_equal_tokens_are_reported_in_order() -> None:
    (choice,) = sample(torch.zeros(1, 1000), [Row(sampler(1000, temperature=0, logprobs=3))])
    assert choice is not None
    assert [token for token, _ in choice.top] == [0, 1, 2]


# -- broken logits and parameters --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], [1.0, math.nan]])
@pytest.mark.parametrize("kind", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 1}])
def test_logits_that_are_no_numbers_spoil_only_their_own_row(bad: list[float], kind: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 1.0], bad, [2.0, 1.0]])
    greedy = Row(sampler(2, temperature=0))
    assert tokens(sample(logits, [greedy, Row(sampler(2, **kind), mask=mask_of(0)), greedy])) == [1, None, 0]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for filters in ({}, {"top_p": 0.999}, {"top_k": 4}, {"min_p": 1e-9}):
        assert draws(200, logits, temperature=1.0, seed=3, **filters).keys() == {1, 3}
        last = sampler(5, temperature=1.0, **filters)
        last.draw = lambda num_ahead=0: 1 - 2**-53  # type: ignore[method-assign]
        assert tokens(sample(logits[None].clone(), [Row(last)])) == [3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"top_k": 0},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": math.inf},
        {"presence_penalty": -1000.0},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logit_bias": {50: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {3: 100.5}},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidInput, match=name) as caught:
        sampler(50, **wrong)
    assert caught.value.param == name


@given(
    temperature=st.floats(0, 100),
    top_p=st.none() | st.floats(0, 1),
    top_k=st.none() | st.integers(1, 60),
    min_p=st.none() | st.floats(0, 1),
    logits=st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=40),
    drawn=st.floats(0, 1, exclude_max=True),
)
def test_every_choice_is_a_token(logits: list[float], drawn: float, **filters: Any) -> None:
    one = sampler(len(logits), **filters)
    one.draw = lambda num_ahead=0: drawn  # type: ignore[method-assign]
    (choice,) = sample(torch.tensor([logits]), [Row(one)])
    assert choice is not None
    assert 0 <= choice.token < len(logits)
