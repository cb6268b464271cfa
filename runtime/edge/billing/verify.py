"""Whether a ledger and its bills agree: everything is read once more, and added up in another way.

The other way is fractions of dollars, record by record, from what the price books say; the bill adds up integers of
what the database has summed. What is found is told, and nothing is mended.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from edge.billing.bill import bill_in
from edge.billing.ledger import all_records, opened, price_books
from edge.billing.meter import UsageRecord
from edge.billing.prices import Price, PriceBook, dollars

_MAX_SHOWN = 20


class Verified(NamedTuple):
    """What was looked at, and what is wrong with it."""

    num_records: int
    num_price_books: int
    usd_exact: str
    """What all charged calls cost, as a decimal string."""
    differences: list[str]
    """At most `_MAX_SHOWN`, and how many there are beyond."""


def verify(ledger: Path) -> Verified:
    """Look through all of `ledger`.

    Raises:
        EdgeError: it cannot be read at all.
    """
    with opened(ledger) as database:
        database.execute("BEGIN")  # one state of it, whatever a node writes meanwhile
        books = price_books(database)
        damage = [
            f"the file is damaged: {text}" for (text,) in database.execute("PRAGMA integrity_check") if text != "ok"
        ]
        differences = [*damage, *_wrong_books(books)]
        sums: defaultdict[str, Fraction] = defaultdict(Fraction)
        num_records, total = 0, Fraction()
        for record in all_records(database):
            num_records += 1
            differences += _wrong_record(record, books)
            if (book := books.get(record.price_version)) is not None:
                cost = _cost(record, book)
                total += cost
                sums[record.model] += cost
        if _named_books(database) <= books.keys():  # else there is no bill, as was said
            differences += _wrong_sums(database, sums)
    if len(differences) > _MAX_SHOWN:
        differences = [*differences[:_MAX_SHOWN], f"and {len(differences) - _MAX_SHOWN} more"]
    return Verified(num_records, len(books), dollars(int(total * 10**12)), differences)


def _wrong_books(books: dict[str, PriceBook]) -> Iterator[str]:
    for id, book in books.items():
        if book.id != id:
            yield f"the price book {id} was changed: what it holds now is {book.id}"


def _named_books(database: sqlite3.Connection) -> set[str]:
    return {id for (id,) in database.execute("SELECT DISTINCT price_version FROM usage")}


def _wrong_record(record: UsageRecord, books: dict[str, PriceBook]) -> Iterator[str]:
    if record.price_version not in books:
        yield f"record {record.id}: its price book {record.price_version} is missing"
    if record.ended_at - record.started_at != record.wall_us:
        yield (
            f"record {record.id}: it says {record.wall_us} us, and there are {record.ended_at - record.started_at} "
            "between its start and its end"
        )
    if (record.status == "error") != (record.error_code is not None):
        yield f"record {record.id}: its status is {record.status!r} and its error code {record.error_code}"


def _wrong_sums(database: sqlite3.Connection, sums: dict[str, Fraction]) -> Iterator[str]:
    (until,) = database.execute("SELECT coalesce(max(ended_at), 0) + 1 FROM usage").fetchone()
    bill = bill_in(database, since_us=-(1 << 62), until_us=until, by="model")
    billed = {line.key: Fraction(line.pico_dollars, 10**12) for line in bill.lines}
    for model in sorted(sums.keys() | billed.keys()):
        theirs, ours = billed.get(model, Fraction()), sums.get(model, Fraction())
        if theirs != ours:
            yield f"{model}: the bill has {float(theirs)} USD, and its records are {float(ours)} USD"


def _cost(record: UsageRecord, book: PriceBook) -> Fraction:
    """Dollars of one call, from nothing but the book's own terms."""
    listed = book.prices.get(record.model) or book.prices.get(record.served_by)
    if record.status == "error" or listed is None:
        return Fraction()
    factor = 1 - Fraction(book.batch_discount or 0) if record.trigger == "batch" else Fraction(1)
    neurons = Fraction(
        record.input_tokens * listed.input
        + record.cached_input_tokens * _cached(listed)
        + record.output_tokens * listed.output,
        10**6,
    )
    usd_per_neuron = Fraction(dollars(book.pico_dollars_per_micro_neuron * 10**6))
    return neurons * factor * usd_per_neuron


def _cached(price: Price) -> int:
    return price.input if price.cached_input is None else price.cached_input
