"""The private module of Cloudflare's runtime, for the SDK that workers may have vendored from a package index."""

from contextlib import AbstractContextManager
from typing import Any

import workers


class _CloudflareWorkers:
    """JavaScript's module `cloudflare:workers`."""

    WorkerEntrypoint = workers.WorkerEntrypoint

    @property
    def env(self) -> Any:
        return workers.env

    @staticmethod
    def waitUntil(awaitable: Any) -> None:
        workers.wait_until(awaitable)


cloudflareWorkersModule = _CloudflareWorkers()
cloudflareSocketsModule = None


async def doAnImport(name: str) -> Any:
    """JavaScript's `import(name)`. Raises ImportError for modules other than `cloudflare:workers`."""
    if name == "cloudflare:workers":
        return cloudflareWorkersModule
    raise ImportError(f"there is no JavaScript module {name!r} in this runtime")


def patchWaitUntil(ctx: Any) -> None:
    """`ctx.waitUntil` takes coroutines as it is."""


def patch_env_helper(values: dict[str, Any]) -> AbstractContextManager[Any]:
    """`workers.patch_env`."""
    return workers.patch_env(values)
