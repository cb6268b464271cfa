"""The client of `bench wire`: one request over and over on many connections, or one stream on each, on bare sockets.

`python -m bench.wire_load` reads a `Load` from stdin as JSON and writes a `Result`. While the load runs it only notes
what came when; streams are read afterwards. The text of a stream's tokens, as `peers/stub_engine` writes it, is when
each was due and how late it was then already, so that a stub that gets no core is not taken for a slow server.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.http_load import connect

TIMEOUT_S = 60.0
_TIMED = re.compile(rb"(\d{7,})\+(\d+) ")


@dataclass(frozen=True)
class Load:
    """What to send where: for `seconds`, over and over, or as one stream of `num_tokens` on each connection."""

    port: int
    server_pid: int
    request: str
    """The whole message, as Latin-1."""
    num_clients: int
    cores: list[int]
    """Where the client runs."""
    seconds: float = 0.0
    num_tokens: int = 0
    stagger_s: float = 0.0
    """Between the beginnings of two streams; 0: all begin at once."""


@dataclass(frozen=True)
class Result:
    """What came of it. Times are in milliseconds."""

    elapsed_s: float
    server_cpu_s: float
    """What the server's process used meanwhile."""
    latencies_ms: list[float] = field(default_factory=list)
    """Of each request."""
    delays_ms: list[float] = field(default_factory=list)
    """Of each token, from when it was due to when it was here."""
    gaps_ms: list[float] = field(default_factory=list)
    """Between the tokens of a stream."""
    stub_delays_ms: list[float] = field(default_factory=list)
    """Of each token, in the order of `delays_ms`, from when it was due to when the stub wrote it."""


def run(load: Load) -> Result:
    """Do `load` in a process of its own.

    Raises:
        RuntimeError: a request failed, or a stream did not have its tokens.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.wire_load"],
        input=json.dumps(asdict(load)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the load client failed: {done.stderr.strip()[-1000:]}")
    return Result(**json.loads(done.stdout))


def drive(load: Load) -> Result:
    """Do `load` in this process. Raises as `run`."""
    os.sched_setaffinity(0, load.cores)
    gc.disable()  # it would hold up what is read by milliseconds
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(load.port)) for _ in range(load.num_clients)]
        epoll = stack.enter_context(select.epoll())
        by_fd = {sock.fileno(): sock for sock in socks}
        for fd in by_fd:
            epoll.register(fd, select.EPOLLIN)
        began_s, began_cpu_s = time.monotonic(), _cpu_s(load.server_pid)
        latencies = [] if load.num_tokens else _requests(load, by_fd, epoll)
        received = _streams(load, by_fd, epoll) if load.num_tokens else []
        elapsed_s, cpu_s = time.monotonic() - began_s, _cpu_s(load.server_pid) - began_cpu_s
    return Result(elapsed_s, cpu_s, latencies, *_times(load, received))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _requests(load: Load, socks: dict[int, socket.socket], epoll: select.epoll) -> list[float]:
    clock, latencies = time.monotonic, []
    request = load.request.encode("latin-1")
    ends = clock() + load.seconds
    sent: dict[int, float] = {}
    parts = dict.fromkeys(socks, b"")
    for fd, sock in socks.items():
        sent[fd] = clock()
        sock.sendall(request)
    while sent:
        for fd in _ready(epoll):
            data = socks[fd].recv(1 << 16)
            now = clock()
            parts[fd] += data
            if not _is_whole(parts[fd]) and data:
                continue
            _check(parts[fd])
            latencies.append(1000 * (now - sent[fd]))
            parts[fd] = b""
            if now < ends:
                sent[fd] = clock()
                socks[fd].sendall(request)
            else:
                del sent[fd]
    return latencies


def _is_whole(data: bytes) -> bool:
    """Whether that is all of a response; one without a length is over when its last chunk is there."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return len(body) >= int(found[1]) if found else body.endswith(b"0\r\n\r\n")


def _streams(load: Load, socks: dict[int, socket.socket], epoll: select.epoll) -> list[list[tuple[float, bytes]]]:
    """What came on each connection, and when."""
    clock, request = time.monotonic, load.request.encode("latin-1")
    received: dict[int, list[tuple[float, bytes]]] = {fd: [] for fd in socks}
    num_open, to_begin, begin_at = len(socks), deque(socks.values()), clock()
    while num_open:
        while to_begin and clock() >= begin_at:
            to_begin.popleft().sendall(request)
            begin_at += load.stagger_s
        for fd in _ready(epoll, max(0.0, begin_at - clock()) if to_begin else None):
            data = socks[fd].recv(1 << 16)
            received[fd].append((clock(), data))
            if not data or data.endswith(b"\r\n0\r\n\r\n"):
                epoll.unregister(fd)
                num_open -= 1
    return list(received.values())


def _times(load: Load, received: list[list[tuple[float, bytes]]]) -> tuple[list[float], list[float], list[float]]:
    """Of all tokens, their delays, the gaps between them, and the stub's own delays, in milliseconds."""
    delays: list[float] = []
    gaps: list[float] = []
    stub_delays: list[float] = []
    for pieces in received:
        _check(pieces[0][1])
        arrivals = _arrivals(pieces)
        if len(arrivals) != load.num_tokens:
            body = b"".join(data for _, data in pieces)
            raise RuntimeError(f"a stream has {len(arrivals)} tokens, not {load.num_tokens}: {body[-300:]!r}")
        delays += [1000 * (at - due) for at, due, _ in arrivals]
        gaps += [1000 * (later - at) for (at, _, _), (later, _, _) in pairwise(arrivals)]
        stub_delays += [1000 * late for _, _, late in arrivals]
    return delays, gaps, stub_delays


def _arrivals(pieces: list[tuple[float, bytes]]) -> list[tuple[float, float, float]]:
    """When each token of a stream came and was due, and how late it was written, in seconds.

    A token is here when the end of its text is.
    """
    body = b"".join(data for _, data in pieces)
    ends, arrivals = 0, []
    remaining = iter(pieces)
    at = 0.0
    for found in _TIMED.finditer(body):
        while ends < found.end():
            at, data = next(remaining)
            ends += len(data)
        arrivals.append((at, int(found[1]) / 1e6, int(found[2]) / 1e6))
    return arrivals


def _ready(epoll: select.epoll, timeout_s: float | None = None) -> list[int]:
    """Where something has come, or nothing after `timeout_s`."""
    ready = epoll.poll(TIMEOUT_S if timeout_s is None else timeout_s)
    if not ready and timeout_s is None:
        raise RuntimeError(f"nothing came for {TIMEOUT_S:g} s")
    return [fd for fd, _ in ready]


def _check(data: bytes) -> None:
    if not data.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the answer was {data[:300]!r}")


def main() -> None:
    """Do the load on stdin."""
    json.dump(asdict(drive(Load(**json.load(sys.stdin)))), sys.stdout)


if __name__ == "__main__":
    main()
