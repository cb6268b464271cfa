"""`edge r2`: reads and writes the R2 buckets of a state directory."""

from __future__ import annotations

import mimetypes
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli import Group
from edge.cli.bindings import F, caller_of, local_option, one_piece, pick, pieces_of, run_with
from edge.cli.options import config_options, json_option, read_config
from edge.cli.output import Column, emit, format_bytes
from edge.errors import EdgeError, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from edge.bindings.r2 import R2
    from edge.config import Config

_COLUMNS = [
    Column("key", "Key"),
    Column("size", "Size"),
    Column("uploaded", "Uploaded (UTC)", drop=1),
    Column("etag", "ETag", drop=2),
]


@click.group(cls=Group)
def r2() -> None:
    """Read and write R2 buckets.

    They live in the state directory, beside the configuration file: `.edge/r2`; those that the configuration places in
    S3, there. An `edge dev` that is running sees every change at once.
    """


@r2.group("object", cls=Group)
def object_group() -> None:
    """Read and write the objects of a bucket.

    BUCKET is a bucket's name, or its name in `env`.
    """


def _bucket_options(command: F) -> F:
    return config_options(local_option(command))


@object_group.command("put")
@click.argument("path", metavar="BUCKET/KEY")
@click.option("-f", "--file", type=click.Path(path_type=Path), metavar="FILE", help="Store what is in this file.")
@click.option("-p", "--pipe", is_flag=True, help="Store what comes from stdin.")
@click.option("--content-type", "--ct", metavar="TYPE", help="The media type.  [default: by the key's ending]")
@_bucket_options
def put_object(path: str, file: Path | None, pipe: bool, content_type: str | None, **where: Any) -> None:
    """Store a file, or stdin, as an object."""
    if (file is None) != pipe:
        raise click.UsageError("give either --file FILE or --pipe")
    config, caller, binding, key = _object(path, **where)
    metadata = {"contentType": content_type or mimetypes.guess_type(key)[0]}
    body = _stdin() if file is None else pieces_of(file)
    args = [key, None, {"httpMetadata": metadata}]
    answer: Any = run_with(_provider(config), lambda r2: r2.call(caller, binding, "put", args, body))
    click.echo(f"{path} is stored ({format_bytes(answer.value['size'])})", err=True)


@object_group.command("get")
@click.argument("path", metavar="BUCKET/KEY")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path), metavar="FILE", help="Where to.  [default: the key's end]"
)
@click.option("-p", "--pipe", is_flag=True, help="Write to stdout.")
@_bucket_options
def get_object(path: str, file: Path | None, pipe: bool, **where: Any) -> None:
    """Write an object to a file, or to stdout."""
    config, caller, binding, key = _object(path, **where)
    target = None if pipe else file or Path(Path(key).name)

    async def read(r2: R2) -> None:
        answer: Any = await r2.call(caller, binding, "get", [key, {}], None)
        found = answer.value
        if found is None:
            raise EdgeError(f"there is no object {key!r} in the bucket {binding.props['id']}")
        pieces = one_piece(found["data"]) if "data" in found else await _rest(r2, found)
        out = sys.stdout.buffer if target is None else target.open("wb")
        try:
            async for piece in pieces:
                out.write(piece)
        finally:
            out.flush()
            if target is not None:
                out.close()

    async def _rest(r2: R2, found: dict[str, Any]) -> AsyncIterator[bytes]:
        args = [key, found["record"]["version"], 0, found["record"]["size"]]
        answer: Any = await r2.call(caller, binding, "read", args, None)
        if answer.status == 404:
            raise EdgeError(f"{path} was replaced while it was read; try again")
        body: AsyncIterator[bytes] = answer.body
        return body

    run_with(_provider(config), read)
    if target is not None:
        click.echo(f"{path} is in {target}", err=True)


@object_group.command("delete")
@click.argument("path", metavar="BUCKET/KEY")
@_bucket_options
def delete_object(path: str, **where: Any) -> None:
    """Remove an object."""
    config, caller, binding, key = _object(path, **where)
    run_with(_provider(config), lambda r2: r2.call(caller, binding, "delete", [[key]], None))
    click.echo(f"{path} is removed", err=True)


@object_group.command("list")
@click.argument("bucket", required=False)
@click.option("--prefix", default="", help="Only keys that begin so.")
@json_option
@_bucket_options
def list_objects(bucket: str | None, prefix: str, as_json: bool, **where: Any) -> None:
    """List the objects of BUCKET; by default of the only one."""
    config, caller, binding = _bucket(bucket, **where)
    include = ["httpMetadata", "customMetadata"]

    async def read(r2: R2) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        cursor = None
        while True:
            args = [{"prefix": prefix, "cursor": cursor, "include": include}]
            answer: Any = await r2.call(caller, binding, "list", args, None)
            rows += answer.value["objects"]
            cursor = answer.value.get("cursor")
            if cursor is None:
                return rows

    rows = run_with(_provider(config), read)
    shown = rows if as_json else [{**row, **_for_people(row)} for row in rows]
    emit(shown, _COLUMNS, as_json=as_json, footer="" if rows else "No objects.")


def _object(path: str, **where: Any) -> Any:
    """The configuration, who calls, the bucket's binding, and the key."""
    bucket, slash, key = path.partition("/")
    if not slash or not key:
        raise UsageError(f"{path!r} is no BUCKET/KEY, such as photos/cat.png")
    return *_bucket(bucket, **where), key


def _bucket(bucket: str | None, config_path: Path | None, state_dir: Path | None) -> Any:
    from edge.isolates.base import Binding

    config = read_config(config_path, state_dir)
    entries = [[each.storage_id, each.binding] for each in config.r2_buckets]
    chosen = config.r2_buckets[pick("R2 bucket", bucket, entries)]
    return config, caller_of(config), Binding("r2", {"id": chosen.storage_id})


def _provider(config: Config) -> R2:
    from edge.bindings.r2 import R2

    provider = R2(config.state_dir)
    provider.use_s3((config.account_id, config.name), config.s3_buckets)
    return provider


async def _stdin() -> AsyncIterator[bytes]:
    while piece := sys.stdin.buffer.read(1 << 20):
        yield piece


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    uploaded = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["uploaded"] / 1000))
    return {"size": format_bytes(row["size"]), "uploaded": uploaded}
