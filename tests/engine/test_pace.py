"""How many prompt tokens go beside the others' next tokens."""

from __future__ import annotations

import pytest

from edge.engine.pace import MIN_TOKENS, SHARE, Pace


def learned(decode_us: int = 10_000, prompt_token_us: int = 100) -> Pace:
    pace = Pace(512)
    for _ in range(50):
        pace.observe(8, 0, decode_us)
        pace.observe(0, 512, 512 * prompt_token_us)
    return pace


def test_a_lone_prompt_takes_a_fixed_share_of_the_step() -> None:
    assert learned().prompt_tokens(8, 1) == int(SHARE * 10_000 / 100)


def test_each_prompt_takes_a_share_and_many_behind_few_decoders_take_all() -> None:
    assert learned().prompt_tokens(32, 2) == int(2 * SHARE * 10_000 / 100)
    assert learned().prompt_tokens(8, 2) == 512
    assert learned().prompt_tokens(1, 31) == 512


def test_there_is_always_some_progress_and_never_more_than_a_step() -> None:
    assert learned(decode_us=100).prompt_tokens(8, 1) == MIN_TOKENS
    assert learned(decode_us=10**9).prompt_tokens(8, 1) == 512


def test_mixed_steps_teach_what_a_prompt_token_costs() -> None:
    pace = Pace(512)
    assert pace.prompt_tokens(8, 1) == 128
    for _ in range(100):
        pace.observe(8, 0, 30_000)
        pace.observe(8, 50, 40_000)
    assert pace.prompt_tokens(8, 1) == int(SHARE * 30_000 / 200)


def test_what_a_step_costs_depends_on_how_many_decode() -> None:
    pace = Pace(512)
    for _ in range(100):
        pace.observe(2, 0, 5_000)
        pace.observe(16, 0, 20_000)
        pace.observe(16, 100, 40_000)
    assert pace.prompt_tokens(16, 1) == pytest.approx(SHARE * 20_000 / 200, abs=1)
    for _ in range(100):
        pace.observe(2, 0, 20_000)
    assert pace.prompt_tokens(3, 1) == pytest.approx(SHARE * 20_000 / 200, abs=1)
    assert pace.prompt_tokens(12, 1) == pytest.approx(SHARE * 20_000 / 200, abs=1)
