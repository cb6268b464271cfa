"""`edge dev`: a node in the foreground with one worker, or several, each served again on every save.

The node is the same as anywhere else; only the account, the token, the reload and the traceback pages are
this mode's own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop
from msgspec.structs import replace

from edge.config import Config
from edge.config.file import load
from edge.errors import ConfigError, EdgeError, PortInUse, UsageError
from edge.node.access import Access
from edge.node.app import Node, key_of
from edge.node.connection import while_connected
from edge.node.dev_vars import load_dev_vars
from edge.node.hot_keys import HotKey, hot_keys
from edge.node.protocol import LimitedHttp
from edge.node.saves import saves
from edge.node.welcome import missing_services, short, welcome
from workers._websocket import MAX_MESSAGE_BYTES

TOKEN = "dev"
_NUM_DESCRIPTORS = 1 << 16
_SHUTDOWN_S = 5
_RELOAD_PATIENCE_S = 1.0
_MAX_PROBLEM_CHARS = 300
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
_FIXED_KEYS = ("account_id", "isolates", "dev", "engine", "billing")
"""What only a new start takes over."""
_CUT_SHORT = ("Cancel %s running task(s)", "ASGI callable returned without completing response")
"""How uvicorn puts it."""


def run(configs: Sequence[Config], *, ip: str, port: int, reload: bool) -> None:
    """Serve the workers of `configs` until SIGINT or SIGTERM; HTTP requests reach the first.

    Raises:
        PortInUse: somebody else listens there.
        UsageError: there is no such address, or two workers have one name.
    """
    if len({key_of(config) for config in configs}) < len(configs):
        raise UsageError("two of the configurations have the same `name`; a worker is known by its name")
    _raise_descriptor_limit()
    sockets = _listen(ip, port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(configs, sockets, reload=reload))
    finally:
        for each in sockets:
            each.close()


def _raise_descriptor_limit() -> None:
    """The usual limit of 1024 is for programs that call `select`; the calls of one handler can take as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(configs: Sequence[Config], sockets: list[socket.socket], *, reload: bool) -> None:
    host, port = _public_address(sockets)
    stop = asyncio.Event()
    server = _server()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, server, stop)
    node = Node(
        configs[0],
        tokens={TOKEN: configs[0].account_id},
        show_tracebacks=True,
        say=_say,
        access_log=_log_access,
        local_triggers=True,
    )
    async with node:
        workers = [_Worker(node, config, reload) for config in configs]
        watching = []
        if reload:  # from before the code is read, so that no save after that is missed
            watching = [
                asyncio.create_task(while_connected(each.reload_on_save(stop), stop.wait())) for each in workers
            ]
        try:
            for worker in workers:
                node.use_ai(worker.config)
            for worker in workers:
                await while_connected(worker.deploy(), stop.wait())
            if stop.is_set():
                return
            server.config.app = node.app
            server.config.http = cast(Any, partial(LimitedHttp, direct=node.direct))
            serving = asyncio.create_task(server.serve(sockets))
            serving.add_done_callback(lambda _: stop.set())
            base = f"http://{host}:{port}"
            with hot_keys(sys.stdin, _actions(node, base, lambda: _on_signal(server, stop))) as keys:
                _say("\n".join([*missing_services(node, configs), *welcome(node, configs, base, TOKEN, reload), *keys]))
                print(f"Ready on {base}", flush=True)
                await stop.wait()
            await asyncio.wait({serving}, timeout=_SHUTDOWN_S)
            if not serving.done():
                await node.close()  # so that answers that still run end with an error that says why
            await serving
        finally:
            stop.set()
            for each in watching:
                await each


