"""The AI binding, `env.AI`. It validates nothing about models or inputs: the node's gate does, for every door alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from workers import _runtime
from workers._js_exception import JsException
from workers._wire import AiRun, CallFailed, FrameError, Result, ResultHead
from workers.bindings._calls import BindingCalls
from workers.response import Response
from workers.values import plain, wrap


class InferenceUpstreamError(JsException):
    """A model call was refused or failed. Its text is `<code>: <description>`.

    Attributes:
        name: the error's JavaScript class name, for example `NoSuchModel`.
        message: the text, code included.
        code: the Workers AI error code; 0 if there is none.
        status: the HTTP status that the same call over REST would have had.
    """

    def __init__(self, message: str, *, name: str = "InferenceUpstreamError", code: int = 0, status: int = 500) -> None:
        super().__init__(message, name=name)
        self.code = code
        self.status = status


class Ai:
    """Runs models. The three attributes describe the last call that was made through this object."""

    def __init__(self, name: str = "AI") -> None:
        self._calls = BindingCalls(name)
        self.lastRequestId: str | None = None
        self.lastRequestHttpStatusCode: int | None = None
        self.aiGatewayLogId: str | None = None

    async def run(
        self, model: str, inputs: Mapping[str, Any], options: Mapping[str, Any] | None = None, **more_options: Any
    ) -> Any:
        """Run `model` on `inputs`.

        Returns:
            The result with attribute and item access and `.to_py()` at every depth; a `ReadableStream` of bytes
            (server-sent events) if the inputs say `"stream": True`; a `Response` with the option
            `returnRawResponse=True`, also for a call that failed.

        Raises:
            InferenceUpstreamError: the call was refused or failed.
            TypeError, ValueError: an argument is of a type or size that cannot be sent.
        """
        if not isinstance(model, str):
            raise TypeError(f"env.AI.run() needs the model's name as a str, not {type(model).__name__}")
        options = {**(plain(options, "options") if options is not None else {}), **plain(more_options, "options")}
        wants_response = bool(options.pop("returnRawResponse", False))
        if options.get("websocket"):
            raise ValueError("env.AI.run(websocket=True) is not supported by this runtime; use stream: True")
        calls = _connected().calls
        frame = AiRun(calls.next_id(), _runtime.invocation_id(), model, plain(inputs, "inputs"), options)
        try:
            answer, stream = await calls.ask(frame)
        except FrameError as error:
            raise ValueError(f"env.AI.run({model!r}): {error}") from error
        self._note(answer)
        if isinstance(answer, CallFailed):
            if wants_response:
                return _failure_response(answer)
            raise _failure(answer)
        if isinstance(answer, ResultHead):
            return Response._received(stream, answer.status, answer.headers, "", False) if wants_response else stream
        return Response.json(answer.value) if wants_response else wrap(answer.value)

    async def models(self, params: Mapping[str, Any] | None = None, **more_params: Any) -> Any:
        """The models that `run` can be given, each with `id`, `name` (what `run` takes), `description`, `task`, `tags`
        and `properties`.

        Args:
            params: `search` (a part of the name), `task`, `author` and `source` (1 for `@cf`, 2 for `@hf`) choose;
                `page` and `per_page` (1000) divide the list. `hide_experimental` and `include_deprecated` have no
                effect: a node has neither kind. `format="openrouter"` gives the items in OpenRouter's shape.

        Raises:
            BindingError: a parameter is wrong.
        """
        return wrap(await self._calls.call("models", {**(params or {}), **more_params}))

    def gateway(self, id: str) -> NoReturn:
        """There is no AI Gateway; raises NotImplementedError that says what to use."""
        raise NotImplementedError(
            "env.AI.gateway() is not supported: this node has no AI Gateway, and so none of its logs, caches and other "
            "providers; env.AI.run() calls the models, and `edge usage` lists the calls"
        )

    def toMarkdown(self, *_files: Any, **_options: Any) -> NoReturn:
        """There are no converters of documents; raises NotImplementedError that says what to use."""
        raise NotImplementedError(
            "env.AI.toMarkdown() is not supported: this node has no converters of documents; add a Python package that "
            "does it, such as markitdown, to the worker's dependencies"
        )

    def autorag(self, *_args: Any, **_options: Any) -> NoReturn:
        """There is no AI Search; raises NotImplementedError."""
        raise NotImplementedError(
            "env.AI.autorag() and aiSearch() are not supported: this node has no AI Search and no vector indexes"
        )

    aiSearch = autorag

    def __repr__(self) -> str:
        return "Ai()"

    def _note(self, answer: Result | ResultHead | CallFailed) -> None:
        info: dict[str, Any] = {"status": answer.status} if isinstance(answer, CallFailed) else answer.info
        self.lastRequestId = info.get("requestId")
        self.lastRequestHttpStatusCode = info.get("status")
        self.aiGatewayLogId = info.get("gatewayLogId")


def _connected() -> _runtime.Runtime:
    if _runtime.runtime is None:
        raise RuntimeError("env.AI works only inside a running worker; start it with `edge dev`")
    return _runtime.runtime


def _failure(failed: CallFailed) -> InferenceUpstreamError:
    text = f"{failed.code}: {failed.message}" if failed.code else failed.message
    return InferenceUpstreamError(text, name=failed.name, code=failed.code, status=failed.status)


def _failure_response(failed: CallFailed) -> Response:
    error = {"code": failed.code, "message": failed.message, "name": failed.name}
    return Response.json({"success": False, "errors": [error], "messages": [], "result": None}, failed.status)
