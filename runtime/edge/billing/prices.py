"""The price book: micro-neurons per token by model, and what a neuron is in dollars.

Everything is an integer: a price of N neurons per million tokens is N micro-neurons per token, and a
micro-neuron is a whole number of pico-dollars, so that nothing is ever rounded before a bill line's cents.
This module knows nothing about records, ledgers or bills.
"""

from __future__ import annotations

import hashlib
import tomllib
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec

from edge.errors import ConfigError

_PACKAGED = Path(__file__).with_name("prices.toml")
_MICRO_PER_UNIT = 10**6
_PICO_PER_UNIT = 10**12

Neurons = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Neurons per million tokens, which are micro-neurons per token."""

    input: Neurons
    output: Neurons
    cached_input: Neurons | None = None
    """None: cached prompt tokens cost the same as others. That is not the same as 0, which makes them free."""

    def micro_neurons(self, *, input_tokens: int, cached_input_tokens: int, output_tokens: int) -> int:
        """The exact price of the tokens, in micro-neurons."""
        cached = self.input if self.cached_input is None else self.cached_input
        return input_tokens * self.input + cached_input_tokens * cached + output_tokens * self.output


class PriceBook(msgspec.Struct, frozen=True, dict=True, omit_defaults=True):
    """One version of all prices. A model that is not in it is unpriced, which is not the same as free."""

    version: str
    source: str
    pico_dollars_per_micro_neuron: int
    prices: dict[str, Price]
    batch_discount: str = ""
    """What calls of asynchronous batches cost less, as a fraction such as "1/2"; empty: nothing."""

    @cached_property
    def id(self) -> str:
        """Version and content in one string: an edited book never passes for the one that it was made from."""
        return f"{self.version}+{hashlib.sha256(self.to_json()).hexdigest()[:12]}"

    def price(self, model: str, served_by: str) -> Price | None:
        """The price of `model`, else of the installed model that serves it; None if both are unpriced."""
        return self.prices.get(model) or self.prices.get(served_by)

    def in_batch(self, price: Price) -> Price:
        """`price` as it is for calls of asynchronous batches."""
        if not self.batch_discount:
            return price
        factor = 1 - Fraction(self.batch_discount)
        cached = None if price.cached_input is None else _times(price.cached_input, factor)
        return Price(_times(price.input, factor), _times(price.output, factor), cached)

    def to_json(self) -> bytes:
        """The book in its canonical form, for storage beside the records that it priced."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> PriceBook:
        """The book that `to_json` wrote."""
        return msgspec.json.decode(data, type=cls)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    usd_per_1000_neurons: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,30})?$")]
    neurons_per_million_tokens: dict[str, Price]
    source: str = ""
    batch_discount: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,4}/[0-9]{1,4})?$")] = ""


def load_prices(path: Path | None = None) -> PriceBook:
    """The price book in the TOML file `path`, by default the packaged one (its comments explain the format).

    Raises:
        ConfigError: the file cannot be read, or a price in it is not exact.
    """
    path = path or _PACKAGED
    try:
        text = path.read_text()
        file = msgspec.convert(tomllib.loads(text, parse_float=_refuse_float), _File)
        factor = _pico_dollars_per_micro_neuron(file.usd_per_1000_neurons)
        book = PriceBook(
            file.version, file.source, factor, file.neurons_per_million_tokens, _batch_discount(file.batch_discount)
        )
        for model, price in book.prices.items():
            _check_exact(book, model, price)
    except OSError as error:
        raise ConfigError(f"cannot read the price book {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not TOML, not of this shape, or not exact
        raise ConfigError(f"price book {path}: {error}") from error
    return book


def dollars(pico_dollars: int) -> str:
    """The exact amount in dollars as a decimal string."""
    return _decimal_string(pico_dollars, _PICO_PER_UNIT)


def neurons(micro_neurons: int) -> str:
    """The exact number of neurons as a decimal string."""
    return _decimal_string(micro_neurons, _MICRO_PER_UNIT)


def _decimal_string(amount: int, per_unit: int) -> str:
    whole, part = divmod(abs(amount), per_unit)
    digits = f"{part:0{len(str(per_unit)) - 1}d}".rstrip("0")
    return f"{'-' if amount < 0 else ''}{whole}" + (f".{digits}" if digits else "")


def _times(neurons_per_million: int, factor: Fraction) -> int:
    product = neurons_per_million * factor
    if product.denominator != 1:
        raise ValueError(f"{neurons_per_million} times {factor} is no whole number")
    return int(product)


def _batch_discount(text: str) -> str:
    """The fraction in its lowest terms; empty if it is none, or 0."""
    if not text:
        return ""
    numerator, denominator = map(int, text.split("/"))
    if numerator > denominator or denominator == 0:
        raise ValueError(f"batch_discount is {text!r}, must be a fraction from 0/1 to 1/1")
    fraction = Fraction(numerator, denominator)
    return f"{fraction.numerator}/{fraction.denominator}" if fraction else ""


def _check_exact(book: PriceBook, model: str, price: Price) -> None:
    try:
        book.in_batch(price)
    except ValueError as error:
        raise ValueError(
            f"batch_discount is {book.batch_discount!r}, with which the price of {model!r} is not exact: {error}. "
            "Choose another discount or another price"
        ) from error


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is a float, which is not exact: write neurons as integers and dollars as strings")


def _pico_dollars_per_micro_neuron(usd_per_1000_neurons: str) -> int:
    pico = Fraction(usd_per_1000_neurons) * _PICO_PER_UNIT / (1000 * _MICRO_PER_UNIT)
    if pico.denominator != 1:
        raise ValueError(
            f"usd_per_1000_neurons is {usd_per_1000_neurons!r}, must be a multiple of 0.001: "
            "a micro-neuron has to be a whole number of pico-dollars"
        )
    return int(pico)
