"""Single keys that a developer presses in the terminal of `edge dev`."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO


class HotKey(NamedTuple):
    """A key and what it does."""

    key: str
    label: str
    act: Callable[[], object]


@contextmanager
def hot_keys(terminal: TextIO, keys: Sequence[HotKey]) -> Iterator[list[str]]:
    """Obey `keys` as long as the block runs, if `terminal` is one and this process is in its foreground.

    Yields the line that tells of them; no line where they do not work.
    """
    fd = _fd_of_own(terminal)
    if fd is None:
        yield []
        return
    acts = {key.key: key.act for key in keys}
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        pressed = os.read(fd, 64)
        if not pressed:  # the terminal has gone
            loop.remove_reader(fd)
        for key in pressed.decode(errors="replace"):
            if key in acts:
                acts[key]()

    labels: dict[str, list[str]] = {}
    for key in keys:
        labels.setdefault(key.label, []).append(key.key)
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, on_readable)
    try:
        yield ["Keys      " + ", ".join(f"{'/'.join(names)}: {label}" for label, names in labels.items())]
    finally:
        loop.remove_reader(fd)
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _fd_of_own(terminal: TextIO) -> int | None:
    """The descriptor of `terminal`; None if it is no terminal, or somebody else's at the moment."""
    try:
        fd = terminal.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError):
        return None
