"""`edge serve`: reads the options and the configuration, and hands over to the node."""

from __future__ import annotations

import logging
from pathlib import Path

import click
from msgspec.structs import replace

from edge.cli.dev import read_configs
from edge.cli.options import configs_option, state_dir_option

_IP = "localhost"
_PORT = 8787


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_PORT,
    show_default=True,
    help="Port to listen on; 0: any free one.",
)
@click.option("--ip", metavar="ADDRESS", default=_IP, show_default=True, help="Address to listen on, such as 0.0.0.0.")
@click.option(
    "--drain",
    "drain_s",
    type=click.IntRange(0, 3600),
    metavar="SECONDS",
    default=30,
    show_default=True,
    help="What requests in flight have to finish in, at the end.",
)
@click.option("--without-tokens", is_flag=True, help="Start without any token: nobody can use the API.")
@click.option("--insecure-no-sandbox", is_flag=True, help="Let handlers do whatever this user can.")
@click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
@configs_option
@state_dir_option
def serve(
    port: int,
    ip: str,
    drain_s: int,
    without_tokens: bool,
    insecure_no_sandbox: bool,
    verbose: bool,
    config_paths: tuple[Path, ...],
    state_dir: Path | None,
) -> None:
    """Serve workers and the API to others, with tokens.

    Like `edge dev`, without what is for development: tokens come from `edge tokens`, also on this machine; there are no
    tracebacks and no reloads, rate limits are on, and handlers run in the sandbox `standard` or not at all. SIGTERM and
    Ctrl-C end it once what is in flight is finished; a second one cuts that off.
    """
    configs = read_configs(config_paths, state_dir, insecure_no_sandbox)
    first = configs[0]
    isolates = replace(first.isolates, sandbox=first.isolates.sandbox or "standard")
    limits = replace(first.api, rate_limits=first.api.rate_limits or "on")
    configs = [replace(config, isolates=isolates, api=limits) for config in configs]

    from edge.node.serve import run

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    run(configs, ip=ip, port=port, drain_s=drain_s, without_tokens=without_tokens)
