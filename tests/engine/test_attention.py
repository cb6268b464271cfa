import pytest
import torch
import torch.nn.functional as F
from attending import Attending, make_cache, shape

from edge.engine.attention import AttentionShape, paged_attention, paged_attention_reference, rotate
from edge.engine.kv_cache import FORMATS, KvOptions

SHAPES = {
    "plain": shape(),
    "as many kv heads": shape(3, 3, 16),
    "one kv head": shape(8, 1, 16),
    "window": shape(window=20),
    "softcap": shape(softcap=2.0),
    "all": shape(4, 2, 48, window=33, softcap=3.0, normed=True),
}


def mixed(attending: Attending) -> torch.Tensor:
    """Prefill chunks beside decodes, over the borders of pages."""
    attending.step((0, 31))
    attending.step((0, 1), (1, 70), (2, 5))
    attending.step((0, 1), (2, 1), (1, 1))
    attending.step((1, 20), (0, 1), (2, 44))
    return torch.cat(attending.finish())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_the_reference(name: str, format: str) -> None:
    kind = SHAPES[name]
    got, expected = (
        mixed(Attending(attention, kind, make_cache(format, kind), [40, 100, 60]))
        for attention in (paged_attention, paged_attention_reference)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("options", [KvOptions(False), KvOptions(rotate_values=True), KvOptions(True, True, 0, 1)])
def test_int4_options(options: KvOptions) -> None:
    kind = SHAPES["plain"]
    got, expected = (
        mixed(Attending(attention, kind, make_cache("int4", kind, options=options), [40, 100, 60]))
        for attention in (paged_attention, paged_attention_reference)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


def test_the_reference_is_attention() -> None:
    kind = shape(4, 2, 16)
    attending = Attending(paged_attention_reference, kind, make_cache("float32", kind), [50])
    (out,) = attending.finish(7)
    q, k, v = attending.inputs[0].view(50, 8, 16).split((4, 2, 2), dim=1)
    angles = torch.arange(50)[:, None] * attending.frequencies
    q, k = rotate(q, angles.cos(), angles.sin()), rotate(k, angles.cos(), angles.sin())
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_rotate_turns_pairs_and_leaves_the_rest() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    quarter = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert rotate(x, *quarter).tolist() == [[[-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]]]


@pytest.mark.parametrize(("format", "limit"), [("bfloat16", 0.01), ("int8", 0.02), ("int4", 0.2)])
def test_formats_are_near_float32(format: str, limit: float) -> None:
    kind = SHAPES["plain"]
    got, exact = (
        torch.cat(Attending(paged_attention, kind, make_cache(name, kind), [200, 30]).finish())
        for name in (format, "float32")
    )
    assert 0 < (got - exact).norm() / exact.norm() < limit


def test_bfloat16_activations() -> None:
    kind = SHAPES["plain"]
    got, expected = (
        torch.cat(
            Attending(paged_attention, kind, make_cache(format, kind), [50, 20], dtype=getattr(torch, format)).finish(9)
        )
        for format in ("bfloat16", "float32")
    )
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


def test_another_sequences_nan_stays_there() -> None:
    kind: AttentionShape = SHAPES["plain"]
    cache = make_cache("float32", kind)
    cache.keys[0][0], cache.values[0][0] = torch.nan, torch.nan  # page 0 is what shorter sequences are padded with
    attending = Attending(paged_attention, kind, cache, [40, 10])
    for sequence in attending.sequences:
        sequence.pages = [page or 199 for page in sequence.pages]
    assert all(out.isfinite().all() for out in attending.finish(1))
