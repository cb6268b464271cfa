"""What `edge kv`, `edge d1` and `edge r2` share: which binding of the configuration is meant, and a provider for it.

They work on the files in the state directory, also beside a node that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.bindings.base import Provider
    from edge.config import Config
    from edge.isolates.base import Bundle

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", bound="Provider")
T = TypeVar("T")

_PIECE_BYTES = 1 << 20


def local_option(command: F) -> F:
    """Accept wrangler's `--local`: everything is local here."""
    return click.option("--local", is_flag=True, hidden=True, expose_value=False)(command)


def pick(what: str, wanted: str | None, entries: Sequence[Sequence[str]]) -> int:
    """Which of the configuration's `entries`, given as the names of each, has the name `wanted`.

    None means the only one there is.

    Raises:
        UsageError: there is none of that name, or more than one and none is named.
    """
    known = ", ".join(names[0] for names in entries) or "none"
    if wanted is None and len(entries) == 1:
        return 0
    for index, names in enumerate(entries):
        if wanted in names:
            return index
    if wanted is None:
        raise UsageError(f"which {what}? The configuration has: {known}")
    raise UsageError(f"the configuration has no {what} {wanted!r}; it has: {known}")


def caller_of(config: Config) -> Bundle:
    """The worker of `config`, as providers want to know who calls."""
    from edge.isolates.base import Bundle

    return Bundle(config.name, "", "", "", account=config.account_id)


def run_with(provider: P, work: Callable[[P], Coroutine[Any, Any, T]]) -> T:
    """What `work` gives for a provider that is closed afterwards."""

    async def run() -> T:
        try:
            return await work(provider)
        finally:
            await provider.close()

    return asyncio.run(run())


async def pieces_of(path: Path) -> AsyncIterator[bytes]:
    """The bytes of a file, a piece at a time.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield piece
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


async def one_piece(data: bytes) -> AsyncIterator[bytes]:
    """`data` as a body."""
    yield data
