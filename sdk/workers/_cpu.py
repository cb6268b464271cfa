"""CPU time by invocation, where many invocations take turns on one thread.

The event loop notes whose context a callback or a task's step runs in, and adds the thread's CPU time meanwhile to that
invocation; what it gives to threads counts too. This says only how a process's time is split: the node measures how
much there is of it, and trusts nothing of this.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from time import thread_time_ns
from typing import Any

from workers import _runtime

_lock = threading.Lock()


class CpuTime:
    """What one invocation has used."""

    __slots__ = ("_done_ns", "_since_ns", "_threads_ns")

    def __init__(self) -> None:
        self._done_ns = 0
        self._threads_ns = 0
        self._since_ns: int | None = None

    @property
    def us(self) -> int:
        """Microseconds so far, the running callback included. To be read in the thread of the loop."""
        running_ns = thread_time_ns() - self._since_ns if self._since_ns is not None else 0
        return (self._done_ns + self._threads_ns + running_ns) // 1000

    def run(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback of the loop's and count its time."""
        self._since_ns = start_ns = thread_time_ns()
        try:
            callback(*args)
        finally:
            self._done_ns += thread_time_ns() - start_ns
            self._since_ns = None

    def run_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` in a thread of a pool and count its time; several may do so at once."""
        start_ns = thread_time_ns()
        try:
            return function(*args)
        finally:
            used_ns = thread_time_ns() - start_ns
            with _lock:
                self._threads_ns += used_ns


class MeteredLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, which counts the time of callbacks, timers, tasks and its thread pool by invocation."""

    _ready: deque[asyncio.Handle]
    _is_starting = False
    _first_step: Callable[..., Any] | None = None

    def start_task(
        self, work: Coroutine[Any, Any, Any], context: contextvars.Context, cpu: CpuTime
    ) -> asyncio.Task[Any]:
        """A task whose first step is done at once, and not only in the next turn of the loop. No task may be running.

        Most handlers are done after one step, and a turn of the loop costs as much as all else that is done for them.
        """
        self._is_starting = True
        try:
            task = self.create_task(work, context=context)
        finally:
            self._is_starting = False
        step, self._first_step = self._first_step, None
        assert step is not None
        context.run(cpu.run, step)
        return task

    def _call_soon(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> asyncio.Handle:
        """What `call_soon` and `call_soon_threadsafe` come down to, in asyncio: a second call on top of each of theirs
        would cost as much as reading the clock."""
        if context is None:
            context = contextvars.copy_context()
        if self._is_starting:
            self._first_step = callback
            return asyncio.Handle(callback, args, self, context)
        owner = context.get(_runtime.context)
        if owner is not None:
            callback, args = owner._cpu.run, (callback, *args)
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        if context is None:
            context = contextvars.copy_context()
        owner = context.get(_runtime.context)
        if owner is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, owner._cpu.run, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """See asyncio."""
        owner = _runtime.context.get()
        if owner is not None and (executor is None or isinstance(executor, ThreadPoolExecutor)):
            func = functools.partial(owner._cpu.run_in_thread, func)
        return super().run_in_executor(executor, func, *args)
