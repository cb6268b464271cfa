from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.billing.prices import Price, PriceBook, dollars, load_prices, neurons
from edge.errors import ConfigError

tokens = st.integers(0, 10**9)
usages = st.fixed_dictionaries({"input_tokens": tokens, "cached_input_tokens": tokens, "output_tokens": tokens})
rates = st.integers(0, 10**7)
prices = st.builds(Price, rates, rates, st.none() | rates)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return path


def book(tmp_path: Path, **changes: str) -> Path:
    fields = {"version": '"v1"', "usd": '"0.011"', "input": "5", "output": "7", **changes}
    return write(
        tmp_path,
        f"version = {fields['version']}\nusd_per_1000_neurons = {fields['usd']}\n"
        f"[neurons_per_million_tokens]\nm = {{ input = {fields['input']}, output = {fields['output']} }}\n",
    )


def test_packaged_prices() -> None:
    packaged = load_prices()
    assert len(packaged.prices) == 50
    assert packaged.pico_dollars_per_micro_neuron == 11
    assert packaged.prices["@cf/moonshotai/kimi-k2.5"] == Price(54_545, 272_727, 9_091)
    assert packaged.prices["smollm2-135m-instruct"] == packaged.prices["@cf/meta/llama-3.2-1b-instruct"]
    # A million tokens in of llama-3.2-1b cost 2,457 neurons, which are $0.027027.
    micro_neurons = packaged.prices["smollm2-135m-instruct"].micro_neurons(
        input_tokens=10**6, cached_input_tokens=0, output_tokens=0
    )
    assert (neurons(micro_neurons), dollars(micro_neurons * 11)) == ("2457", "0.027027")


@given(prices, st.lists(usages, max_size=8))
def test_the_sum_of_the_parts_is_the_price_of_the_sum(price: Price, parts: list[dict[str, int]]) -> None:
    whole = {key: sum(part[key] for part in parts) for key in ("input_tokens", "cached_input_tokens", "output_tokens")}
    assert sum(price.micro_neurons(**part) for part in parts) == price.micro_neurons(**whole)


@given(prices, usages)
def test_a_price_is_that_of_a_rational_calculator(price: Price, usage: dict[str, int]) -> None:
    cached = price.input if price.cached_input is None else price.cached_input
    in_neurons = (
        Fraction(usage["input_tokens"] * price.input, 10**6)
        + Fraction(usage["cached_input_tokens"] * cached, 10**6)
        + Fraction(usage["output_tokens"] * price.output, 10**6)
    )
    micro_neurons = price.micro_neurons(**usage)
    assert Fraction(micro_neurons, 10**6) == in_neurons
    assert Fraction(dollars(micro_neurons * 11)) == in_neurons * Fraction("0.000011")
    assert Fraction(neurons(micro_neurons)) == in_neurons


def test_no_cached_price_is_the_full_price_and_zero_is_free() -> None:
    usage = {"input_tokens": 0, "cached_input_tokens": 3, "output_tokens": 0}
    assert Price(5, 7).micro_neurons(**usage) == 15
    assert Price(5, 7, 0).micro_neurons(**usage) == 0


def test_unknown_is_unpriced_and_an_id_goes_before_what_serves_it() -> None:
    packaged = load_prices()
    assert packaged.price("x", "y") is None
    assert packaged.price("@cf/qwen/qwq-32b", "smollm2-135m-instruct") == Price(60_000, 90_909)
    assert packaged.price("x", "smollm2-135m-instruct") == Price(2_457, 18_252)


def test_the_id_tells_version_and_content(tmp_path: Path) -> None:
    first = load_prices(book(tmp_path))
    assert first.id.startswith("v1+")
    assert load_prices(book(tmp_path)).id == first.id
    assert load_prices(book(tmp_path, output="8")).id != first.id
    assert PriceBook.from_json(first.to_json()).id == first.id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "5.0"}, "5.0 is a float, which is not exact"),
        ({"input": "-1"}, "Expected `int` >= 0"),
        ({"input": "true"}, "Expected `int`, got `bool`"),
        ({"input": '"5"'}, "Expected `int`, got `str`"),
        ({"output": "7, free = 1"}, "unknown field `free`"),
        ({"usd": "0.011"}, "is a float"),
        ({"usd": '"0.0111"'}, "must be a multiple of 0.001"),
        ({"usd": '"0.0110000000000000000000001"'}, "must be a multiple of 0.001"),
        ({"usd": '"1e9999999"'}, "Expected `str` matching"),
        ({"usd": '"NaN"'}, "Expected `str` matching"),
        ({"version": '""'}, "length >= 1"),
        ({"input": "}"}, "at line 4"),
    ],
)
def test_what_is_not_exact_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_prices(book(tmp_path, **changes))
    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_an_unreadable_book(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_prices(tmp_path / "none.toml")
    path = tmp_path / "prices.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="utf-8"):
        load_prices(path)


def test_decimal_strings() -> None:
    assert [dollars(pico) for pico in (0, 1, 11 * 10**11, -5 * 10**11)] == ["0", "0.000000000001", "1.1", "-0.5"]


def with_discount(tmp_path: Path, discount: str, **changes: str) -> Path:
    path = book(tmp_path, **changes)
    path.write_text(f'batch_discount = "{discount}"\n' + path.read_text())
    return path


def test_a_batch_discount_is_exact(tmp_path: Path) -> None:
    discounted = load_prices(with_discount(tmp_path, "2/5", input="5", output="10, cached_input = 15"))
    assert discounted.batch_discount == "2/5"
    assert discounted.in_batch(discounted.prices["m"]) == Price(3, 6, 9)
    assert discounted.id != load_prices(book(tmp_path, input="5", output="10, cached_input = 15")).id
    assert PriceBook.from_json(discounted.to_json()).in_batch(Price(5, 10)) == Price(3, 6)
    assert load_prices(with_discount(tmp_path, "1/1")).in_batch(Price(5, 10)) == Price(0, 0)


def test_no_batch_discount_is_no_other_book(tmp_path: Path) -> None:
    plain = load_prices(book(tmp_path))
    assert load_prices(with_discount(tmp_path, "")).id == load_prices(with_discount(tmp_path, "0/7")).id == plain.id
    assert "batch_discount" not in plain.to_json().decode()
    assert plain.in_batch(plain.prices["m"]) is plain.prices["m"]
    assert load_prices().batch_discount == ""


@pytest.mark.parametrize(
    ("discount", "message"),
    [
        ("1/2", "the price of 'm' is not exact: 5 times 1/2 is no whole number"),
        ("3/2", "from 0/1 to 1/1"),
        ("1/0", "from 0/1 to 1/1"),
        ("0.5", "Expected `str` matching"),
        ("50%", "Expected `str` matching"),
        ("-1/2", "Expected `str` matching"),
    ],
)
def test_a_batch_discount_that_is_not_exact_is_refused(tmp_path: Path, discount: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_prices(with_discount(tmp_path, discount))
    assert message in caught.value.message


@given(rates, rates, st.integers(1, 9999), st.integers(1, 9999), usages)
def test_what_a_batch_costs_is_what_a_rational_calculator_says(
    rate_in: int, rate_out: int, part: int, whole: int, usage: dict[str, int]
) -> None:
    part, whole = sorted((part, whole))
    price = Price(rate_in * whole, rate_out * whole)
    discounted = PriceBook("v", "", 11, {}, f"{part}/{whole}").in_batch(price)
    assert discounted.micro_neurons(**usage) == price.micro_neurons(**usage) * (1 - Fraction(part, whole))
