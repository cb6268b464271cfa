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


class PriceBook(msgspec.Struct, frozen=True, dict=True):
    """One version of all prices. A model that is not in it is unpriced, which is not the same as free."""

    version: str
    source: str
    pico_dollars_per_micro_neuron: int
    prices: dict[str, Price]

    @cached_property
    def id(self) -> str:
        """Version and content in one string: an edited book never passes for the one that it was made from."""
        return f"{self.version}+{hashlib.sha256(self.to_json()).hexdigest()[:12]}"

    def price(self, model: str, served_by: str) -> Price | None:
        """The price of `model`, else of the installed model that serves it; None if both are unpriced."""
        return self.prices.get(model) or self.prices.get(served_by)

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
    except OSError as error:
        raise ConfigError(f"cannot read the price book {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not TOML, not of this shape, or not exact
        raise ConfigError(f"price book {path}: {error}") from error
    return PriceBook(file.version, file.source, factor, file.neurons_per_million_tokens)


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
