from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge.engine.pages import OutOfPages, PageAllocator


def test_pages_are_counted_up() -> None:
    allocator = PageAllocator(4, 16)
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17, 64)] == [0, 1, 1, 2, 4]


def test_too_many_pages_take_none() -> None:
    allocator = PageAllocator(4, 16)
    allocator.take(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 4 free"):
        allocator.take(3)
    assert allocator.num_free == 2


def test_a_page_is_free_when_the_last_holder_lets_go() -> None:
    allocator = PageAllocator(2, 16)
    pages = allocator.take(2)
    allocator.share(pages[:1])
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages[:1])
    assert allocator.num_free == 2


def test_releasing_twice_is_noticed() -> None:
    allocator = PageAllocator(2, 16)
    pages = allocator.take(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)


class Allocations(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12, 4)
        self.held: list[list[int]] = []

    @rule(num_pages=st.integers(0, 5))
    def take(self, num_pages: int) -> None:
        try:
            self.held.append(self.allocator.take(num_pages))
        except OutOfPages:
            assert num_pages > self.allocator.num_free

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.held:
            pages = list(data.draw(st.sampled_from(self.held)))
            self.allocator.share(pages)
            self.held.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.allocator.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        assert self.allocator.num_free == 12 - len({page for pages in self.held for page in pages})


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=40, stateful_step_count=30)
