"""One end of the socket between node and isolate: frames in and out, and bodies with credit.

Both sides use it. It knows the frames that carry bodies (`Chunk`, `End`, `Abort`, `Credit`) and hands every other
frame to its owner; what an id means, and who may use it when, is the owner's affair.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import AsyncIterable, Callable
from typing import Any, Self, cast

from workers._wire import (
    MAX_CHUNK_BYTES,
    WINDOW_BYTES,
    Abort,
    Chunk,
    Credit,
    End,
    Frame,
    FrameDecoder,
    FrameError,
    encode,
)

HIGH_WATER_BYTES = 1 << 20
MAX_HELD_FRAMES = 8
"""Frames in one write. Fewer writes wake the peer up less often; but it has to begin with the first frames while the
others are made, or both take turns and leave a core idle."""
MAX_REASON = 64 << 10
"""Characters of a peer's reason for breaking off a body."""
_INT = struct.Struct("i")
_OF_BODIES = frozenset({Chunk, Credit, End, Abort})
CREDIT_STEP_BYTES = WINDOW_BYTES // 4  # smaller steps cost a frame per token of a text stream


class BodyAborted(OSError):
    """The sender of a body gave up before its end."""


class Incoming:
    """The body of one id as it arrives: an async iterator of bytes for one reader.

    Iterating raises BodyAborted if the sender gave up, ConnectionError if the connection broke.
    """

    def __init__(self, channel: Channel, id: int) -> None:
        self._channel = channel
        self._id = id
        self._chunks: deque[bytes] = deque()
        self._num_unread = 0
        self._num_uncredited = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.ended = False
        """Whether everything there is has arrived (or the reader closed this)."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            await self._wait()
        data = self._chunks.popleft()
        self._num_unread -= len(data)
        self._num_uncredited += len(data)
        if self._num_uncredited >= CREDIT_STEP_BYTES and not self.ended:
            self._channel.send(Credit(self._id, self._num_uncredited))
            self._num_uncredited = 0
        return data

    async def aclose(self) -> None:
        """Forget the body; what still arrives of it is dropped. The sender is not told."""
        self._channel.forget_body(self._id)
        self._chunks.clear()
        self.end()

    def push(self, data: bytes) -> None:
        """Take in a chunk. Raises FrameError if the sender exceeds its window."""
        self._chunks.append(data)
        self._num_unread += len(data)
        if self._num_unread + self._num_uncredited > WINDOW_BYTES:
            raise FrameError(f"the body of call {self._id} exceeds its window of {WINDOW_BYTES} bytes")
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No more chunks will come; `error` says why if the body is incomplete."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake()

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("another task is reading this body already")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channel(asyncio.Protocol):
    """Frames over one stream socket.

    Args:
        frames: the union of frames that the peer may send.
        on_frame: called with each frame that is not only about a body; `End` and `Abort` are passed on as well.
        on_lost: called once when the connection is over, with the reason if it is a bad one.
        wait_for_reader: stop reading while the peer does not read, so that it cannot make us buffer answers to it.
            Only one side may do that, or both could wait for each other.
        gathers: put what is sent in one turn of the event loop into one write, each of which wakes up the peer.
    """

    def __init__(
        self,
        frames: Any,
        on_frame: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
        *,
        wait_for_reader: bool = False,
        gathers: bool = False,
    ) -> None:
        self._decoder = FrameDecoder(frames)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._wait_for_reader = wait_for_reader
        self._gathers = gathers
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[int, Incoming] = {}
        self._windows: dict[int, _Window] = {}
        self._writable = asyncio.Event()
        self._writable.set()
        self._error: Exception | None = None
        self._is_holding = False
        """Whether what is sent waits for more, and somebody will write all of it."""
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._num_held_frames = 0
        self._transport: asyncio.Transport
        self.lost = False

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        frames: Any,
        on_frame: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
        *,
        wait_for_reader: bool = False,
        gathers: bool = False,
    ) -> Channel:
        """A channel over the connected Unix stream socket `sock`, which it owns from now on."""
        sock.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: cls(frames, on_frame, on_lost, wait_for_reader=wait_for_reader, gathers=gathers), sock=sock
        )
        return channel

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the kernel did not take yet."""
        return self._transport.get_write_buffer_size() + self._num_held_bytes

    async def writable(self) -> None:
        """Wait until the kernel has taken enough to be sent more, or the connection is lost."""
        await self._writable.wait()

    @property
    def num_unread_bytes(self) -> int:
        """Bytes in the kernel that the peer did not read yet, with what the kernel adds; 0 where it cannot tell."""
        sock = self._transport.get_extra_info("socket")
        try:
            return _INT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT.size)))[0]  # type: ignore[no-any-return]
        except OSError:
            return 0

    def send(self, *frames: Frame) -> None:
        """Send frames, in one write; nothing happens once the connection is lost.

        Raises:
            FrameError: a frame is too long, or holds a value that cannot be sent.
        """
        try:
            data = encode(frames[0]) if len(frames) == 1 else b"".join([encode(frame) for frame in frames])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise error if isinstance(error, FrameError) else FrameError(f"a value cannot be sent: {error}") from error
        if self.lost:
            return
        if not self._is_holding:
            if not self._gathers:
                self._transport.write(data)
                return
            self._is_holding = True
            self._loop.call_soon(self._write_held)
        self._held.append(data)
        self._num_held_bytes += len(data)
        self._num_held_frames += len(frames)
        if self._num_held_frames >= MAX_HELD_FRAMES or self._num_held_bytes > HIGH_WATER_BYTES:
            self._flush()

    async def send_body(self, id: int, body: AsyncIterable[bytes]) -> None:
        """Send `body` and its end, no faster than the reader reads. Errors of `body` are the caller's to report.

        Raises:
            ConnectionError: the connection is lost.
        """
        window = self._windows[id] = _Window()
        try:
            async for data in body:
                for start in range(0, len(data), MAX_CHUNK_BYTES):
                    piece = data[start : start + MAX_CHUNK_BYTES]
                    await self._until_room(window, len(piece))
                    self.send(Chunk(id, piece))
            self.send(End(id))
        finally:
            del self._windows[id]

    def receive_body(self, id: int) -> Incoming:
        """The body that follows the frame just received. To be called before `on_frame` returns."""
        body = self._incoming[id] = Incoming(self, id)
        return body

    def forget_body(self, id: int) -> None:
        """Drop what still arrives of the body of `id`."""
        self._incoming.pop(id, None)

    def close(self) -> None:
        """Close the connection; what was sent so far still goes out."""
        if not self.lost:
            self._write_held()
            self._transport.close()

    def fail(self, error: Exception) -> None:
        """Close the connection at once because the peer broke the rules."""
        self._error = self._error or error
        self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            frames = self._decoder.feed(data)
            if len(frames) > 1:
                self._is_holding = True
            for frame in frames:
                if self._error is not None:
                    return
                self._dispatch(frame)
        except FrameError as error:
            self.fail(error)
        finally:
            if self._is_holding:
                self._write_held()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable.clear()
        if self._wait_for_reader:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writable.set()
        if self._wait_for_reader:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self.lost = True
        self._writable.set()
        for window in self._windows.values():
            window.wake()
        for body in list(self._incoming.values()):
            body.end(ConnectionResetError("the connection broke off"))
        self._incoming.clear()
        self._on_lost(self._error or error)

    # ------------------------------------------------------------------------------------------------------

    def _write_held(self) -> None:
        self._is_holding = False
        self._flush()

    def _flush(self) -> None:
        if self._held:
            if not self.lost:
                self._transport.write(b"".join(self._held))
            self._held.clear()
            self._num_held_bytes = self._num_held_frames = 0

    def _dispatch(self, frame: Any) -> None:
        kind = type(frame)
        if kind not in _OF_BODIES:  # most frames; a `match` would compare with each kind in turn
            self._on_frame(frame)
        elif kind is Chunk:
            if frame.id in self._incoming:
                self._incoming[frame.id].push(frame.data)
        elif kind is Credit:
            if frame.id in self._windows:
                self._windows[frame.id].add(frame.num_bytes)
        else:
            body = self._incoming.pop(frame.id, None)
            if body is not None:
                body.end(BodyAborted(frame.message[:MAX_REASON]) if kind is Abort else None)
            self._on_frame(frame)

    async def _until_room(self, window: _Window, num_bytes: int) -> None:
        while not self.lost:
            if window.num_bytes < num_bytes:
                await window.wait()
            elif not self._writable.is_set():
                await self._writable.wait()
            else:
                window.num_bytes -= num_bytes
                return
        raise ConnectionResetError("the connection broke off")


class _Window:
    """What the receiver of one body has room for."""

    def __init__(self) -> None:
        self.num_bytes = WINDOW_BYTES
        self._changed = asyncio.Event()

    def add(self, num_bytes: int) -> None:
        self.num_bytes = min(self.num_bytes + max(num_bytes, 0), WINDOW_BYTES)
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
