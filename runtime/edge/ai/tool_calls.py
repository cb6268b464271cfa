"""Tool calls on the way out: found in the text of an answer while it arrives.

A reader is fed the text in pieces of any size and gives the same, put together, wherever it was cut: text to show, and
calls with the JSON text of their arguments. How tools are offered is in `edge.ai.tools`.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import msgspec

from edge.ai.fields import is_deep


class CallStart(msgspec.Struct, frozen=True):
    """A call begins, the `index`-th of the answer."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


class Thought(msgspec.Struct, frozen=True):
    """More of the reasoning that comes before an answer."""

    text: str


Piece = str | Thought | CallStart | CallArguments


class Reader(Protocol):
    """Takes one answer apart."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """What `text`, which comes next, adds."""
        ...

    def end(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        ...


class Call(msgspec.Struct):
    """A call as it stands in an answer. `arguments` is JSON text, cut short if the answer was."""

    name: str
    arguments: str = ""

    def parsed(self) -> dict[str, Any] | None:
        """The arguments, unless they are no JSON object, or one that is nested too deeply to be handed on."""
        return json_object(self.arguments)


def put_together(pieces: list[Piece]) -> tuple[str, list[Call]]:
    """The text and the calls of a whole answer, without its reasoning."""
    text, calls = "", []
    for piece in pieces:
        match piece:
            case CallStart(name=name):
                calls.append(Call(name))
            case CallArguments(index=index, text=arguments):
                calls[index].arguments += arguments
            case str():
                text += piece
    return text, calls


def json_object(text: str | bytes | msgspec.Raw) -> dict[str, Any] | None:
    """The JSON object in `text`; None if it is none, or nested too deeply to be handed on."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) and not is_deep(value) else None


class ForcedCall:
    """Reads an answer that is one call and nothing else, as `tools.call_schema` demands: its arguments as they come."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
    _MAX_HEAD_CHARS = 4096

    def __init__(self) -> None:
        self.num_calls = 0
        self._head = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_over = False

    def feed(self, text: str) -> list[Piece]:
        """What `text`, which comes next, adds."""
        if self.num_calls:
            return self._arguments(text)
        self._head += text
        head = self._HEAD.match(self._head) if len(self._head) <= self._MAX_HEAD_CHARS else None
        if head is None:
            return []
        self.num_calls = 1
        return [CallStart(0, msgspec.json.decode(head[1])), *self._arguments(self._head[head.end() :])]

    def end(self) -> list[Piece]:
        """What came is shown as it is if it was cut short before the arguments."""
        return [] if self.num_calls or not self._head else [self._head]

    def _arguments(self, text: str) -> list[Piece]:
        """The part of `text` up to the brace that closes the arguments."""
        num_chars = 0
        for char in text:
            if self._is_over:
                break
            num_chars += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self._is_over = self._depth == 0
        return [CallArguments(0, text[:num_chars])] if num_chars else []


class HermesCalls:
    """Reads text with calls in the form that Hermes and Qwen models are trained on, JSON in `<tool_call>` tags.

    A block that is no call is shown as text. White space before a call, and after the last one, is dropped.
    """

    _OPEN, CLOSE = "<tool_call>", "</tool_call>"
    _MAX_TAGS_IN_STRINGS = 8
    """After so many closing tags, a block whose JSON still goes on is text; each costs a look at all of it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._num_searched = 0
        self._num_tags = 0  # closing ones in the block
        self._in_block = False
        self._space = ""  # before the block

    def feed(self, text: str) -> list[Piece]:
        """What `text`, which comes next, adds; what may be the start of a block is held back."""
        self._held += text
        pieces: list[Piece] = []
        while self._take(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """The last block, which models often leave open, or text that was held back."""
        held, self._held = self._held, ""
        if self._in_block:
            return self._call(held) or [f"{self._space}{self._OPEN}{held}"]
        return [held] if held and not (self.num_calls and held.isspace()) else []

    def _take(self, pieces: list[Piece]) -> bool:
        """Move what is certain from what is held to `pieces`; whether there may be more."""
        tag = self.CLOSE if self._in_block else self._OPEN
        at = self._held.find(tag, max(0, self._num_searched - len(tag)))
        if at >= 0:
            return self._take_block(at, pieces) if self._in_block else self._open_block(at, pieces)
        self._num_searched = len(self._held)
        if not self._in_block:
            shown = self._held[: len(self._held) - num_unclear(self._held, tag)]
            _show(shown, pieces)
            self._held = self._held[len(shown) :]
            self._num_searched = 0
        return False

    def _open_block(self, at: int, pieces: list[Piece]) -> bool:
        before = self._held[:at]
        shown = before.rstrip()
        _show(shown, pieces)
        self._space = before[len(shown) :]
        self._held = self._held[at + len(self._OPEN) :]
        self._num_searched, self._num_tags, self._in_block = 0, 0, True
        return True

    def _take_block(self, at: int, pieces: list[Piece]) -> bool:
        block, end = self._held[:at], at + len(self.CLOSE)
        call = self._call(block)
        self._num_tags += 1
        if not call and self._num_tags < self._MAX_TAGS_IN_STRINGS and _is_cut_short(block):
            self._num_searched = end + len(self.CLOSE)  # the tag is inside of a string
            return True
        pieces += call or [f"{self._space}{self._OPEN}{block}{self.CLOSE}"]
        self._held, self._num_searched, self._in_block = self._held[end:], 0, False
        return True

    def _call(self, block: str) -> list[Piece]:
        """The call in `block`; nothing if there is none."""
        try:
            call = msgspec.json.decode(block, type=_Call)
            arguments = bytes(call.arguments)
            if arguments.startswith(b'"'):  # some models write the JSON text of the arguments as a string
                arguments = msgspec.json.decode(arguments, type=str).encode()
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return []
        if json_object(arguments) is None:
            return []
        self.num_calls += 1
        index = self.num_calls - 1
        return [CallStart(index, call.name), CallArguments(index, arguments.decode())]


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _show(text: str, pieces: list[Piece]) -> None:
    if text:
        pieces.append(text)


def num_unclear(text: str, tag: str) -> int:
    """Characters at the end of `text` that may belong to a `tag`, or are white space before one."""
    for length in range(min(len(tag) - 1, len(text)), -1, -1):
        if text.endswith(tag[:length]):
            break
    before = text[: len(text) - length]
    return len(text) - len(before.rstrip())


def _is_cut_short(block: str) -> bool:
    try:
        msgspec.json.decode(block)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except (UnicodeError, RecursionError):
        return False
    return False
