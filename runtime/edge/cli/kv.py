"""`edge kv`: reads and writes the KV namespaces of a state directory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli import Group
from edge.cli.bindings import F, caller_of, local_option, one_piece, pick, pieces_of, run_with
from edge.cli.options import config_options, json_option, read_config
from edge.cli.output import Column, emit
from edge.errors import EdgeError

if TYPE_CHECKING:
    from edge.bindings.kv import Kv
    from edge.isolates.base import JsonAnswer, StreamAnswer

_COLUMNS = [Column("name", "Key"), Column("expiration", "Expires (UTC)"), Column("metadata", "Metadata", drop=1)]


@click.group(cls=Group)
def kv() -> None:
    """Read and write KV namespaces.

    They live in the state directory, beside the configuration file: `.edge/kv`. An `edge dev` that is running sees
    every change at once.
    """


@kv.group("key", cls=Group)
def key_group() -> None:
    """Read and write the keys of a namespace."""


def _namespace_options(command: F) -> F:
    for option in (
        local_option,
        click.option("--namespace-id", metavar="ID", help="The namespace, by its id."),
        click.option("--binding", metavar="NAME", help="The namespace, by its name in `env`.  [default: the only one]"),
    ):
        command = option(command)
    return config_options(command)


@key_group.command("put")
@click.argument("key")
@click.argument("value", required=False)
@click.option("--path", "file", type=click.Path(path_type=Path), metavar="FILE", help="Store what is in this file.")
@click.option("--ttl", type=int, metavar="SECONDS", help="Remove the key after this time, at least 60.")
@click.option("--expiration", type=int, metavar="TIME", help="Remove the key at this time, in seconds since 1970.")
@click.option("--metadata", metavar="JSON", help="Store this beside the value.")
@_namespace_options
def put_key(
    key: str,
    value: str | None,
    file: Path | None,
    ttl: int | None,
    expiration: int | None,
    metadata: str | None,
    **where: Any,
) -> None:
    """Store VALUE, or the content of a file, under KEY."""
    if (value is None) == (file is None):
        raise click.UsageError("give the VALUE, or --path FILE")
    try:
        parsed = None if metadata is None else json.loads(metadata)
    except ValueError as error:
        raise click.UsageError(f"--metadata is not JSON: {error}") from error
    options = {"expirationTtl": ttl, "expiration": expiration, "metadata": parsed}
    content = pieces_of(file) if file is not None else one_piece((value or "").encode())
    _call(where, "put", key, None, options, body=content)
    click.echo(f"{key} is stored", err=True)


@key_group.command("get")
@click.argument("key")
@click.option("--text", is_flag=True, hidden=True, expose_value=False)
@_namespace_options
def get_key(key: str, **where: Any) -> None:
    """Write the value of KEY to stdout, byte for byte."""
    from edge.bindings.kv import Kv

    config, caller, binding = _namespace(**where)

    async def read(kv: Kv) -> None:
        answer: Any = await kv.call(caller, binding, "get", [key], None)
        if answer.value is None:
            raise EdgeError(f"there is no key {key!r} in the namespace {binding.props['id']}")
        if "value" in answer.value:
            sys.stdout.buffer.write(answer.value["value"])
            return
        stream: Any = await kv.call(caller, binding, "read", [key], None)
        if stream.status == 404:
            raise EdgeError(f"{key} was removed while it was read")
        async for piece in stream.body:
            sys.stdout.buffer.write(piece)

    run_with(Kv(config.state_dir), read)
    sys.stdout.buffer.flush()


@key_group.command("list")
@click.option("--prefix", default="", help="Only keys that begin so.")
@json_option
@_namespace_options
def list_keys(prefix: str, as_json: bool, **where: Any) -> None:
    """List the keys of a namespace."""
    from edge.bindings.kv import Kv

    config, caller, binding = _namespace(**where)

    async def read(kv: Kv) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        cursor = None
        while True:
            answer: Any = await kv.call(caller, binding, "list", [{"prefix": prefix, "cursor": cursor}], None)
            rows += answer.value["keys"]
            cursor = answer.value.get("cursor")
            if cursor is None:
                return rows

    rows = run_with(Kv(config.state_dir), read)
    emit(
        rows if as_json else list(map(_for_people, rows)), _COLUMNS, as_json=as_json, footer="" if rows else "No keys."
    )


@key_group.command("delete")
@click.argument("key")
@_namespace_options
def delete_key(key: str, **where: Any) -> None:
    """Remove KEY."""
    _call(where, "delete", key)
    click.echo(f"{key} is removed", err=True)


def _call(where: dict[str, Any], method: str, *args: Any, body: Any = None) -> JsonAnswer | StreamAnswer:
    from edge.bindings.kv import Kv

    config, caller, binding = _namespace(**where)
    return run_with(Kv(config.state_dir), lambda kv: kv.call(caller, binding, method, list(args), body))


def _namespace(config_path: Path | None, state_dir: Path | None, binding: str | None, namespace_id: str | None) -> Any:
    """The configuration, who calls, and the binding that is meant."""
    from edge.isolates.base import Binding

    config = read_config(config_path, state_dir)
    if namespace_id is None:
        entries = [[each.binding] for each in config.kv_namespaces]
        namespace_id = config.kv_namespaces[pick("KV namespace", binding, entries)].storage_id
    return config, caller_of(config), Binding("kv", {"id": namespace_id})


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    expiration, metadata = row.get("expiration"), row.get("metadata")
    return {
        "name": row["name"],
        "expiration": expiration and time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(expiration)),
        "metadata": None if metadata is None else json.dumps(metadata, ensure_ascii=False),
    }
