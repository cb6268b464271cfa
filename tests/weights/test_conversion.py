import msgspec
import pytest

from edge.weights.conversion import Recipe, Report, Result, misses


def result(bits: int, mean_kl: float, top1: float) -> Result:
    report = Report(num_tokens=9, perplexity_reference=2, perplexity=2, mean_kl=mean_kl, kl_999=1, top1=top1)
    recipe = msgspec.convert({"bits": bits, "group": 64}, Recipe)
    return Result(recipe=recipe, report=report, size_bytes_source=9, size_bytes=3, quantize_s=1)


@pytest.mark.parametrize(("bits", "mean_kl", "top1"), [(8, 0.002, 0.97), (4, 0.03, 0.95), (4, 0, 1)])
def test_what_passes(bits: int, mean_kl: float, top1: float) -> None:
    assert misses(result(bits, mean_kl, top1)) == []


def test_a_miss_says_by_how_much() -> None:
    assert misses(result(4, 0.105, 0.8291)) == [
        "the mean KL divergence is 0.105, 3.5 times the limit of 0.03",
        "the top-1 agreement is 82.9%, 12.1 points below the limit of 95%",
    ]
    assert misses(result(8, float("nan"), 0.99))[0].startswith("the mean KL divergence is nan")
