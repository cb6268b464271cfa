"""What a handler's author gets to see: captured output and log records line by line, and tracebacks without our frames.

It knows frames only as `Log`, and nothing about invocations but their number.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

from workers import _runtime
from workers._channel import HIGH_WATER_BYTES, Channel
from workers._wire import Log

MAX_TEXT = 64 << 10
"""Characters of one line or traceback."""

_record_level: ContextVar[str | None] = ContextVar("record_level", default=None)
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def traceback_text(error: BaseException) -> str:
    """The traceback of `error` as Python prints it, without the frames of this package and of the import machinery."""
    summary = traceback.TracebackException.from_exception(error)
    _drop_our_frames(summary)
    text = "".join(summary.format())
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n… {len(text) - MAX_TEXT} characters left out …\n{text[-MAX_TEXT // 2 :]}"
    return sendable(text)


def message_text(error: BaseException) -> str:
    """The message of `error`, or that it has none to give."""
    try:
        text = str(error)
    except Exception as failure:  # `__str__` is the handler's code
        text = f"(its message cannot be shown: {type(failure).__name__})"
    return sendable(text[:MAX_TEXT])


def sendable(text: str) -> str:
    """`text` with lone surrogates, which no frame can carry, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class Reporter:
    """Sends what the handler prints and logs as `Log` frames, one a line, tagged with the invocation it happened in.

    Levels are `log` for stdout, `error` for stderr, and that of the record (`warning`, …) for the logging module.

    When the node does not keep up, lines are dropped and counted rather than kept; how many is said once there is room.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._num_dropped = 0
        self._telling: asyncio.Task[None] | None = None
        self._context = contextvars.copy_context()  # of no invocation
        self._lines = [_Lines(self, "log"), _Lines(self, "error")]

    def capture(self) -> None:
        """Take over `sys.stdout` and `sys.stderr`."""
        sys.stdout, sys.stderr = self.streams()
        _keep_levels_of_records()

    def streams(self) -> Iterator[io.TextIOWrapper]:
        """What to write to for stdout, then for stderr."""
        for lines in self._lines:
            yield io.TextIOWrapper(cast(Any, lines), encoding="utf-8", errors="backslashreplace", write_through=True)

    def log(self, level: str, text: str, invocation: int | None = None) -> None:
        """Send one entry; callable from any thread."""
        if invocation is None:
            invocation = _runtime.invocation_id()
        frame = Log(invocation, level, sendable(text[:MAX_TEXT]))
        if threading.get_ident() == self._thread:
            self._send(frame)
        else:
            self._loop.call_soon_threadsafe(self._send, frame)

    def flush(self, invocation: int) -> None:
        """Send what `invocation` printed without a line end."""
        for lines in self._lines:
            lines.finish(invocation)

    def _send(self, frame: Log) -> None:
        if self._channel.num_unsent_bytes > HIGH_WATER_BYTES:
            if self._num_dropped == 0:
                self._telling = self._loop.create_task(self._tell_once_there_is_room(), context=self._context)
            self._num_dropped += 1
            return
        self._tell_of_dropped()
        self._channel.send(frame)

    async def _tell_once_there_is_room(self) -> None:
        await self._channel.writable()
        self._tell_of_dropped()

    def _tell_of_dropped(self) -> None:
        if self._num_dropped:
            text = f"{self._num_dropped} lines of output were dropped here, because they came faster than they are read"
            self._channel.send(Log(0, "warning", text))
            self._num_dropped = 0


class _Lines(io.RawIOBase):
    """The bytes behind `sys.stdout` or `sys.stderr`, cut into lines per invocation, so that prints do not mix."""

    def __init__(self, reporter: Reporter, level: str) -> None:
        self._reporter = reporter
        self._level = level
        self._partial: dict[int, bytes] = {}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        invocation = _runtime.invocation_id()
        *lines, rest = (self._partial.pop(invocation, b"") + bytes(data)).split(b"\n")
        for line in lines:
            self._emit(invocation, line)
        if len(rest) > MAX_TEXT:
            self._emit(invocation, rest)
        elif rest:
            self._partial[invocation] = rest
        return len(data)

    def finish(self, invocation: int) -> None:
        rest = self._partial.pop(invocation, None)
        if rest is not None:
            self._emit(invocation, rest)

    def _emit(self, invocation: int, line: bytes) -> None:
        text = line.decode("utf-8", "replace").removesuffix("\r")
        for start in range(0, len(text) or 1, MAX_TEXT):
            self._reporter.log(_record_level.get() or self._level, text[start : start + MAX_TEXT], invocation)


def _keep_levels_of_records() -> None:
    """Have lines that come from the logging module carry the level of their record.

    A handler of our own on the root logger would make the user's `logging.basicConfig()` do nothing; so the user's
    handlers, and the default ones, write to `sys.stderr` as ever, and only the level is passed on beside the text.
    """
    emit = logging.StreamHandler.emit

    def emit_with_level(self: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
        token = _record_level.set(record.levelname.lower())
        try:
            emit(self, record)
        finally:
            _record_level.reset(token)

    logging.StreamHandler.emit = emit_with_level  # type: ignore[method-assign, assignment]


def _drop_our_frames(summary: traceback.TracebackException) -> None:
    seen: set[int] = set()
    waiting: list[traceback.TracebackException | None] = [summary]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list([frame for frame in one.stack if not _is_ours(frame.filename)])
        waiting += [one.__cause__, one.__context__, *(one.exceptions or [])]


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OUR_FOLDER, "<frozen importlib"))
