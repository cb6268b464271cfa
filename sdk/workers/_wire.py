"""Framing and structs of the socket between node and isolate.

One frame is a 4-byte big-endian length and that many bytes of msgpack: a tagged array of the struct's
fields. Many calls share one socket; `id` tells them apart. The node mints even ids (invocations), the
isolate odd ids (calls it makes), so neither side has to ask.

An id can carry one body in each direction: `Chunk`s, then `End` or `Abort`. The sender of a body may have
at most `WINDOW_BYTES` unacknowledged; the receiver returns `Credit` as its consumer takes bytes, so that a
slow reader holds up only its own stream.

This module knows nothing about sockets, tasks or HTTP. `edge.frames` uses the same framing for engines.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_FRAME_BYTES = 32 << 20
MAX_CHUNK_BYTES = 64 << 10
WINDOW_BYTES = 256 << 10

_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """The peer sent bytes that are no frame: too long, truncated, or of an unknown shape."""


class Frame(msgspec.Struct, array_like=True, tag_field="frame", tag=True):
    """Base of every struct on the wire; the class name is the tag."""


# -- both directions ---------------------------------------------------------------------------------------


class Chunk(Frame):
    """A piece of the body of `id`, at most `MAX_CHUNK_BYTES`."""

    id: int
    data: bytes


class End(Frame):
    """The body of `id` is complete."""

    id: int


class Abort(Frame):
    """The body of `id` ends here, incomplete, because of `message`."""

    id: int
    message: str


class Credit(Frame):
    """The receiver of the body of `id` has room for `num_bytes` more."""

    id: int
    num_bytes: int


class Cancel(Frame):
    """Nobody waits for `id` any more: stop its work. Cancelling a finished id is harmless."""

    id: int


# -- node to isolate ---------------------------------------------------------------------------------------


class Binding(msgspec.Struct, frozen=True, array_like=True):
    """What one name in `env` is. `kind` is `ai`, `kv`, `d1`, `r2`, `queue`, `service`, `assets`, `ratelimit` or
    `version_metadata`; `props` is what the SDK's class for that kind needs to know of it (no secrets of the node)."""

    kind: str
    props: dict[str, Any] = {}


class Init(Frame):
    """First frame to a new isolate: what to import, and what `env` gets.

    `root` is the module root (the folder of `main`); `main` is the file's path relative to it. `search_paths` come
    after `root` on `sys.path`: the folders of the packages that the worker depends on. `vars` includes secrets.
    """

    worker: str
    version: str
    root: str
    main: str
    vars: dict[str, Any]
    bindings: dict[str, Binding] = {}
    search_paths: list[str] = []
    compatibility_date: str = ""
    compatibility_flags: list[str] = []


class Fetch(Frame):
    """An HTTP request for the worker; its body follows as chunks of `id` if `has_body`."""

    id: int
    method: str
    url: str
    headers: list[tuple[str, str]]
    has_body: bool
    cf: dict[str, Any] = {}
    entrypoint: str = ""
    """A named entrypoint class; empty: `Default`."""
    props: dict[str, Any] = {}
    """`ctx.props`: what the service binding that this came through says."""
    is_websocket: bool = False
    """A response of 101 opens a WebSocket: both bodies of `id` then carry messages (`workers._websocket`)."""


class Event(Frame):
    """Something other than an HTTP request for the worker. The answer is `EventResult` or `Threw`, then `Finished`.

    By `kind`: `scheduled` {cron, scheduledTime (ms)} gives {noRetry}; `queue` {queue, messages: [{id, timestamp (ms),
    body, attempts}]} gives {acks: [id], retries: [[id, delay_s or None]], error: None or {type, message, traceback}},
    where a message in neither is acknowledged if there is no error and retried if there is; `rpc` {method, args} gives
    the packed result. Bodies, args and the result of rpc are bytes (`workers._rpc`) that the node does not look into.
    """

    id: int
    kind: str
    payload: Any
    entrypoint: str = ""
    props: dict[str, Any] = {}


class Result(Frame):
    """The answer to call `id`, complete: a JSON value."""

    id: int
    value: Any
    info: dict[str, Any] = {}
    """What `env.AI` shows of the last call: `requestId`, `status`."""


class ResultHead(Frame):
    """The answer to call `id` is an HTTP-like response, whose body follows as chunks."""

    id: int
    status: int
    headers: list[tuple[str, str]]
    has_body: bool
    url: str = ""
    info: dict[str, Any] = {}


class CallFailed(Frame):
    """Call `id` failed. `code` is the Workers AI code (0: none), `name` the JavaScript class name."""

    id: int
    name: str
    code: int
    message: str
    status: int


