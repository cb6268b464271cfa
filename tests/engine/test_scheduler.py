"""The scheduler over hand-made cases and over random traces. No model takes part: `Engine` computes hashes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
from helpers import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.pages import PageAllocator
from edge.engine.scheduler import Chunk, Scheduler, Sequence
from edge.errors import OutOfCapacity

PAGE_SIZE = 4
PRIME = (1 << 61) - 1


def make(
    num_pages: int = 16,
    step_tokens: int = 16,
    max_running: int = 4,
    max_waiting: int = 100,
    max_overtaken: int = 16,
    arrivals_per_priority: int = 64,
) -> Scheduler:
    return Scheduler(
        PageAllocator(num_pages, PAGE_SIZE),
        step_tokens=step_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
        max_overtaken=max_overtaken,
        arrivals_per_priority=arrivals_per_priority,
    )


def sequence(number: int, num_prompt_tokens: int, credit: int = 1000, priority: int = 0) -> Sequence:
    """A sequence whose prompt shares nothing with that of another number."""
    return Sequence(number, [number] * num_prompt_tokens, num_prompt_tokens, credit, priority)


def prompt(number: int, tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(number, tokens, len(tokens), 1000, salt=salt)


def run(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step, in which every sequence that is complete gets a token: (id, number of tokens) of each chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        completes = chunk.completes
        scheduler.computed(chunk)
        if completes:
            chunk.sequence.tokens.append(0)
    return [(chunk.sequence.id, chunk.num_tokens) for chunk in chunks]


def finish(scheduler: Scheduler, member: Sequence) -> None:
    """Run `member`, which is alone, until its prompt is computed, and remove it."""
    scheduler.add(member)
    while member.num_output_tokens == 0:
        run(scheduler)
    scheduler.remove(member)


# -- the budget --------------------------------------------------------------------------------------------


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


def test_prompts_get_less_of_a_step_while_somebody_reads_an_answer() -> None:
    scheduler = make()
    scheduler.prefill_tokens = 5
    first = sequence(1, 20)
    scheduler.add(first)
    assert [run(scheduler) for _ in range(2)] == [[(1, 16)], [(1, 4)]]  # nobody waits for a next token
    scheduler.add(sequence(2, 12))
    assert [run(scheduler) for _ in range(2)] == [[(1, 1), (2, 5)], [(1, 1), (2, 5)]]
    first.credit = 0
    assert run(scheduler) == [(2, 2)]


def test_prompts_share_a_step_oldest_first() -> None:
    scheduler = make()
    for number, length in ((1, 6), (2, 6), (3, 6)):
        scheduler.add(sequence(number, length))
    assert run(scheduler) == [(1, 6), (2, 6), (3, 4)]
    assert run(scheduler) == [(1, 1), (2, 1), (3, 2)]


def test_a_short_prompt_does_not_wait_for_a_long_one_which_gets_half() -> None:
    scheduler = make(num_pages=30)
    scheduler.add(sequence(1, 60))
    assert run(scheduler) == [(1, 16)]
    scheduler.add(sequence(2, 11))
    assert run(scheduler) == [(2, 8), (1, 8)]
    assert run(scheduler) == [(2, 3), (1, 13)]


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


def test_prompts_must_be_able_to_move() -> None:
    with pytest.raises(ValueError, match=r"step_tokens \(4\) must be greater than max_running \(4\)"):
        make(step_tokens=4)


def test_scheduling_needs_no_torch() -> None:
    code = "import sys, edge.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- preemption and priority -------------------------------------------------------------------------------


def test_the_youngest_is_preempted_when_pages_run_out_and_comes_back() -> None:
    scheduler = make(num_pages=4)
    old, young = sequence(1, 7), sequence(2, 7)
    scheduler.add(old)
    scheduler.add(young)
    assert run(scheduler) == [(1, 7), (2, 7)]
    assert run(scheduler) == [(1, 1), (2, 1)]
    assert run(scheduler) == [(1, 1)]  # it needs a third page
    assert (young.num_computed_tokens, young.pages, young.num_preemptions) == (0, [], 1)
    scheduler.remove(old)
    assert run(scheduler) == [(2, 5)]  # all but what is found of it, its two answer tokens as well
    assert young.num_cached_tokens == 0  # that was its own work


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
    assert run(scheduler) == [(1, 9)]


def test_higher_priority_is_admitted_first_and_equal_priority_in_order() -> None:
    scheduler = make(max_running=1, step_tokens=16)
    members = [sequence(number, 1, priority=priority) for number, priority in enumerate([0, -5, 0, 7, 7, 100])]
    for member in members:
        scheduler.add(member)
    order = []
    while scheduler.has_work:
        run(scheduler)
        order.append(scheduler.running[0].id)
        scheduler.remove(scheduler.running[0])
    assert order == [5, 3, 4, 0, 2, 1]


def test_higher_priority_takes_a_place_and_pages_only_if_there_are_none() -> None:
    scheduler = make(num_pages=8, max_running=3)
    low, middle = sequence(1, 9), sequence(2, 9, priority=1)
    for member in (low, middle):
        scheduler.add(member)
    run(scheduler)
    scheduler.add(sequence(3, 7, priority=2))  # two pages are left
    run(scheduler)
    assert [member.id for member in scheduler.running] == [3, 2, 1]
    scheduler.add(sequence(4, 3, priority=1))  # a place is needed
    run(scheduler)
    assert [member.id for member in scheduler.running] == [3, 2, 4]
    scheduler.add(sequence(5, 9, priority=1))
    run(scheduler)
    assert [member.id for member in scheduler.running] == [3, 2, 4]  # nobody gives way to an equal
    assert (low.num_preemptions, middle.num_preemptions) == (1, 0)


def test_nobody_gives_way_in_vain() -> None:
    scheduler = make(num_pages=8)
    for member in (sequence(1, 20, priority=5), sequence(2, 4)):
        scheduler.add(member)
    run(scheduler)
    run(scheduler)
    scheduler.add(sequence(3, 25, priority=1))  # even with the pages of 2 there would be too few
    run(scheduler)
    assert [member.id for member in scheduler.running] == [1, 2]


def test_low_priority_is_overtaken_by_so_many_later_ones_at_most() -> None:
    scheduler = make(max_running=1, arrivals_per_priority=3)
    low = sequence(0, 1)
    scheduler.add(low)
    num_overtaking = 0
    for number in range(1, 100):
        scheduler.add(sequence(number, 1, priority=2))
        run(scheduler)
        if scheduler.running[0] is low:
            break
        num_overtaking += 1
        scheduler.remove(scheduler.running[0])
    assert num_overtaking == 5  # those less than 2 * 3 arrivals later
    scheduler.add(sequence(100, 1, priority=2))
    run(scheduler)
    assert scheduler.running == [low]  # and once it runs, they do not take its place


# -- shared prefixes ---------------------------------------------------------------------------------------


def test_a_prompt_that_was_seen_is_found_but_for_its_last_page() -> None:
    scheduler = make()
    tokens = list(range(12))
    finish(scheduler, prompt(1, tokens[:]))
    again, longer = prompt(2, tokens[:]), prompt(3, [*tokens, 12, 13])
    for member in (again, longer):
        scheduler.add(member)
    assert run(scheduler) == [(3, 2), (2, 4)]
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (8, 12)
    assert again.pages[:2] == longer.pages[:2]
    assert len(set(again.pages + longer.pages)) == 5


def test_of_full_pages_only_the_last_token_is_computed_where_it_is_stored_as_it_was() -> None:
    scheduler = make()
    scheduler.recomputes_in_place = True
    tokens = list(range(12))
    first = prompt(1, tokens[:])
    scheduler.add(first)
    run(scheduler)
    again, shorter = prompt(2, tokens[:]), prompt(3, tokens[:11])
    for member in (again, shorter):
        scheduler.add(member)
    assert run(scheduler) == [(1, 1), (2, 1), (3, 3)]
    assert (again.num_cached_tokens, shorter.num_cached_tokens) == (11, 8)
    assert again.pages[:3] == first.pages[:3]
    run(scheduler)
    assert again.pages[3] != first.pages[3]


def test_the_answer_is_found_in_the_next_turn() -> None:
    scheduler = make()
    first = prompt(1, [1, 2, 3])
    scheduler.add(first)
    for _ in range(6):
        run(scheduler)
    scheduler.remove(first)
    assert first.tokens == [1, 2, 3, 0, 0, 0, 0, 0, 0]
    second = prompt(2, [*first.tokens, 5])
    scheduler.add(second)
    assert run(scheduler) == [(2, 2)]
    assert second.num_cached_tokens == 8


def test_another_salt_finds_nothing() -> None:
    scheduler = make()
    finish(scheduler, prompt(1, [7] * 12, salt="alice"))
    stranger = prompt(2, [7] * 12, salt="bob")
    scheduler.add(stranger)
    assert run(scheduler) == [(2, 12)]
    assert stranger.num_cached_tokens == 0


def test_of_two_equal_prompts_the_second_waits_for_the_first() -> None:
    scheduler = make()
    first, second = prompt(1, [7] * 24), prompt(2, [7] * 23)
    for member in (first, second):
        scheduler.add(member)
    assert run(scheduler) == [(1, 16)]
    assert run(scheduler) == [(1, 8)]
    assert run(scheduler) == [(1, 1), (2, 3)]
    assert second.num_cached_tokens == 20


def test_nobody_waits_for_one_that_does_not_move() -> None:
    scheduler = make(num_pages=30)
    first, second = prompt(1, [7] * 24), prompt(2, [7] * 24)
    for member in (first, second):
        scheduler.add(member)
    run(scheduler)
    first.credit = 0
    assert run(scheduler) == [(2, 8)]
    assert second.num_cached_tokens == 16


def test_nobody_waits_for_one_of_lower_priority() -> None:
    scheduler = make(num_pages=30)
    low, high = prompt(1, [7] * 24), prompt(2, [7] * 24)
    high.priority = 1
    scheduler.add(low)
    run(scheduler)
    scheduler.add(high)
    assert run(scheduler) == [(2, 8), (1, 8)]


def test_what_was_cached_once_does_not_go_first() -> None:
    scheduler = make(num_pages=7, max_running=1)
    finish(scheduler, prompt(0, list(range(9))))
    first, plain, cached = sequence(1, 3), sequence(2, 9), prompt(3, [*range(8), 3])
    for member in (first, plain, cached):
        scheduler.add(member)
    run(scheduler)
    assert (scheduler.running, cached.num_found_pages) == ([cached], 2)
    scheduler.remove(cached)
    scheduler.add(prompt(4, [*range(8), 4]))
    scheduler.remove(first)
    scheduler.add(sequence(5, 25, priority=1))  # it takes all pages
    run(scheduler)
    scheduler.remove(scheduler.running[0])
    run(scheduler)
    assert scheduler.running == [plain]


def test_what_is_cached_goes_first_but_others_are_not_overtaken_forever() -> None:
    scheduler = make(max_running=1, max_overtaken=3)
    tokens = list(range(8))
    finish(scheduler, prompt(0, tokens[:]))
    scheduler.add(sequence(1, 9))
    order = []
    for number in range(2, 9):
        scheduler.add(prompt(number, [*tokens, number]))
        run(scheduler)
        order.append(scheduler.running[0].id)
        scheduler.remove(scheduler.running[0])
    assert order == [2, 3, 4, 1, 5, 6, 7]


def test_broken_pages_are_not_found_again_nor_what_came_of_them() -> None:
    scheduler = make()
    tokens = list(range(8))
    finish(scheduler, prompt(1, [*tokens, 1, 1, 1, 1, 1]))  # a third page, after the two that will be broken
    broken, other = prompt(2, [*tokens, 2]), prompt(3, [*tokens, 3])
    for member in (broken, other):
        scheduler.add(member)
    run(scheduler)
    assert (broken.pages, other.pages) == ([0, 1, 3], [0, 1, 4])  # and page 2 is the third page of 1
    assert scheduler.discard(broken) == [2, 3]
    assert scheduler._allocator.num_cached == 0
    assert not other.shareable
    assert scheduler.discard(other) == [0, 1, 4]
    late = prompt(4, [*tokens, 4])
    scheduler.add(late)
    assert run(scheduler) == [(4, 9)]


# -- guesses -----------------------------------------------------------------------------------------------


def test_right_guesses_are_kept_and_wrong_ones_are_computed_again() -> None:
    scheduler = make()
    member = prompt(1, [1, 2, 3, 4, 5])
    scheduler.add(member)
    run(scheduler)
    member.draft = [7, 8, 9]
    [chunk] = scheduler.schedule()
    assert (chunk.num_tokens, chunk.num_draft, chunk.completes) == (4, 3, True)
    assert len(member.pages) == 3  # nine tokens
    scheduler.computed(chunk, num_accepted=2)
    member.tokens += [7, 8, 6]
    member.draft = []
    assert (member.num_computed_tokens, member.num_missing_tokens) == (8, 1)
    assert run(scheduler) == [(1, 1)]
    follower = prompt(2, [1, 2, 3, 4, 5, 0, 7, 8, 1])
    scheduler.add(follower)
    assert run(scheduler) == [(1, 1), (2, 1)]
    assert follower.num_cached_tokens == 8


def test_guesses_take_the_tokens_that_are_left() -> None:
    scheduler = make(step_tokens=8)
    first = sequence(1, 2)
    scheduler.add(first)
    run(scheduler)
    first.draft = [0] * 30
    assert run(scheduler) == [(1, 8)]
    scheduler.add(sequence(2, 3))
    assert run(scheduler) == [(1, 5), (2, 3)]  # prompts come before guesses


def test_nobody_gives_way_to_a_guess() -> None:
    scheduler = make(num_pages=3)
    first, second = sequence(1, 5), sequence(2, 3)
    for member in (first, second):
        scheduler.add(member)
    run(scheduler)
    assert scheduler._allocator.num_free == 0
    first.draft = [0] * 9
    assert run(scheduler) == [(1, 3), (2, 1)]  # its two pages hold eight tokens


# -- random traces -----------------------------------------------------------------------------------------


def values(salt: str, tokens: list[int]) -> list[int]:
    """What stands in a cache after each of `tokens`: hashes of all that came before."""
    value, result = sum(salt.encode()), []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % PRIME
        result.append(value)
    return result


def next_token(value: int) -> int:
    return value % 2


def answer(salt: str, tokens: list[int], num_tokens: int) -> list[int]:
    """What comes after `tokens` when nothing else runs."""
    tokens = tokens[:]
    for _ in range(num_tokens):
        tokens.append(next_token(values(salt, tokens)[-1]))
    return tokens[-num_tokens:]


class Engine:
    """Runs steps over pages in which it writes and reads values, and checks everything that it sees."""

    def __init__(self, scheduler: Scheduler, step_tokens: int, num_answer: int, draft: list[bool]) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler._allocator
        self.step_tokens = step_tokens
        self.num_answer = num_answer
        self.draft = draft
        self.live: list[Sequence] = []
        self.slots: dict[tuple[int, int], int] = {}
        self.num_computed: Counter[int] = Counter()
        self.overtaken_by: dict[int, set[int]] = {}
        self.was_stalled: set[int] = set()
        self.num_added = 0

    def add(self, tokens: list[int], salt: str, priority: int) -> None:
        member = Sequence(self.num_added, tokens[:], len(tokens), 1000, priority, salt)
        self.num_added += 1
        self.scheduler.add(member)
        self.live.append(member)
        self.overtaken_by[member.id] = set()

    def step(self) -> list[Chunk]:
        for member in self.scheduler.running:
            guesses = answer(member.salt, member.tokens, len(self.draft)) if self.draft else []
            room = self.num_answer - member.num_output_tokens - 1
            member.draft = [token ^ wrong for token, wrong in zip(guesses, self.draft, strict=True)][:room]
        has_work = self.scheduler.has_work
        decoding = [
            (s, s.num_preemptions) for s in self.scheduler.running if s.credit > 0 and s.num_missing_tokens == 1
        ]
        chunks = self.scheduler.schedule()
        assert bool(chunks) == has_work
        self.check_plan(chunks, [s for s, num_preemptions in decoding if s.num_preemptions == num_preemptions])
        self.check_pages()
        self.note_overtaking()
        for chunk in chunks:
            self.compute(chunk)
        return chunks

    def check_plan(self, chunks: list[Chunk], decoding: list[Sequence]) -> None:
        assert sum(chunk.num_tokens for chunk in chunks) <= self.step_tokens
        assert len(self.scheduler.running) <= 3
        planned = {chunk.sequence.id for chunk in chunks}
        assert len(planned) == len(chunks)
        assert all(s.id in planned for s in decoding)
        prefills = [chunk.num_tokens for chunk in chunks if chunk.sequence.num_missing_tokens > 1]
        if any(s.num_output_tokens > 0 for s in decoding):
            assert sum(prefills) <= self.scheduler.prefill_tokens
        for chunk in chunks:
            member = chunk.sequence
            assert chunk.num_tokens > chunk.num_draft
            assert member.credit > 0
            assert member in self.scheduler.running
            assert len(member.pages) * PAGE_SIZE >= member.num_computed_tokens + chunk.num_tokens

    def check_pages(self) -> None:
        holders = Counter(page for member in self.live for page in member.pages)
        assert [holders[page] for page in range(self.allocator.num_pages)] == self.allocator._counts
        assert self.allocator.num_free == self.allocator.num_pages - len(holders)
        for page in holders:
            assert len({member.salt for member in self.live if page in member.pages}) == 1

    def note_overtaking(self) -> None:
        self.was_stalled |= {member.id for member in self.live if member.credit <= 0}
        for member in self.scheduler.waiting:
            if member.num_preemptions == 0:
                self.overtaken_by[member.id] |= {s.id for s in self.scheduler.running if s.arrival > member.arrival}

    def compute(self, chunk: Chunk) -> None:
        member, start = chunk.sequence, chunk.sequence.num_computed_tokens
        end = start + chunk.num_tokens
        tokens = (member.tokens + member.draft)[:end]
        assert len(tokens) == end
        right = values(member.salt, tokens)
        for position in range(start):
            assert self.slots[self.slot(member, position)] == right[position]
        for position in range(start, end):
            page, _ = slot = self.slot(member, position)
            if page in self.allocator._keys:  # it is stored again as it was
                assert self.scheduler.recomputes_in_place
                assert position == member.num_tokens - 1
                assert self.slots[slot] == right[position]
            else:
                assert self.allocator._counts[page] == 1
            self.slots[slot] = right[position]
        self.num_computed[member.id] += max(0, min(end, member.num_prompt_tokens) - start)
        if not chunk.completes:
            self.scheduler.computed(chunk)
            return
        last = end - chunk.num_draft - 1
        chosen = [next_token(self.slots[self.slot(member, last)])]
        for guess in member.draft[: chunk.num_draft]:
            if guess != chosen[-1]:
                break
            chosen.append(next_token(self.slots[self.slot(member, last + len(chosen))]))
        self.scheduler.computed(chunk, num_accepted=len(chosen) - 1)
        member.tokens += chosen
        if member.num_output_tokens == self.num_answer:
            self.finish(member)

    def slot(self, member: Sequence, position: int) -> tuple[int, int]:
        return member.pages[position // PAGE_SIZE], position % PAGE_SIZE

    def finish(self, member: Sequence) -> None:
        start = member.tokens[: member.num_prompt_tokens]
        assert member.tokens[member.num_prompt_tokens :] == answer(member.salt, start, self.num_answer)
        if member.num_preemptions == 0:
            assert self.num_computed[member.id] + member.num_cached_tokens == member.num_prompt_tokens
        self.scheduler.remove(member)
        self.live.remove(member)


@dataclass
class Trace:
    """What happens before one step."""

    prompts: list[tuple[int, int, str, int]] = field(default_factory=list)
    """Each: where it leaves the common text, length, salt, priority."""
    cancel: int | None = None
    stall: int | None = None
    discard: int | None = None


arrivals = st.tuples(st.integers(0, 40), st.integers(1, 40), st.sampled_from("ab"), st.integers(-2, 2))
members = st.none() | st.integers(0, 9)
traces = st.lists(
    st.builds(Trace, prompts=st.lists(arrivals, max_size=3), cancel=members, stall=members, discard=members),
    max_size=25,
)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    traces=traces,
    num_pages=st.integers(13, 30),
    step_tokens=st.integers(4, 24),
    prefill_tokens=st.integers(1, 24),
    num_answer=st.integers(1, 9),
    draft=st.lists(st.booleans(), max_size=4),
    max_overtaken=st.integers(0, 4),
    arrivals_per_priority=st.integers(0, 4),
    recomputes_in_place=st.booleans(),
)
def test_random_traces(
    traces: list[Trace],
    num_pages: int,
    step_tokens: int,
    prefill_tokens: int,
    num_answer: int,
    draft: list[bool],
    max_overtaken: int,
    arrivals_per_priority: int,
    recomputes_in_place: bool,
) -> None:
    """Whatever happens: everybody reads its own prefix and finishes, and budget, pages and fairness are kept."""
    scheduler = make(
        num_pages,
        step_tokens,
        max_running=3,
        max_overtaken=max_overtaken,
        arrivals_per_priority=arrivals_per_priority,
    )
    scheduler.prefill_tokens = prefill_tokens
    scheduler.recomputes_in_place = recomputes_in_place
    engine = Engine(scheduler, step_tokens, num_answer, draft)
    common = [(position * 7) % 5 for position in range(40)]
    for trace in traces:
        for branch, length, salt, priority in trace.prompts:
            own = [9 + engine.num_added] * length
            engine.add((common[:branch] + own)[:length], salt, priority)
        if trace.stall is not None and trace.stall < len(engine.live):
            stalled = engine.live[trace.stall]
            stalled.credit = 1000 if stalled.credit == 0 else 0
        if trace.cancel is not None and trace.cancel < len(engine.live):
            scheduler.remove(engine.live.pop(trace.cancel))
        if trace.discard is not None and trace.discard < len(engine.live):
            for page in scheduler.discard(engine.live.pop(trace.discard)):
                engine.slots.update({(page, offset): -1 for offset in range(PAGE_SIZE)})
        engine.step()

    for member in engine.live:
        member.credit = 1000
    num_steps = 0
    while engine.live:
        assert engine.step(), "sequences are left, but nothing is scheduled"
        num_steps += 1
        assert num_steps < 10_000
    assert engine.allocator.num_free == num_pages
    assert not scheduler.has_work
    for number, others in engine.overtaken_by.items():
        if number not in engine.was_stalled:
            assert len(others) <= max_overtaken + arrivals_per_priority * 4


def test_who_would_not_wait_is_refused_where_there_is_no_place_now() -> None:
    scheduler = make(num_pages=4, max_running=2)
    scheduler.add(sequence(1, 4), reject_if_busy=True)
    scheduler.add(sequence(2, 8))  # there is a place for it, as far as anybody knows before the step
    with pytest.raises(OutOfCapacity, match="busy with 2 requests, and rejectIfBusy was asked for"):
        scheduler.add(sequence(3, 4), reject_if_busy=True)
    run(scheduler)
    for each in scheduler.running[:]:
        scheduler.remove(each)
    scheduler.add(sequence(4, 14))
    scheduler.add(sequence(5, 8))
    assert run(scheduler) == [(4, 14)]
    scheduler.remove(scheduler.running[0])
    with pytest.raises(OutOfCapacity):  # one was left without pages, though not all places are taken
        scheduler.add(sequence(6, 4), reject_if_busy=True)
    run(scheduler)
    scheduler.add(sequence(7, 4), reject_if_busy=True)
