"""`env.AI` under test: canned answers, answers from a cassette, or those of the installed models.

It knows nothing about isolates. The installed models are reached through the node's own gate.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from edge.ai.answers import sse
from edge.billing.meter import UsageRecord, new_id
from edge.billing.times import now_us
from edge.errors import EdgeError, InvalidInput, UnknownModel
from edge.isolates.base import Bundle, JsonAnswer, StreamAnswer
from edge.testing.cassette import Cassette, Recorded

AiMode = Literal["canned", "record", "replay", "real"]
_DONE = b"data: [DONE]\n\n"
_EVENT_STREAM = [("content-type", "text/event-stream")]


class Models(Protocol):
    """The installed models."""

    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer | StreamAnswer:
        """One model call; it is metered."""
        ...

    async def models(self, params: Mapping[str, Any]) -> JsonAnswer:
        """What can be called."""
        ...


class AiCall(msgspec.Struct, frozen=True):
    """A call that a handler has made."""

    model: str
    inputs: Any
    options: dict[str, Any]


class Ai:
    """What the handlers' `env.AI` answers, and what it was asked.

    Attributes:
        calls: every call, oldest first.
    """

    def __init__(
        self,
        mode: AiMode,
        cassette: Cassette,
        models: Callable[[], Awaitable[Models]],
        record_usage: Callable[[UsageRecord], Awaitable[None]],
    ) -> None:
        self.mode = mode
        self.calls: list[AiCall] = []
        self._cassette = cassette
        self._models = models
        self._record_usage = record_usage
        self._canned: dict[str, _Canned] = {}

    def answers(
        self,
        model: str,
        answer: Any = None,
        *,
        stream: Iterable[str | dict[str, Any]] | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """Answer calls of `model` (`*`: of any) with `answer` from here on, whatever the mode.

        Args:
            answer: a dict is the result as it is; a str is the response of a text model; a list has one of these for
                each call in turn; a function is called with the inputs (and the options, if it takes two arguments) and
                gives one of these, or raises; an exception of `edge.errors` is how the call fails.
            stream: pieces of a response, or whole events: what a call with `stream` gets one by one, others joined.
            input_tokens: what the call uses, for `usage`; by default what `usage` in the answer says.
            output_tokens: likewise.

        Raises:
            TypeError: there is no answer, or one of another type.
        """
        if (answer is None) == (stream is None):
            raise TypeError("ai.answers() needs an answer or stream=[…], one of them")
        if stream is not None:
            answer = _Pieces(list(stream))
        turns = list(answer) if isinstance(answer, list) else None
        for each in turns if turns is not None else [answer]:
            _check(each)
        self._canned[model] = _Canned(answer, iter(turns) if turns is not None else None, input_tokens, output_tokens)

    async def models(self, params: Mapping[str, Any]) -> JsonAnswer:
        """The installed models, where answers come from them. Raises InvalidInput otherwise."""
        if self.mode not in ("real", "record"):
            raise InvalidInput("env.AI.models() lists installed models, which tests have with --edge-ai real only")
        return await (await self._models()).models(params)

    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer | StreamAnswer:
        """One call of a handler. EdgeErrors travel to it."""
        self.calls.append(AiCall(model, inputs, options))
        canned = self._canned.get(model) or self._canned.get("*")
        if canned is not None:
            return await self._answer(caller, model, inputs, await canned.answer(model, inputs, options), canned)
        match self.mode:
            case "real":
                return await (await self._models()).run(caller, model, inputs, options)
            case "record":
                answer = await (await self._models()).run(caller, model, inputs, options)
                return self._recorded(Recorded(model, inputs, options), answer)
            case "replay":
                return await self._replayed(caller, model, inputs, options)
        raise UnknownModel(
            f"no answer for the model {model!r}: add ai.answers({model!r}, …) to the test, or take answers from a "
            "cassette (--edge-ai replay) or from the installed models (--edge-ai real)"
        )

    def save(self) -> None:
        """Write what was recorded."""
        self._cassette.save()

    # -- cassettes -----------------------------------------------------------------------------------------

    async def _replayed(
        self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]
    ) -> JsonAnswer | StreamAnswer:
        call = self._cassette.play(model, inputs, options)
        if call is None:
            raise UnknownModel(
                f"the cassette {self._cassette.file} has no answer of {model!r} to these inputs; record the test again "
                "(pytest --edge-ai record), or add ai.answers() to it"
            )
        answer = call.result if call.events is None else _Pieces(call.events)
        canned = _Canned(answer, None, call.input_tokens, call.output_tokens)
        return await self._answer(caller, model, inputs, answer, canned)

    def _recorded(self, call: Recorded, answer: JsonAnswer | StreamAnswer) -> JsonAnswer | StreamAnswer:
        if isinstance(answer, JsonAnswer):
            call.result = answer.value
            call.input_tokens, call.output_tokens = _tokens(answer.value)
            self._cassette.record(call)
            return answer
        body = _Copied(answer.body, lambda data: self._record_stream(call, data))
        return StreamAnswer(answer.status, answer.headers, body, answer.info)

    def _record_stream(self, call: Recorded, data: bytes) -> None:
        call.events = []
        for event in data.decode().split("\n\n"):
            text = event.removeprefix("data: ")
            if text and text != "[DONE]":
                value = msgspec.json.decode(text)
                value.pop("p", None)  # a filling of random length
                call.events.append(value)
        call.input_tokens, call.output_tokens = _tokens(call.events[-1] if call.events else None)
        self._cassette.record(call)

    # -- canned answers ------------------------------------------------------------------------------------

    async def _answer(
        self, caller: Bundle, model: str, inputs: Any, answer: Any, canned: _Canned
    ) -> JsonAnswer | StreamAnswer:
        """`answer` in the form that the handler has asked for."""
        if isinstance(answer, EdgeError):
            await self._use(caller, model, error=answer)
            raise answer
        if isinstance(answer, _Pieces):
            events = answer.events()
            value: Any = {"response": answer.text()}
        else:
            value = {"response": answer} if isinstance(answer, str) else answer
            events = [{"response": value.get("response", "")}] if isinstance(value, dict) else [{"response": ""}]
        input_tokens, output_tokens = canned.input_tokens, canned.output_tokens
        if not (input_tokens or output_tokens):
            input_tokens, output_tokens = _tokens(value)
        if isinstance(answer, str | _Pieces):
            value |= {"finish_reason": "stop", "usage": _usage(input_tokens, output_tokens)}
        record_id = await self._use(caller, model, input_tokens, output_tokens)
        info = {"requestId": record_id, "status": 200}
        if not (isinstance(inputs, dict) and inputs.get("stream")):
            return JsonAnswer(value, info)
        if not any("usage" in event for event in events):
            usage = _usage(input_tokens, output_tokens)
            events = [*events, {"response": "", "finish_reason": "stop", "usage": usage}]
        return StreamAnswer(200, _EVENT_STREAM, _stream(events), info)

    async def _use(
        self,
        caller: Bundle,
        model: str,
        input_tokens: int = 0,
        output_tokens: int = 0,
        error: EdgeError | None = None,
    ) -> str:
        now = now_us()
        record = UsageRecord(
            id=new_id(),
            request_id=new_id(),
            started_at=now,
            ended_at=now,
            account=caller.account,
            worker=caller.worker,
            version=caller.version,
            model=model,
            served_by=model,
            task="text-generation",
            trigger="binding",
            status="ok" if error is None else "error",
            error_code=None if error is None else error.code,
            input_tokens=input_tokens,
            cached_input_tokens=0,
            output_tokens=output_tokens,
            compute_us=0,
            wall_us=0,
            price_version="",
        )
        await self._record_usage(record)
        return record.request_id


class _Pieces:
    """A response in pieces."""

    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = pieces

    def events(self) -> list[dict[str, Any]]:
        return [{"response": piece} if isinstance(piece, str) else piece for piece in self._pieces]

    def text(self) -> str:
        return "".join(str(event.get("response") or "") for event in self.events())


class _Canned(msgspec.Struct):
    """What a model answers."""

    value: Any
    turns: Iterator[Any] | None
    input_tokens: int
    output_tokens: int

    async def answer(self, model: str, inputs: Any, options: dict[str, Any]) -> Any:
        """The answer to one call."""
        value = self.value
        if self.turns is not None:
            value = next(self.turns, None)
            if value is None:
                raise UnknownModel(
                    f"{model!r} was called more often than the list in ai.answers() has answers ({len(self.value)})"
                )
        if not callable(value):
            return value
        try:
            value = value(*(inputs, options)[: len(inspect.signature(value).parameters)])
            value = await value if inspect.isawaitable(value) else value
            _check(value)
        except EdgeError:
            raise
        except Exception as error:  # of the test's own code: the handler, and with it the test, is to hear of it
            raise EdgeError(
                f"the answer of {model!r} in ai.answers() raised {type(error).__name__}: {error}"
            ) from error
        return value


class _Copied:
    """A stream that tells what it had once it is complete."""

    def __init__(self, body: AsyncIterator[bytes], on_end: Callable[[bytes], None]) -> None:
        self._body = body
        self._on_end = on_end
        self._data: list[bytes] = []

    def __aiter__(self) -> _Copied:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await anext(self._body)
        except StopAsyncIteration:
            self._on_end(b"".join(self._data))
            raise
        self._data.append(data)
        return data

    async def aclose(self) -> None:
        """Cancel what is not finished."""
        if (close := getattr(self._body, "aclose", None)) is not None:
            await close()


async def _stream(events: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    for event in events:
        yield sse(event)
    yield _DONE


def _check(answer: Any) -> None:
    if not (isinstance(answer, dict | str | EdgeError | _Pieces) or callable(answer)):
        raise TypeError(
            f"ai.answers() takes a dict, a str, a function, an error of edge.errors, or a list of these, not "
            f"{type(answer).__name__}"
        )


def _tokens(value: Any) -> tuple[int, int]:
    usage = value.get("usage") if isinstance(value, dict) else None
    if not isinstance(usage, dict):
        return 0, 0
    return int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))


def _usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
