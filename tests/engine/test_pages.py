from __future__ import annotations

import pytest
from helpers import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge.engine.pages import OutOfPages, PageAllocator, extend_keys

PAGE_SIZE = 4


def keys_of(tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, salt, tokens, PAGE_SIZE)
    return keys


def publish(allocator: PageAllocator, pages: list[int], keys: list[bytes]) -> None:
    for index, page in enumerate(pages):
        allocator.publish(page, keys[index], keys[index - 1] if index > 0 else None)


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
    with pytest.raises(AssertionError, match="cannot be shared"):
        allocator.share(pages)


def test_published_pages_are_found_also_when_free_as_far_as_the_keys_agree() -> None:
    allocator = PageAllocator(8, PAGE_SIZE)
    pages = allocator.take(3)
    publish(allocator, pages, keys_of(list(range(12))))
    assert allocator.find(keys_of([*range(8), 5, 5, 5, 5])) == pages[:2]
    allocator.release(pages)
    assert allocator.free_among(pages) == pages
    assert allocator.find(keys_of(list(range(12)))) == pages
    allocator.share(pages)
    assert (allocator.num_free, allocator.num_cached) == (5, 3)


def test_of_equal_pages_the_first_is_found() -> None:
    allocator = PageAllocator(4, PAGE_SIZE)
    first, second = allocator.take(2)
    [key] = keys_of([1, 2, 3, 4])
    allocator.publish(first, key, None)
    allocator.publish(second, key, None)
    allocator.release([second])
    assert allocator.find([key]) == [first]
    assert allocator.num_cached == 1


def test_empty_pages_are_taken_first_then_those_freed_longest_ago_ends_before_beginnings() -> None:
    allocator = PageAllocator(6, PAGE_SIZE)
    old, new = allocator.take(2), allocator.take(2)
    old_keys, new_keys = keys_of([1] * 8), keys_of([2] * 8)
    publish(allocator, new, new_keys)
    publish(allocator, old, old_keys)
    allocator.release(old)
    allocator.release(new)
    assert set(allocator.take(2)).isdisjoint(old + new)
    assert allocator.take(3) == [old[1], old[0], new[1]]
    assert allocator.find(old_keys) == []
    assert allocator.find(new_keys) == [new[0]]


def test_forgotten_pages_take_those_after_them_along() -> None:
    allocator = PageAllocator(8, PAGE_SIZE)
    trunk, branch, other = allocator.take(2), allocator.take(1), allocator.take(1)
    publish(allocator, trunk, keys_of([1] * 8))
    allocator.publish(branch[0], keys_of([1] * 8 + [2] * 4)[2], keys_of([1] * 8)[1])
    publish(allocator, other, keys_of([3] * 4))
    allocator.release(branch)
    assert allocator.forget(trunk[1:]) == branch
    assert allocator.find(keys_of([1] * 8)) == trunk[:1]
    assert allocator.find(keys_of([3] * 4)) == other
    allocator.publish(trunk[1], keys_of([1] * 8)[1], keys_of([1] * 8)[0])
    assert allocator.find(keys_of([1] * 8 + [2] * 4)) == trunk


tokens = st.lists(st.integers(0, 3) | st.integers(0, (1 << 32) - 1), max_size=20)


@given(tokens=tokens, num_more=st.integers(0, 20), salt=st.text())
def test_keys_may_be_made_bit_by_bit(tokens: list[int], num_more: int, salt: str) -> None:
    keys = keys_of(tokens[:num_more], salt)
    extend_keys(keys, salt, tokens, PAGE_SIZE)
    assert keys == keys_of(tokens, salt)
    assert len(keys) == len(tokens) // PAGE_SIZE


@given(first=st.tuples(tokens, st.text(max_size=3)), second=st.tuples(tokens, st.text(max_size=3)))
def test_keys_are_equal_only_where_everything_before_is(
    first: tuple[list[int], str], second: tuple[list[int], str]
) -> None:
    for index, pair in enumerate(zip(keys_of(*first), keys_of(*second), strict=False), 1):
        size = index * PAGE_SIZE
        same = first[1] == second[1] and first[0][:size] == second[0][:size]
        assert (pair[0] == pair[1]) == same


class Allocations(RuleBasedStateMachine):
    """Beside the allocator, what each published key was given for."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12, PAGE_SIZE)
        self.held: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(num_pages=st.integers(0, 5))
    def take(self, num_pages: int) -> None:
        try:
            self.held.append(self.allocator.take(num_pages))
        except OutOfPages:
            assert num_pages > self.allocator.num_free
        else:
            for page in self.held[-1]:
                self.contents.pop(page, None)

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

    @rule(data=st.data(), token=st.integers(0, 2))
    def publish(self, data: st.DataObject, token: int) -> None:
        if self.held:
            pages = data.draw(st.sampled_from(self.held))
            keys = keys_of([token] * PAGE_SIZE * len(pages))
            for index, page in enumerate(pages):
                if page not in self.contents and not self.allocator.is_published(keys[index]):
                    self.allocator.publish(page, keys[index], keys[index - 1] if index > 0 else None)
                    self.contents[page] = keys[index]

    @rule(token=st.integers(0, 2), num_pages=st.integers(1, 5))
    def find_and_hold(self, token: int, num_pages: int) -> None:
        keys = keys_of([token] * PAGE_SIZE * num_pages)
        pages = self.allocator.find(keys)
        assert [self.contents[page] for page in pages] == keys[: len(pages)]
        assert len(pages) == num_pages or keys[len(pages)] not in self.contents.values()
        self.allocator.share(pages)
        self.held.append(pages)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.held:
            self.allocator.forget(data.draw(st.sampled_from(self.held)))
            self.contents = {page: key for page, key in self.contents.items() if self.allocator.is_published(key)}

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        assert self.allocator.num_free == 12 - len({page for pages in self.held for page in pages})
        assert self.allocator.num_cached == len(self.contents)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=num_examples(60), stateful_step_count=30)
