"""What a test can look at afterwards: what handlers logged, and what invocations and model calls used and cost."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

import msgspec

from edge.billing.meter import UsageRecord
from edge.billing.prices import PriceBook, dollars
from edge.isolates.base import InvocationUsage


class Log(NamedTuple):
    """One line."""

    level: str
    """`log` for stdout, `error` for stderr, and that of the record (`info`, `warning`, …) for the logging module."""
    text: str


class Logs:
    """What handlers printed and logged, oldest first: iterable, with `len()` and `in` for a part of the text."""

    def __init__(self) -> None:
        self._logs: list[Log] = []

    def add(self, level: str, text: str) -> None:
        """Take in one line."""
        self._logs.append(Log(level, text))

    @property
    def text(self) -> str:
        """All lines in one text."""
        return "".join(f"{log.text}\n" for log in self._logs)

    def lines(self, level: str | None = None) -> list[str]:
        """The texts, of one level or of all."""
        return [log.text for log in self._logs if level in (None, log.level)]

    def clear(self) -> None:
        """Forget what there is."""
        self._logs.clear()

    def __iter__(self) -> Iterator[Log]:
        return iter(self._logs)

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, text: object) -> bool:
        return str(text) in self.text

    def __repr__(self) -> str:
        return f"Logs({self._logs!r})"


class AiUsage(msgspec.Struct, frozen=True):
    """One model call, as it would be on a bill."""

    model: str
    status: str
    """`ok`, `cancelled` or `error`."""
    input_tokens: int
    """Those that were cached are not among them."""
    cached_input_tokens: int
    output_tokens: int
    micro_neurons: int | None
    """None: the price book has no price for the model."""


class Usage:
    """What the test's invocations and model calls used."""

    def __init__(self, prices: PriceBook, *, has_cpu_times: bool) -> None:
        self._prices = prices
        self._has_cpu_times = has_cpu_times
        self.ai: list[AiUsage] = []
        """Model calls that are over, oldest first."""
        self.invocations: list[InvocationUsage] = []
        """Invocations that are over, `waitUntil` work included, oldest first."""

    async def record(self, record: UsageRecord) -> None:
        """Take in the usage record of a model call."""
        price = self._prices.price(record.model, record.served_by)
        micro_neurons = None
        if price is not None:
            micro_neurons = price.micro_neurons(
                input_tokens=record.input_tokens,
                cached_input_tokens=record.cached_input_tokens,
                output_tokens=record.output_tokens,
            )
        self.ai.append(
            AiUsage(
                record.model,
                record.status,
                record.input_tokens,
                record.cached_input_tokens,
                record.output_tokens,
                micro_neurons,
            )
        )

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all model calls, cached ones included."""
        return sum(call.input_tokens + call.cached_input_tokens for call in self.ai)

    @property
    def output_tokens(self) -> int:
        """Tokens that all model calls gave."""
        return sum(call.output_tokens for call in self.ai)

    @property
    def neurons(self) -> Decimal:
        """What all model calls cost, exactly."""
        return Decimal(self._micro_neurons()).scaleb(-6)

    @property
    def dollars(self) -> Decimal:
        """The same in dollars at the price book's list price, exactly."""
        return Decimal(dollars(self._micro_neurons() * self._prices.pico_dollars_per_micro_neuron))

    @property
    def cpu_ms(self) -> float | None:
        """CPU time of all invocations in ms; None in in-process mode, where it cannot be told from the test's own."""
        return sum(each.cpu_us for each in self.invocations) / 1000 if self._has_cpu_times else None

    @property
    def subrequests(self) -> int:
        """Calls of `fetch` and of bindings that the invocations made."""
        return sum(each.subrequests for each in self.invocations)

    def _micro_neurons(self) -> int:
        unpriced = {call.model for call in self.ai if call.micro_neurons is None}
        if unpriced:
            raise ValueError(
                f"the price book {self._prices.version} has no price for {', '.join(sorted(unpriced))}; add one to a "
                "book of your own and name it under [billing] prices in the configuration"
            )
        return sum(call.micro_neurons or 0 for call in self.ai)
