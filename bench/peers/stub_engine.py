"""`stub_engine.py CORES FD PARENT CACHE CONFIG`: an engine that takes no time, so that what is left is the node's.

It speaks the frames of `edge.frames` and computes nothing. A request gets as many tokens as its `max_tokens`: all at
once, or, if its `seed` is above 0, one a step of `1 / seed` seconds, in one write for all requests, as a real engine's
steps are. The text of such a token, `DUE+LATE`, is the time at which it was due, in microseconds of the monotonic
clock, which is the same for all processes of a machine, and how many of them later it was written.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from edge.engine.parent import die_with
from edge.frames import (
    Delta,
    Done,
    EngineReady,
    Generate,
    LoadModel,
    ModelLoaded,
    MoreDeltas,
    Ping,
    Pong,
    Started,
    ToEngine,
    Usage,
)
from workers._wire import Cancel, Frame, FrameDecoder, encode

READ_BYTES = 1 << 20
NUM_PROMPT_TOKENS = 16
WORD = "token "
"""The text of a token that comes at once."""


class _Stream:
    """A request that gets one token a step."""

    def __init__(self, request: Generate) -> None:
        self.id = request.id
        self.credit = request.credit
        self.num_tokens = request.max_tokens or 1
        self.num_done = 0

    def step(self, text: str) -> bytes:
        """Its frames of this step; none while the node has no room for them."""
        if self.credit == 0:
            return b""
        self.credit -= 1
        self.num_done += 1
        usage = Usage(NUM_PROMPT_TOKENS, 0, self.num_done, self.num_done)
        data = encode(Delta(self.id, text, usage))
        return data + encode(Done(self.id, "length", usage)) if self.is_over else data

    @property
    def is_over(self) -> bool:
        return self.num_done == self.num_tokens


class _Engine:
    """All streams, in steps of one rate: that of the request that came last."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._streams: dict[int, _Stream] = {}
        self._interval_s = 0.0
        self._next_step = 0.0

    def serve(self) -> None:
        """Answer until the node closes the socket."""
        decoder = FrameDecoder(ToEngine)
        self._sock.sendall(encode(EngineReady("stub", 1, "none")))
        while True:
            wait_s = max(0.0, self._next_step - time.monotonic()) if self._streams else None
            if select.select([self._sock], [], [], wait_s)[0]:
                data = self._sock.recv(READ_BYTES)
                if not data:
                    return
                self._sock.sendall(b"".join(self._receive(frame) for frame in decoder.feed(data)))
            if self._streams and time.monotonic() >= self._next_step:
                self._step()

    def _step(self) -> None:
        text = timed_text(self._next_step)
        self._sock.sendall(b"".join(stream.step(text) for stream in self._streams.values()))
        self._streams = {id: stream for id, stream in self._streams.items() if not stream.is_over}
        self._next_step += self._interval_s

    def _receive(self, frame: Frame) -> bytes:
        match frame:
            case Generate(id=id):
                return encode(Started(id, NUM_PROMPT_TOKENS)) + self._begin(frame)
            case MoreDeltas(id=id, num_deltas=num) if id in self._streams:
                self._streams[id].credit += num
            case Cancel(id=id) if (stream := self._streams.pop(id, None)) is not None:
                return encode(Done(id, "cancelled", Usage(NUM_PROMPT_TOKENS, 0, stream.num_done)))
            case LoadModel(model=model):
                return encode(ModelLoaded(model, "stub", 1 << 20, 1, 1, 0, "none", "none"))
            case Ping(number=number):
                return encode(Pong(number, 0, len(self._streams)))
        return b""

    def _begin(self, request: Generate) -> bytes:
        rate = request.sampling.seed or 0
        num_tokens = request.max_tokens or 1
        if rate == 0:
            usage = Usage(NUM_PROMPT_TOKENS, 0, num_tokens, num_tokens)
            return encode(Delta(request.id, WORD * num_tokens, usage)) + encode(Done(request.id, "length", usage))
        if not self._streams:
            self._next_step = time.monotonic() + 1 / rate
        self._interval_s = 1 / rate
        self._streams[request.id] = _Stream(request)
        return b""


def timed_text(due_s: float) -> str:
    """The text of a token that is written now."""
    return f"{int(due_s * 1e6)}+{max(0, int((time.monotonic() - due_s) * 1e6))} "  # timers end a little early


def main(arguments: list[str]) -> None:
    """Serve the socket that `arguments` name, on the cores that they name."""
    os.sched_setaffinity(0, [int(core) for core in arguments[0].split(",")])
    die_with(int(arguments[2]))
    _Engine(socket.socket(fileno=int(arguments[1]))).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
