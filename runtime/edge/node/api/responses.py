"""How answers are written: JSON, envelopes, event streams, and what the head of each tells of the call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from edge.ai.answers import AnswerStream
from edge.ai.call_report import CallReport
from edge.billing.prices import dollars
from edge.config import ApiConfig
from edge.node.connection import DISCONNECT, SEND, hung_up, while_connected

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment in an event stream, which no client shows."""
_CLIENT_GONE = 499
_LONG_S = 3600.0

_encoder = msgspec.json.Encoder(decimal_format="number")


class EventStream(Response):
    """Sends an answer stream as it comes, and closes it whatever happens.

    For a client that does not read, at most one event waits beside what the connection's buffers hold, and no further
    one is asked of the engine. `scope["state"]` has the `ApiConfig` as `api` and the `Turns` as `turns`.
    """

    def __init__(self, stream: AnswerStream) -> None:
        super().__init__(media_type=None, headers={"cache-control": "no-cache"})
        self._stream = stream
        self._clock = asyncio.get_running_loop().time
        self._is_sending = False
        self._since_s = self._clock()
        """Since when something is being sent, or nothing is there to be sent."""
        self._is_too_slow = False
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends, the client hangs up, or it has not read for too long."""
        config: ApiConfig = scope["state"]["api"]
        try:
            past = scope.get("extensions", {}).get(SEND, send)
            sending, watching = self._send(send, past), while_connected(self._watch(config, past), hung_up(receive))
            with scope["state"]["turns"].streaming():
                await while_connected(sending, watching)
        finally:
            await self._stream.aclose()
        if self._is_too_slow:
            scope["state"]["problem"] = f"the client read too little for {config.read_timeout_s:g} s: disconnected"
            if (disconnect := scope.get("extensions", {}).get(DISCONNECT)) is not None:
                disconnect()
                await hung_up(receive)

    async def _send(self, send: Send, past: Send) -> None:
        await self._pass(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._stream:
            await self._pass(past, {"type": "http.response.body", "body": chunk, "more_body": True})
        await self._pass(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, send: Send, message: Message) -> None:
        self._is_sending, self._since_s = True, self._clock()
        await send(message)
        self._is_sending, self._since_s = False, self._clock()

    async def _watch(self, config: ApiConfig, send: Send) -> None:
        """Send a comment whenever it has been silent for long; return once the client has read too little for long."""
        keep_alive_s, read_timeout_s = config.keep_alive_s or math.inf, config.read_timeout_s or math.inf
        while not self._is_too_slow:
            left_s = self._since_s + (read_timeout_s if self._is_sending else keep_alive_s) - self._clock()
            if left_s > 0:
                await asyncio.sleep(min(left_s, keep_alive_s, read_timeout_s, _LONG_S))
            elif self._is_sending:
                self._is_too_slow = True
            else:
                await self._comment(send, config.read_timeout_s or None)

    async def _comment(self, send: Send, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        except TimeoutError:
            self._is_too_slow = True
        if not self._is_sending:  # else an event has come meanwhile
            self._since_s = self._clock()


def call_headers(report: CallReport, *, is_success: bool) -> Iterator[tuple[str, str]]:
    """What the head of an answer says of the calls behind it, as far as it is known when the head is sent."""
    if report.rate is not None:
        yield "x-ratelimit-limit-requests", str(report.rate.limit)
        yield "x-ratelimit-remaining-requests", str(report.rate.remaining)
        yield "x-ratelimit-reset-requests", f"{report.rate.reset_s:.3f}s"
    times = {"queue": report.queue_us, "prefill": report.prefill_us, "decode": report.decode_us}
    if known := [f"{name};dur={us / 1000:.3f}" for name, us in times.items() if us is not None]:
        yield "server-timing", ", ".join(known)
    if is_success and report.micro_neurons is not None and report.pico_dollars is not None:
        yield "cf-ai-neurons", f"{report.micro_neurons // 10**6}.{report.micro_neurons % 10**6:06d}"
        yield "x-edge-cost-usd", dollars(report.pico_dollars)


def stream_or_nothing(stream: AnswerStream | None) -> Response:
    """The response with `stream`; None means that the client has gone, and nobody reads this one."""
    return EventStream(stream) if stream is not None else Response(status_code=_CLIENT_GONE)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON. The content type is exactly this: the binding compares the whole string."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def envelope(result: Any) -> dict[str, Any]:
    """`result` as every client of Cloudflare's API expects it."""
    return {"result": result, "success": True, "errors": [], "messages": []}