class Probe(Frame):
    """Does the process still read, and who uses its CPU time? Answered with `CpuUsed`."""


# -- isolate to node ---------------------------------------------------------------------------------------


class Sandboxed(Frame):
    """First frame of an isolate: the sandbox layers that it is under, those that are off (and why), and the forbidden
    acts that its self-test got away with. Only if they are good enough is `Init` sent to it."""

    layers: list[str]
    missing: dict[str, str] = {}
    escapes: list[str] = []


class Ready(Frame):
    """User code is imported. `handlers` names the events it has handlers for, for example `fetch`."""

    handlers: list[str]
    import_us: int


class StartFailed(Frame):
    """User code could not be imported."""

    type: str
    message: str
    traceback: str


class ResponseHead(Frame):
    """The response of invocation `id`; its body follows as chunks of `id` if `has_body`.

    A short body that is at hand goes along as `content` (at most `MAX_CHUNK_BYTES`), and what `Finished` would say as
    `cpu_us`, so that most invocations are answered with one frame.
    """

    id: int
    status: int
    headers: list[tuple[str, str]]
    has_body: bool
    content: bytes | None = None
    cpu_us: int | None = None


class Threw(Frame):
    """The handler of invocation `id` raised before it returned a response."""

    id: int
    type: str
    message: str
    traceback: str


class EventResult(Frame):
    """What the handler of event `id` made of it: see `Event`."""

    id: int
    value: Any


class Finished(Frame):
    """Invocation `id` is over: response body sent (or given up) and every `waitUntil` awaited.

    `cpu_us` is what the isolate attributes to it of its own CPU time. It only says how the time of a process, which the
    node measures itself, is split among invocations that ran at the same time.
    """

    id: int
    cpu_us: int = 0


class CpuUsed(Frame):
    """Answer to `Probe`: pairs of an invocation in flight and the microseconds that it has used, as in `Finished`."""

    used: list[tuple[int, int]]


class AiRun(Frame):
    """`await env.AI.run(model, inputs, options)` in `invocation` (0: outside of any)."""

    id: int
    invocation: int
    model: str
    inputs: Any
    options: dict[str, Any]


class Call(Frame):
    """`await env.BINDING.method(*args)` in `invocation` (0: outside of any), for every kind of binding but `ai`.

    The node answers as to `AiRun`. A stream among the arguments is sent as the body of `id` if `has_body`. What the
    methods of a kind take and give is in the docstring of its provider (`edge.bindings`); `ResultHead` is for answers
    that stream.
    """

    id: int
    invocation: int
    binding: str
    method: str
    args: list[Any]
    has_body: bool = False


class Subrequest(Frame):
    """`await fetch(url, …)` in `invocation`; the request body follows as chunks of `id` if `has_body`."""

    id: int
    invocation: int
    method: str
    url: str
    headers: list[tuple[str, str]]
    has_body: bool
    redirect: str = "follow"
    is_websocket: bool = False
    """It asks for a WebSocket: its body, and that of an answer of 101, carry messages (`workers._websocket`)."""


class Log(Frame):
    """A line that the handler printed or logged in `invocation` (0: outside of any)."""

    invocation: int
    level: str
    text: str


ToIsolate = Init | Fetch | Event | Result | ResultHead | CallFailed | Chunk | End | Abort | Credit | Cancel | Probe
ToNode = (
    Sandboxed
    | Ready
    | StartFailed
    | ResponseHead
    | Threw
    | EventResult
    | Finished
    | CpuUsed
    | AiRun
    | Call
    | Subrequest
    | Log
    | Chunk
    | End
    | Abort
    | Credit
    | Cancel
)

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """`frame` as bytes, length prefix included.

    Raises:
        FrameError: the frame is longer than `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"{type(frame).__name__} frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into frames of one union of structs."""

    def __init__(self, frames: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(frames)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """All frames that are complete once `data` has arrived, oldest first.

        Raises:
            FrameError: a frame is too long or of no known shape; the stream is unusable from here on.
        """
        if self._buffer:
            self._buffer += data
            frames, num_used = self._cut(self._buffer)
            del self._buffer[:num_used]
        else:  # most often what arrives are whole frames, which then need not be copied
            frames, num_used = self._cut(data)
            self._buffer += data[num_used:]
        return frames

    def _cut(self, data: bytes | bytearray) -> tuple[list[Any], int]:
        """The complete frames at the beginning of `data`, and how many bytes they are."""
        frames = []
        start, end_of_data = 0, len(data)
        with memoryview(data) as view:
            while end_of_data - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if end_of_data < end:
                    break
                try:
                    frames.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise FrameError(f"frame of an unknown shape: {error}") from error
                start = end
        return frames, start
