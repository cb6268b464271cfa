"""What `edge dev` and `edge serve` have in common: sockets, uvicorn, signals, and the lines of the one who started it.

It knows nothing about configurations and workers.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop

from edge.errors import PortInUse, UsageError
from edge.node.access import Access
from edge.node.app import Node
from edge.node.protocol import LimitedHttp
from workers._websocket import MAX_MESSAGE_BYTES

_KEEP_ALIVE_S = 75
_NUM_DESCRIPTORS = 1 << 16
_MAX_PROBLEM_CHARS = 300
_CUT_SHORT = ("Cancel %s running task(s)", "ASGI callable returned without completing response")
"""How uvicorn puts it."""


def run(
    serve: Callable[[Server], Coroutine[Any, Any, None]], *, ip: str, port: int, drain_s: int, command: str
) -> None:
    """Listen, and run `serve` with a server that has `drain_s` seconds to finish what is in flight at the end.

    Raises:
        PortInUse, UsageError: as `listen`.
    """
    _raise_descriptor_limit()
    sockets = listen(ip, port, command)

    async def main() -> None:
        await serve(Server(sockets, drain_s))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        for each in sockets:
            each.close()


class Server:
    """HTTP for a node, from `start` until SIGINT, SIGTERM or `stop`."""

    def __init__(self, sockets: list[socket.socket], drain_s: int) -> None:
        host, port = public_address(sockets)
        self.base = f"http://{host}:{port}"
        """The URL."""
        self.stopping = asyncio.Event()
        """Set when it is time to end."""
        self._sockets = sockets
        self._drain_s = drain_s
        self._uvicorn = _uvicorn(drain_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)

    def start(self, node: Node) -> None:
        """Take requests."""
        self._uvicorn.config.app = node.app
        self._uvicorn.config.http = cast(Any, partial(LimitedHttp, direct=node.direct))
        gc.freeze()  # a full collection that looks at all modules holds up every stream for tens of milliseconds
        self._serving = asyncio.create_task(self._uvicorn.serve(self._sockets))
        self._serving.add_done_callback(lambda _: self.stopping.set())

    def stop(self) -> None:
        """Take no more requests, finish what is in flight; on the second call, do not."""
        num_running = len(self._uvicorn.server_state.tasks)
        if num_running and not self._uvicorn.should_exit:
            say(
                f"Stopping; requests still running: {num_running}. They have {self._drain_s} s; Ctrl-C again cuts "
                "them off"
            )
        self._uvicorn.force_exit = self._uvicorn.should_exit
        self._uvicorn.should_exit = True
        self.stopping.set()

    async def finish(self, node: Node) -> None:
        """Return once all answers are out; those that take too long end with the node."""
        await asyncio.wait({self._serving}, timeout=self._drain_s)
        if not self._serving.done():
            await node.close()  # so that answers that still run end with an error that says why
        await self._serving


def _raise_descriptor_limit() -> None:
    """The usual limit of 1024 is for programs that call `select`; the calls of one handler can take as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process before the node has closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `Server.stop`."""
        yield


def _uvicorn(drain_s: int) -> _Uvicorn:
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return _Uvicorn(
        uvicorn.Config(
            app="",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            # Else whoever connects from this machine could say in a header which address it comes from.
            proxy_headers=False,
            # Longer than clients keep idle connections: who sends on one that is being closed gets no answer.
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="websockets-sansio",
            ws_max_size=MAX_MESSAGE_BYTES,
            # After the node has closed, only answers that nobody reads are left.
            timeout_graceful_shutdown=drain_s + 1,
        )
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn's `record` says what `Server.stop` or the access log does not: that requests were cut short."""
    cause = record.exc_info[1] if record.exc_info else None
    return not isinstance(cause, asyncio.CancelledError) and not record.msg.startswith(_CUT_SHORT)


# -- sockets -----------------------------------------------------------------------------------------------


def listen(ip: str, port: int, command: str) -> list[socket.socket]:
    """Listening sockets for every address of `ip`: `localhost` is both 127.0.0.1 and ::1.

    Raises:
        PortInUse: somebody else listens there; `command` with another port is the way out.
        UsageError: there is no such address.
    """
    try:
        found = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, OverflowError) as error:
        raise UsageError(f"cannot listen on {ip}:{port}: {error}. Give an address of this machine with --ip") from error
    sockets: list[socket.socket] = []
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        # With --port 0 the first address chooses the port and the others follow.
        chosen = (address[0], sockets[0].getsockname()[1], *address[2:]) if sockets and port == 0 else address
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(chosen)
            listener.listen(2048)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if family == socket.AF_INET6 and sockets and error.errno != errno.EADDRINUSE:
                continue  # a machine without IPv6
            for each in sockets:
                each.close()
            if error.errno == errno.EADDRINUSE:
                other = port + 1 if port < 65535 else port - 1
                raise PortInUse(
                    f"port {port} on {ip} is in use by another process. Choose another one: {command} --port {other}"
                ) from error
            raise UsageError(f"cannot listen on {ip}:{port}: {error.strerror}") from error
        sockets.append(listener)
    return sockets


def public_address(sockets: list[socket.socket]) -> tuple[str, int]:
    """Host and port for people to open."""
    host, port = sockets[0].getsockname()[:2]
    return ("localhost" if host in ("127.0.0.1", "::1", "0.0.0.0", "::") else host), port


# -- what the one who started it reads ---------------------------------------------------------------------


def say(text: str) -> None:
    """A line for whoever started the command."""
    sys.stderr.write(f"{text}\n")  # in one write, which `print` would make two of
    sys.stderr.flush()


def log_access(access: Access, *, is_shared: bool = False) -> None:
    """A line for a request that is over; of a node that is shared, also when it was (UTC), and who made it."""
    if access.path == "/healthz":
        return
    outcome = "hung up" if access.status is None else str(access.status)
    cut = ", cut short" if access.status is not None and not access.is_complete else ""
    problem = f"  {access.problem[:_MAX_PROBLEM_CHARS]}" if access.problem else ""
    line = f"{access.method} {access.path} {outcome}{cut} ({access.elapsed_ms:.0f} ms){problem}"
    if is_shared:
        when = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        line = f"{when}Z {access.account or '-'} {access.request_id or '-'} {line}"
    # What clients sent must not move the cursor of the terminal, or look like a line of its own.
    say(line if line.isprintable() else "".join(each if each.isprintable() else "�" for each in line))
