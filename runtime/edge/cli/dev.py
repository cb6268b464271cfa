"""`edge dev`: reads the options and the configuration, and hands over to the node."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec.structs import replace

from edge.cli.options import configs_option, read_config, state_dir_option
from edge.config import Config
from edge.errors import UsageError


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0: any free one. Else dev.port.")
@click.option("--ip", metavar="ADDRESS", help="Address to listen on. Else dev.ip.")
@click.option("--no-reload", is_flag=True, help="Do not watch the files.")
@click.option("--insecure-no-sandbox", is_flag=True, help="Let handlers do whatever this user can.")
@click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
@configs_option
@state_dir_option
def dev(
    port: int | None,
    ip: str | None,
    no_reload: bool,
    insecure_no_sandbox: bool,
    verbose: bool,
    config_paths: tuple[Path, ...],
    state_dir: Path | None,
) -> None:
    """Run workers on this machine, reloading on save.

    Serves the worker of the configuration file together with the REST API of its account. Stops with Ctrl-C.
    """
    configs = read_configs(config_paths, state_dir, insecure_no_sandbox)

    import logging

    from edge.node.dev import run

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s %(message)s"
    )
    run(
        configs,
        ip=configs[0].dev.ip if ip is None else ip,
        port=configs[0].dev.port if port is None else port,
        reload=not no_reload,
    )


def read_configs(paths: tuple[Path, ...], state_dir: Path | None, insecure_no_sandbox: bool) -> list[Config]:
    """The configurations; what concerns the node as a whole is that of the first.

    Raises:
        ConfigError: as `edge.config.file.load`.
        UsageError: the sandbox is to be off, and the option that confirms it is missing.
    """
    configs = [read_config(path, state_dir) for path in paths or (None,)]
    isolates = configs[0].isolates
    if insecure_no_sandbox:
        isolates = replace(isolates, sandbox="none")
    elif isolates.sandbox == "none":
        raise UsageError(
            'sandbox = "none" lets handlers do whatever this user can; confirm it with --insecure-no-sandbox, '
            'or choose "best-effort"'
        )
    return [replace(config, isolates=isolates, state_dir=configs[0].state_dir) for config in configs]
