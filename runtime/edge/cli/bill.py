"""`edge bill`: what the model calls of a period cost, how the cost of one comes about, and whether it all adds up."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli import Group
from edge.cli.options import config_options, find_state_dir, json_option
from edge.cli.output import Column, emit

if TYPE_CHECKING:
    from edge.billing.bill import Bill, Explained, Grouping, Line

_GROUPINGS = ["model", "worker", "version", "account", "trigger", "day", "hour"]


@click.group(cls=Group, invoke_without_command=True)
@click.option("--month", metavar="YYYY-MM", help="A month in UTC.  [default: the current one]")
@click.option("--since", metavar="TIME", help="Start of the period, included (ISO 8601, UTC).")
@click.option("--until", metavar="TIME", help="End of the period, excluded (ISO 8601, UTC).  [default: now]")
@click.option("--by", type=click.Choice(_GROUPINGS), default="model", show_default=True)
@click.option("--account", help="Only the calls of this account.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@config_options
@json_option
@click.pass_context
def bill(
    context: click.Context,
    month: str | None,
    since: str | None,
    until: str | None,
    by: Grouping,
    account: str | None,
    form: str,
    config_path: Path | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Show what model calls cost, at list price before free allocations.

    Amounts are exact until the end of a line, where cents are rounded once, half to even. Failed calls are listed
    and not charged. JSON and CSV have exact amounts as decimal strings. Days and hours are of UTC.
    """
    from edge.billing.bill import make_bill

    if context.invoked_subcommand is not None:
        if month or since or until or account:
            raise click.UsageError(f"periods and accounts are not for `edge bill {context.invoked_subcommand}`")
        return
    since_us, until_us = _window(month, since, until)
    made = make_bill(_ledger(config_path, state_dir), since_us=since_us, until_us=until_us, by=by, account=account)
    match "json" if as_json else form:
        case "json":
            print(json.dumps(made.to_json(), indent=2))
        case "csv":
            _write_csv(made)
        case _:
            _print(made)


@bill.command()
@click.argument("request_id")
@config_options
@json_option
def explain(request_id: str, config_path: Path | None, state_dir: Path | None, as_json: bool) -> None:
    """Show how the cost of a request comes about: every meter, price and multiplication.

    REQUEST_ID is what the answer says as `cf-ai-req-id`, or `env.AI.lastRequestId`; the id of a record in `edge usage
    --json` will do, too.
    """
    from edge.billing.bill import explain as explain_calls
    from edge.errors import UsageError

    ledger = _ledger(config_path, state_dir)
    calls = explain_calls(ledger, request_id)
    if not calls:
        raise UsageError(f"{ledger} has no call of the request {request_id!r}; `edge usage --json` has the ids of all")
    if as_json:
        print(json.dumps([call.to_json() for call in calls], indent=2))
        return
    for call in calls:
        _print_explained(call)


@bill.command()
@config_options
@json_option
def verify(config_path: Path | None, state_dir: Path | None, as_json: bool) -> None:
    """Read all records and prices once more, add them up in another way, and say where that differs from the bill.

    The exit code is 1 if anything differs, also where a record or a price book was changed after it was written.
    """
    from edge.billing.verify import verify as verify_ledger

    ledger = _ledger(config_path, state_dir)
    found = verify_ledger(ledger)
    if as_json:
        print(json.dumps(found._asdict(), indent=2))
    else:
        for difference in found.differences:
            click.secho(difference, fg="red")
        outcome = f"{len(found.differences)} differences" if found.differences else "no differences"
        counts = f"records {found.num_records:,}, price books {found.num_price_books}"
        print(f"{ledger}: {counts}, {found.usd_exact} USD: {outcome}")
    if found.differences:
        sys.exit(1)


def _ledger(config_path: Path | None, state_dir: Path | None) -> Path:
    """The ledger that the options name, wherever on the command line they are."""
    from edge.billing.ledger import FILE_NAME

    parent = click.get_current_context().parent
    before = parent.params if parent is not None else {}
    config_path, state_dir = config_path or before.get("config_path"), state_dir or before.get("state_dir")
    return find_state_dir(config_path, state_dir) / FILE_NAME


def _window(month: str | None, since: str | None, until: str | None) -> tuple[int, int]:
    """[since, until) in microseconds, UTC."""
    from edge.billing.times import month_window, now_us, parse_time, this_month

    if month is not None and (since is not None or until is not None):
        raise click.UsageError("--month is a period of its own: leave out --since and --until")
    if since is None and until is None:
        return month_window(month or this_month())
    if since is None:
        raise click.UsageError("--until needs --since, the start of the period")
    since_us, until_us = parse_time(since), parse_time(until) if until is not None else now_us()
    if since_us >= until_us:
        raise click.UsageError("the period is empty: --since must be before --until, which is now by default")
    return since_us, until_us


