"""Reads small text files that people write: bounded, and with errors that name the file."""

from __future__ import annotations

from pathlib import Path

from edge.errors import ConfigError


def read_text(file: Path, what: str, max_bytes: int) -> str:
    r"""The text of `file`, which is UTF-8 with or without a byte order mark; lines end with `\n` alone.

    Args:
        what: the kind of file, for errors, such as "a configuration file".

    Raises:
        ConfigError: it cannot be read, is longer than `max_bytes`, or is no such text.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{file} is longer than {max_bytes} bytes; is it {what}?")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error
