import asyncio
import csv
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
from doubles import MODEL, STAND_IN, usage_record

from edge.billing.ledger import FILE_NAME, Ledger
from edge.billing.prices import load_prices
from edge.cli import cli

Run = Callable[..., click.testing.Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*arguments: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli, [*arguments, "--state-dir", str(tmp_path)])

    return invoke


@pytest.fixture
def written(tmp_path: Path) -> None:
    async def write() -> None:
        ledger = Ledger(tmp_path / FILE_NAME)
        ledger.add_price_book(load_prices())
        for minute, changes in enumerate(
            (
                {"model": STAND_IN, "input_tokens": 10**6},
                {"status": "cancelled"},
                {"status": "error", "error_code": 3043},
                {"model": "mystery", "served_by": "mystery", "worker": None},
            )
        ):
            ended_at = 1_796_040_000_000_000 + minute
            times = {"started_at": ended_at - 1_000_000, "ended_at": ended_at}
            await ledger.record(usage_record(id=f"u{minute}", **times, **changes))
        await ledger.close()

    asyncio.run(write())


@pytest.mark.usefixtures("written")
def test_usage(run: Run) -> None:
    records = json.loads(run("usage", "--json").stdout)
    assert [record["id"] for record in records] == ["u3", "u2", "u1", "u0"]
    assert records[3] == {
        "id": "u0",
        "request_id": "r-1",
        "started_at": 1_796_039_999_000_000,
        "ended_at": 1_796_040_000_000_000,
        "account": "dev",
        "worker": "demo",
        "version": "v1",
        "model": STAND_IN,
        "served_by": MODEL,
        "task": "text-generation",
        "trigger": "binding",
        "status": "ok",
        "error_code": None,
        "input_tokens": 1_000_000,
        "cached_input_tokens": 0,
        "output_tokens": 2,
        "compute_us": 700,
        "wall_us": 1_000_000,
        "price_version": load_prices().id,
        "sandbox": 0,
        "neurons": "2457.036504",
        "usd_exact": "0.027027401544",
    }
    assert [(record["neurons"], record["usd_exact"]) for record in records[:3]] == [
        (None, None),  # no price
        ("0", "0"),  # failed
        ("0.061074", "0.000000671814"),
    ]
    assert len(json.loads(run("usage", "--json", "--limit", "1").stdout)) == 1
    assert [record["id"] for record in json.loads(run("usage", "--json", "--model", "mystery").stdout)] == ["u3"]
    assert json.loads(run("usage", "--json", "--since", "2026-12-01").stdout) == []
    assert [len(json.loads(run("usage", "--json", "--account", one).stdout)) for one in ("dev", "other")] == [4, 0]
    table = run("usage").stdout
    for text in ("11-30 12:00:00", "error 3043", "1,000,000", "mystery", "unpriced", "0.027027401544"):
        assert text in table
    assert "2026-11-30T12" not in table


@pytest.mark.usefixtures("written")
def test_no_match_is_not_no_calls(run: Run, tmp_path: Path) -> None:
    ledger = tmp_path / FILE_NAME
    assert run("usage", "--model", "nope").stdout == f"No calls in {ledger} match --model nope.\n"
    both = run("usage", "--since", "2026-12-01", "--model", "mystery")
    assert both.stdout == f"No calls in {ledger} match --since 2026-12-01 --model mystery.\n"
    assert "2026-12-01T00:00:00Z: no calls\n" in run("bill", "--month", "2026-11", "--account", "nobody").stdout


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("command", [("usage",), ("bill", "--month", "2026-11"), ("bill", "--since", "2026-11-30")])
@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run(*command).stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert any("0.027027401544" in line and "3.2-1b-instruct" in line for line in lines)


@pytest.mark.usefixtures("written")
def test_an_amount_below_a_cent_is_shown_exactly(run: Run) -> None:
    small = run("bill", "--since", "2026-11-30T12:00:00.000001Z", "--until", "2026-12-01").stdout
    assert "Total 0.000000671814 USD, which is 0.00 in whole cents" in small


@pytest.mark.usefixtures("written")
def test_bill(run: Run) -> None:
    bill = json.loads(run("bill", "--month", "2026-11", "--json").stdout)
    assert [(line["model"], line["requests"], line["usd_exact"]) for line in bill["lines"]] == [
        (STAND_IN, 1, "0.027027401544"),
        ("mystery", 1, None),
        (MODEL, 2, "0.000000671814"),
    ]
    assert bill["total"]["usd"] == "0.03"
    table = run("bill", "--month", "2026-11").stdout
    for text in ("unpriced", "0.027027401544", "Total 0.03 USD", "before free allocations", "1 call is of a model"):
        assert text in table
    window = ("--since", "2026-11-30T12:00:00Z", "--until", "2026-11-30T12:00:01Z", "--by", "worker")
    lines = json.loads(run("bill", *window, "--json").stdout)["lines"]
    assert [(line["worker"], line["requests"], line["failed_requests"]) for line in lines] == [
        ("(no worker)", 1, 0),
        ("demo", 3, 1),
    ]
    assert json.loads(run("bill", "--month", "2026-10", "--json").stdout)["lines"] == []


