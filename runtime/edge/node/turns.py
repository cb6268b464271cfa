"""Keeps a burst of requests from holding up the answers that are being streamed meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

PER_TURN = 8
"""Requests that may begin in one turn of the event loop. Each takes up to a millisecond."""
PER_TURN_BESIDE_STREAMS = 1
"""The same while answers are streamed, whose tokens are to be no later than ten milliseconds."""


class Turns:
    """Lets few requests begin in each turn of the event loop, in the order in which they came."""

    def __init__(self) -> None:
        self._num_begun = 0
        """In this turn."""
        self._num_streams = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when one more request may begin: at once, unless many do."""
        loop = asyncio.get_running_loop()
        if self._num_begun == 0 and not self._waiting:
            loop.call_soon(self._end)
        if self._may_begin() and not self._waiting:
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """While an answer is streamed."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def _may_begin(self) -> bool:
        return self._num_begun < (PER_TURN_BESIDE_STREAMS if self._num_streams else PER_TURN)

    def _end(self) -> None:
        """End the turn: some that wait begin in the next one."""
        self._num_begun = 0
        while self._waiting and self._may_begin():
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has gone
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun > 0:
            asyncio.get_running_loop().call_soon(self._end)