def _write_csv(made: Bill) -> None:
    """A row for each line, of what the JSON has; nothing is added up."""
    lines = [_flat(line) for line in made.to_json()["lines"]]
    names = list(lines[0]) if lines else [made.by]
    writer = csv.DictWriter(sys.stdout, ["since", "until", *names], lineterminator="\n")
    writer.writeheader()
    period = {key: made.to_json()[key] for key in ("since", "until")}
    writer.writerows(period | line for line in lines)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        match value:
            case dict():
                flat |= _flat(value, f"{prefix}{key}_")
            case list():
                flat[prefix + key] = " ".join(value)
            case _:
                flat[prefix + key] = value
    return flat


def _print_explained(call: Explained) -> None:
    from edge.billing.prices import dollars, neurons
    from edge.billing.times import iso_time

    record = call.record
    status = record.status if record.error_code is None else f"{record.status} {record.error_code}"
    who = f"account {record.account}" + (f", worker {record.worker} {record.version}" if record.worker else "")
    print(f"{iso_time(record.ended_at)}  {record.model}  {status}  ({who}, record {record.id})")
    rows = [
        {"meter": meter, "quantity": quantity, "each": neurons(each), "neurons": neurons(quantity * each)}
        for meter, quantity, each in call.meters
    ]
    columns = [
        Column("meter", "Meter"),
        Column("quantity", "Quantity"),
        Column("each", "Neurons each"),
        Column("neurons", "Neurons"),
    ]
    emit(rows, columns, as_json=False)
    if call.note:
        print(call.note)
    if call.cost is None:
        print("unpriced\n")
        return
    rate = dollars(1000 * 10**6 * call.book.pico_dollars_per_micro_neuron)
    total = f"{neurons(call.cost.micro_neurons)} neurons x {rate} USD per 1,000 = {dollars(call.cost.pico_dollars)} USD"
    print(f"{total}  (price book {call.book.id})\n")


def _print(made: Bill) -> None:
    columns = [
        Column(made.by, made.by.capitalize()),
        Column("requests", "Requests"),
        Column("failed", "Failed", drop=3),
        Column("input_tokens", "Input"),
        Column("cached_input_tokens", "Cached", drop=1),
        Column("output_tokens", "Output"),
        *(
            [Column("discount", "Batch discount")]
            if any(line.batch_discount.pico_dollars for line in made.lines)
            else []
        ),
        Column("neurons", "Neurons", drop=2),
        Column("usd_exact", "USD exact"),
        Column("usd", "USD"),
    ]
    rows = [_for_people(line, made.by) for line in made.lines]
    emit(rows, columns, as_json=False, footer="\n".join(_summary(made)))


def _summary(made: Bill) -> Iterator[str]:
    from edge.billing.bill import NOTE, cents_string
    from edge.billing.prices import dollars
    from edge.billing.times import iso_time

    yield f"{iso_time(made.since_us)} to {iso_time(made.until_us)}{'' if made.lines else ': no calls'}"
    rounded, exact = cents_string(made.total_cents), dollars(made.total_pico_dollars)
    if made.total_cents == 0 and made.total_pico_dollars > 0:
        yield f"Total {exact} USD, which is {rounded} in whole cents"
    else:
        yield f"Total {rounded} USD (exactly {exact})"
    if saved := made.cache_saving.pico_dollars:
        yield f"Cached prompt tokens saved {dollars(saved)} USD"
    yield NOTE
    unpriced = sum(line.unpriced_requests for line in made.lines)
    if unpriced:
        calls = "1 call is of a model" if unpriced == 1 else f"{unpriced:,} calls are of models"
        yield f"{calls} without a price and not in the total."


def _for_people(line: Line, by: str) -> dict[str, Any]:
    """The tokens are those that are charged; of a line without any price, those that would be."""
    from edge.billing.bill import cents_string
    from edge.billing.prices import dollars, neurons

    tokens = line.unpriced if line.is_unpriced else line.charged
    row = {
        by: line.key,
        "requests": line.requests,
        "failed": line.failed_requests,
        "input_tokens": tokens.input_tokens,
        "cached_input_tokens": tokens.cached_input_tokens,
        "output_tokens": tokens.output_tokens,
        "discount": dollars(line.batch_discount.pico_dollars),
    }
    if line.is_unpriced:
        return row | {"neurons": "unpriced", "usd_exact": "unpriced", "usd": "unpriced"}
    return row | {
        "neurons": neurons(line.micro_neurons),
        "usd_exact": dollars(line.pico_dollars),
        "usd": cents_string(line.cents),
    }
