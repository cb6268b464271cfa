"""`edge tokens`: creates, lists and revokes the tokens of a state directory, and shows what happened to them."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli import Group
from edge.cli.options import config_options, find_state_dir, json_option, read_config
from edge.cli.output import Column, emit
from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.auth.store import AuditEntry, Token, TokenStore

_TOKEN_COLUMNS = [
    Column("id", "Id"),
    Column("name", "Name"),
    Column("account", "Account", drop=3),
    Column("scopes", "Scopes", drop=4),
    Column("status", "Status"),
    Column("created_at", "Created (UTC)", drop=1),
    Column("expires_at", "Expires (UTC)"),
    Column("last_used_at", "Last used (UTC)", drop=2),
]
_LOG_COLUMNS = [
    Column("at", "When (UTC)"),
    Column("event", "What"),
    Column("count", "Times", drop=1),
    Column("account", "Account", drop=2),
    Column("token_id", "Token"),
    Column("actor", "By", drop=3),
    Column("address", "From"),
    Column("detail", "Detail"),
]
_UNITS_US = {"h": 3600 * 10**6, "d": 86_400 * 10**6}


@click.group(cls=Group)
def tokens() -> None:
    """Create, list and revoke the tokens of the API.

    They are in the state directory, beside the ledger. A node that is running knows within a second what changed.
    """


@tokens.command("create")
@click.argument("name")
@click.option("--account", metavar="ID", help="Whose token it is.  [default: the configuration's account_id]")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help="What it may do, as often as needed: ai:run, ai:read, ai:edit, usage:read, tokens:edit, workers:read, "
    "workers:edit, all, or Cloudflare's name such as 'Workers AI Read'.  [default: ai:run and ai:read]",
)
@click.option("--expires", metavar="TIME", help="When it ends: 90d, 12h, or a date or time (ISO 8601, UTC).")
@config_options
@json_option
def create(
    name: str,
    account: str | None,
    scopes: tuple[str, ...],
    expires: str | None,
    config_path: Path | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Create a token and print it, once: only a hash of it is kept.

    NAME says what it is for.
    """
    from edge.auth.scopes import DEFAULT, parse_scopes

    account = account or read_config(config_path, state_dir).account_id
    wanted = parse_scopes(scopes) if scopes else DEFAULT
    with _store(config_path, state_dir) as store:
        token, credential = store.create(name, account, wanted, expires_us=_end_us(expires), actor=_actor())
    if as_json:
        print(json.dumps({**_row(token), "token": credential}, ensure_ascii=False, indent=2))
        return
    end = _row(token)["expires_at"]
    until = f", until {end}" if end else ""
    may = ", ".join(sorted(wanted))
    click.echo(f"Token {token.id} of the account {account} may {may}{until}. It is shown this once:", err=True)
    print(credential)


@tokens.command("list")
@click.option("--account", metavar="ID", help="Tokens of this account.")
@config_options
@json_option
def list_tokens(account: str | None, config_path: Path | None, state_dir: Path | None, as_json: bool) -> None:
    """List the tokens, newest first, those that are revoked or expired included."""
    with _store(config_path, state_dir) as store:
        found = store.tokens(account)
        where = store.path
    rows = [_row(token) for token in found]
    if not as_json:
        rows = [{**row, "scopes": " ".join(row["scopes"])} for row in rows]
    emit(rows, _TOKEN_COLUMNS, as_json=as_json, footer="" if rows else f"There are no tokens in {where}.")


@tokens.command("revoke")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@config_options
def revoke(ids: tuple[str, ...], config_path: Path | None, state_dir: Path | None) -> None:
    """Revoke tokens, by id or the whole token. Nodes that are running refuse them within a second."""
    from edge.auth.store import id_of

    with _store(config_path, state_dir) as store:
        for each in ids:
            token = store.revoke(id_of(each) or each, actor=_actor())
            click.echo(f"{token.id} ({token.name}) is revoked", err=True)


@tokens.command("log")
@click.option("-n", "--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Newest entries.")
@click.option("--account", metavar="ID", help="Entries of this account; refusals of unknown tokens are of none.")
@config_options
@json_option
def log(limit: int, account: str | None, config_path: Path | None, state_dir: Path | None, as_json: bool) -> None:
    """Show what happened to tokens, newest first: created, revoked, refused, forbidden.

    Refusals that repeat are one entry, with their number.
    """
    with _store(config_path, state_dir) as store:
        rows = [_entry(each) for each in store.log(limit=limit, account=account)]
        where = store.path
    emit(rows, _LOG_COLUMNS, as_json=as_json, footer="" if rows else f"Nothing is logged in {where}.")


@contextmanager
def _store(config_path: Path | None, state_dir: Path | None) -> Iterator[TokenStore]:
    from edge.auth.store import FILE_NAME, TokenStore

    store = TokenStore(find_state_dir(config_path, state_dir) / FILE_NAME)
    try:
        yield store
    finally:
        store.close()


def _actor() -> str:
    """The user who runs this, for the log."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # a user without a name, as in some containers
        return f"cli:{os.getuid()}"


def _end_us(expires: str | None) -> int | None:
    from edge.billing.times import now_us, parse_time

    if expires is None:
        return None
    if span := re.fullmatch(r"(\d{1,5})([hd])", expires):
        return now_us() + int(span[1]) * _UNITS_US[span[2]]
    try:
        return parse_time(expires)
    except UsageError as error:
        raise UsageError(f"--expires {expires!r}: give 90d, 12h, or a date or time (ISO 8601)") from error


def _row(token: Token) -> dict[str, Any]:
    from edge.billing.times import now_us

    times = {"created": token.created_us, "expires": token.expires_us, "last_used": token.last_used_us}
    return {
        "id": token.id,
        "name": token.name,
        "account": token.account,
        "scopes": sorted(token.scopes),
        "status": token.status(now_us()),
        **{f"{key}_at": _time(moment) for key, moment in times.items()},
    }


def _entry(entry: AuditEntry) -> dict[str, Any]:
    import msgspec

    row = msgspec.structs.asdict(entry)
    return {"at": _time(row.pop("at_us")), **row}


def _time(moment_us: int | None) -> str | None:
    from edge.billing.times import iso_time

    return None if moment_us is None else f"{iso_time(moment_us)[:19]}Z"