def _actions(node: Node, base: str, end: Callable[[], None]) -> list[HotKey]:
    running: set[asyncio.Task[Any]] = set()

    def fire() -> None:
        first = node.triggers.first()
        if first is None:
            _say("there is no cron; add one under [triggers]")
            return
        task = asyncio.create_task(node.triggers.run(*first, time.time_ns() // 1_000_000))
        running.add(task)
        task.add_done_callback(running.discard)

    return [
        HotKey("t", "fire the first cron", fire),
        HotKey("b", "open a browser", lambda: webbrowser.open(base)),
        HotKey("c", "clear", lambda: print(_CLEAR, end="", flush=True)),
        HotKey("x", "exit", end),
        HotKey("q", "exit", end),
    ]


class _Worker:
    """A worker and the configuration that it has now."""

    def __init__(self, node: Node, config: Config, reload: bool) -> None:
        self.config = config
        self._reloads = reload
        self._node = node
        self._started_with = config
        self._warned: set[str] = set()
        """Warnings about the configuration file are said once."""

    async def deploy(self, config: Config | None = None) -> bool:
        """Bring up the code as it is on disk now; what is wrong with it is said and leaves the old code serving."""
        config = config or self.config
        try:
            secrets = load_dev_vars(config.path) if config.path is not None else {}
            await self._node.deploy(config, secrets=secrets, was=self.config)
        except EdgeError as error:
            serves = self._node.serves(self.config)
            meanwhile = "the version before it goes on serving" if serves else "it is not served"
            again = "The next save tries again" if self._reloads else "Start `edge dev` again once this is mended"
            details = getattr(error, "traceback", "")
            _say(
                f"{short(config.main)} could not be started; {meanwhile}. {again}.\n{error.message}\n{details}".rstrip()
            )
            return False
        self.config = config
        return True

    async def reload_on_save(self, stop: asyncio.Event) -> None:
        """Serve what is on disk after each save, until `stop` is set."""
        config = self._started_with
        reloading = None
        if config.path is not None:
            with suppress(ConfigError):  # it was right a moment ago; if it is not any more, the next save will say so
                load(config.path, config.path.parent, self._warned.add)
        try:
            async with aclosing(saves(config.main.parent, config.path, config.state_dir, stop)) as bursts:
                async for _ in bursts:
                    await _end(reloading)
                    reloading = asyncio.create_task(self._reload())
        except (OSError, RuntimeError) as error:  # as watchfiles raises them
            _say(
                f"error: files cannot be watched any more: {error}. Restart `edge dev` after changes; if the limit of "
                "watches is reached, raise it: sysctl fs.inotify.max_user_watches=524288"
            )
        finally:
            await _end(reloading, patience_s=0)

    async def _reload(self) -> None:
        """Serve the worker as it is on disk now, with what its configuration file says of it now."""
        began = time.perf_counter()
        before = self._started_with
        config = loaded = before
        if before.path is not None:
            try:
                # What the options said keeps its place over the file.
                loaded = load(before.path, before.path.parent, self._warn)
                sandbox = replace(loaded.isolates, sandbox=before.isolates.sandbox)
                loaded = replace(loaded, state_dir=before.state_dir, isolates=sandbox)
                config = replace(loaded, account_id=before.account_id)
            except ConfigError as error:
                _say(f"error: {error.message}\nThe worker keeps running with the old configuration.")
                return
        if await self.deploy(config):
            _say(f"Reloaded in {(time.perf_counter() - began) * 1000:.0f} ms")
        if fixed := _only_at_start(before, loaded):
            _say(f"Changes of {', '.join(fixed)} take effect when `edge dev` is started again")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _say(text)


async def _end(reloading: asyncio.Task[None] | None, patience_s: float = _RELOAD_PATIENCE_S) -> None:
    """Return once `reloading` is over: an import that hangs must not hold up the save that mends it."""
    if reloading is None:
        return
    await asyncio.wait({reloading}, timeout=patience_s)
    reloading.cancel()
    (result,) = await asyncio.gather(reloading, return_exceptions=True)
    if isinstance(result, Exception):
        raise result


def _only_at_start(running: Config, config: Config) -> list[str]:
    """The keys whose values differ, and that only a new start takes over."""
    keys = [key for key in _FIXED_KEYS if getattr(running, key) != getattr(config, key)]
    if running.main.parent != config.main.parent:
        keys.append("the folder of main (which files are watched)")
    return keys


# -- the server --------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process before the node has closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `_on_signal`."""
        yield


def _server() -> _Server:
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return _Server(
        uvicorn.Config(
            app="",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            ws="websockets-sansio",
            ws_max_size=MAX_MESSAGE_BYTES,
            # After the node has closed, only answers that nobody reads are left.
            timeout_graceful_shutdown=_SHUTDOWN_S + 1,
        )
    )


def _on_signal(server: _Server, stop: asyncio.Event) -> None:
    """Finish what is in flight; on the second signal, do not."""
    num_running = len(server.server_state.tasks)
    if num_running and not server.should_exit:
        _say(f"Stopping; requests still running: {num_running}. They have {_SHUTDOWN_S} s; Ctrl-C again cuts them off")
    server.force_exit = server.should_exit
    server.should_exit = True
    stop.set()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn's `record` says what `_on_signal` or the access log does not: that requests were cut short."""
    cause = record.exc_info[1] if record.exc_info else None
    return not isinstance(cause, asyncio.CancelledError) and not record.msg.startswith(_CUT_SHORT)


def _listen(ip: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `ip`: `localhost` is both 127.0.0.1 and ::1."""
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
                    f"port {port} on {ip} is in use by another process. Choose another one: edge dev --port {other}"
                ) from error
            raise UsageError(f"cannot listen on {ip}:{port}: {error.strerror}") from error
        sockets.append(listener)
    return sockets


def _public_address(sockets: list[socket.socket]) -> tuple[str, int]:
    host, port = sockets[0].getsockname()[:2]
    return ("localhost" if host in ("127.0.0.1", "::1", "0.0.0.0", "::") else host), port


# -- what the developer reads ------------------------------------------------------------------------------


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # in one write, which `print` would make two of
    sys.stderr.flush()


def _log_access(access: Access) -> None:
    if access.path == "/healthz":
        return
    outcome = "hung up" if access.status is None else str(access.status)
    cut = ", cut short" if access.status is not None and not access.is_complete else ""
    problem = f"  {access.problem[:_MAX_PROBLEM_CHARS]}" if access.problem else ""
    line = f"{access.method} {access.path} {outcome}{cut} ({access.elapsed_ms:.0f} ms){problem}"
    # What clients sent must not move the cursor of the terminal, or look like a line of its own.
    _say(line if line.isprintable() else "".join(each if each.isprintable() else "�" for each in line))
