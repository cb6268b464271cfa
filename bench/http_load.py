"""An HTTP client that costs next to nothing: the same request over and over on some keep-alive connections.

`python -m bench.http_load` reads a `Load` from stdin as JSON and writes a `Result`. It runs in a process of its own and
on bare sockets, so that what it takes from the server's processor is small and the same for everybody. It knows only
responses that have a length and always the same one.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

TIMEOUT_S = 30.0
_STATUS = b"HTTP/1.1 200 "


@dataclass(frozen=True)
class Load:
    """What to send where, for `seconds`, or `num_requests` times."""

    port: int
    request: str
    """The whole message, as Latin-1."""
    num_clients: int
    seconds: float = 0.0
    num_requests: int = 0


@dataclass(frozen=True)
class Result:
    """What came of it."""

    num_requests: int
    elapsed_s: float
    p50_ms: float
    cpu_s: float
    """What the client itself used."""

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.num_requests / self.elapsed_s


def get(path: str = "/") -> str:
    """A GET request for `Load`."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n"


def post(path: str, body: str) -> str:
    """A POST request with JSON for `Load`."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}"


def run(load: Load) -> Result:
    """Do `load` in a process of its own.

    Raises:
        RuntimeError: a request failed, or a response was another one than the first.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.http_load"],
        input=json.dumps(asdict(load)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the load client failed: {done.stderr.strip()[-1000:]}")
    return Result(**json.loads(done.stdout))


def connect(port: int) -> socket.socket:
    """A connection to the server that listens on this machine."""
    sock = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(sock: socket.socket, request: bytes) -> tuple[float, bytes]:
    """Send `request`; seconds to the first byte of the response, and all of it.

    Raises:
        RuntimeError: the response has no length, or the connection ended.
    """
    start = time.perf_counter()
    sock.sendall(request)
    data = sock.recv(1 << 16)
    first_s = time.perf_counter() - start
    while len(data) < (size := _size(data)):
        more = sock.recv(1 << 16)
        if not more:
            raise RuntimeError(f"the connection ended within a response: {data[:200]!r}")
        data += more
    if len(data) != size:
        raise RuntimeError(f"more came than one response: {data[:200]!r}")
    return first_s, data


def _size(data: bytes) -> int:
    """How long a response will be that begins with `data`; more than that if the head is not there yet."""
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end:
        if not data:
            raise RuntimeError("the connection ended without a response")
        return len(data) + 1
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(head) + 4 + int(value)
    raise RuntimeError(f"a response has no length: {head[:200]!r}")


def drive(load: Load) -> Result:
    """Do `load` in this process. Raises as `run`."""
    request = load.request.encode("latin-1")
    with connect(load.port) as first:
        _, data = exchange(first, request)
    _check(data)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(load.port)) for _ in range(load.num_clients)]
        epoll = stack.enter_context(select.epoll())
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        times = _exchanges(load, request, len(data), {sock.fileno(): sock for sock in socks}, epoll)
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Result(len(times), elapsed_s, 1000 * statistics.median(times), cpu_s)


def _exchanges(
    load: Load, request: bytes, size: int, socks: dict[int, socket.socket], epoll: select.epoll
) -> list[float]:
    """Seconds that each request took; every answer has `size` bytes."""
    clock, times = time.perf_counter, []
    ends = clock() + load.seconds if load.seconds else float("inf")
    num_left = (load.num_requests or sys.maxsize) - len(socks)
    num_open = len(socks)
    sent, received = dict.fromkeys(socks, 0.0), dict.fromkeys(socks, 0)
    for fd, sock in socks.items():
        epoll.register(fd, select.EPOLLIN)
        sent[fd] = clock()
        sock.sendall(request)
    while num_open:
        ready = epoll.poll(TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"no answer came for {TIMEOUT_S:g} s")
        for fd, _ in ready:
            sock = socks[fd]
            data = sock.recv(1 << 16)
            now = clock()
            if received[fd] == 0:
                _check(data)
            received[fd] += len(data)
            if received[fd] < size and data:
                continue
            if received[fd] != size:
                raise RuntimeError(f"an answer is not as long as the first, {size} bytes: {data[:300]!r}")
            times.append(now - sent[fd])
            received[fd] = 0
            if num_left > 0 and now < ends:
                num_left -= 1
                sent[fd] = clock()
                sock.sendall(request)
            else:
                num_open -= 1
    return times


def _check(data: bytes) -> None:
    if not data.startswith(_STATUS):
        raise RuntimeError(f"the answer was {data[:300]!r}")


def main() -> None:
    """Do the load on stdin."""
    json.dump(asdict(drive(Load(**json.load(sys.stdin)))), sys.stdout)


if __name__ == "__main__":
    main()
