"""OpenAI's Responses: answers that are made of items, whole and as a stream of typed events.

Format: OpenAI's API reference, `response` and its streaming events. Nothing is stored.
"""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from typing import Any

import msgspec

from edge.ai.answers import AnswerStream, Tariff, error_message, logprob_object, reader_of, tariff_of
from edge.ai.catalogue import TEXT_GENERATION, Model
from edge.ai.choices import ChoiceEvent, run_choices
from edge.ai.gate import Event, Gate, Principal
from edge.ai.inputs import with_options
from edge.ai.response_bodies import ResponseBody, read_response
from edge.ai.tool_calls import CallArguments, CallStart, Piece, Thought
from edge.errors import EdgeError, OutOfCapacity
from edge.frames import Delta, Done, Started, TokenLogprob, Usage


async def response(gate: Gate, principal: Principal, body: Any) -> dict[str, Any] | AnswerStream:
    """The answer to a Responses `body`: a `response`, or a stream of events.

    A stream is returned once the engine has accepted the prompt; close it when its reader goes away.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    asked = read_response(body)
    principal = with_options(principal, body.get("options"))
    return await answer_response(gate, principal, gate.catalogue.resolve(asked.model, TEXT_GENERATION), asked)


async def answer_response(
    gate: Gate, principal: Principal, model: Model, asked: ResponseBody
) -> dict[str, Any] | AnswerStream:
    """The answer of `model`, as `response` gives it."""
    turn = _Turn(asked, _head(asked, principal, model), tariff_of(gate, principal, model))
    events = run_choices(gate, principal, model, asked.request)
    if asked.request.stream:
        return await AnswerStream(events, _TurnEncoder(turn), principal.request_id).accepted()
    async with aclosing(events):
        async for _, event in events:
            turn.take(event)
    return turn.response


async def count_response_tokens(gate: Gate, principal: Principal, body: Any) -> dict[str, Any]:
    """How many tokens the prompt of a Responses `body` has; nothing is generated, and nothing charged.

    Raises:
        UnknownModel, InvalidInput, InvalidJson: the call is wrong.
        EdgeError: it was refused or failed.
    """
    asked = read_response(body)
    model = gate.catalogue.resolve(asked.model, TEXT_GENERATION)
    num_tokens = await gate.count_tokens(principal, model, asked.request)
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _head(asked: ResponseBody, principal: Principal, model: Model) -> dict[str, Any]:
    """The response before there is anything of the answer."""
    return {
        "id": f"resp_{principal.request_id.replace('-', '')}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": model.id,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": asked.request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": asked.request.sampling.logprobs or 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **asked.shown,
    }


class _Turn:
    """Builds one response from the events of its call, and tells each step as OpenAI's stream does.

    A step is an event's type and its fields. One item is open at a time: reasoning, a message or a function call.
    """

    def __init__(self, asked: ResponseBody, head: dict[str, Any], tariff: Tariff) -> None:
        self.response = head
        self._tariff = tariff
        self._reader = reader_of(asked.request.form, splits_reasoning=True)
        self._has_logprobs = asked.request.sampling.logprobs is not None
        self._item: dict[str, Any] | None = None
        self._num_reasoning_tokens = 0

    def take(self, event: Event) -> list[tuple[str, dict[str, Any]]]:
        """What `event` adds."""
        match event:
            case Started():
                return [(f"response.{name}", {"response": dict(self.response)}) for name in ("created", "in_progress")]
            case Delta():
                pieces: list[Piece] = [event.text] if self._reader is None else self._reader.feed(event.text)
                if any(isinstance(piece, Thought) for piece in pieces):
                    self._num_reasoning_tokens = event.usage.output_tokens
                return self._add(pieces, event.logprobs if self._has_logprobs else [])
            case Done():
                return self._end(event)

    def fail(self, error: EdgeError, request_id: str) -> tuple[str, dict[str, Any]]:
        """The call has failed half-way."""
        code = "rate_limit_exceeded" if isinstance(error, OutOfCapacity) else "server_error"
        failure = {"code": code, "message": error_message(error, request_id)}
        return "response.failed", {"response": {**self.response, "status": "failed", "error": failure}}

    def _add(self, pieces: list[Piece], logprobs: list[TokenLogprob]) -> list[tuple[str, dict[str, Any]]]:
        steps: list[tuple[str, dict[str, Any]]] = []
        for piece in pieces:
            match piece:
                case CallStart(name=name):
                    steps += self._open({**_new_item("function_call"), **_new_call(name)})
                case CallArguments(text=text):
                    assert self._item is not None, "a call starts before its arguments"
                    self._item["arguments"] += text
                    steps.append(self._step("function_call_arguments.delta", delta=text))
                case Thought(text=text):
                    steps += self._part("reasoning", "reasoning_text", text)
                case str() if piece:
                    shown = [logprob_object(token) for token in logprobs]
                    steps += self._part("message", "output_text", piece, logprobs=shown)
                    logprobs = []  # they are told once
        return steps

    def _part(self, kind: str, part_kind: str, text: str, **more: Any) -> list[tuple[str, dict[str, Any]]]:
        """More text of the one part of an item of that kind."""
        steps = self._open(_new_item(kind)) if self._item is None or self._item["type"] != kind else []
        assert self._item is not None, "it has just been opened"
        if not self._item["content"]:
            empty: dict[str, Any] = {"type": part_kind, "text": ""} | (
                {"annotations": [], "logprobs": []} if kind == "message" else {}
            )
            steps.append(self._step("content_part.added", content_index=0, part=empty))
            self._item["content"] = [_copied(empty)]
        part = self._item["content"][0]
        part["text"] += text
        for key, values in more.items():
            part[key] += values
        steps.append(self._step(f"{part_kind}.delta", content_index=0, delta=text, **more))
        return steps

    def _open(self, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The end of the item before, and the start of this one."""
        steps = self._close("completed")
        self._item = item
        added = ("response.output_item.added", {"output_index": self._index, "item": _copied(item)})
        return [*steps, added]

    def _close(self, status: str) -> list[tuple[str, dict[str, Any]]]:
        item = self._item
        if item is None:
            return []
        steps = []
        if item["type"] == "function_call":
            steps.append(self._step("function_call_arguments.done", name=item["name"], arguments=item["arguments"]))
        for part in item.get("content") or ():
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            steps.append(self._step(f"{part['type']}.done", content_index=0, text=part["text"], **more))
            steps.append(self._step("content_part.done", content_index=0, part=part))
        item["status"] = status
        steps.append(("response.output_item.done", {"output_index": self._index, "item": item}))
        self.response["output"].append(item)
        self._item = None
        return steps

    def _end(self, done: Done) -> list[tuple[str, dict[str, Any]]]:
        steps = self._add(self._reader.end(), []) if self._reader is not None else []
        if self._item is None and not self.response["output"]:
            steps += self._part("message", "output_text", "", logprobs=[])
        status = "incomplete" if done.finish_reason == "length" else "completed"
        steps += self._close(status)
        self.response["status"] = status
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["completed_at"] = int(time.time())
        self.response["usage"] = self._usage(done.usage)
        return [*steps, (f"response.{status}", {"response": self.response})]

    def _usage(self, usage: Usage) -> dict[str, Any]:
        input_tokens = usage.input_tokens + usage.cached_input_tokens
        return {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_input_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": input_tokens + usage.output_tokens,
            **self._tariff.shown([usage]),
        }

    @property
    def _index(self) -> int:
        """Of the open item."""
        return len(self.response["output"])

    def _step(self, kind: str, /, **more: Any) -> tuple[str, dict[str, Any]]:
        """A step within the open item."""
        assert self._item is not None, "a step within an item"
        return f"response.{kind}", {"item_id": self._item["id"], "output_index": self._index, **more}


def _new_item(kind: str) -> dict[str, Any]:
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
    match kind:
        case "message":
            item |= {"role": "assistant", "content": []}
        case "reasoning":
            item |= {"summary": [], "content": []}
    return item


def _new_call(name: str) -> dict[str, Any]:
    return {"call_id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""}


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """`item` as it is now; its lists grow later."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


class _TurnEncoder:
    """Encodes the steps of a turn, numbered through."""

    def __init__(self, turn: _Turn) -> None:
        self._turn = turn
        self._num_sent = 0

    def encode(self, choice_event: ChoiceEvent) -> bytes:
        """The server-sent events for one event."""
        return b"".join(self._event(*step) for step in self._turn.take(choice_event[1]))

    def failed(self, error: EdgeError, request_id: str) -> bytes:
        """The event that ends a response that has failed."""
        return self._event(*self._turn.fail(error, request_id))

    def _event(self, type: str, fields: dict[str, Any]) -> bytes:
        data = {"type": type, "sequence_number": self._num_sent, **fields}
        self._num_sent += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), msgspec.json.encode(data))
