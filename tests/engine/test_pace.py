"""How many prompt tokens go beside the others' next tokens."""

from __future__ import annotations

import pytest

from edge.engine.pace import (
    IDLE_TEXTS_US,
    MIN_TEXTS_US,
    MIN_TOKENS,
    MIN_TOKENS_BESIDE_FEW,
    SHARE,
    Pace,
    Prompts,
    texts_us,
)


def learned(decode_us: int = 10_000, prompt_token_us: int = 100) -> Pace:
    pace = Pace(512)
    for _ in range(50):
        pace.observe(8, Prompts(0, 0), decode_us)
        pace.observe(8, Prompts(16, 0), decode_us + 16 * prompt_token_us)
    return pace


def test_a_lone_prompt_takes_a_fixed_share_of_the_step() -> None:
    assert learned().prompt_tokens(8, 1, 0) == int(SHARE * 10_000 / 100)


def test_each_prompt_takes_a_share_and_many_behind_few_decoders_take_all() -> None:
    assert learned().prompt_tokens(32, 2, 0) == int(2 * SHARE * 10_000 / 100)
    assert learned().prompt_tokens(8, 2, 0) == 512
    assert learned().prompt_tokens(1, 31, 0) == 512


def test_texts_take_a_share_of_a_step_in_which_somebody_decodes_and_little_if_they_are_outranked() -> None:
    assert texts_us(None, beside_decoding=False, is_outranked=False) == IDLE_TEXTS_US
    assert texts_us(60_000, beside_decoding=False, is_outranked=False) == 60_000  # prompts alone
    assert texts_us(60_000, beside_decoding=True, is_outranked=False) == SHARE * 60_000
    assert texts_us(60, beside_decoding=True, is_outranked=False) == MIN_TEXTS_US
    for step_us in (None, 60_000):
        assert texts_us(step_us, beside_decoding=step_us is not None, is_outranked=True) == MIN_TEXTS_US


def test_there_is_always_some_progress_and_never_more_than_a_step() -> None:
    assert learned(decode_us=100).prompt_tokens(8, 1, 0) == MIN_TOKENS
    assert learned(decode_us=100).prompt_tokens(2, 1, 0) == MIN_TOKENS_BESIDE_FEW
    assert learned(decode_us=10**9).prompt_tokens(8, 1, 0) == 512


def test_mixed_steps_teach_what_a_prompt_token_costs() -> None:
    pace = Pace(512)
    assert pace.prompt_tokens(8, 1, 0) == 128
    for _ in range(100):
        pace.observe(8, Prompts(0, 0), 30_000)
        pace.observe(8, Prompts(50, 0), 40_000)
    assert pace.prompt_tokens(8, 1, 0) == pytest.approx(SHARE * 30_000 / 200, abs=1)


def test_what_a_step_costs_depends_on_how_many_decode() -> None:
    pace = Pace(512)
    for _ in range(100):
        pace.observe(2, Prompts(0, 0), 5_000)
        pace.observe(16, Prompts(0, 0), 20_000)
        pace.observe(16, Prompts(100, 0), 40_000)
    assert pace.prompt_tokens(16, 1, 0) == pytest.approx(SHARE * 20_000 / 200, abs=1)
    for _ in range(100):
        pace.observe(2, Prompts(0, 0), 20_000)
    assert pace.prompt_tokens(3, 1, 0) == pytest.approx(SHARE * 20_000 / 200, abs=1)
    assert pace.prompt_tokens(12, 1, 0) == pytest.approx(SHARE * 20_000 / 200, abs=1)


def test_tokens_cost_more_the_more_there_are_before_them() -> None:
    pace = Pace(512)
    for num_before in range(0, 2000, 20):
        pace.observe(16, Prompts(0, 0), 20_000)
        pace.observe(16, Prompts(20, 20 * num_before), 20_000 + 20 * (100 + num_before // 10))
    assert pace.prompt_tokens(16, 1, 2000) == pytest.approx(SHARE * 20_000 / 300, abs=1)
    assert pace.prompt_tokens(16, 1, 3000) == pytest.approx(SHARE * 20_000 / 400, abs=1)


def test_steps_of_prompts_alone_teach_with_caution() -> None:
    pace = Pace(512)
    for _ in range(50):
        pace.observe(16, Prompts(0, 0), 20_000)
        pace.observe(0, Prompts(512, 0), 512 * 100)
    assert pace.prompt_tokens(16, 1, 0) == pytest.approx(SHARE * 20_000 / 200, abs=1)
    for _ in range(50):
        pace.observe(16, Prompts(8, 0), 20_000 + 8 * 400)
    assert pace.prompt_tokens(16, 1, 0) == pytest.approx(SHARE * 20_000 / 400, abs=1)
