"""Requests as libraries write them to a connection, taken apart again. With real isolates: tests/isolates."""

from __future__ import annotations

import http.client
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers._transports import _is_chunked, _Request, _unchunked


class Recorded:
    """A socket that keeps what is written to it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def sendall(self, data: Any) -> None:
        self.pieces.append(bytes(data))


def written(body: list[bytes], *, is_chunked: bool) -> list[bytes]:
    """What http.client writes for a request with `body`."""
    connection = http.client.HTTPConnection("a.example")
    sock = connection.sock = Recorded()  # type: ignore[assignment]
    if is_chunked:
        connection.request("POST", "/", body=iter(body), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    else:
        connection.request("POST", "/", body=b"".join(body))
    return sock.pieces


@given(st.lists(st.binary(min_size=1, max_size=50)), st.booleans())
def test_a_request_is_complete_with_its_last_piece_and_no_earlier(body: list[bytes], is_chunked: bool) -> None:
    data = b"".join(written(body, is_chunked=is_chunked))
    request = _Request("http://a.example")
    for position in range(len(data) - 1):
        request.feed(data[position : position + 1])
        assert not request.is_complete
    request.feed(data[-1:])
    assert request.is_complete
    head, _, rest = data.partition(b"\r\n\r\n")
    assert _is_chunked(head) is is_chunked
    assert (_unchunked(rest) if is_chunked else rest) == b"".join(body)


def test_a_body_in_chunks_without_its_end() -> None:
    assert _unchunked(b"3\r\nabc\r\n") is None
    assert _unchunked(b"3;name=value\r\nabc\r\n0\r\n\r\n") == b"abc"
