"""The options that several commands share: which configuration file, and which state directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec.structs import replace

from edge.config import Config
from edge.config.file import load

F = TypeVar("F", bound=Callable[..., Any])


def config_options(command: F) -> F:
    """Add `--config` and `--state-dir`; the command gets them as `config_path` and `state_dir`."""
    config_option = click.option(
        "-c",
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The configuration file; else the first found from here upwards.",
    )
    return config_option(state_dir_option(command))


def configs_option(command: F) -> F:
    """Add `--config`, as often as there are workers; the command gets it as `config_paths`."""
    return click.option(
        "-c",
        "--config",
        "config_paths",
        type=click.Path(path_type=Path),
        metavar="FILE",
        multiple=True,
        help="The configuration file; else the first found from here upwards. With several, HTTP reaches the worker of "
        "the first, and the others are for its service bindings and queues.",
    )(command)


def state_dir_option(command: F) -> F:
    """Add `--state-dir`; the command gets it as `state_dir`."""
    return click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where models and the ledger live; over the file's state_dir.",
    )(command)


def json_option(command: F) -> F:
    """Add `--json`; the command gets it as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def read_config(config_path: Path | None, state_dir: Path | None) -> Config:
    """The configuration that the options name.

    Raises:
        ConfigError: as `edge.config.file.load`.
        UnicodeEncodeError: a path is no text in UTF-8.
    """
    config = load(config_path, Path.cwd())
    config = config if state_dir is None else replace(config, state_dir=state_dir.absolute())
    for path in (config.main, config.state_dir):
        str(path).encode()  # other processes get it as text
    return config


def find_state_dir(config_path: Path | None, state_dir: Path | None) -> Path:
    """The state directory, for commands that need no more: with `--state-dir` no configuration file is needed.

    Raises:
        ConfigError: as `edge.config.file.load`.
    """
    return state_dir.absolute() if state_dir is not None else read_config(config_path, None).state_dir
