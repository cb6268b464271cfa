"""A client that costs next to nothing: many streamed completions at once over raw sockets, in a process of its own.

`python -m bench.load` reads `{"host", "port", "path", "token", "requests": [{"at_s", "body"}, ...]}` from stdin and
writes a list with one `Answer` each. While the load runs it only notes which bytes came when; they are read
afterwards, so that the client takes no time from the server beside it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Target:
    """Where the requests go."""

    host: str
    port: int
    path: str
    token: str


@dataclass(frozen=True)
class Answer:
    """What came of one request. Times are seconds since the load began."""

    sent_s: float
    status: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """When text came, and how many characters."""
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str = ""
    """What the server said instead of answering."""

    @property
    def first_s(self) -> float:
        """Time from the request to its first text."""
        return self.pieces[0][0] - self.sent_s


def run(target: Target, bodies: list[dict[str, Any]], at_s: list[float] | None = None) -> list[Answer]:
    """Send all `bodies`, each `at_s` seconds after the start (default: at once), and wait for all the answers.

    Raises:
        RuntimeError: a request was refused or failed; the message says how.
    """
    times = at_s or [0.0] * len(bodies)
    requests = [{"at_s": at, "body": body} for at, body in zip(times, bodies, strict=True)]
    job = json.dumps({**asdict(target), "requests": requests})
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=job,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the load client failed: {done.stderr.strip()[-1000:]}")
    answers = [Answer(**answer) for answer in json.loads(done.stdout)]
    for answer in answers:
        if answer.error or not answer.pieces:
            raise RuntimeError(f"a request failed: HTTP {answer.status}: {answer.error or 'an empty answer'}")
    return answers


class _Call(asyncio.Protocol):
    """One connection with one request; `chunks` is what came, and when."""

    def __init__(self, request: bytes, began: float) -> None:
        self._request = request
        self._began = began
        self.chunks: list[tuple[float, bytes]] = []
        self.sent_s = 0.0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.sent_s = time.perf_counter() - self._began
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter() - self._began, data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def _load(job: dict[str, Any]) -> list[Answer]:
    messages = [_message(job, request["body"]) for request in job["requests"]]
    began = time.perf_counter()

    async def call(at_s: float, message: bytes) -> _Call:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - began)))
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: _Call(message, began), job["host"], job["port"])
        await protocol.closed
        return protocol

    calls = [call(request["at_s"], message) for request, message in zip(job["requests"], messages, strict=True)]
    async with asyncio.timeout(TIMEOUT_S):
        return [parse(done.sent_s, done.chunks) for done in await asyncio.gather(*calls)]


def _message(job: dict[str, Any], body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {job['path']} HTTP/1.1\r\nHost: {job['host']}:{job['port']}\r\nAuthorization: Bearer {job['token']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def parse(sent_s: float, chunks: list[tuple[float, bytes]]) -> Answer:
    """The answer in the bytes of a connection and their times of arrival."""
    data = b"".join(chunk for _, chunk in chunks)
    ends, end = [], 0  # offset after each chunk, and its time
    for at_s, chunk in chunks:
        end += len(chunk)
        ends.append((end, at_s))
    head, _, _ = data.partition(b"\r\n\r\n")
    first_line = head.split(b"\r\n")[0].split(b" ")
    status = int(first_line[1]) if len(first_line) > 1 and first_line[1].isdigit() else 0
    body, offsets = _unchunked(data, len(head) + 4) if b"chunked" in head.lower() else (data[len(head) + 4 :], None)
    ended_s = chunks[-1][0] if chunks else sent_s
    if status != 200:
        return Answer(sent_s, status, ended_s=ended_s, error=body.decode(errors="replace")[:500] or "no answer")
    return _read_events(sent_s, ended_s, body, offsets or [(0, len(head) + 4)], ends)


def _unchunked(data: bytes, start: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The body that is sent in HTTP chunks, and where its parts lie: (offset in the body, offset in `data`)."""
    parts: list[bytes] = []
    offsets: list[tuple[int, int]] = []
    length = 0
    while True:
        end = data.find(b"\r\n", start)
        size = int(data[start:end].split(b";")[0] or b"0", 16) if end > 0 else 0
        if size == 0:
            return b"".join(parts), offsets
        offsets.append((length, end + 2))
        parts.append(data[end + 2 : end + 2 + size])
        length += size
        start = end + 2 + size + 2


def _read_events(
    sent_s: float, ended_s: float, body: bytes, offsets: list[tuple[int, int]], ends: list[tuple[int, float]]
) -> Answer:
    pieces: list[tuple[float, int]] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    error = ""
    at, part, arrival = 0, 0, 0
    for event in body.split(b"\n\n"):
        at += len(event) + 2
        if not event.startswith(b"data: {"):
            continue
        while part + 1 < len(offsets) and offsets[part + 1][0] < at:
            part += 1
        in_data = at - offsets[part][0] + offsets[part][1]
        while arrival + 1 < len(ends) and ends[arrival][0] < in_data:
            arrival += 1
        value = json.loads(event[6:])
        if "error" in value:
            error = json.dumps(value["error"])
        usage = value.get("usage") or usage
        text = "".join(choice["delta"].get("content") or "" for choice in value.get("choices", []))
        if text:
            texts.append(text)
            pieces.append((ends[arrival][1], len(text)))
    if not body.rstrip().endswith(b"data: [DONE]") and not error:
        error = "the stream ended early"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(
        sent_s, 200, pieces, ended_s,
        num_prompt_tokens=usage.get("prompt_tokens", 0), num_cached_tokens=cached,
        num_output_tokens=usage.get("completion_tokens", 0), text="".join(texts), error=error,
    )  # fmt: skip


def main() -> None:
    """Run the job on stdin."""
    answers = uvloop.run(_load(json.load(sys.stdin)))
    json.dump([asdict(answer) for answer in answers], sys.stdout)


if __name__ == "__main__":
    main()
