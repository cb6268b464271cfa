"""`edge usage`: the latest model calls, as the ledger has them, and what each of them cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.options import config_options, find_state_dir, json_option
from edge.cli.output import Column, emit

if TYPE_CHECKING:
    from edge.billing.bill import Cost
    from edge.billing.meter import UsageRecord

_COLUMNS = [
    Column("ended_at", "Ended (UTC)"),
    Column("account", "Account", drop=7),
    Column("worker", "Worker", drop=6),
    Column("model", "Model"),
    Column("trigger", "Via", drop=5),
    Column("status", "Status"),
    Column("input_tokens", "Input"),
    Column("cached_input_tokens", "Cached", drop=2),
    Column("output_tokens", "Output"),
    Column("compute_ms", "Compute ms", drop=1),
    Column("wall_ms", "Wall ms", drop=4),
    Column("neurons", "Neurons", drop=3),
    Column("usd_exact", "USD exact"),
]


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Newest calls.")
@click.option("--since", metavar="TIME", help="Calls that ended at or after this date or time (ISO 8601, UTC).")
@click.option("--model", help="Calls of this model: the id that was called, or the installed model behind it.")
@click.option("--account", help="Calls of this account.")
@config_options
@json_option
def usage(
    limit: int,
    since: str | None,
    model: str | None,
    account: str | None,
    config_path: Path | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Show the latest model calls, newest first.

    Every call that reached a model is here once: finished, cancelled or failed. Its cost is exact, at list price, from
    the price book that was in force; failed calls cost nothing. `--json` has all fields, with times in microseconds.
    """
    from edge.billing.bill import call_costs
    from edge.billing.ledger import FILE_NAME, latest_records
    from edge.billing.times import parse_time

    ledger = find_state_dir(config_path, state_dir) / FILE_NAME
    since_us = parse_time(since) if since is not None else None
    records = latest_records(ledger, limit=limit, since_us=since_us, model=model, account=account)
    rows = [_row(*each) for each in zip(records, call_costs(ledger, records), strict=True)]
    if not as_json:
        rows = [_for_people(row) for row in rows]
    footer = "" if rows else _why_empty(ledger, since, model, account)
    emit(rows, _COLUMNS, as_json=as_json, footer=footer)


def _row(record: UsageRecord, cost: Cost | None) -> dict[str, Any]:
    import msgspec

    from edge.billing.prices import dollars, neurons

    return {
        **msgspec.structs.asdict(record),
        "neurons": None if cost is None else neurons(cost.micro_neurons),
        "usd_exact": None if cost is None else dollars(cost.pico_dollars),
    }


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    status = row["status"] if row["error_code"] is None else f"{row['status']} {row['error_code']}"
    return {
        **row,
        "ended_at": _short_time(row["ended_at"]),
        "status": status,
        "compute_ms": row["compute_us"] // 1000,
        "wall_ms": row["wall_us"] // 1000,
        "neurons": row["neurons"] or "unpriced",
        "usd_exact": row["usd_exact"] or "unpriced",
    }


def _short_time(moment_us: int) -> str:
    """`11-30 14:05:09`, with the year if it is not this one. In UTC."""
    from edge.billing.times import iso_time, this_month

    text = iso_time(moment_us)[:19].replace("T", " ")
    return text.removeprefix(this_month()[:5])


def _why_empty(ledger: Path, since: str | None, model: str | None, account: str | None) -> str:
    asked = {"--since": since, "--model": model, "--account": account}
    given = " ".join(f"{option} {value}" for option, value in asked.items() if value is not None)
    return f"No calls in {ledger} match {given}." if given else f"No calls are recorded in {ledger}."
