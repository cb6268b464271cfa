from __future__ import annotations

import re

import pytest
from doubles import MODEL, STAND_IN, catalogue
from hypothesis import given
from hypothesis import strategies as st

from edge.ai import rate_limits
from edge.ai.call_report import CallReport, RateStatus
from edge.ai.rate_limits import DEFAULTS, WINDOW_S, RateLimits
from edge.config import ApiConfig
from edge.errors import ConfigError, InvalidInput, TooManyRequests

TASK = "text-generation"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def admit(limits: RateLimits, account: str = "a", task: str = TASK, model: str = "m") -> RateStatus | None:
    report = CallReport()
    limits.admit(account, task, model, report)
    return report.rate


def test_the_limit_is_that_of_a_minute_and_the_wait_is_exact() -> None:
    clock = Clock()
    limits = RateLimits({TASK: 2}, clock)
    assert admit(limits) == (2, 1, 60.0)
    clock.now_s += 10.5
    assert admit(limits) == (2, 0, 49.5)
    report = CallReport()
    with pytest.raises(TooManyRequests) as refused:
        limits.admit("a", TASK, "m", report)
    assert (refused.value.retry_after_s, report.rate) == (50, (2, 0, 49.5))
    assert "'a' has made 2 calls of text-generation within a minute, of 2 that it may make" in refused.value.message
    clock.now_s += 49.4
    with pytest.raises(TooManyRequests) as refused:
        admit(limits)
    assert refused.value.retry_after_s == 1
    clock.now_s += 0.1  # what was refused has not counted
    assert admit(limits) == (2, 0, 10.5)


def test_calls_that_are_made_together_are_let_through_or_refused_together() -> None:
    clock = Clock()
    limits = RateLimits({TASK: 5}, clock)
    for num_calls in (1, 2):
        limits.admit("a", TASK, "m", CallReport(), num_calls)
        clock.now_s += 10
    report = CallReport()
    with pytest.raises(TooManyRequests, match=r"has made 3 calls of .*; the 4 of this request may be made in 50 s"):
        limits.admit("a", TASK, "m", report, 4)
    assert report.rate == (5, 2, 50.0)
    limits.admit("a", TASK, "m", report, 2)
    assert report.rate == (5, 0, 40.0)
    clock.now_s += 50
    limits.admit("a", TASK, "m", report, 3)
    assert report.rate is not None
    assert report.rate.remaining == 0
    with pytest.raises(InvalidInput, match="asks for 6 answers, and 5 calls of text-generation may be made within"):
        limits.admit("a", TASK, "m", report, 6)


def test_accounts_tasks_and_models_are_counted_apart() -> None:
    limits = RateLimits({TASK: 1, "text-embeddings": 1, "@cf/a/b": 1}, Clock())
    assert admit(limits) == (1, 0, 60.0)
    assert admit(limits, account="b") == (1, 0, 60.0)
    assert admit(limits, task="text-embeddings") == (1, 0, 60.0)
    assert admit(limits, model="@cf/a/b") == (1, 0, 60.0)
    with pytest.raises(TooManyRequests, match="calls of @cf/a/b"):
        admit(limits, model="@cf/a/b")
    with pytest.raises(TooManyRequests):
        admit(limits, model="another")


def test_what_has_no_limit_is_not_counted() -> None:
    limits = RateLimits({TASK: 0}, Clock())
    assert [admit(limits) for _ in range(1000)] == [None] * 1000
    assert admit(limits, task="translation") is None
    assert not limits._windows


def test_accounts_that_made_no_call_for_a_minute_take_no_memory() -> None:
    clock = Clock()
    limits = RateLimits({TASK: 3}, clock)
    for number in range(500):
        admit(limits, account=str(number))
        clock.now_s += 1
    assert len(limits._windows) <= WINDOW_S + 1


@given(st.lists(st.floats(0, 30), min_size=1, max_size=200), st.integers(1, 5))
def test_no_minute_has_more_calls_than_the_limit(gaps_s: list[float], limit: int) -> None:
    clock, admitted = Clock(), []
    limits = RateLimits({TASK: limit}, clock)
    for gap_s in gaps_s:
        clock.now_s += gap_s
        if len(admitted) >= limit and admitted[-limit] + WINDOW_S > clock.now_s:
            with pytest.raises(TooManyRequests) as refused:
                admit(limits)
            assert refused.value.retry_after_s is not None
            assert admitted[-limit] + WINDOW_S - clock.now_s <= refused.value.retry_after_s
        else:
            admit(limits)
            admitted.append(clock.now_s)
    assert all(first + WINDOW_S <= later for first, later in zip(admitted, admitted[limit:], strict=False))


def test_the_configuration_goes_over_the_published_limits() -> None:
    asked = {"translation": 7, "@cf/a/b": 9}
    limits = rate_limits.of(ApiConfig(rate_limits="on", requests_per_minute=asked), ["@cf/a/b"])
    assert (admit(limits) or ())[:1] == (DEFAULTS[TASK],) == (300,)
    assert (admit(limits, task="translation") or ())[:1] == (7,)
    assert (admit(limits, model="@cf/a/b") or ())[:1] == (9,)
    for off in (None, "off"):
        config = ApiConfig(rate_limits=off, requests_per_minute=asked)
        assert admit(rate_limits.of(config, ["@cf/a/b"]), model="@cf/a/b") is None


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("text-genration", "did you mean 'text-generation'?"),
        ("Text Embeddings", "did you mean 'text-embeddings'?"),
        ("@cf/metta/llama-3.2-1b-instruct", f"did you mean '{STAND_IN}'?"),
        (MODEL[:-1], f"did you mean '{MODEL}'?"),
        ("zzz", "tasks are text-generation, text-embeddings"),
    ],
)
def test_a_limit_for_nothing_is_a_mistake(key: str, hint: str) -> None:
    for switch in ("on", "off", None):
        config = ApiConfig(rate_limits=switch, requests_per_minute={TASK: 1, key: 2})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=re.escape(hint)):
            rate_limits.of(config, catalogue().known_ids)
