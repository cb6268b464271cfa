"""WebSocket messages as bytes, the way they travel between node and isolate in the two bodies of an invocation.

A message is one byte for its kind (`t` text, `b` binary, `c` close), 4 bytes big-endian for the length of what follows,
and the payload; that of a close is 2 bytes for the code and the reason in UTF-8. A body that ends without a close
means code 1006. Both sides use this module, which knows nothing about sockets or handlers.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_MESSAGE_BYTES = 1 << 20
ABNORMAL = 1006
"""The code of a connection that ended without a close; it never travels."""

_HEAD = struct.Struct(">cI")
_CODE = struct.Struct(">H")
_MAX_REASON_BYTES = 123


class WebSocketError(ValueError):
    """Bytes that are no messages, or a message over the limit; `code` is what the connection is closed with."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Close(NamedTuple):
    """The last message."""

    code: int
    reason: str = ""


Message = str | bytes | Close


def encode(message: Message) -> bytes:
    """`message` as bytes.

    Raises:
        WebSocketError: it is longer than `MAX_MESSAGE_BYTES`.
    """
    match message:
        case Close(code, reason):
            kind, payload = b"c", _CODE.pack(code) + _cut(reason)
        case str():
            kind, payload = b"t", message.encode("utf-8", "replace")
        case _:
            kind, payload = b"b", message
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WebSocketError(
            1009, f"a WebSocket message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
        )
    return _HEAD.pack(kind, len(payload)) + payload


class MessageDecoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """All messages that are complete once `data` has arrived.

        Raises:
            WebSocketError: the bytes are no messages, or one is too long; the stream is unusable from here on.
        """
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise WebSocketError(1009, f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
            end = start + _HEAD.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(kind, bytes(self._buffer[start + _HEAD.size : end])))
            start = end
        del self._buffer[:start]
        return messages


def _decode(kind: bytes, payload: bytes) -> Message:
    try:
        match kind:
            case b"t":
                return payload.decode()
            case b"b":
                return payload
            case b"c":
                return Close(_CODE.unpack_from(payload)[0], payload[_CODE.size :].decode())
    except UnicodeDecodeError as error:
        raise WebSocketError(1007, f"text that is not UTF-8: {error}") from error
    except struct.error as error:
        raise WebSocketError(1002, f"a close without a code: {error}") from error
    raise WebSocketError(1002, f"a message of the unknown kind {kind!r}")


def _cut(reason: str) -> bytes:
    """`reason` as the protocol has room for it."""
    raw = reason.encode("utf-8", "replace")[:_MAX_REASON_BYTES]
    return raw.decode("utf-8", "ignore").encode()
