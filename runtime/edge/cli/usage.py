"""`edge usage`: the latest model calls, as the ledger has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge.cli.options import config_options, find_state_dir, json_option
from edge.cli.output import emit

_COLUMNS = [
    ("ended_at", "Ended (UTC)"),
    ("worker", "Worker"),
    ("model", "Model"),
    ("trigger", "Via"),
    ("status", "Status"),
    ("input_tokens", "Input"),
    ("cached_input_tokens", "Cached"),
    ("output_tokens", "Output"),
    ("compute_ms", "Compute ms"),
    ("wall_ms", "Wall ms"),
]


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Newest calls.")
@click.option("--since", metavar="TIME", help="Calls that ended at or after this date or time (ISO 8601, UTC).")
@click.option("--model", help="Calls of this model: the id that was called, or the installed model behind it.")
@config_options
@json_option
def usage(
    limit: int, since: str | None, model: str | None, config_path: Path | None, state_dir: Path | None, as_json: bool
) -> None:
    """Show the latest model calls, newest first.

    Every call that reached a model is here once: finished, cancelled or failed. `--json` has all fields, with times
    in microseconds.
    """
    import msgspec

    from edge.billing.ledger import FILE_NAME, latest_records
    from edge.billing.times import parse_time

    ledger = find_state_dir(config_path, state_dir) / FILE_NAME
    since_us = parse_time(since) if since is not None else None
    records = latest_records(ledger, limit=limit, since_us=since_us, model=model)
    rows = [msgspec.structs.asdict(record) for record in records]
    emit(
        rows if as_json else [_for_people(row) for row in rows],
        _COLUMNS,
        as_json=as_json,
        footer=None if rows else f"No calls are recorded in {ledger}.",
    )


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    from edge.billing.times import iso_time

    status = row["status"] if row["error_code"] is None else f"{row['status']} {row['error_code']}"
    return {
        **row,
        "ended_at": iso_time(row["ended_at"] // 10**6 * 10**6),
        "status": status,
        "compute_ms": row["compute_us"] // 1000,
        "wall_ms": row["wall_us"] // 1000,
    }
