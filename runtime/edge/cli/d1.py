"""`edge d1`: runs SQL and migrations on the D1 databases of a state directory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli import Group
from edge.cli.bindings import F, T, caller_of, local_option, pick, run_with
from edge.cli.options import config_options, json_option, read_config
from edge.cli.output import Column, emit
from edge.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from edge.bindings.d1 import D1
    from edge.config import Config, D1Config

_TIMEOUT_S = 3600.0


@click.group(cls=Group)
def d1() -> None:
    """Run SQL and migrations on D1 databases.

    They live in the state directory, beside the configuration file: `.edge/d1`. An `edge dev` that is running sees
    every change at once.
    """


def _database_options(command: F) -> F:
    command = local_option(click.option("-y", "--yes", is_flag=True, hidden=True, expose_value=False)(command))
    return config_options(command)


@d1.command("execute")
@click.argument("database", required=False)
@click.option("--command", "sql", metavar="SQL", help="One or more statements.")
@click.option("--file", type=click.Path(path_type=Path), metavar="FILE", help="Run the statements in this file.")
@json_option
@_database_options
def execute(database: str | None, sql: str | None, file: Path | None, as_json: bool, **where: Any) -> None:
    """Run SQL on DATABASE: its name, id or name in `env`; by default the only one.

    The statements of a command are one transaction. Of a file, those before one that fails stay done.
    """
    from edge.bindings.d1 import split_statements

    if (sql is None) == (file is None):
        raise click.UsageError("give either --command SQL or --file FILE")
    if file is not None:
        text = _read(file)
        done = _run(database, where, lambda d1, config, found: d1.exec(caller_of(config), found.storage_id, text))
        rows = [{"statements": done["count"], "duration_ms": done["duration"]}]
        emit(rows, [Column("statements", "Statements"), Column("duration_ms", "Duration ms")], as_json=as_json)
        return
    statements = [[piece.sql, []] for piece in split_statements(sql or "")]
    results = _run(database, where, lambda d1, config, found: _query(d1, config, found, statements))
    if as_json:
        emit([_named(result) for result in results], (), as_json=True)
        return
    for result in results:
        rows = _named(result)["results"]
        if result["columns"]:
            footer = "" if rows else "No rows."
            emit(rows, [Column(name, name) for name in dict.fromkeys(result["columns"])], as_json=False, footer=footer)
        else:
            click.echo(f"{result['meta']['changes']} rows changed", err=True)


@d1.group(cls=Group)
def migrations() -> None:
    """Apply, list and make migrations: numbered .sql files in `migrations_dir`."""


@migrations.command("apply")
@click.argument("database", required=False)
@_database_options
def apply_migrations(database: str | None, **where: Any) -> None:
    """Apply the migrations that DATABASE does not have yet, each whole or not at all."""

    async def apply(d1: D1, config: Config, found: D1Config) -> int:
        num_applied = 0
        for path in _migration_files(_migrations_dir(config, found)):
            text = _read(path)
            if await d1.migrate(caller_of(config), found.storage_id, found.migrations_table, path.name, text):
                click.echo(f"{path.name} is applied", err=True)
                num_applied += 1
        return num_applied

    if not _run(database, where, apply):
        click.echo("No migrations to apply", err=True)


@migrations.command("list")
@click.argument("database", required=False)
@json_option
@_database_options
def list_migrations(database: str | None, as_json: bool, **where: Any) -> None:
    """List the migrations of DATABASE, and which of them were applied."""

    async def read(d1: D1, config: Config, found: D1Config) -> list[dict[str, Any]]:
        applied = dict(await d1.migrations(caller_of(config), found.storage_id, found.migrations_table))
        names = [path.name for path in _migration_files(_migrations_dir(config, found))]
        missing = [name for name in applied if name not in names]
        return [{"name": name, "applied_at": applied.get(name)} for name in missing + names]

    rows = _run(database, where, read)
    columns = [Column("name", "Migration"), Column("applied_at", "Applied (UTC)")]
    emit(rows, columns, as_json=as_json, footer="" if rows else "No migrations yet: edge d1 migrations create NAME")


@migrations.command("create")
@click.argument("arguments", nargs=-1, required=True, metavar="[DATABASE] NAME")
@_database_options
def create_migration(arguments: tuple[str, ...], **where: Any) -> None:
    """Make an empty migration called NAME, with the next number."""
    if len(arguments) > 2:
        raise click.UsageError("put a NAME of several words in quotes")
    *databases, name = arguments
    config, found = _database(databases[0] if databases else None, **where)
    folder = _migrations_dir(config, found)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in _migration_files(folder) if (match := re.match(r"(\d+)_", path.name))]
    number = f"{max(numbers, default=0) + 1:04}"
    path = folder / f"{number}_{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}.sql"
    path.write_text(f"-- Migration number: {number}, {time.strftime('%Y-%m-%d', time.gmtime())}\n")
    click.echo(str(path))


def _run(
    database: str | None, where: dict[str, Any], work: Callable[[D1, Config, D1Config], Coroutine[Any, Any, T]]
) -> T:
    from edge.bindings.d1 import D1

    config, found = _database(database, **where)
    return run_with(D1(config.state_dir, _TIMEOUT_S), lambda d1: work(d1, config, found))


def _database(database: str | None, config_path: Path | None, state_dir: Path | None) -> Any:
    config = read_config(config_path, state_dir)
    entries = [
        [name for name in (each.database_name, each.binding, each.database_id) if name] for each in config.d1_databases
    ]
    return config, config.d1_databases[pick("D1 database", database, entries)]


def _migrations_dir(config: Config, database: D1Config) -> Path:
    return config.project / database.migrations_dir


def _migration_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.sql"))


async def _query(d1: D1, config: Config, database: D1Config, statements: list[Any]) -> list[dict[str, Any]]:
    from edge.isolates.base import Binding

    binding = Binding("d1", {"id": database.storage_id})
    answer: Any = await d1.call(caller_of(config), binding, "query", [statements], None)
    results: list[dict[str, Any]] = answer.value["results"]
    return results


def _named(result: dict[str, Any]) -> dict[str, Any]:
    rows = [dict(zip(result["columns"], map(_shown, row), strict=True)) for row in result["rows"]]
    return {"results": rows, "success": True, "meta": result["meta"]}


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, bytes) else value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
