"""The split of a process's CPU time: nothing is lost, nothing is invented, and honest claims are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.isolates.accounting import TYPICAL_OVERHEAD_US, CpuSplit

US = st.integers(0, 10**9)
STEPS = st.lists(st.tuples(st.sampled_from(["begin", "end", "look"]), US, st.integers(-(10**9), 10**12)), max_size=60)


@given(STEPS)
def test_the_parts_sum_up_to_what_the_clock_says(steps):
    split = CpuSplit(17)
    total_us, paid_us = 17, 0
    for kind, used_us, claim_us in steps:
        total_us += used_us
        if kind == "begin":
            split.begin(total_us)
        elif kind == "end" and split.num_active:
            part_us = split.end(total_us, claim_us)
            assert part_us >= 0
            paid_us += part_us
        else:
            split.pending_us(total_us)
        assert paid_us + split.pending_us(total_us) + split.pending_background_us(total_us) == total_us - 17
        assert split.num_active > 0 or split.pending_us(total_us) == 0


def test_one_at_a_time_pays_the_difference_whatever_it_claims():
    split = CpuSplit()
    for claim_us in (0, 10, 10**9, -5):
        split.begin(1000)
        assert split.end(1500, claim_us) == 500
        split = CpuSplit()


def test_what_is_used_between_invocations_is_nobodys():
    split = CpuSplit()
    split.begin(300)
    assert split.end(400, 0) == 100
    assert split.take_background(450) == 350
    assert split.pending_background_us(450) == 0


def test_interleaved_claims_are_kept():
    split = CpuSplit()
    split.begin(0)
    split.begin(0)
    idler = split.end(200_000, 0)
    assert idler <= TYPICAL_OVERHEAD_US
    assert split.end(200_000, 200_000) == 200_000 - idler


def test_the_overhead_of_each_is_learned():
    """Each of 3000 overlapping invocations works 500 us and costs 400 us around that: no remainder piles up."""
    split, total_us = CpuSplit(), 0
    split.begin(total_us)
    parts = []
    for _ in range(3000):
        split.begin(total_us)
        total_us += 900
        parts.append(split.end(total_us, 500))
    assert sum(parts[-500:]) / 500 == pytest.approx(900, rel=0.05)


def test_a_clock_that_stands_still_or_jumps_back_harms_nothing():
    split = CpuSplit(100)
    split.begin(50)
    assert split.end(90, 10) == 0
