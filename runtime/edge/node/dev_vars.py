"""`.dev.vars` and `.env` files: a worker's secrets during development, kept out of its configuration file.

Files, their order and their dialect are those of wrangler (npm's dotenv and dotenv-expand): one file serves both. It
knows nothing about what becomes of the values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from edge.errors import ConfigError
from edge.text_files import read_text

MAX_FILE_BYTES = 1 << 20
USE_DOT_ENV = "CLOUDFLARE_LOAD_DEV_VARS_FROM_DOT_ENV"
"""`false` in the process's environment: `.env` files are not read."""
INCLUDE_PROCESS_ENV = "CLOUDFLARE_INCLUDE_PROCESS_ENV"
"""`true` in the process's environment: all of that is taken as well, below what `.env` files say."""


def load_dev_vars(
    config_path: Path, environment: str = "", *, process_env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables beside the configuration file `config_path`, by name. They go before `vars` of the configuration.

    `.dev.vars` is read, or instead of it `.dev.vars.ENVIRONMENT` if there is one. Only where there is neither, `.env`,
    `.env.local`, `.env.ENVIRONMENT` and `.env.ENVIRONMENT.local` are, the later ones going first, and `$NAME`,
    `${NAME}` and `${NAME:-default}` in them stand for other variables of these files, or of `process_env`.

    Raises:
        ConfigError: a file cannot be read, or `.dev.vars` has a line that is no `NAME=value`. In `.env` files, which
            other programs read as well, such lines are skipped.
    """
    folder = config_path.parent
    for name in ([f".dev.vars.{environment}"] if environment else []) + [".dev.vars"]:
        if (folder / name).is_file():
            return _parse(folder / name, is_strict=True)
    if process_env.get(USE_DOT_ENV, "").lower() == "false":
        return {}
    names = [".env", ".env.local"]
    if environment:
        names += [f".env.{environment}", f".env.{environment}.local"]
    values: dict[str, str] = {}
    for file in (folder / name for name in names):
        if file.is_file():
            values |= _parse(file, is_strict=False)
    inherited = dict(process_env) if process_env.get(INCLUDE_PROCESS_ENV, "").lower() == "true" else {}
    return inherited | _expanded(values, process_env)


# The grammar of npm's dotenv.
_LINE = re.compile(
    r"""
    ^[ \t]*(?:export[ \t]+)?(?P<name>[\w.-]+)(?:[ \t]*=[ \t]*|:[ \t]+)
    (?P<value>'(?:\\'|[^'])*'|"(?:\\"|[^"])*"|`(?:\\`|[^`])*`|[^\#\r\n]*)
    [ \t]*(?:\#[^\n]*)?(?:\r?\n|$)
    | ^[ \t]*(?:\#[^\n]*)?(?:\r?\n|\Z)
    """,
    re.VERBOSE | re.MULTILINE,
)


def _parse(file: Path, *, is_strict: bool) -> dict[str, str]:
    text = read_text(file, "a file of variables", MAX_FILE_BYTES)
    values: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LINE.match(text, position)
        if match is None and not is_strict:
            position = (text.find("\n", position) + 1) or len(text)
            continue
        if match is None:
            raise ConfigError(f"{file}, line {text.count(chr(10), 0, position) + 1}: expected NAME=value")
        if match["name"]:
            values[match["name"]] = _unquoted(match["value"].strip())
        position = match.end()
    return values


def _unquoted(value: str) -> str:
    quote = value[:1]
    if quote not in ("'", '"', "`") or len(value) < 2 or value[-1] != quote:
        return value
    value = value[1:-1]
    return value.replace("\\n", "\n").replace("\\r", "\r") if quote == '"' else value


_REFERENCE = re.compile(r"(?<!\\)\$(?:\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<plain>[A-Za-z_]\w*))")


def _expanded(values: Mapping[str, str], process_env: Mapping[str, str]) -> dict[str, str]:
    """`values` with the variables in them replaced, those of the process going first."""
    return {name: _expand(name, values, process_env, frozenset()).replace("\\$", "$") for name in values}


def _expand(name: str, values: Mapping[str, str], process_env: Mapping[str, str], inside: frozenset[str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        wanted = match["braced"] or match["plain"]
        if wanted in process_env:
            return process_env[wanted] or match["default"] or ""
        if wanted in values and wanted not in inside and wanted != name:
            return _expand(wanted, values, process_env, inside | {name}) or match["default"] or ""
        return match["default"] or ""

    return _REFERENCE.sub(replacement, values[name])
