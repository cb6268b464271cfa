"""What the gate needs of a pool of engines: one Protocol, whatever places and runs the engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from edge.frames import Delta, Done, Encode, Encoded, Generate, Started, Usage

OnUsage = Callable[[Usage], None]
"""Called with what a call has used by now, each time that this is heard of."""


class Pool(Protocol):
    """Runs calls on engines and hides that engines die and come back."""

    def generate(self, request: Generate, on_usage: OnUsage) -> AsyncGenerator[Started | Delta | Done, None]:
        """The frames of one generation: `Started`, `Delta`s, then `Done`. `request.id` is replaced by the pool.

        Closing the generator cancels the work in the engine within one step; until it is closed, `on_usage` is told
        of the usage, also of a generation that fails or is cancelled.

        Raises:
            EngineLost: the engine died (retryable).
            OutOfCapacity, PromptTooLong, InvalidInput, UnknownModel: as the engine refused it.
        """
        ...

    def encode(self, request: Encode, on_usage: OnUsage) -> AsyncGenerator[Started | Delta | Encoded, None]:
        """The frames of one `Encode`: `Started`, perhaps `Delta`s that only tell the usage, then `Encoded`.

        As with `generate`, closing the generator cancels the work; the same is raised.
        """
        ...

    async def count_tokens(self, request: Generate) -> int:
        """How many tokens the prompt of `request` has; also of one that is too long for the model.

        Raises:
            EngineLost, OutOfCapacity, InvalidInput, UnknownModel: as `generate`.
        """
        ...
