"""`edge dev`: reads the options and the configuration, and hands over to the node."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.options import config_options, read_config


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0: any free one. Else dev.port.")
@click.option("--ip", metavar="ADDRESS", help="Address to listen on. Else dev.ip.")
@click.option("--no-reload", is_flag=True, help="Do not watch the files.")
@click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
@config_options
def dev(
    port: int | None, ip: str | None, no_reload: bool, verbose: bool, config_path: Path | None, state_dir: Path | None
) -> None:
    """Run the worker on this machine, reloading on save.

    Serves the worker of the configuration file together with the REST API of its account. Stops with Ctrl-C.
    """
    config = read_config(config_path, state_dir)

    import logging

    from edge.node.dev import run

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s %(message)s"
    )
    run(
        config,
        ip=config.dev.ip if ip is None else ip,
        port=config.dev.port if port is None else port,
        reload=not no_reload,
    )
