from dataclasses import replace

import pytest
import torch
from attending import CPU, PAGE_SIZE, Attending, make_cache, shape
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.attention import paged_attention
from edge.engine.kv_cache import (
    FORMATS,
    KvCache,
    KvOptions,
    hadamard,
    quantize_int8,
    quantize_key_int4,
    quantize_value_int4,
)
from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import Step, build_step

KIND = shape(2, 2, 64)


def step_of(pages: list[int], num_computed: int, num_tokens: int) -> Step:
    end = num_computed + num_tokens
    sequence = Sequence(0, [0] * end, end, 1, num_computed_tokens=num_computed, pages=pages)
    return build_step([Chunk(sequence, num_tokens)], PAGE_SIZE, CPU)


def written(cache: KvCache, pages: list[int], length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of a whole sequence, stored in one step."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, length, cache.num_kv_heads, cache.head_dim, generator=generator)
    step = step_of(pages, 0, length)
    cache.begin(step)
    cache.write(0, step.slots, k, v)
    return k, v


@pytest.mark.parametrize(("format", "limit"), [("float32", 0), ("bfloat16", 0.005), ("int8", 0.01), ("int4", 0.15)])
def test_what_is_read_is_what_was_written(format: str, limit: float) -> None:
    cache = make_cache(format, KIND, num_pages=20)
    pages = [9, 3, 17, 0, 5, 6]
    k, v = written(cache, pages, 90)
    keys, values = cache.read(0, torch.tensor(pages), 90)
    assert keys.shape == (90, 2, 64)
    assert (keys - k).norm() <= limit * k.norm()
    assert (values - v).norm() <= limit * v.norm()


def test_sizes() -> None:
    sizes = {format: make_cache(format, shape(9, 3, 64), num_pages=4, num_layers=2) for format in FORMATS}
    assert {format: cache.bytes_per_token() for format, cache in sizes.items()} == {
        "float32": 2 * 3 * 2 * 64 * 4,
        "bfloat16": 2 * 3 * 2 * 64 * 2,
        "int8": 2 * 3 * 2 * (64 + 2),
        "int4": 2 * 3 * (2 * 32 + 6),
    }
    whole = sizes["bfloat16"].size_bytes(2000)
    assert whole / sizes["int8"].size_bytes(2000) >= 1.9
    assert whole / sizes["int4"].size_bytes(2000) >= 3.3


def test_unused_memory_is_zero_and_clear_makes_it_so_again() -> None:
    for format in FORMATS:
        cache = make_cache(format, KIND, num_pages=8)
        pages = torch.arange(8)
        written(cache, [1, 2], 20)
        cache.clear([1, 2])
        cache.begin(step_of([0], 0, 1))
        keys, values = cache.read(0, pages, 128)
        assert not keys.any()
        assert not values.any()


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_is_not_lost(format: str, bad: float) -> None:
    cache = make_cache(format, KIND, num_pages=4, options=KvOptions(sink_pages=0, window_pages=0))
    step = step_of([1], 0, 1)
    k, v = torch.ones(2, 1, 2, 64)
    k[0, 0, 5] = v[0, 1, 7] = bad
    cache.begin(step)
    cache.write(0, step.slots, k, v)
    keys, values = cache.read(0, torch.tensor([1]), 1)
    assert not keys[0, 0].isfinite().all()
    assert not values[0, 1].isfinite().all()
    assert keys[0, 1].isfinite().all()


def test_int4_reads_the_first_and_the_last_pages_in_full() -> None:
    cache = make_cache("int4", KIND, num_pages=8)
    pages = torch.tensor([7, 1, 2, 3, 4])
    k, _ = written(cache, pages.tolist(), 80)
    for position, expected in ((79, [1, 0, 0, 1, 1]), (63, [1, 0, 1, 1, 0]), (20, [1, 1, 0, 0, 0])):
        keys, _ = cache.read(0, pages, 80, position)
        errors = (keys - k).view(5, -1).norm(dim=1) / k.view(5, -1).norm(dim=1)
        full = [int(error < 0.01) for error in errors]
        assert full[: position // PAGE_SIZE + 1] == expected[: position // PAGE_SIZE + 1]


def test_the_copy_used_least_recently_makes_room() -> None:
    cache = make_cache("int4", KIND, num_pages=12, num_side_pages=4)
    assert cache.side is not None
    for pages in ([0, 1], [2, 3]):
        written(cache, pages, 32)
    assert cache.side.side_of_page.tolist()[:6] == [0, 1, 2, 3, -1, -1]
    cache.begin(step_of([0, 1], 31, 1))  # used again
    written(cache, [4], 10)
    assert cache.side.side_of_page.tolist()[:6] == [0, 1, -1, 3, 2, -1]


def test_a_sequence_that_pauses_keeps_what_it_reads_in_full() -> None:
    cache = make_cache("int4", KIND, num_pages=20, num_side_pages=6)
    assert cache.side is not None
    paused = [9, 8, 7, 6, 5]
    written(cache, paused, 70)  # goes on in the fifth page: its first, fourth and fifth are read in full
    for page in range(5):
        cache.keep(paused, 70)
        written(cache, [page], 16, seed=page)
    assert (cache.side.side_of_page[paused] >= 0).tolist() == [True, False, False, True, True]
    cache.keep([], 0)
    cache.keep(paused, 80)  # its next page is not there yet
    assert (cache.side.side_of_page[paused] >= 0).tolist() == [True, False, False, True, True]


def test_a_page_without_copy_is_read_as_int4_and_gets_none_halfway() -> None:
    cache = make_cache("int4", KIND, num_pages=12, num_side_pages=1)
    assert cache.side is not None
    k, _ = written(cache, [0], 10)
    written(cache, [5], 10, seed=1)  # takes the only side page
    keys, _ = cache.read(0, torch.tensor([0]), 10)
    assert 0.01 < (keys - k).norm() / k.norm() < 0.15
    cache.begin(step_of([0], 10, 1))
    assert cache.side.side_of_page[0] == -1


def test_more_pages_than_side_pages_in_one_step() -> None:
    cache = make_cache("int4", KIND, num_pages=12, num_side_pages=2)
    assert cache.side is not None
    k, _ = written(cache, list(range(6)), 96)
    assert (cache.side.side_of_page >= 0).sum() == 2
    keys, _ = cache.read(0, torch.arange(6), 96)
    assert (keys - k).norm() / k.norm() < 0.15


def test_no_side_pages_at_all() -> None:
    cache = make_cache("int4", KIND, num_pages=12, options=KvOptions(sink_pages=0, window_pages=0))
    k, _ = written(cache, [0, 1, 2], 40)
    keys, _ = cache.read(0, torch.arange(3), 40)
    assert cache.size_bytes(2000) == cache.bytes_per_token() * 2000
    assert 0.01 < (keys - k).norm() / k.norm() < 0.15


def test_pages_are_used_again_after_garbage() -> None:
    for format in FORMATS:
        cache = make_cache(format, KIND, num_pages=16)
        Attending(paged_attention, KIND, cache, [200], first_seed=50).finish()
        (again,) = Attending(paged_attention, KIND, cache, [150]).finish(40)
        (fresh,) = Attending(paged_attention, KIND, make_cache(format, KIND, num_pages=16), [150]).finish(40)
        assert torch.equal(again, fresh)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"KV format 'int3' is unknown \(known: float32, bfloat16, int8, int4\)"):
        make_cache("int3", KIND)
    with pytest.raises(ValueError, match="even head dimension, not 5; choose kv = int8"):
        make_cache("int4", replace(KIND, head_dim=5))


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 6, 16, 48, 64, 96]))
def test_hadamard_is_its_own_inverse_and_keeps_products(seed: int, D: int) -> None:
    x, y = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1))


numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
vectors = st.lists(numbers, min_size=8, max_size=8).map(torch.tensor)
TINY = 1e-35
"""What is lost where a scale would be too small to have an inverse."""


@given(vectors)
def test_int8_is_off_by_half_a_step_at_most(x: torch.Tensor) -> None:
    codes, scale = quantize_int8(x)
    assert ((codes * scale.float() - x).abs() <= scale.float() * 0.501 + TINY).all()
    assert scale.float() <= x.abs().max() / 127 * 1.01 + TINY


@given(vectors)
def test_int4_is_off_by_half_a_step_at_most(x: torch.Tensor) -> None:
    packed, scale = quantize_key_int4(x)
    codes = torch.cat((packed & 15, packed >> 4))
    assert (((codes - 7.5) * scale.float() - x).abs() <= scale.float() * 0.501 + TINY).all()
    packed, scale, minimum = quantize_value_int4(x)
    codes = torch.cat((packed & 15, packed >> 4))
    rounding = x.abs().max() * 1e-6
    error = (codes * scale.float() + minimum.float() - x).abs()
    assert (error <= scale.float() * 0.501 + rounding + TINY).all()
