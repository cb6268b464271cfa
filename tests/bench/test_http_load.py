"""The HTTP client of the benches, against a server of a few lines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from bench import http_load
from bench.http_load import Load

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Site:
    """Answers the requests of each connection, which all come whole, with `answers` in turn, over and over."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_requests = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while sock.recv(1 << 16):
                with self._lock:
                    pieces = self._answers[self.num_requests % len(self._answers)]
                    self.num_requests += 1
                for piece in pieces:
                    sock.sendall(piece)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def site() -> Iterator[Site]:
    served = Site([[OK], [OK[:20], OK[20:]], [OK[:-3], OK[-3:]]])
    yield served
    served.close()


@pytest.mark.parametrize("num_clients", [1, 3])
def test_so_many_requests_are_sent_and_counted(site: Site, num_clients: int) -> None:
    result = http_load.drive(Load(site.port, http_load.get(), num_clients, num_requests=30))
    assert result.num_requests == 30
    assert site.num_requests == 31  # one to learn how long an answer is
    assert 0 < result.p50_ms < 1000 * result.elapsed_s
    assert result.per_s == 30 / result.elapsed_s


def test_in_a_process_of_its_own(site: Site) -> None:
    assert http_load.run(Load(site.port, http_load.post("/x", "{}"), 2, seconds=0.05)).num_requests >= 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"]], "the answer was b'HTTP/1.1 500 Oh"),
        ([[OK], [b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"]], "the answer was b'HTTP/1.1 500 Oh"),
        ([[OK], [OK + b"more"]], "not as long as the first"),
        ([[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]], "has no length"),
    ],
)
def test_an_answer_that_is_not_as_the_others_is_an_error(answers: list[list[bytes]], message: str) -> None:
    site = Site(answers)
    with pytest.raises(RuntimeError, match=message):
        http_load.drive(Load(site.port, http_load.get(), 1, num_requests=3))
    site.close()
