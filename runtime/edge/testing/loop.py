"""An event loop in a thread of its own, so that plain test functions can call what is async.

It is the loop of isolates: in-process mode runs handlers in it. It knows nothing about tests or workers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from workers import _run_sync
from workers._cpu import MeteredLoop

T = TypeVar("T")


class LoopThread:
    """Runs from when it is made until `stop`."""

    def __init__(self) -> None:
        self._loop = MeteredLoop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="edge-testing", daemon=True)
        self._thread.start()
        self._ready.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, for code in other threads. Interrupting the wait cancels it.

        Raises:
            RuntimeError: called in the loop itself, which would wait for ever.
            BaseException: whatever `work` raises.
        """
        __tracebackhide__ = True
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """The same without waiting."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "the fixtures cannot be called from handlers, answers of `ai` and other code that runs in the worker; "
                "call them from the test"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def owns_current_thread(self) -> bool:
        """Whether the caller runs in this loop's thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        _run_sync.install(loop)
        loop.call_soon(self._ready.set)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
