"""Finds, reads and parses the configuration file: TOML, or JSON with comments, as wrangler takes it.

What its values mean, and whether they are right, is for `edge.config.checks`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge.config import Config
from edge.config.checks import check, describe
from edge.errors import ConfigError
from edge.text_files import read_text

FILE_NAMES = ("edge.toml", "wrangler-like.toml", "wrangler.toml", "wrangler.jsonc", "wrangler.json")
"""The names looked for, in this order, in the working directory and then in its parents."""

MAX_FILE_BYTES = 1 << 20


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def load(path: Path | None, cwd: Path, warn: Callable[[str], None] = _warn) -> Config:
    """The configuration in `path`, or in the first of `FILE_NAMES` found from `cwd` upwards.

    Unknown keys, and keys of wrangler that have no effect here yet, are handed to `warn`, by default to stderr.

    Raises:
        ConfigError: there is no file, it cannot be read or parsed, or values are wrong (all of them are listed).
    """
    file = find(cwd) if path is None else Path(os.path.abspath(cwd / path))
    if file is None:
        raise ConfigError(
            f"no configuration file in {cwd} or above it; looked for {', '.join(FILE_NAMES)}. "
            "`edge init NAME` makes a new worker; `--config FILE` names a file elsewhere"
        )
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give the configuration file in it")
    text = read_text(file, "a configuration file", MAX_FILE_BYTES)
    table, lines = _parse_toml(file, text) if file.suffix == ".toml" else _parse_jsonc(file, text)
    return check(table, file, lines, warn)


def find(cwd: Path) -> Path | None:
    """The configuration file for the folder `cwd`: the first of `FILE_NAMES` in it, else in its parents."""
    cwd = Path(os.path.abspath(cwd))
    candidates = (folder / name for folder in (cwd, *cwd.parents) for name in FILE_NAMES)
    return next((file for file in candidates if file.is_file()), None)


def strip_jsonc(text: str) -> str:
    """`text` with comments and trailing commas turned into spaces: plain JSON in which all positions are the same."""
    no_comments = re.sub(rf"{_STRING}|//[^\n]*|/\*.*?\*/", _blank_comment, text, flags=re.DOTALL)
    return re.sub(rf"{_STRING}|,(?=\s*[}}\]])", lambda match: " " if match[0] == "," else match[0], no_comments)


_STRING = r'"(?:[^"\\\n]|\\.)*"'


def _blank_comment(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)


# -- parsing ----------------------------------------------------------------------------------------------


def _parse_toml(file: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        return tomllib.loads(text), _toml_lines(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _parse_jsonc(file: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    plain = strip_jsonc(text)
    try:
        table = json.loads(plain, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{file} is not valid JSON: {error.msg} (at {where})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {describe(table)}")
    return table, _json_lines(plain)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _toml_lines(text: str) -> dict[str, int]:
    """Line numbers by key path, for messages only: keys in inline tables are not found."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = _bare(header[1])
            lines.setdefault(section, number)
        elif key := re.match(r"""\s*((?:"[^"]*"|'[^']*'|[\w.-]|\s)+?)\s*=""", line):
            lines.setdefault(f"{section}.{_bare(key[1])}" if section else _bare(key[1]), number)
    return lines


def _json_lines(plain: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    path: list[str] = []
    key = ""
    for token in re.finditer(rf"{_STRING}|[{{}}\[\]:]", plain):
        match token[0]:
            case ":":
                lines.setdefault(".".join([*path[1:], key]), plain.count("\n", 0, token.start()) + 1)
            case "{" | "[":
                path.append(key)
            case "}" | "]":
                path.pop()
            case string:
                key = json.loads(string, strict=False)
    return lines


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
