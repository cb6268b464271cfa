"""Zygotes that the tests of a module use one after the other: to start one takes far longer than to fork a process."""

from __future__ import annotations

import asyncio

from edge.config import IsolatesConfig
from edge.isolates.spawner import Spawner

HANG_S = 20
_shared: dict[str, SharedSpawner] = {}
"""Of the module whose tests run now, by the sandbox's policy."""


class SharedSpawner(Spawner):
    """Outlives the `Isolates` that use it: when they are closed, only what it forked for them ends."""

    async def close(self) -> None:
        """End all processes but the zygote and the spare one; returns when they are gone."""
        async with asyncio.timeout(HANG_S):
            while used := self._children.keys() - {self.spare_pid}:
                if self._making_spare is None:  # else one of them will be the spare one
                    for pid in used:
                        self.kill(pid)
                await asyncio.sleep(0.002)

    async def end(self) -> None:
        """What `close` is to others."""
        await super().close()


def shared_spawner(config: IsolatesConfig | None = None) -> Spawner | None:
    """What can be handed to `Isolates` with this configuration; None: it needs a zygote of its own."""
    config = config or IsolatesConfig()
    if config.preload:
        return None
    policy = config.sandbox or "best-effort"
    return _shared.setdefault(policy, SharedSpawner(policy))


async def end_shared_spawners() -> None:
    """To be called once no test of the module runs any more, on its event loop."""
    for spawner in _shared.values():
        await spawner.end()
    _shared.clear()
