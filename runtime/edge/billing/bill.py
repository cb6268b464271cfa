"""A bill: a query over usage records, priced by the books that the records name.

Amounts are list prices before free allocations. They are exact until the end of a line, where cents are rounded
half-even once and the residual is kept, so that the printed lines add up to the printed total. Failed calls
are listed and not charged; successful and cancelled ones are. A call whose model has no price is unpriced: it
is listed as such and never passes for free.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from edge.billing.ledger import opened, price_books, records_of
from edge.billing.meter import UsageRecord
from edge.billing.prices import Price, PriceBook, dollars, neurons
from edge.billing.times import iso_time
from edge.errors import EdgeError

Grouping = Literal["model", "worker", "version", "account", "trigger", "day", "hour"]
NOTE = "List prices before free allocations. Failed calls are listed and not charged."
_PICO_DOLLARS_PER_CENT = 10**10
_GROUPED_BY = {
    "model": "model",
    "worker": "coalesce(worker, '(no worker)')",
    "version": "coalesce(worker || ' ' || version, '(no worker)')",
    "account": "account",
    "trigger": "trigger",
    "day": "strftime('%Y-%m-%d', ended_at / 1000000, 'unixepoch')",
    "hour": "strftime('%Y-%m-%dT%H:00Z', ended_at / 1000000, 'unixepoch')",
}


class Tokens(msgspec.Struct):
    """Sums of the three disjoint token counts."""

    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Tokens) -> None:
        """Add `other` to these sums."""
        self.input_tokens += other.input_tokens
        self.cached_input_tokens += other.cached_input_tokens
        self.output_tokens += other.output_tokens


class Cost(msgspec.Struct, frozen=True):
    """An exact amount, in both of its units."""

    micro_neurons: int
    pico_dollars: int

    def plus(self, other: Cost) -> Cost:
        """The sum."""
        return Cost(self.micro_neurons + other.micro_neurons, self.pico_dollars + other.pico_dollars)

    def minus(self, other: Cost) -> Cost:
        """The difference."""
        return Cost(self.micro_neurons - other.micro_neurons, self.pico_dollars - other.pico_dollars)


class Explained(msgspec.Struct, frozen=True):
    """One call, and everything that was multiplied to get at what it costs."""

    record: UsageRecord
    cost: Cost | None
    """None: its model has no price."""
    book: PriceBook
    price: Price | None
    """None: it is not charged."""
    tokens: Tokens
    note: str
    """Why it costs nothing, or less; else empty."""

    @property
    def meters(self) -> list[tuple[str, int, int]]:
        """What was counted, how much, and the micro-neurons for each; without a price nothing."""
        if self.price is None:
            return []
        cached = self.price.input if self.price.cached_input is None else self.price.cached_input
        return [
            ("input tokens", self.tokens.input_tokens, self.price.input),
            ("cached input tokens", self.tokens.cached_input_tokens, cached),
            ("output tokens", self.tokens.output_tokens, self.price.output),
        ]

    def to_json(self) -> dict[str, Any]:
        """As JSON values: money and neurons as decimal strings, counts as integers."""
        return {
            **msgspec.structs.asdict(self.record),
            "price_book": self.book.id,
            "usd_per_1000_neurons": dollars(1000 * 10**6 * self.book.pico_dollars_per_micro_neuron),
            "meters": [
                {
                    "meter": meter,
                    "quantity": quantity,
                    "neurons_each": neurons(each),
                    "neurons": neurons(quantity * each),
                }
                for meter, quantity, each in self.meters
            ],
            "note": self.note,
            "neurons": None if self.cost is None else neurons(self.cost.micro_neurons),
            "usd_exact": None if self.cost is None else dollars(self.cost.pico_dollars),
        }


class Line(msgspec.Struct):
    """All calls of one model, worker, account or whatever else the bill is by."""

    key: str
    charged_requests: int = 0
    charged: Tokens = msgspec.field(default_factory=Tokens)
    failed_requests: int = 0
    failed: Tokens = msgspec.field(default_factory=Tokens)
    unpriced_requests: int = 0
    unpriced: Tokens = msgspec.field(default_factory=Tokens)
    compute_us: int = 0
    micro_neurons: int = 0
    pico_dollars: int = 0
    batch_requests: int = 0
    """Of the charged ones, those of asynchronous batches."""
    batch_discount: Cost = Cost(0, 0)
    """What they would have cost more; the amounts of this line are without it."""
    cache_saving: Cost = Cost(0, 0)
    """What the cached prompt tokens would have cost more if they had not been; the amounts are without it."""
    price_versions: set[str] = msgspec.field(default_factory=set)

    @property
    def requests(self) -> int:
        """All calls, charged or not."""
        return self.charged_requests + self.failed_requests + self.unpriced_requests

    @property
    def is_unpriced(self) -> bool:
        """Nothing on this line has a price, so that it has no amount either."""
        return self.unpriced_requests > 0 and self.charged_requests == 0

    @property
    def cents(self) -> int:
        """The amount to pay, rounded half-even to cents."""
        return round_half_even(self.pico_dollars, _PICO_DOLLARS_PER_CENT)

    @property
    def residual_pico_dollars(self) -> int:
        """What rounding to cents took away (positive) or added (negative)."""
        return self.pico_dollars - self.cents * _PICO_DOLLARS_PER_CENT


class Bill(msgspec.Struct, frozen=True):
    """The lines of the calls that ended in [since_us, until_us), UTC."""

    since_us: int
    until_us: int
    by: Grouping
    lines: list[Line]

    @property
    def total_cents(self) -> int:
        """Sum of the rounded lines: what is printed adds up."""
        return sum(line.cents for line in self.lines)

    @property
    def total_pico_dollars(self) -> int:
        """Sum of the exact lines."""
        return sum(line.pico_dollars for line in self.lines)

    @property
    def cache_saving(self) -> Cost:
        """What prompt tokens saved by being cached."""
        saving = Cost(0, 0)
        for line in self.lines:
            saving = saving.plus(line.cache_saving)
        return saving

    def to_json(self) -> dict[str, Any]:
        """The bill as JSON values: money and neurons as decimal strings, counts as integers, times in ISO 8601."""
        lines = self.lines
        return {
            "since": iso_time(self.since_us),
            "until": iso_time(self.until_us),
            "by": self.by,
            "currency": "USD",
            "note": NOTE,
            "lines": [_line_json(line, self.by) for line in lines],
            "total": {
                "requests": sum(line.requests for line in lines),
                "charged_requests": sum(line.charged_requests for line in lines),
                "failed_requests": sum(line.failed_requests for line in lines),
                "unpriced_requests": sum(line.unpriced_requests for line in lines),
                "neurons": neurons(sum(line.micro_neurons for line in lines)),
                "usd_exact": dollars(self.total_pico_dollars),
                "usd": cents_string(self.total_cents),
                "usd_residual": dollars(self.total_pico_dollars - self.total_cents * _PICO_DOLLARS_PER_CENT),
                "cache_saving_usd_exact": dollars(self.cache_saving.pico_dollars),
            },
        }


def make_bill(ledger: Path, *, since_us: int, until_us: int, by: Grouping, account: str | None = None) -> Bill:
    """The bill for the calls that ended in [since_us, until_us), of `account` or of all accounts.

    Raises:
        EdgeError: the ledger cannot be read, or lacks the price book that a record names.
    """
    with opened(ledger) as database:
        return bill_in(database, since_us=since_us, until_us=until_us, by=by, account=account)


def bill_in(
    database: sqlite3.Connection, *, since_us: int, until_us: int, by: Grouping, account: str | None = None
) -> Bill:
    """`make_bill` of a ledger that is open."""
    query = f"""
        SELECT {_GROUPED_BY[by]}, status = 'error', model, served_by, price_version, trigger = 'batch', count(*),
               sum(input_tokens), sum(cached_input_tokens), sum(output_tokens), sum(compute_us)
        FROM usage
        WHERE ended_at >= :since AND ended_at < :until AND (:account IS NULL OR account = :account)
        GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1
    """
    rows = database.execute(query, {"since": since_us, "until": until_us, "account": account}).fetchall()
    return Bill(since_us, until_us, by, _lines(rows, price_books(database)))


def call_costs(ledger: Path, records: Iterable[UsageRecord]) -> list[Cost | None]:
    """What each of `records`, read from `ledger`, is on the bill with; None: its model has no price.

    A failed call costs nothing.

    Raises:
        EdgeError: the ledger cannot be read, or lacks the price book that a record names.
    """
    with opened(ledger) as database:
        books = price_books(database)
    return [_explained(record, books).cost for record in records]


def explain(ledger: Path, label: str) -> list[Explained]:
    """How what the calls of a request cost comes about; `label` is the request's id, or the id of one call's record.

    Raises:
        EdgeError: the ledger cannot be read, or lacks the price book that a record names.
    """
    with opened(ledger) as database:
        books = price_books(database)
        records = records_of(database, label)
    return [_explained(record, books) for record in records]


def _explained(record: UsageRecord, books: dict[str, PriceBook]) -> Explained:
    book = _book(books, record.price_version)
    listed = book.price(record.model, record.served_by)
    is_batch = record.trigger == "batch"
    tokens = Tokens(record.input_tokens, record.cached_input_tokens, record.output_tokens)
    if record.status == "error":
        return Explained(record, Cost(0, 0), book, None, tokens, "Failed calls are not charged.")
    if listed is None:
        return Explained(record, None, book, None, tokens, f"The price book has no price for {record.model}.")
    price = book.in_batch(listed) if is_batch else listed
    note = f"Calls of batches cost {book.batch_discount} less." if is_batch and book.batch_discount else ""
    return Explained(record, _amount(tokens, price, book), book, price, tokens, note)


def _lines(rows: Iterable[sqlite3.Row], books: dict[str, PriceBook]) -> list[Line]:
    lines: dict[str, Line] = {}
    for key, is_failed, model, served_by, price_version, is_batch, num_requests, *counts, compute_us in rows:
        line = lines.setdefault(key, Line(key))
        tokens = Tokens(*counts)
        line.compute_us += compute_us
        if is_failed:
            line.failed_requests += num_requests
            line.failed.add(tokens)
            continue
        book = _book(books, price_version)
        listed = book.price(model, served_by)
        if listed is None:
            line.unpriced_requests += num_requests
            line.unpriced.add(tokens)
            continue
        price = book.in_batch(listed) if is_batch else listed
        cost = _amount(tokens, price, book)
        line.charged_requests += num_requests
        line.charged.add(tokens)
        line.micro_neurons += cost.micro_neurons
        line.pico_dollars += cost.pico_dollars
        line.batch_requests += num_requests if is_batch else 0
        line.batch_discount = line.batch_discount.plus(_amount(tokens, listed, book)).minus(cost)
        uncached = Tokens(tokens.input_tokens + tokens.cached_input_tokens, 0, tokens.output_tokens)
        line.cache_saving = line.cache_saving.plus(_amount(uncached, price, book)).minus(cost)
        line.price_versions.add(price_version)
    return list(lines.values())


def _book(books: dict[str, PriceBook], price_version: str) -> PriceBook:
    if price_version not in books:
        raise EdgeError(
            f"the ledger lacks the price book {price_version} that records in it name, so that they have no price; "
            "restore the ledger from a copy"
        )
    return books[price_version]


def _amount(tokens: Tokens, price: Price, book: PriceBook) -> Cost:
    micro_neurons = price.micro_neurons(**msgspec.structs.asdict(tokens))
    return Cost(micro_neurons, micro_neurons * book.pico_dollars_per_micro_neuron)


def _line_json(line: Line, by: Grouping) -> dict[str, Any]:
    return {
        by: line.key,
        "requests": line.requests,
        "charged_requests": line.charged_requests,
        **msgspec.structs.asdict(line.charged),
        "failed_requests": line.failed_requests,
        "failed": msgspec.structs.asdict(line.failed),
        "unpriced_requests": line.unpriced_requests,
        "unpriced": msgspec.structs.asdict(line.unpriced),
        "compute_us": line.compute_us,
        "batch_requests": line.batch_requests,
        "batch_discount_neurons": neurons(line.batch_discount.micro_neurons),
        "batch_discount_usd_exact": dollars(line.batch_discount.pico_dollars),
        "price_versions": sorted(line.price_versions),
        "neurons": None if line.is_unpriced else neurons(line.micro_neurons),
        "usd_exact": None if line.is_unpriced else dollars(line.pico_dollars),
        "usd": None if line.is_unpriced else cents_string(line.cents),
        "usd_residual": None if line.is_unpriced else dollars(line.residual_pico_dollars),
    }


def round_half_even(amount: int, unit: int) -> int:
    """How many `unit`s `amount` is, rounded to the nearest, and a tie to the even one."""
    whole, rest = divmod(amount, unit)
    return whole + (2 * rest > unit or (2 * rest == unit and whole % 2 == 1))


def cents_string(cents: int) -> str:
    """`cents` as dollars with two decimals."""
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02d}"
