"""`WebSocketPair`: two connected ends, one for the handler and one for the client, which `Response` hands to the node.

What one end sends is in the inbox of the other. Whoever fills an inbox from outside waits for room in it, so that a
handler that does not keep up slows its client down, and the other way round.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from workers._websocket import ABNORMAL, MAX_MESSAGE_BYTES, Close, Message, MessageDecoder, WebSocketError, encode
from workers.values import JsBytes, buffer_bytes

INBOX_BYTES = 1 << 20
"""Above this, `room()` waits."""
MAX_INBOX_BYTES = 32 << 20
"""What `send()`, which cannot wait, may pile up."""
CLOSE_GRACE_S = 5.0
"""How long the other side has to answer a close."""

_MESSAGE_OVERHEAD_BYTES = 64
_log = logging.getLogger("workers.websocket")


class WebSocketEvent:
    """What a listener gets: `type`, and by it `data`, or `code`, `reason` and `wasClean`."""

    def __init__(self, type: str, **attributes: Any) -> None:
        self.type = type
        self.__dict__.update(attributes)

    def __repr__(self) -> str:
        return f"WebSocketEvent({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class WebSocket:
    """One end. After `accept()`, listeners get `message`, `close` and `error` events."""

    CONNECTING, OPEN, CLOSING, CLOSED = range(4)

    def __init__(self) -> None:
        self._peer: WebSocket
        self._inbox: deque[Message] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_accepted = False
        self._is_connecting = False
        self._is_dispatching = False
        self._close_sent: Close | None = None
        self._close_received: Close | None = None

    # -- JavaScript's interface ----------------------------------------------------------------------------

    @property
    def readyState(self) -> int:
        """`CONNECTING`, `OPEN`, `CLOSING` (one side has closed) or `CLOSED`."""
        if self._is_connecting:
            return self.CONNECTING
        return self.OPEN + (self._close_sent is not None) + (self._close_received is not None)

    def accept(self, _options: Any = None) -> None:
        """Begin to pass what arrives, and has arrived, to the listeners."""
        self._is_accepted = True
        self._dispatch_soon()

    def addEventListener(self, event: str, listener: Callable[..., Any], _options: Any = None) -> None:
        """Call `listener` with each event of the type `event`; what it returns is awaited if it is awaitable.

        Raises:
            TypeError: `listener` cannot be called.
        """
        if not callable(listener):
            raise TypeError(f"addEventListener() needs a function, not {type(listener).__name__}")
        self._listeners.setdefault(event, []).append(listener)

    def removeEventListener(self, event: str, listener: Callable[..., Any]) -> None:
        """Call it no more."""
        if listener in self._listeners.get(event, ()):
            self._listeners[event].remove(listener)

    def send(self, message: Any) -> None:
        """Send a str, or bytes or a buffer; to nobody, if the other end has closed.

        Raises:
            TypeError: it is something else.
            ValueError: it is over the limit of a message's size.
            RuntimeError: this end was closed or is not open yet, or the other side has left too much unread.
        """
        if self._is_connecting:
            raise RuntimeError("WebSocket.send() before the open event")
        if self._close_sent is not None:
            raise RuntimeError("WebSocket.send() after close()")
        data = _as_message(message)
        if not self.is_left:
            self._peer._put(data)

    def close(self, code: int | None = None, reason: str | None = None) -> None:
        """Close the connection; closing again does nothing.

        Raises:
            ValueError: `code` is neither 1000 nor 3000 to 4999.
        """
        if code is not None and code != 1000 and not 3000 <= code <= 4999:
            raise ValueError(f"WebSocket.close() takes the codes 1000 and 3000 to 4999, not {code}")
        self.send_close(1000 if code is None else code, reason or "")

    # -- for those that await ------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The next message; after the last one, its `Close` again and again."""
        while not self._inbox:
            if self._close_received is not None:
                return self._close_received
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    @property
    def is_left(self) -> bool:
        """Whether the other end has closed, even if its `Close` is still to be received."""
        return self._peer._close_sent is not None

    async def room(self) -> None:
        """Wait until the other end has read enough to be sent more."""
        while self._peer._num_bytes > INBOX_BYTES and self._close_sent is None and not self.is_left:
            self._peer._changed.clear()
            await self._peer._changed.wait()

    def send_close(self, code: int, reason: str = "") -> None:
        """`close()` with any code."""
        if self._close_sent is None:
            self._close_sent = Close(code, reason)
            self._peer._put(self._close_sent)
            self._changed.set()

    def connect(self, opening: Callable[[], Awaitable[None]]) -> None:
        """Have `opening` done, then pass messages to the listeners; if it raises, they get `error` and `close`."""
        self._is_connecting = True
        self._keep(asyncio.ensure_future(self._connect(opening)))

    async def _connect(self, opening: Callable[[], Awaitable[None]]) -> None:
        try:
            await opening()
        except Exception as error:
            self._is_connecting = False
            self._close_sent = self._close_received = Close(ABNORMAL)
            await self._emit_failure(WebSocketEvent("error", message=str(error), error=error))
            return
        self._is_connecting = False
        if self._close_sent is not None:
            await self._emit_failure(WebSocketEvent("error", message="WebSocket was closed before it was open"))
            return
        await self._emit(WebSocketEvent("open"))
        self.accept()

    async def _emit_failure(self, event: WebSocketEvent) -> None:
        await self._emit(event)
        await self._emit(WebSocketEvent("close", code=ABNORMAL, reason="", wasClean=False))

    async def relay(self, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Connect this end to the node: what comes in is sent to the other end, what the other end sends comes out."""
        reading = asyncio.ensure_future(self._read(incoming))
        try:
            while True:
                message = await self.receive()
                yield encode(message)
                if isinstance(message, Close):
                    break
            await asyncio.wait([reading, *self._peer._tasks], timeout=CLOSE_GRACE_S)
        finally:
            reading.cancel()
            self.send_close(ABNORMAL)

    # ------------------------------------------------------------------------------------------------------

    async def _read(self, incoming: AsyncIterator[bytes]) -> None:
        """Send what comes in to the other end, and end the relay when nothing more comes."""
        close = await self._read_messages(incoming)
        self.send_close(*close)
        self._put(close)  # the client hears no more than what was sent so far, whether the handler reads or not

    async def _read_messages(self, incoming: AsyncIterator[bytes]) -> Close:
        decoder = MessageDecoder()
        try:
            async for data in incoming:
                for message in decoder.feed(data):
                    if isinstance(message, Close):
                        return message
                    self._peer._put(message)
                await self.room()
        except WebSocketError as error:
            return Close(error.code, str(error))
        except OSError as error:
            return Close(ABNORMAL, str(error))
        return Close(ABNORMAL)

    def _put(self, message: Message) -> None:
        if self._close_received is not None:
            return
        size = _size(message)
        if self._num_bytes + size > MAX_INBOX_BYTES:
            raise RuntimeError(f"the WebSocket's other end has over {MAX_INBOX_BYTES >> 20} MiB still to read")
        self._num_bytes += size
        self._inbox.append(message)
        self._changed.set()
        if self._is_accepted:
            self._dispatch_soon()

    def _take(self) -> Message:
        message = self._inbox.popleft()
        self._num_bytes -= _size(message)
        self._changed.set()
        if isinstance(message, Close):
            self._close_received = message
            self.send_close(message.code, message.reason)  # a close is answered with a close
        return message

    def _dispatch_soon(self) -> None:
        if not self._is_dispatching:
            self._is_dispatching = True
            self._keep(asyncio.ensure_future(self._dispatch()))

    async def _dispatch(self) -> None:  # in a task, so that listeners can use run_sync()
        while self._inbox:
            match self._take():
                case Close(code, reason):
                    if code == ABNORMAL:
                        await self._emit(WebSocketEvent("error", message="the connection broke off", error=None))
                    await self._emit(WebSocketEvent("close", code=code, reason=reason, wasClean=code != ABNORMAL))
                case bytes(data):
                    await self._emit(WebSocketEvent("message", data=JsBytes(data)))
                case text:
                    await self._emit(WebSocketEvent("message", data=text))
        self._is_dispatching = False

    async def _emit(self, event: WebSocketEvent) -> None:
        property_listener = getattr(self, f"on{event.type}", None)
        for listener in [*self._listeners.get(event.type, ()), *([property_listener] if property_listener else ())]:
            try:
                result = listener(event)
            except Exception:  # a listener is the handler's code; the others and the connection go on
                _log.exception("a listener of %s events failed", event.type)
                continue
            if isinstance(result, Awaitable):
                self._keep(asyncio.ensure_future(_logged(result, event.type)))
                await asyncio.sleep(0)  # it begins before the next event, as in JavaScript

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class WebSocketPair:
    """Two connected ends: `client, server = WebSocketPair().object_values()`, or items 0 and 1."""

    def __init__(self) -> None:
        self._ends = WebSocket(), WebSocket()
        self._ends[0]._peer, self._ends[1]._peer = self._ends[1], self._ends[0]

    def object_values(self) -> tuple[WebSocket, WebSocket]:
        """Both ends, as Pyodide gives an object's values."""
        return self._ends

    def __getitem__(self, index: int | str) -> WebSocket:
        return self._ends[int(index)]

    def __len__(self) -> int:
        return 2


async def _logged(work: Awaitable[Any], event: str) -> None:
    try:
        await work
    except Exception:
        _log.exception("a listener of %s events failed", event)


def _as_message(message: Any) -> Message:
    data = message if isinstance(message, str) else buffer_bytes(message)
    if data is None:
        raise TypeError(f"WebSocket.send() takes str, bytes and buffers, not {type(message).__name__}")
    if len(data) > MAX_MESSAGE_BYTES:
        raise WebSocketError(1009, f"a WebSocket message is over the limit of {MAX_MESSAGE_BYTES} bytes")
    return data


def _size(message: Message) -> int:
    return _MESSAGE_OVERHEAD_BYTES + (0 if isinstance(message, Close) else len(message))
