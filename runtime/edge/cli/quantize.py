"""`edge models quantize`: makes a smaller copy of a model, compares the two, and installs it if it is good enough.

The work is done by `edge.engine.quantize` in a process of its own, since it takes torch and gigabytes of memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from edge.cli.options import config_options, find_state_dir, json_option
from edge.cli.output import Column, emit, format_bytes
from edge.errors import ModelStoreError
from edge.weights.conversion import CALIBRATION_TEXT, HELDOUT_TEXT, Job, Recipe, Result, misses
from edge.weights.facts import read_facts
from edge.weights.store import ModelStore, slug

_COLUMNS = [
    Column("name", "Name"),
    Column("size", "Size"),
    Column("perplexity_source", "Perplexity of source"),
    Column("perplexity", "Perplexity"),
    Column("kl", "Mean KL"),
    Column("kl_999", "99.9% KL"),
    Column("top1", "Top-1"),
    Column("gate", "Gate"),
]


@click.command("quantize")
@click.argument("model")
@click.option(
    "--weights", type=click.Choice(["int4", "int8"]), default="int4", show_default=True, help="Bits of a weight."
)
@click.option(
    "--group",
    type=click.Choice(["32", "64", "128", "row"]),
    help="Columns that share a scale; else 32 for int4, and 128 for int8.",
)
@click.option("--symmetric", is_flag=True, help="Centre every group's range on 0.")
@click.option("--plain", is_flag=True, help="Round to the nearest code, without a search on the calibration text.")
@click.option("--name", help="The name of the result; else that of MODEL with -int4 or -int8.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What the search is made on; else a packaged text.",
)
@click.option("--force", is_flag=True, help="Install the result even if it misses its gate.")
@json_option
@config_options
def quantize_model(
    model: str,
    weights: str,
    group: str | None,
    symmetric: bool,
    plain: bool,
    name: str | None,
    text: Path | None,
    force: bool,
    as_json: bool,
    config_path: Path | None,
    state_dir: Path | None,
) -> None:
    """Make a smaller copy of MODEL, an installed model or a path, with weights of 4 or 8 bits.

    The copy is compared with the source on a packaged text that the search has not seen. It is installed only if it
    is close enough: for int8 a mean KL divergence of at most 0.002 and the same most likely token at 97% of all
    places, for int4 0.03 and 95%. The report is kept beside it as report.json.
    """
    store = ModelStore.in_state_dir(find_state_dir(config_path, state_dir))
    source, origin, license = _source(store, model)
    name = name or f"{origin}-{weights}"
    store.check_new(name)
    bits: Literal[4, 8] = 4 if weights == "int4" else 8
    recipe = Recipe(
        bits=bits,
        group=_group(group, bits),
        symmetric=symmetric,
        search=not plain,
    )
    with store.workshop() as workshop:
        job = Job(
            source=str(source.absolute()),
            folder=str(workshop / "model"),
            recipe=recipe,
            calibration=str((text or CALIBRATION_TEXT).absolute()),
            heldout=str(HELDOUT_TEXT),
            cache_dir=str(store.root.parent / "cache" / "kernels"),
        )
        result = _run(job)
        missed = misses(result)
        emit(_rows(name, result, missed, as_json), _COLUMNS, as_json=as_json)
        if missed and not force:
            raise ModelStoreError(
                f"{name} is not installed: {'; '.join(missed)}. Try another --weights or a smaller --group, or install "
                "it nevertheless with --force"
            )
        for reason in missed:
            click.echo(f"warning: {reason}", err=True)
        manifest = store.adopt(Path(job.folder), name, source=f"quantize:{origin}", license=license)
    click.echo(f"{manifest.name} ({format_bytes(manifest.size_bytes)}) is in {store.path(manifest.name)}", err=True)


def _source(store: ModelStore, model: str) -> tuple[Path, str, str]:
    """Weights, name and licence of an installed model, or of the one in a path."""
    manifest = next((each for each in store.list() if each.name == model), None)
    if manifest is not None:
        return store.path(model), model, manifest.license
    path = Path(model)
    if not path.exists():
        store.path(model)  # says what is wrong, and which one was meant
    facts = read_facts(path)
    return path, slug(path.stem if path.is_file() else path.absolute().name), facts.license


def _group(option: str | None, bits: int) -> int:
    """Columns that share a scale; 0: a whole row. What is the default passes its gate with small models too."""
    if option is None:
        return 32 if bits == 4 else 128
    return 0 if option == "row" else int(option)


def _run(job: Job) -> Result:
    Path(job.folder).mkdir()
    command = [sys.executable, "-P", "-m", "edge.engine.quantize", msgspec.json.encode(job).decode()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ModelStoreError(
            f"the quantizer was ended by {name}; if that was for lack of memory: it needs about 5 bytes for each "
            "parameter of the model"
        )
    if done.returncode != 0:
        raise click.exceptions.Exit(done.returncode)  # it has said why
    return msgspec.json.decode(done.stdout, type=Result)


def _rows(name: str, result: Result, missed: list[str], as_json: bool) -> list[dict[str, Any]]:
    report = result.report
    if as_json:
        return [{"name": name, "passed": not missed, "missed": missed, **msgspec.to_builtins(result)}]
    sizes = f"{format_bytes(result.size_bytes)} of {format_bytes(result.size_bytes_source)}"
    return [
        {
            "name": name,
            "size": sizes,
            "perplexity_source": f"{report.perplexity_reference:.3f}",
            "perplexity": f"{report.perplexity:.3f}",
            "kl": f"{report.mean_kl:.5f}",
            "kl_999": f"{report.kl_999:.4f}",
            "top1": f"{report.top1:.1%}",
            "gate": "missed" if missed else "passed",
        }
    ]
