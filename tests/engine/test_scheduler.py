"""The scheduler over random traces of arrivals, slow readers and cancellations; no model takes part."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.pages import PageAllocator
from edge.engine.scheduler import Chunk, Scheduler, Sequence
from edge.errors import OutOfCapacity

PAGE_SIZE = 4


def make(num_pages: int = 16, step_tokens: int = 16, max_running: int = 4, max_waiting: int = 100) -> Scheduler:
    allocator = PageAllocator(num_pages, PAGE_SIZE)
    return Scheduler(allocator, step_tokens=step_tokens, max_running=max_running, max_waiting=max_waiting)


def sequence(number: int, num_prompt_tokens: int, credit: int = 1000) -> Sequence:
    return Sequence(number, [0] * num_prompt_tokens, num_prompt_tokens, credit)


def run(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step, in which every sequence that is complete gets a token: (id, number of tokens) of each chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        completes = chunk.completes
        scheduler.computed(chunk)
        if completes:
            chunk.sequence.tokens.append(0)
    return [(chunk.sequence.id, chunk.num_tokens) for chunk in chunks]


def test_a_long_prompt_is_cut_and_does_not_hold_up_decoding() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 2))
    assert run(scheduler) == [(1, 2)]
    scheduler.add(sequence(2, 40))
    assert [run(scheduler) for _ in range(4)] == [
        [(1, 1), (2, 15)],
        [(1, 1), (2, 15)],
        [(1, 1), (2, 10)],
        [(1, 1), (2, 1)],
    ]


def test_prompts_share_a_step_oldest_first() -> None:
    scheduler = make()
    for number, length in ((1, 6), (2, 6), (3, 6)):
        scheduler.add(sequence(number, length))
    assert run(scheduler) == [(1, 6), (2, 6), (3, 4)]
    assert run(scheduler) == [(1, 1), (2, 1), (3, 2)]


def test_no_more_than_max_running_run() -> None:
    scheduler = make(max_running=2)
    for number in (1, 2, 3):
        scheduler.add(sequence(number, 1))
    assert run(scheduler) == [(1, 1), (2, 1)]
    scheduler.remove(scheduler.running[0])
    assert run(scheduler) == [(2, 1), (3, 1)]


def test_the_queue_is_bounded() -> None:
    scheduler = make(max_waiting=2)
    scheduler.add(sequence(1, 1))
    scheduler.add(sequence(2, 1))
    with pytest.raises(OutOfCapacity, match=r"2 requests are waiting .* \(engine.max_waiting\)"):
        scheduler.add(sequence(3, 1))


def test_the_youngest_is_preempted_when_pages_run_out_and_comes_back() -> None:
    scheduler = make(num_pages=4)
    old, young = sequence(1, 7), sequence(2, 7)
    scheduler.add(old)
    scheduler.add(young)
    assert run(scheduler) == [(1, 7), (2, 7)]
    assert run(scheduler) == [(1, 1), (2, 1)]
    assert run(scheduler) == [(1, 1)]  # it needs a third page
    assert (young.num_computed_tokens, young.pages) == (0, [])
    scheduler.remove(old)
    assert run(scheduler) == [(2, 9)]  # everything again, its two answer tokens as well


def test_without_credit_a_sequence_waits_and_gives_way() -> None:
    scheduler = make(num_pages=4)
    slow, quick = sequence(1, 12), sequence(2, 12)
    scheduler.add(slow)
    assert run(scheduler) == [(1, 12)]
    slow.credit = 0
    assert not scheduler.has_work
    assert run(scheduler) == []
    scheduler.add(quick)
    assert run(scheduler) == [(2, 12)]
    assert slow.pages == []
    slow.credit = 1
    scheduler.remove(quick)
    assert run(scheduler) == [(1, 13)]


def test_prompts_must_be_able_to_move() -> None:
    with pytest.raises(ValueError, match=r"step_tokens \(4\) must be greater than max_running \(4\)"):
        make(step_tokens=4)


def test_scheduling_needs_no_torch() -> None:
    code = "import sys, edge.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@dataclass
class Trace:
    """What happens before one step."""

    prompts: list[int] = field(default_factory=list)
    cancel: int | None = None
    stall: int | None = None


traces = st.lists(
    st.builds(
        Trace,
        prompts=st.lists(st.integers(1, 40), max_size=2),
        cancel=st.none() | st.integers(0, 9),
        stall=st.none() | st.integers(0, 9),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(traces=traces, num_pages=st.integers(13, 30), step_tokens=st.integers(4, 24), num_answer=st.integers(1, 9))
def test_random_traces(traces: list[Trace], num_pages: int, step_tokens: int, num_answer: int) -> None:
    """No page leaks, the budget holds, credit is respected, decoding goes first, and everybody finishes."""
    scheduler = make(num_pages, step_tokens, max_running=3)
    allocator = scheduler._allocator
    live: list[Sequence] = []
    number = 0

    def step() -> list[Chunk]:
        has_work = scheduler.has_work
        decoding = [s for s in scheduler.running if s.credit > 0 and s.num_missing_tokens == 1]
        chunks = scheduler.schedule()
        assert bool(chunks) == has_work
        assert sum(chunk.num_tokens for chunk in chunks) <= step_tokens
        assert len(scheduler.running) <= 3
        assert len({chunk.sequence.id for chunk in chunks}) == len(chunks)
        planned = {chunk.sequence.id for chunk in chunks}
        assert all(s.id in planned for s in decoding if s in scheduler.running)
        for chunk in chunks:
            member = chunk.sequence
            assert member.credit > 0
            assert member in scheduler.running
            assert len(member.pages) * PAGE_SIZE >= member.num_computed_tokens + chunk.num_tokens
        held = [page for s in live for page in s.pages]
        assert len(held) == len(set(held)) == num_pages - allocator.num_free
        for chunk in chunks:
            completes = chunk.completes
            scheduler.computed(chunk)
            if completes:
                chunk.sequence.tokens.append(0)
                if chunk.sequence.num_output_tokens == num_answer:
                    scheduler.remove(chunk.sequence)
                    live.remove(chunk.sequence)
        return chunks

    for trace in traces:
        for length in trace.prompts:
            number += 1
            live.append(sequence(number, length))
            scheduler.add(live[-1])
        if trace.stall is not None and trace.stall < len(live):
            live[trace.stall].credit = 1000 if live[trace.stall].credit == 0 else 0
        if trace.cancel is not None and trace.cancel < len(live):
            scheduler.remove(live.pop(trace.cancel))
        step()

    for waiting in live:
        waiting.credit = 1000
    num_steps = 0
    while live:
        assert step(), "sequences are left, but nothing is scheduled"
        num_steps += 1
        assert num_steps < 10_000
    assert allocator.num_free == num_pages
    assert not scheduler.has_work
