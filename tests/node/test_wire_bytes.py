"""Whatever bytes come on a connection: an answer or its end in time, no fault of the node, and no request too many."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_api import ACCOUNT, HANG_S, Served, served

_HEAD = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_BODY = b'{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "hi"}]}'
QUIET_S = 0.05
_PATH = b"/v1/chat/completions"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("api")) as api:
        yield api


def exchanged(api: Served, *parts: bytes, num_answers: int | None = None) -> list[int]:
    """The statuses of all that comes back for `parts`, each a write.

    Once `num_answers` are there, or else for a moment nothing has come, the client ends its side, and the server, which
    may still wait for a part of a request, has to end the connection.
    """
    url = httpx.URL(api.url)
    got = b""
    with socket.create_connection((url.host, url.port), timeout=HANG_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):  # it has refused what came before, and is gone
            for part in parts:
                connection.sendall(part.replace(b"TOKEN", api.tokens[ACCOUNT].encode()))
        connection.settimeout(HANG_S if num_answers else QUIET_S)
        with suppress(ConnectionError, TimeoutError):
            while len(statuses_in(got)) < (num_answers or math.inf) and (data := connection.recv(1 << 16)):
                got += data
        connection.settimeout(HANG_S)
        with suppress(ConnectionError, OSError):
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                got += data
    return statuses_in(got)


def statuses_in(got: bytes) -> list[int]:
    """The statuses of the responses that `got` is, as far as their heads are there."""
    statuses: list[int] = []
    while got:
        head = _HEAD.match(got)
        if head is None:
            assert got.startswith(b"HTTP/1.1 "), got[:300]
            return statuses
        statuses.append(int(head[1]))
        length = re.search(rb"(?i)\bcontent-length: (\d+)", head[2])
        if length is None or statuses[-1] == 100:
            got = got[head.end() :] if statuses[-1] == 100 else b""
        else:
            got = got[head.end() + int(length[1]) :]
    return statuses


def check_is_up(api: Served) -> None:
    """That the bytes before have harmed nobody."""
    assert exchanged(api, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", num_answers=1) == [200]


def request(
    *,
    line: bytes = b"POST " + _PATH + b" HTTP/1.1",
    headers: tuple[bytes, ...] = (),
    body: bytes = _BODY,
    length: bytes | None = None,
) -> bytes:
    """A request that is right but for what is given."""
    fields = (b"host: x", b"authorization: Bearer TOKEN", b"content-type: application/json", *headers)
    if not any(field.lower().startswith(b"transfer-encoding") for field in headers):
        fields = (*fields, b"content-length: " + (b"%d" % len(body) if length is None else length))
    return b"\r\n".join([line, *fields, b"", body])


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


OK = request()
CHUNKED = (b"transfer-encoding: chunked",)


@pytest.mark.parametrize("cuts", [(), (1,), (10, 200), (len(OK) - 1,), tuple(range(1, len(OK), 37))], ids=str)
def test_a_request_is_served_wherever_it_is_cut(api: Served, cuts: tuple[int, ...]) -> None:
    assert exchanged(api, *(OK[start:end] for start, end in pairwise((0, *cuts, len(OK)))), num_answers=1) == [200]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (OK * 3, [200, 200, 200]),
        (OK + request(body=b"{") + OK, [200, 400, 200]),
        (OK + request(headers=CHUNKED, body=chunked(_BODY[:9], _BODY[9:])) + OK, [200, 200, 200]),
        (request(headers=CHUNKED, body=chunked(_BODY, end=b"0;x=y\r\nx-trailer: 1\r\n\r\n")) + OK, [200, 200]),
        (OK + b"GET /client/v4/accounts/acme/ai/nothing HTTP/1.1\r\nhost: x\r\n\r\n" + OK, [200, 404, 200]),
        (request(headers=(b"connection: close",)) + OK, [200]),
        (request(line=b"POST " + _PATH + b" HTTP/1.0") + OK, [200]),
        (OK + b"POST / HTT", [200]),
    ],
    ids=["three", "wrong", "chunked", "trailers", "unknown", "close", "http 1.0", "a part"],
)
def test_requests_one_after_another(api: Served, content: bytes, expected: list[int]) -> None:
    assert exchanged(api, content, num_answers=len(expected)) == expected


@pytest.mark.parametrize(
    "content",
    [
        request(length=b"-1"),
        request(length=b"+3"),
        request(length=b"0x10"),
        request(length=b"3, 3"),
        request(length=b"99999999999999999999999999"),
        request(length=b""),
        request(headers=(b"content-length: 3",)),
        request(headers=(b"Content-Length: 0", *CHUNKED), body=chunked(_BODY)),
        request(headers=(b"transfer-encoding: gzip, chunked, gzip",), body=chunked(_BODY)),
        request(headers=CHUNKED, body=b"zz\r\n" + _BODY),
        request(headers=CHUNKED, body=b"-1\r\n" + _BODY),
        request(headers=CHUNKED, body=b"ffffffffffffffffff\r\n" + _BODY),
        request(headers=CHUNKED, body=b"3\r\n" + _BODY),
        request(headers=(b" folded: x",), body=b""),
        request(headers=(b"no colon",)),
        request(headers=(b"bad name: x",)),
        request(headers=(b"x: a\x00b",)),
        request(line=b"POST " + _PATH + b" HTTP/9.9"),
        request(line=b"post " + _PATH + b" HTTP/1.1"),
        request(line=b"FLY " + _PATH + b" HTTP/1.1"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=repr,
)
def test_what_is_no_http_is_refused_and_smuggles_nothing(api: Served, content: bytes) -> None:
    """What follows it on the connection must not be taken for a request of its own."""
    statuses = exchanged(api, content + OK)
    assert len(statuses) <= 1
    assert all(400 <= status < 500 for status in statuses)
    check_is_up(api)


@pytest.mark.parametrize(
    "content",
    [
        b"\r\n\r\n" + OK,
        request(line=b"POST  " + _PATH + b"  HTTP/1.1"),
        OK + b"\x00\x01 nonsense",
        request(body=_BODY + b" " * 5, length=b"%d" % len(_BODY)),
    ],
    ids=["lines before", "spaces", "nonsense after", "longer than it says"],
)
def test_what_is_nearly_right_is_served_at_most_once(api: Served, content: bytes) -> None:
    """The connection may end at what is wrong, also before the answer to what was right."""
    assert exchanged(api, content) in ([], [200], [400], [200, 400])
    check_is_up(api)


@pytest.mark.parametrize("body", [b"", b"{", _BODY[:-1]], ids=len)
@pytest.mark.parametrize("headers", [(), CHUNKED], ids=["length", "chunked"])
def test_a_body_that_is_cut_short_is_no_body(api: Served, headers: tuple[bytes, ...], body: bytes) -> None:
    content = chunked(body, end=b"") if headers and body else body
    assert exchanged(api, request(headers=headers, body=content, length=b"%d" % len(_BODY))) in ([], [400])
    check_is_up(api)


PIECES = [
    *(b"GET ", b"POST ", b"/v1/models", _PATH, b"/client/v4/accounts/acme/ai/run/x?queueRequest=1", b" HTTP/1.1"),
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b":",
        b" ",
        b"host: x",
        b"\r\nauthorization: Bearer TOKEN",
        b"\r\nexpect: 100-continue",
    ),
    *(
        b"\r\ncontent-length: 5",
        b"\r\ntransfer-encoding: chunked",
        b"5\r\nabcde\r\n",
        b"0\r\n\r\n",
        b"\r\nupgrade: websocket",
    ),
    *(b"\r\nconnection: upgrade", b"\r\nconnection: close", b"%2e%2e%2f", b"\xff", b"\x00", b"%", b"?", b"#", _BODY),
]
pieces = st.lists(st.sampled_from(PIECES) | st.binary(max_size=20), max_size=20)


@given(pieces)
def test_any_pieces_of_requests(api: Served, content: list[bytes]) -> None:
    for statuses in (exchanged(api, *content), exchanged(api, b"".join(content))):
        assert all(100 <= status < 500 or status == 501 for status in statuses)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A request, or two, in which a few bytes have been changed, taken out, doubled or put in."""
    content = bytearray(
        draw(st.sampled_from([OK, OK * 2, request(headers=CHUNKED, body=chunked(_BODY[:20], _BODY[20:]))]))
    )
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 8)))
        content[start:end] = draw(st.sampled_from([b"", bytes(content[start:end]) * 2]) | st.binary(max_size=8))
    return bytes(content)


@given(damaged())
def test_any_damage_to_a_request(api: Served, content: bytes) -> None:
    assert all(100 <= status < 500 or status == 501 for status in exchanged(api, content))
