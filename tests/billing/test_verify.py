"""`verify` finds what was changed behind the ledger's back, and nothing in a ledger that is as it was written."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path

import pytest
from doubles import MODEL, usage_record
from hypothesis import given
from hypothesis import strategies as st

from edge.billing.bill import make_bill
from edge.billing.ledger import Ledger
from edge.billing.meter import UsageRecord
from edge.billing.prices import Price, PriceBook, dollars
from edge.billing.verify import verify

BOOK = PriceBook("v1", "", 11, {MODEL: Price(100, 20, 10), "other": Price(4, 6)}, "1/2")
WHOLE = (0, 1 << 60)


async def write(path: Path, *records: UsageRecord) -> None:
    ledger = Ledger(path)
    ledger.add_price_book(BOOK)
    await asyncio.gather(*(ledger.record(record) for record in records))
    await ledger.close()


def record(**changes: object) -> UsageRecord:
    return usage_record(price_version=BOOK.id, started_at=1000, ended_at=3000, wall_us=2000, **changes)


def change(path: Path, *statements: str) -> None:
    """Change the file as its triggers would not allow."""
    with sqlite3.connect(path) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            database.execute(statement)
    database.close()


def test_an_empty_ledger_is_right(tmp_path: Path) -> None:
    assert verify(tmp_path / "none") == (0, 0, "0", [])


@pytest.mark.parametrize(
    ("statement", "difference"),
    [
        ("UPDATE price_books SET content = replace(content, '100', '1')", "was changed: what it holds now is v1+"),
        ("DELETE FROM price_books", "record a: its price book v1+"),
        ("UPDATE usage SET wall_us = 1 WHERE id = 'a'", "record a: it says 1 us, and there are 2000"),
        ("UPDATE usage SET error_code = 3043 WHERE id = 'b'", "record b: its status is 'ok' and its error code 3043"),
        ("UPDATE usage SET status = 'error' WHERE id = 'b'", "record b: its status is 'error' and its error code None"),
    ],
)
async def test_what_was_changed_is_found(tmp_path: Path, statement: str, difference: str) -> None:
    path = tmp_path / "ledger"
    await write(path, record(id="a"), record(id="b"))
    assert verify(path).differences == []
    change(path, statement)
    assert any(difference in found for found in verify(path).differences), verify(path).differences


async def test_many_differences_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    await write(path, *(record(id=f"{i}") for i in range(30)))
    change(path, "UPDATE usage SET wall_us = 1")
    *first, last = verify(path).differences
    assert (len(first), last) == (20, "and 10 more")


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "model": st.sampled_from([MODEL, "other", "unpriced"]),
                "trigger": st.sampled_from(["rest", "batch"]),
                "status": st.sampled_from(["ok", "cancelled", "error"]),
                "input_tokens": st.integers(0, 10**6),
                "cached_input_tokens": st.integers(0, 10**6),
                "output_tokens": st.integers(0, 10**6),
            }
        ),
        max_size=8,
    )
)
def test_any_ledger_is_right_and_has_the_sum_of_its_bill(calls: list[dict[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        codes = {"error": 3043}
        records = [
            record(id=f"{i}", served_by=call["model"], error_code=codes.get(str(call["status"])), **call)
            for i, call in enumerate(calls)
        ]
        asyncio.run(write(path, *records))
        found = verify(path)
        assert (found.num_records, found.differences) == (len(calls), [])
        bill = make_bill(path, since_us=WHOLE[0], until_us=WHOLE[1], by="model")
        assert found.usd_exact == dollars(bill.total_pico_dollars)