def test_without_a_ledger_there_is_nothing_to_show(run: Run, tmp_path: Path) -> None:
    assert json.loads(run("usage", "--json").stdout) == []
    assert run("usage").stdout == f"No calls are recorded in {tmp_path / FILE_NAME}.\n"
    assert json.loads(run("bill", "--json").stdout)["total"]["requests"] == 0
    assert "Total 0.00 USD" in run("bill").stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bill", "--month", "2026"), "not of the form YYYY-MM"),
        (("bill", "--month", "2026-11", "--since", "2026-11-01"), "leave out --since"),
        (("bill", "--until", "2026-11-01"), "--until needs --since"),
        (("bill", "--since", "2026-11-02", "--until", "2026-11-01"), "the period is empty"),
        (("bill", "--since", "soon"), "not ISO 8601"),
        (("bill", "--by", "moon"), "is not one of"),
        (("usage", "--limit", "0"), "--limit"),
        (("usage", "--since", "soon"), "not ISO 8601"),
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_broken_ledger_is_exit_code_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    result = run("bill")
    assert result.exit_code == 1
    assert "cannot be opened" in result.stderr


@pytest.mark.usefixtures("written")
def test_a_bill_as_csv(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("bill", "--month", "2026-11", "--format", "csv").stdout)))
    lines = json.loads(run("bill", "--month", "2026-11", "--format", "json").stdout)["lines"]
    assert [row["model"] for row in rows] == [line["model"] for line in lines]
    assert [row["usd_exact"] for row in rows] == [line["usd_exact"] or "" for line in lines]
    assert {row["since"] for row in rows} == {"2026-11-01T00:00:00Z"}
    assert rows[0]["failed_output_tokens"] == str(lines[0]["failed"]["output_tokens"])
    assert run("bill", "--month", "2026-10", "--format", "csv").stdout == "since,until,model\n"


@pytest.mark.usefixtures("written")
def test_the_cost_of_a_request_is_explained(run: Run) -> None:
    calls = json.loads(run("bill", "explain", "r-1", "--json").stdout)
    assert [(call["id"], call["usd_exact"]) for call in calls] == [
        ("u0", "0.027027401544"),
        ("u1", "0.000000671814"),
        ("u2", "0"),
        ("u3", None),
    ]
    assert calls[0]["meters"][0] == {
        "meter": "input tokens",
        "quantity": 10**6,
        "neurons_each": "0.002457",
        "neurons": "2457",
    }
    text = run("bill", "explain", "u0").stdout
    assert "2457.036504 neurons x 0.011 USD per 1,000 = 0.027027401544 USD" in text
    assert load_prices().id in text
    assert "Failed calls are not charged." in run("bill", "explain", "u2").stdout
    missing = run("bill", "explain", "nobody")
    assert missing.exit_code == 2
    assert "no call of the request 'nobody'" in missing.stderr


@pytest.mark.usefixtures("written")
def test_a_ledger_is_verified(run: Run, tmp_path: Path) -> None:
    right = run("bill", "verify")
    assert (right.exit_code, right.stdout) == (
        0,
        f"{tmp_path / FILE_NAME}: records 4, price books 1, 0.027028073358 USD: no differences\n",
    )
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("DROP TRIGGER price_books_no_update")
        database.execute("UPDATE price_books SET content = replace(content, '2457', '2458')")
    database.close()
    wrong = run("bill", "verify", "--json")
    assert wrong.exit_code == 1
    assert "was changed" in json.loads(wrong.stdout)["differences"][0]


def test_options_of_the_bill_are_for_the_bill(run: Run, tmp_path: Path) -> None:
    refused = run("bill", "--month", "2026-11", "verify")
    assert refused.exit_code == 2
    assert "not for `edge bill verify`" in refused.stderr
    before = click.testing.CliRunner().invoke(cli, ["bill", "--state-dir", str(tmp_path), "verify"])
    assert before.stdout == f"{tmp_path / FILE_NAME}: records 0, price books 0, 0 USD: no differences\n"
    assert "bill verify`?" in run("bill", "verfy").stderr
