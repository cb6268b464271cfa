"""`edge bill`: what the model calls of a period cost, by model, worker, account or day."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.options import config_options, find_state_dir, json_option
from edge.cli.output import Column, emit

if TYPE_CHECKING:
    from edge.billing.bill import Bill, Grouping, Line


@click.command()
@click.option("--month", metavar="YYYY-MM", help="A month in UTC.  [default: the current one]")
@click.option("--since", metavar="TIME", help="Start of the period, included (ISO 8601, UTC).")
@click.option("--until", metavar="TIME", help="End of the period, excluded (ISO 8601, UTC).  [default: now]")
@click.option("--by", type=click.Choice(["model", "worker", "account", "day"]), default="model", show_default=True)
@click.option("--account", help="Only the calls of this account.")
@config_options
@json_option
def bill(
    month: str | None,
    since: str | None,
    until: str | None,
    by: Grouping,
    account: str | None,
    config_path: Path | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Show what model calls cost, at list price before free allocations.

    Amounts are exact until the end of a line, where cents are rounded once, half to even. Failed calls are listed
    and not charged. `--json` has exact amounts as decimal strings.
    """
    from edge.billing.bill import make_bill
    from edge.billing.ledger import FILE_NAME

    since_us, until_us = _window(month, since, until)
    ledger = find_state_dir(config_path, state_dir) / FILE_NAME
    made = make_bill(ledger, since_us=since_us, until_us=until_us, by=by, account=account)
    if as_json:
        print(json.dumps(made.to_json(), indent=2))
    else:
        _print(made)


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
