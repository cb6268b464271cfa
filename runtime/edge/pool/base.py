"""What the gate needs of a pool of engines: one Protocol, whatever places and runs the engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from edge.frames import Delta, Done, Generate, Started

__all__ = ["Pool"]


class Pool(Protocol):
    """Runs generations on engines and hides that engines die and come back."""

    def generate(self, request: Generate) -> AsyncGenerator[Started | Delta | Done, None]:
        """The frames of one generation: `Started`, `Delta`s, then `Done`. `request.id` is replaced by the pool.

        Closing the generator cancels the work in the engine within one step.

        Raises:
            EngineLost: the engine died (retryable); usage up to then is in the last frame received.
            OutOfCapacity, PromptTooLong, InvalidInput, UnknownModel: as the engine refused it.
        """
        ...
