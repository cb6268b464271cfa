"""How the classes of bindings call the node: `Call` out; `Result`, `ResultHead` or `CallFailed` back."""

from __future__ import annotations

from typing import Any

from workers import _runtime
from workers._body import Content
from workers._js_exception import JsException
from workers._wire import Call, CallFailed, FrameError, Result, ResultHead
from workers.streams import ReadableStream
from workers.values import plain


class BindingError(JsException):
    """A call of a binding was refused or failed.

    Attributes:
        name: the error's JavaScript class name.
        message: the same as the text of the exception.
        code: the error's number; 0 if it has none.
        status: the HTTP status that goes with it.
    """

    def __init__(self, message: str, *, name: str = "Error", code: int = 0, status: int = 500) -> None:
        super().__init__(message, name=name)
        self.code = code
        self.status = status


class BindingCalls:
    """The calls that go through one binding, in whatever invocation they are made."""

    def __init__(self, binding: str) -> None:
        self.binding = binding
        self.name = binding if binding.startswith("ctx.") else f"env.{binding}"
        """As the handler writes it."""

    async def call(self, method: str, *args: Any, body: Content = None) -> Any:
        """Call `method` and give its result, plain: use `values.wrap` for attribute access.

        Args:
            args: None, bool, int, float, str, bytes, lists, dicts with str keys, and what has `to_py()`.
            body: bytes too many for an argument, or a stream.

        Raises:
            BindingError: the call was refused or failed.
            TypeError, ValueError: an argument is of a type or size that cannot be sent.
            RuntimeError: called outside of a running worker.
        """
        answer, stream = await self._ask(method, args, body)
        if isinstance(answer, Result):
            return answer.value
        if stream is not None:
            await stream.aclose()
        raise BindingError(f"{self.name}.{method}() was answered with a stream, which it has no use for")

    async def stream(self, method: str, *args: Any, body: Content = None) -> tuple[ResultHead, ReadableStream | None]:
        """The same for a method whose result is a head and a stream; no stream means that there is no body."""
        answer, stream = await self._ask(method, args, body)
        if isinstance(answer, ResultHead):
            return answer, stream
        raise BindingError(f"{self.name}.{method}() was answered with a value instead of a stream")

    async def _ask(
        self, method: str, args: tuple[Any, ...], body: Content
    ) -> tuple[Result | ResultHead, ReadableStream | None]:
        where = f"{self.name}.{method}()"
        if _runtime.runtime is None:
            raise RuntimeError(f"{where} works only inside a running worker; start it with `edge dev`")
        sendable = [plain(arg, f"argument {number} of {where}") for number, arg in enumerate(args, 1)]
        calls = _runtime.runtime.calls
        frame = Call(calls.next_id(), _runtime.invocation_id(), self.binding, method, sendable, body is not None)
        try:
            answer, stream = await calls.ask(frame, body)
        except FrameError as error:
            raise ValueError(f"{where}: {error}") from error
        if isinstance(answer, CallFailed):
            raise BindingError(answer.message, name=answer.name, code=answer.code, status=answer.status)
        return answer, stream
