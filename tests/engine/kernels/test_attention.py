import itertools
from typing import Any

import pytest
import torch
from attending import Attending, make_cache, shape
from helpers import mostly_slow

from edge.engine.attention import Attention, AttentionShape, paged_attention, paged_attention_reference
from edge.engine.kernels import Kernels
from edge.engine.kernels.attention import NativeAttention, make_attention, why_not_native
from edge.engine.kv_cache import FORMATS, KvCache, KvOptions

SHAPES = {
    "plain": shape(9, 3, 64),
    "as many kv heads": shape(2, 2, 32),
    "one kv head": shape(50, 1, 32),
    "odd": shape(4, 2, 48),
    "window": shape(6, 2, 96, window=20),
    "long window": shape(4, 2, 32, window=300),
    "softcap": shape(4, 4, 128, softcap=2.0),
    "all": shape(8, 1, 256, window=70, softcap=3.0, normed=True),
}
RELATIVE_ERROR = {
    # Native products are of bfloat16 numbers where keys and values are no more exact than that.
    "float32": 1e-6,
    "bfloat16": 3e-3,
    "int8": 3e-3,
    "int4": 8e-3,
}
LARGEST_ERROR = {"float32": 4e-6, "bfloat16": 2e-2, "int8": 2e-2, "int4": 4e-2}
"""A key or value that is rounded to another code, because its last bit came out otherwise, moves a result more."""


def assert_near(got: torch.Tensor, expected: torch.Tensor, format: str) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=LARGEST_ERROR[format])
    assert (got - expected).norm() / expected.norm() < RELATIVE_ERROR[format]


def mixed(attending: Attending) -> torch.Tensor:
    """Prefill chunks beside decodes, over the borders of pages, blocks and splits."""
    attending.step((0, 31))
    attending.step((0, 1), (1, 330), (2, 5))
    attending.step((0, 1), (2, 1), (1, 1))
    attending.step((1, 5), (0, 33), (2, 44))
    attending.step((1, 260))
    return torch.cat(attending.finish(7))


