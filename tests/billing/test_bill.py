import asyncio
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doubles import MODEL, usage_record
from hypothesis import given
from hypothesis import strategies as st

from edge.billing.bill import Bill, Cost, Grouping, call_costs, cents_string, explain, make_bill, round_half_even
from edge.billing.ledger import Ledger
from edge.billing.meter import UsageRecord
from edge.billing.prices import Price, PriceBook, load_prices
from edge.billing.times import month_window
from edge.errors import EdgeError

NOVEMBER = month_window("2026-11")
QWQ = "@cf/qwen/qwq-32b"


async def bill_of(path: Path, records: list[UsageRecord], *books: PriceBook, by: Grouping = "model") -> Bill:
    ledger = Ledger(path)
    for book in books or (load_prices(),):
        ledger.add_price_book(book)
    await asyncio.gather(*(ledger.record(record) for record in records))
    await ledger.close()
    return make_bill(path, since_us=NOVEMBER[0], until_us=NOVEMBER[1], by=by)


async def test_lines_are_exact_and_rounded_once(tmp_path: Path) -> None:
    records = [usage_record(input_tokens=10**6, cached_input_tokens=3, output_tokens=10**6) for _ in range(3)]
    records.append(usage_record(model=QWQ, status="cancelled", input_tokens=0, output_tokens=1))
    bill = await bill_of(tmp_path / "l", records)
    assert bill.to_json() == {
        "since": "2026-11-01T00:00:00Z",
        "until": "2026-12-01T00:00:00Z",
        "by": "model",
        "currency": "USD",
        "note": "List prices before free allocations. Failed calls are listed and not charged.",
        "lines": [
            {
                "model": QWQ,
                "requests": 1,
                "charged_requests": 1,
                "input_tokens": 0,
                "cached_input_tokens": 0,
                "output_tokens": 1,
                "failed_requests": 0,
                "failed": {"input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0},
                "unpriced_requests": 0,
                "unpriced": {"input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0},
                "compute_us": 700,
                "batch_requests": 0,
                "batch_discount_neurons": "0",
                "batch_discount_usd_exact": "0",
                "price_versions": [load_prices().id],
                "neurons": "0.090909",
                "usd_exact": "0.000000999999",
                "usd": "0.00",
                "usd_residual": "0.000000999999",
            },
            {
                "model": MODEL,
                "requests": 3,
                "charged_requests": 3,
                "input_tokens": 3_000_000,
                "cached_input_tokens": 9,
                "output_tokens": 3_000_000,
                "failed_requests": 0,
                "failed": {"input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0},
                "unpriced_requests": 0,
                "unpriced": {"input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0},
                "compute_us": 2100,
                "batch_requests": 0,
                "batch_discount_neurons": "0",
                "batch_discount_usd_exact": "0",
                "price_versions": [load_prices().id],
                "neurons": "62127.022113",
                "usd_exact": "0.683397243243",
                "usd": "0.68",
                "usd_residual": "0.003397243243",
            },
        ],
        "total": {
            "requests": 4,
            "charged_requests": 4,
            "failed_requests": 0,
            "unpriced_requests": 0,
            "neurons": "62127.113022",
            "usd_exact": "0.683398243242",
            "usd": "0.68",
            "usd_residual": "0.003398243242",
            "cache_saving_usd_exact": "0",
        },
    }


async def test_failed_calls_are_listed_and_not_charged(tmp_path: Path) -> None:
    records = [usage_record(), usage_record(status="error", error_code=3043, input_tokens=99)]
    (line,) = (await bill_of(tmp_path / "l", records)).lines
    assert (line.requests, line.charged_requests, line.failed_requests) == (2, 1, 1)
    assert (line.charged.input_tokens, line.failed.input_tokens) == (10, 99)
    assert line.micro_neurons == 10 * 2457 + 2 * 18252


async def test_unpriced_is_not_free(tmp_path: Path) -> None:
    records = [usage_record(model="mystery", served_by="mystery"), usage_record()]
    bill = await bill_of(tmp_path / "l", records)
    mystery = bill.to_json()["lines"][0]
    assert (mystery["usd"], mystery["usd_exact"], mystery["neurons"]) == (None, None, None)
    assert mystery["unpriced"] == {"input_tokens": 10, "cached_input_tokens": 0, "output_tokens": 2}
    assert bill.to_json()["total"]["unpriced_requests"] == 1
    (by_worker,) = make_bill(tmp_path / "l", since_us=NOVEMBER[0], until_us=NOVEMBER[1], by="worker").lines
    assert (by_worker.unpriced_requests, by_worker.charged_requests, by_worker.is_unpriced) == (1, 1, False)


async def test_what_cached_prompt_tokens_save_is_told(tmp_path: Path) -> None:
    book = PriceBook("v1", "", 11, {MODEL: Price(100, 1, 10)}, "1/2")
    counts = {"input_tokens": 1, "cached_input_tokens": 1000, "output_tokens": 5, "price_version": book.id}
    records = [usage_record(**counts), usage_record(**counts, trigger="batch"), usage_record(**counts, status="error")]
    with pytest.raises(ValueError, match="no whole number"):  # 1 times 1/2
        book.in_batch(book.prices[MODEL])
    book = PriceBook("v1", "", 11, {MODEL: Price(100, 2, 10)}, "1/2")
    records = [msgspec.structs.replace(record, price_version=book.id) for record in records]
    bill = await bill_of(tmp_path / "l", records, book)
    assert bill.cache_saving == Cost(1000 * 90 + 1000 * 45, (1000 * 90 + 1000 * 45) * 11)
    assert bill.to_json()["total"]["cache_saving_usd_exact"] == "0.000001485"


@pytest.mark.parametrize(
    ("by", "keys"),
    [
        ("day", ["2026-11-30"]),
        ("hour", ["2026-11-30T12:00Z", "2026-11-30T13:00Z"]),
        ("version", ["(no worker)", "demo v1"]),
        ("trigger", ["binding", "rest"]),
    ],
)
async def test_groupings_have_the_same_total(tmp_path: Path, by: Grouping, keys: list[str]) -> None:
    noon = 1_796_040_000_000_000
    records = [
        usage_record(ended_at=noon),
        usage_record(ended_at=noon + 3_599_999_999, trigger="rest"),
        usage_record(ended_at=noon + 3_600_000_000, worker=None, version=None),
    ]
    bill = await bill_of(tmp_path / "l", records, by=by)
    assert [line.key for line in bill.lines] == keys
    assert bill.total_pico_dollars == 3 * (10 * 2457 + 2 * 18252) * 11


async def test_the_cost_of_a_request_is_explained(tmp_path: Path) -> None:
    book = PriceBook("v1", "", 11, {MODEL: Price(100, 20, 10)}, "1/2")
    same = {"request_id": "r-7", "price_version": book.id, "cached_input_tokens": 4}
    records = [
        usage_record(id="a", **same),
        usage_record(id="b", trigger="batch", **same),
        usage_record(id="c", status="error", error_code=3043, **same),
        usage_record(id="d", model="mystery", served_by="mystery", **same),
        usage_record(id="e", price_version=book.id),
    ]
    bill = await bill_of(tmp_path / "l", records, book)
    calls = explain(tmp_path / "l", "r-7")
    assert [call.record.id for call in calls] == ["a", "b", "c", "d"]
    assert [call.cost for call in calls] == call_costs(tmp_path / "l", records[:4])
    assert calls[0].meters == [("input tokens", 10, 100), ("cached input tokens", 4, 10), ("output tokens", 2, 20)]
    assert calls[1].meters == [("input tokens", 10, 50), ("cached input tokens", 4, 5), ("output tokens", 2, 10)]
    for call in calls[:2]:
        assert call.cost == Cost(
            sum(n * each for _, n, each in call.meters), sum(n * each for _, n, each in call.meters) * 11
        )
    assert [call.note for call in calls] == [
        "",
        "Calls of batches cost 1/2 less.",
        "Failed calls are not charged.",
        "The price book has no price for mystery.",
    ]
    assert [call.record.id for call in explain(tmp_path / "l", "e")] == ["e"]
    assert explain(tmp_path / "l", "r-8") == []
    assert bill.total_pico_dollars == sum(
        call.cost.pico_dollars for call in [*calls[:3], *explain(tmp_path / "l", "e")] if call.cost
    )


async def test_every_record_is_priced_by_the_book_that_it_names(tmp_path: Path) -> None:
    first = PriceBook("v1", "", 11, {MODEL: Price(1, 1)})
    second = PriceBook("v2", "", 22, {MODEL: Price(100, 100)})
    records = [usage_record(price_version=first.id), usage_record(price_version=second.id)]
    (line,) = (await bill_of(tmp_path / "l", records, first, second)).lines
    assert line.micro_neurons == 12 * 1 + 12 * 100
    assert line.pico_dollars == 12 * 11 + 1200 * 22
    assert line.price_versions == {first.id, second.id}


async def test_a_lost_price_book_is_an_error_and_not_a_zero(tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match=r"lacks the price book gone\+1"):
        await bill_of(tmp_path / "l", [usage_record(price_version="gone+1")])


async def test_the_costs_of_calls_are_those_on_the_bill(tmp_path: Path) -> None:
    book = PriceBook("v1", "", 11, {MODEL: Price(2, 3)})
    records = [
        usage_record(price_version=book.id),
        usage_record(price_version=book.id, status="cancelled", cached_input_tokens=5, output_tokens=0),
        usage_record(price_version=book.id, status="error", error_code=3043),
        usage_record(price_version=book.id, model="mystery", served_by="mystery"),
    ]
    bill = await bill_of(tmp_path / "l", records, book)
    costs = call_costs(tmp_path / "l", records)
    assert costs == [Cost(26, 286), Cost(30, 330), Cost(0, 0), None]
    assert bill.total_pico_dollars == 286 + 330
    with pytest.raises(EdgeError, match=r"lacks the price book gone\+1"):
        call_costs(tmp_path / "l", [usage_record(price_version="gone+1")])


async def test_grouping_window_and_account(tmp_path: Path) -> None:
    records = [
        usage_record(ended_at=NOVEMBER[0] - 1),
        usage_record(ended_at=NOVEMBER[0]),
        usage_record(ended_at=NOVEMBER[1] - 1, worker=None, account="other"),
        usage_record(ended_at=NOVEMBER[1]),
    ]
    by_day = await bill_of(tmp_path / "l", records, by="day")
    assert [(line.key, line.requests) for line in by_day.lines] == [("2026-11-01", 1), ("2026-11-30", 1)]
    window: dict[str, Any] = {"since_us": NOVEMBER[0], "until_us": NOVEMBER[1], "by": "worker"}
    assert [line.key for line in make_bill(tmp_path / "l", **window).lines] == ["(no worker)", "demo"]
    assert [line.key for line in make_bill(tmp_path / "l", **window, account="other").lines] == ["(no worker)"]


counts = st.integers(0, 10**7)
records = st.lists(
    st.builds(
        usage_record,
        id=st.uuids().map(str),
        model=st.sampled_from([MODEL, QWQ, "unpriced"]),
        served_by=st.just("unpriced"),
        worker=st.sampled_from(["a", "b", None]),
        status=st.sampled_from(["ok", "cancelled", "error"]),
        input_tokens=counts,
        cached_input_tokens=counts,
        output_tokens=counts,
    ),
    max_size=12,
)


@given(records)
def test_every_grouping_gives_the_sum_of_the_single_calls(made: list[UsageRecord]) -> None:
    prices = load_prices().prices
    expected = sum(
        prices[record.model].micro_neurons(
            input_tokens=record.input_tokens,
            cached_input_tokens=record.cached_input_tokens,
            output_tokens=record.output_tokens,
        )
        for record in made
        if record.model in prices and record.status != "error"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger")
        asyncio.run(bill_of(path, made))
        for by in ("model", "worker", "account", "day"):
            bill = make_bill(path, since_us=NOVEMBER[0], until_us=NOVEMBER[1], by=by)
            assert bill.total_pico_dollars == expected * 11
            assert sum(line.requests for line in bill.lines) == len(made)
            for line in bill.lines:
                assert line.pico_dollars == line.cents * 10**10 + line.residual_pico_dollars
                assert abs(line.residual_pico_dollars) <= 5 * 10**9


@given(st.integers(-(10**6), 10**6), st.integers(1, 100))
def test_rounding_is_that_of_python(amount: int, unit: int) -> None:
    assert round_half_even(amount, unit) == round(Fraction(amount, unit))


def test_cents_are_dollars_with_two_decimals() -> None:
    assert [cents_string(cents) for cents in (0, 5, 12345, -7)] == ["0.00", "0.05", "123.45", "-0.07"]


async def test_batches_cost_less_by_the_rule_of_their_book(tmp_path: Path) -> None:
    book = PriceBook("v", "", 11, {MODEL: Price(1000, 3000, 500)}, "1/4")
    calls = [
        usage_record(trigger=trigger, input_tokens=10, cached_input_tokens=2, output_tokens=4, price_version=book.id)
        for trigger in ("batch", "batch", "rest")
    ]
    calls.append(usage_record(trigger="batch", status="error", price_version=book.id))
    bill = await bill_of(tmp_path / "l", calls, book)
    full = 10 * 1000 + 2 * 500 + 4 * 3000
    (line,) = bill.lines
    assert (line.requests, line.charged_requests, line.batch_requests) == (4, 3, 2)
    assert line.micro_neurons == full + 2 * full * 3 // 4
    assert line.batch_discount == Cost(2 * full // 4, 2 * full // 4 * 11)
    assert line.charged.input_tokens == 30
    shown = bill.to_json()["lines"][0]
    assert (shown["batch_requests"], shown["batch_discount_neurons"]) == (2, "0.0115")
    assert shown["batch_discount_usd_exact"] == "0.0000001265"
    costs = call_costs(tmp_path / "l", calls)
    assert costs == [Cost(full * 3 // 4, full * 3 // 4 * 11)] * 2 + [Cost(full, full * 11), Cost(0, 0)]
    assert sum(cost.micro_neurons for cost in costs if cost is not None) == line.micro_neurons
