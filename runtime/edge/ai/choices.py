"""The choices of one call: as many generations of the same prompt, each with a usage record of its own.

The first one computes the prompt; the others start when that is done, so that they find it in the prefix cache. No
more than `MAX_AT_A_TIME` of them are under way: the next one starts when one ends, so that a call with many choices
takes no more places in the engine than some calls with one. Calls with several prompts, each with its choices, are made
one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from edge.ai.catalogue import Model
from edge.ai.gate import Event, Gate, Principal
from edge.ai.schemas import TextGeneration
from edge.frames import Delta, Done

ChoiceEvent = tuple[int, Event]
"""An event and the index of the choice that it belongs to."""

MAX_AT_A_TIME = 8
_SEED_BITS = 64


async def run_choices(
    gate: Gate, principal: Principal, model: Model, request: TextGeneration, *, num_calls: int | None = None
) -> AsyncGenerator[ChoiceEvent, None]:
    """The events of all choices of `request`, as they come. Closing the generator cancels all of them.

    `num_calls`: as how many the rate limit counts them; None: each is one.

    Raises:
        EdgeError: one of them was refused or failed; the others are cancelled.
    """
    num_calls = request.num_choices if num_calls is None else num_calls
    if request.num_choices == 1:
        async with aclosing(gate.run(principal, model, request, num_calls=num_calls)) as only:
            async for event in only:
                yield 0, event
        return
    runs: list[AsyncGenerator[Event, None]] = []
    waiting: dict[asyncio.Task[Event | None], int] = {}

    def begin() -> None:
        index = len(runs)
        runs.append(gate.run(principal, model, _variant(request, index), num_calls=0 if index else num_calls))
        waiting[_next(runs[index])] = index

    is_prompt_computed = False
    try:
        begin()
        while waiting:
            arrived, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(arrived, key=waiting.__getitem__):
                index, following = waiting.pop(task), task.result()
                is_prompt_computed = is_prompt_computed or following is None or _is_prompt_computed(following)
                if following is not None:
                    waiting[_next(runs[index])] = index
                while is_prompt_computed and len(runs) < request.num_choices and len(waiting) < MAX_AT_A_TIME:
                    begin()
                if following is not None:
                    yield index, following
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for run in runs:
            await run.aclose()


async def run_prompts(
    gate: Gate, principal: Principal, model: Model, requests: Sequence[TextGeneration]
) -> AsyncGenerator[ChoiceEvent, None]:
    """The events of the choices of all `requests`, which have as many each; they are numbered through.

    Raises:
        EdgeError: one of them was refused or failed.
    """
    num_calls = sum(request.num_choices for request in requests)
    for i, request in enumerate(requests):
        async with aclosing(run_choices(gate, principal, model, request, num_calls=0 if i else num_calls)) as choices:
            async for index, event in choices:
                yield i * request.num_choices + index, event


def _variant(request: TextGeneration, index: int) -> TextGeneration:
    """`request` for the choice `index`: a seed must not make all of them the same."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    seed = (seed + index + (1 << _SEED_BITS - 1)) % (1 << _SEED_BITS) - (1 << _SEED_BITS - 1)
    return replace(request, sampling=replace(request.sampling, seed=seed))


def _next(events: AsyncGenerator[Event, None]) -> asyncio.Task[Event | None]:
    async def event() -> Event | None:
        return await anext(events, None)

    return asyncio.create_task(event())


def _is_prompt_computed(event: Event) -> bool:
    return isinstance(event, Delta | Done) and (isinstance(event, Done) or event.usage.output_tokens > 0)
