"""What the gate needs of a pool of engines: one Protocol, whatever places and runs the engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from edge.frames import Delta, Done, Generate, Started, Usage

OnUsage = Callable[[Usage], None]
"""Called with what a generation has used by now, each time that this is heard of."""


class Pool(Protocol):
    """Runs generations on engines and hides that engines die and come back."""

    def generate(self, request: Generate, on_usage: OnUsage) -> AsyncGenerator[Started | Delta | Done, None]:
        """The frames of one generation: `Started`, `Delta`s, then `Done`. `request.id` is replaced by the pool.

        Closing the generator cancels the work in the engine within one step; until it is closed, `on_usage` is told
        of the usage, also of a generation that fails or is cancelled.

        Raises:
            EngineLost: the engine died (retryable).
            OutOfCapacity, PromptTooLong, InvalidInput, UnknownModel: as the engine refused it.
        """
        ...
