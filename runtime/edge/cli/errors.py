"""`edge errors`: the errors that callers of the API can meet; docs/errors.md has the same table."""

from __future__ import annotations

from typing import Any

import click

from edge.cli.options import json_option
from edge.cli.output import Column, emit
from edge.errors import EdgeError, UsageError, catalogue

_COLUMNS = [
    Column("code", "Code"),
    Column("status", "HTTP"),
    Column("name", "Name"),
    Column("retry", "Retry", drop=1),
    Column("cause", "Cause"),
]


@click.command()
@click.argument("code", required=False)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table of docs/errors.md.")
@json_option
def errors(code: str | None, as_markdown: bool, as_json: bool) -> None:
    """Show the errors of the API, or what one CODE means.

    CODE is a number or a name. Each error has its HTTP status, whether trying again can help, what brings it about and
    what to do.
    """
    if as_markdown:
        click.echo(markdown())
        return
    rows = [_row(kind) for kind in catalogue()]
    found = [row for row in rows if code is None or code.lower() in (row["code"], row["name"].lower())]
    if not found:
        raise UsageError(f"there is no error {code}; `edge errors` lists all")
    if code is None or as_json:
        emit(found, _COLUMNS, as_json=as_json)
    else:
        click.echo("\n\n".join(_details(row) for row in found))


def _row(kind: type[EdgeError]) -> dict[str, Any]:
    return {
        "code": str(kind.code),  # a name, not an amount
        "status": str(kind.status),
        "name": kind.name,
        "retry": "yes" if kind.retryable else "no",
        "cause": kind.cause,
        "remedy": kind.remedy,
    }


def _details(row: dict[str, Any]) -> str:
    retry = "trying again can help" if row["retry"] == "yes" else "trying again does not help"
    return f"{row['code']} {row['name']}: HTTP {row['status']}, {retry}\n{row['cause']}\n{row['remedy']}"


def markdown() -> str:
    """All errors as a table in Markdown."""
    rows = [" | ".join(_row(kind).values()) for kind in catalogue()]
    return "\n".join(
        [
            "| code | HTTP | name | retry | cause | what to do |",
            "|---|---|---|---|---|---|",
            *(f"| {row} |" for row in rows),
        ]
    )