LENGTHS = [90, 620, 60]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_torch(kernels: Kernels, name: str, format: str) -> None:
    kind = SHAPES[name]
    if why_not_native(kind.num_heads, kind.num_kv_heads, kind.head_dim, format):
        pytest.skip("goes to torch")
    got, expected = (
        mixed(Attending(attention, kind, make_cache(format, kind), LENGTHS, num_rotary=kind.head_dim // 2))
        for attention in (NativeAttention(kernels), paged_attention)
    )
    assert_near(got, expected, format)


@pytest.mark.slow
def test_without_the_best_instructions(lesser_kernels: Kernels) -> None:
    for format, name in itertools.product(FORMATS, ("plain", "window", "softcap", "all")):
        kind = SHAPES[name]
        got, expected = (
            mixed(Attending(attention, kind, make_cache(format, kind), LENGTHS, num_rotary=kind.head_dim // 2))
            for attention in (NativeAttention(lesser_kernels), paged_attention)
        )
        assert_near(got, expected, format)
        whole, in_chunks = (
            Attending(NativeAttention(lesser_kernels), kind, make_cache(format, kind), [90]).finish(size)[0]
            for size in (90, 7)
        )
        assert torch.equal(whole, in_chunks)


@pytest.mark.parametrize("format", FORMATS)
def test_it_equals_the_reference(kernels: Kernels, format: str) -> None:
    kind = SHAPES["plain"]
    got, expected = (
        torch.cat(Attending(attention, kind, make_cache(format, kind), [70, 20]).finish(24))
        for attention in (NativeAttention(kernels), paged_attention_reference)
    )
    assert_near(got, expected, format)


@pytest.mark.parametrize(
    "options",
    [KvOptions(False, False, 0, 0), KvOptions(rotate_values=True), KvOptions(sink_pages=0, window_pages=1)],
)
def test_int4_options(kernels: Kernels, options: KvOptions) -> None:
    kind = SHAPES["plain"]
    got, expected = (
        mixed(Attending(attention, kind, make_cache("int4", kind, options=options), LENGTHS))
        for attention in (NativeAttention(kernels), paged_attention)
    )
    assert_near(got, expected, "int4")


@pytest.mark.parametrize("format", FORMATS)
def test_both_store_the_same(kernels: Kernels, format: str) -> None:
    kind = shape(2, 2, 64)
    caches = make_cache(format, kind), make_cache(format, kind)
    for attention, cache in zip((NativeAttention(kernels), paged_attention), caches, strict=True):
        attending = Attending(attention, kind, cache, [100])
        attending.frequencies *= 0  # without rotation there is nothing to round
        attending.finish(30)
    for name in ("keys", "values", "key_scales", "value_scales", "value_minimums", "side_keys", "side_values"):
        for ours, theirs in zip(*(getattr(cache, name) for cache in caches), strict=True):
            differing = (ours != theirs).float().mean()
            assert differing <= (1e-3 if format == "int4" else 0), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", mostly_slow(["plain", "as many kv heads", "one kv head", "long window", "all"]))
def test_a_row_is_the_same_bits_in_every_company(kernels: Kernels, name: str, format: str) -> None:
    kind = SHAPES[name]

    def attending(lengths: list[int]) -> Attending:
        return Attending(NativeAttention(kernels), kind, make_cache(format, kind), lengths)

    (whole,) = attending([530]).finish()
    (by_token,) = attending([530]).finish(1)
    (in_chunks,) = attending([530]).finish(37)
    together = attending([530, 300, 20])
    together.step((1, 40), (0, 300), (2, 1))
    mixed_in = together.finish(3)[0]
    threads = kernels.num_threads
    try:
        kernels.num_threads = 1
        (on_one_thread,) = attending([530]).finish(200)
        kernels.num_threads = 5
        (on_five_threads,) = attending([530]).finish(200)
    finally:
        kernels.num_threads = threads
    for other in (by_token, in_chunks, mixed_in, on_one_thread, on_five_threads):
        assert torch.equal(whole, other)


@pytest.mark.parametrize("format", FORMATS)
def test_garbage_in_reused_pages_is_not_seen(kernels: Kernels, format: str) -> None:
    kind = SHAPES["plain"]
    cache, fresh = make_cache(format, kind, num_pages=20), make_cache(format, kind, num_pages=20)
    for plane in (cache.key_scales, cache.value_scales, cache.value_minimums, cache.side_keys, cache.side_values):
        for tensor in plane:
            tensor.fill_(torch.nan)
    if not cache.key_scales:
        cache.keys[0].fill_(torch.nan)
        cache.values[0].fill_(torch.nan)
    (got,), (expected,) = (Attending(NativeAttention(kernels), kind, each, [150]).finish(40) for each in (cache, fresh))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_nan_reaches_every_later_token_of_its_sequence_and_no_other(kernels: Kernels, format: str) -> None:
    kind = SHAPES["plain"]
    attending = Attending(NativeAttention(kernels), kind, make_cache(format, kind), [40, 40])
    attending.inputs[0][20, -5] = torch.nan  # in a value of the last head
    first, second = attending.finish(16)
    last_head = first.view(40, 9, 64)[:, -1]
    assert last_head[:16].isfinite().all()  # those of the steps before
    assert last_head[20:].isnan().any(dim=1).all()
    assert second.isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_task_leaves_nothing_behind_for_the_next_one_of_its_thread(kernels: Kernels, format: str) -> None:
    kind = SHAPES["plain"]
    attending = Attending(NativeAttention(kernels), kind, make_cache(format, kind), [200, 20, 5])
    attending.inputs[0][30:100, -64:] = torch.inf  # values, on pages that become int4
    kernels.num_threads, before = 1, kernels.num_threads
    try:
        attending.step((0, 199))
        attending.step((0, 1), (1, 20), (2, 5))
    finally:
        kernels.num_threads = before
    assert attending.outputs[1].isfinite().all()
    assert attending.outputs[2].isfinite().all()


def test_side_pages_that_are_lost(kernels: Kernels) -> None:
    kind = SHAPES["plain"]

    def run(attention: Attention) -> torch.Tensor:
        attending = Attending(attention, kind, make_cache("int4", kind, num_side_pages=5), LENGTHS)
        return mixed(attending)

    assert_near(run(NativeAttention(kernels)), run(paged_attention), "int4")


def test_what_it_cannot_do_goes_to_torch(kernels: Kernels) -> None:
    for D, kv in itertools.product((8, 24, 272), FORMATS):
        assert make_attention(4, 2, D, kv, kernels) is paged_attention
    assert make_attention(4, 2, 48, "int4", kernels) is paged_attention
    assert make_attention(5, 2, 64, "int8", kernels) is paged_attention
    assert make_attention(4, 2, 64, "int8", None) is paged_attention
    assert isinstance(make_attention(4, 2, 48, "int8", kernels), NativeAttention)
    assert why_not_native(4, 2, 48, "int4") == (
        "the native attention needs a head dimension of 32 to 256 in steps of 32, not 48"
    )


def test_what_it_cannot_read_is_refused(kernels: Kernels) -> None:
    kind = SHAPES["plain"]

    def refused(match: str, kind: AttentionShape, cache: KvCache, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            Attending(NativeAttention(kernels), kind, cache, [20], **options).finish()

    refused("qkv must be contiguous float32", kind, make_cache("int8", kind), dtype=torch.bfloat16)
    refused("made for other heads", kind, make_cache("int8", shape(2, 2, 64)))
    refused("steps of 16, not 24", shape(2, 2, 24), make_cache("int8", shape(2, 2, 24)))
    refused("128 rotated dimensions do not fit", kind, make_cache("int8", kind), num_rotary=128)
