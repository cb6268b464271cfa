"""`run_sync`: plain sync code, called from an async handler, waits for an awaitable while the event loop goes on.

Every task of an isolate runs on a stack of its own (a greenlet), so that it can stand still in the middle of a call.
Asyncio notices nothing of that: what `run_sync` waits for is awaited by the very task that called it, with its context
and its cancellation. In another thread, `run_sync` blocks the thread and the awaitable runs in the isolate's loop.

Without the package greenlet, tasks run as they always do, and `run_sync` works in threads only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, NoReturn, TypeVar

try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError:  # pragma: no cover - a dependency of this package, which a copy of it may lack
    greenlet = None

T = TypeVar("T")

_MAX_IDLE = 16

_loop: asyncio.AbstractEventLoop | None = None
_loop_thread = 0


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Let `run_sync` work in all tasks that are created in `loop`, which runs in this thread, and in other threads."""
    global _loop, _loop_thread
    _loop, _loop_thread = loop, threading.get_ident()
    if greenlet is not None:
        loop.set_task_factory(_create_task)


def can_run_sync() -> bool:
    """Whether `run_sync` works where this is called: in a task of the isolate, or in another thread."""
    if _loop is None:
        return False
    if threading.get_ident() != _loop_thread:
        return _loop.is_running()
    return greenlet is not None and isinstance(getcurrent(), _Stack)


def run_sync(awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, for code that cannot `await`. Other tasks go on meanwhile.

    Raises:
        TypeError: it is no awaitable.
        RuntimeError: neither a task of the isolate nor another thread calls this.
        BaseException: whatever the awaitable raises.
    """
    if not isinstance(awaitable, Awaitable):
        raise TypeError(f"run_sync() needs an awaitable, not {type(awaitable).__name__}")
    if not can_run_sync():
        _refuse(awaitable)
    if threading.get_ident() != _loop_thread:
        assert _loop is not None
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), _loop).result()
    stack = getcurrent()
    steps = awaitable.__await__()
    result = _first_step(steps)
    while not isinstance(result, _Returned):
        try:
            value = stack.parent.switch(result)
        except BaseException as error:  # cancelled, or what was waited for failed
            result = _step(steps.throw, error)
        else:
            result = _step(steps.send, value)
    return result.value  # type: ignore[no-any-return]


class _Returned:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _first_step(steps: Generator[Any, Any, Any]) -> Any:
    try:
        return next(steps)
    except StopIteration as stop:
        return _Returned(stop.value)


def _step(resume: Any, argument: Any) -> Any:
    """What the awaitable waits for next, or its result as `_Returned`."""
    try:
        return resume(argument)
    except StopIteration as stop:
        return _Returned(stop.value)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _refuse(awaitable: Awaitable[Any]) -> NoReturn:
    if isinstance(awaitable, Coroutine):
        awaitable.close()  # it is never going to be awaited, and saying so once is enough
    if greenlet is None:
        raise RuntimeError("run_sync() in a handler needs the package greenlet; install it: pip install greenlet")
    raise RuntimeError("run_sync() works only in a handler, in tasks that it started, and in threads; use `await` here")


def _create_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(OnOwnStack(coro), loop=loop, **options)


class OnOwnStack(Coroutine[Any, Any, Any]):
    """`coro`, each step of which runs on a stack that `run_sync` can leave and come back to."""

    __slots__ = ("__weakref__", "_coro", "_stack")

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self._stack: _Stack | None = None  # of the step that is not finished

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        if self._stack is None:
            return self._begin(self._coro.send, value)
        return self._after(self._stack, self._stack.switch(value))

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """See `collections.abc.Coroutine`."""
        error = kind if isinstance(kind, BaseException) else kind() if value is None else value
        if self._stack is None:
            return self._begin(self._coro.throw, error)
        return self._after(self._stack, self._stack.throw(error))

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.throw()  # GreenletExit
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # cr_frame, __qualname__ and the like, for those who look at tasks

    def _begin(self, resume: Any, argument: Any) -> Any:
        idle = _idle.stacks
        stack = idle.pop() if idle else _Stack(_serve_steps)
        stack.is_in_step = True
        stack.gr_context = getcurrent().gr_context  # a task's steps all run in the task's context
        return self._after(stack, stack.switch(resume, argument))

    def _after(self, stack: _Stack, answer: Any) -> Any:
        if stack.is_in_step:  # `run_sync` on that stack waits for `answer`
            self._stack = stack
            return answer
        self._stack = None
        idle = _idle.stacks
        if len(idle) < _MAX_IDLE:
            idle.append(stack)
        if type(answer) is _Raised:
            raise answer.error
        return answer


class _Raised:
    """How a step ended that did not come to its next wait."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


if greenlet is not None:

    class _Stack(greenlet):  # type: ignore[misc]  # a class of our own, to know ours from those that a handler makes
        is_in_step: bool


class _Idle(threading.local):
    """Stacks between two steps: making one costs ten times what using one does. A stack belongs to its thread."""

    def __init__(self) -> None:
        self.stacks: list[Any] = []


_idle = _Idle()


def _serve_steps(resume: Any, argument: Any) -> NoReturn:
    """The life of a stack: run a step, hand over what came of it, wait for the next one."""
    stack = getcurrent()
    back = stack.parent.switch
    while True:
        try:
            answer = resume(argument)
        except BaseException as error:  # it belongs to the task, and this stack has others to serve
            answer = _Raised(error)
        del resume, argument
        stack.is_in_step = False
        resume, argument = back(answer)
        del answer
