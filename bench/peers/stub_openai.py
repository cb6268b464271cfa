"""`stub_openai.py PORT CORES`: the same stub as `stub_engine.py` for a proxy that wants an OpenAI endpoint behind it.

It answers what `bench.wire` sends, and reads of it no more than it needs: `stream`, `seed` and `max_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import uvloop
from stub_engine import NUM_PROMPT_TOKENS, WORD, timed_text

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 1, "model": "stub"}


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self._received = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        if len(body) < int(length.partition(b":")[2]):
            return
        self._received = b""
        request = json.loads(body or b"{}")
        num_tokens = request.get("max_tokens") or 1
        if request.get("stream"):
            self.transport.write(_STREAM_HEAD)
            self._streams.add(self.transport, num_tokens, request["seed"])
        else:
            answer = _answer(num_tokens)
            self.transport.write(_HEAD % (len(answer), answer))


class _Streams:
    """All streams, in steps of one rate."""

    def __init__(self) -> None:
        self._left: dict[Any, int] = {}
        self._next_step = 0.0

    def add(self, transport: Any, num_tokens: int, rate: int) -> None:
        """Give it a token a step."""
        if not self._left:
            self._next_step = time.monotonic() + 1 / rate
            self._plan(rate)
        self._left[transport] = num_tokens

    def _plan(self, rate: int) -> None:
        asyncio.get_running_loop().call_later(max(0.0, self._next_step - time.monotonic()), self._step, rate)

    def _step(self, rate: int) -> None:
        event = _event({"content": timed_text(self._next_step)})
        for transport in list(self._left):
            self._left[transport] -= 1
            if self._left[transport]:
                transport.write(event)
            else:
                transport.write(event + _event({}, "length") + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                del self._left[transport]
        self._next_step += 1 / rate
        if self._left:
            self._plan(rate)


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return _chunked(b"data: " + json.dumps({**_CHUNK, "choices": [choice]}).encode() + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(num_tokens: int) -> bytes:
    message = {"role": "assistant", "content": WORD * num_tokens}
    usage = {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": NUM_PROMPT_TOKENS + num_tokens,
    }
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    answer = {**_CHUNK, "object": "chat.completion", "choices": [choice], "usage": usage}
    return json.dumps(answer).encode()


async def _serve(port: int) -> None:
    streams = _Streams()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(streams), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    os.sched_setaffinity(0, [int(core) for core in sys.argv[2].split(",")])
    uvloop.run(_serve(int(sys.argv[1])))
