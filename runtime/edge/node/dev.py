"""`edge dev`: a node in the foreground with one worker, or several, each served again on every save.

The node is the same as anywhere else; only the account, the token, the reload and the traceback pages are
this mode's own.
"""

from __future__ import annotations

import asyncio
import sys
import time
import webbrowser
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

from msgspec.structs import replace

from edge.config import Config
from edge.config.file import load
from edge.errors import ConfigError, EdgeError, UsageError
from edge.node import serving
from edge.node.app import Node, key_of
from edge.node.connection import while_connected
from edge.node.dev_vars import load_dev_vars
from edge.node.hot_keys import HotKey, hot_keys
from edge.node.saves import saves
from edge.node.serving import Server, log_access, say
from edge.node.welcome import missing_services, short, welcome

TOKEN = "dev"
_SHUTDOWN_S = 5
_RELOAD_PATIENCE_S = 1.0
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"
_FIXED_KEYS = ("account_id", "isolates", "dev", "engine", "api", "billing", "batches")
"""What only a new start takes over."""


def run(configs: Sequence[Config], *, ip: str, port: int, reload: bool) -> None:
    """Serve the workers of `configs` until SIGINT or SIGTERM; HTTP requests reach the first.

    Raises:
        PortInUse: somebody else listens there.
        UsageError: there is no such address, or two workers have one name.
    """
    if len({key_of(config) for config in configs}) < len(configs):
        raise UsageError("two of the configurations have the same `name`; a worker is known by its name")
    serving.run(
        lambda server: _serve(configs, server, reload=reload), ip=ip, port=port, drain_s=_SHUTDOWN_S, command="edge dev"
    )


async def _serve(configs: Sequence[Config], server: Server, *, reload: bool) -> None:
    node = Node(
        configs[0],
        tokens={TOKEN: configs[0].account_id},
        show_tracebacks=True,
        say=say,
        access_log=log_access,
        local_triggers=True,
        show_health=True,
    )
    stop = server.stopping
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
            server.start(node)
            with hot_keys(sys.stdin, _actions(node, server)) as keys:
                account, access = configs[0].account_id, f"Token {TOKEN}"
                lines = welcome(node, configs, server.base, account=account, access=access, reload=reload)
                say("\n".join([*missing_services(node, configs), *lines, *keys]))
                print(f"Ready on {server.base}", flush=True)
                await stop.wait()
            await server.finish(node)
        finally:
            stop.set()
            for each in watching:
                await each


def _actions(node: Node, server: Server) -> list[HotKey]:
    running: set[asyncio.Task[Any]] = set()

    def fire() -> None:
        first = node.triggers.first()
        if first is None:
            say("there is no cron; add one under [triggers]")
            return
        task = asyncio.create_task(node.triggers.run(*first, time.time_ns() // 1_000_000))
        running.add(task)
        task.add_done_callback(running.discard)

    return [
        HotKey("t", "fire the first cron", fire),
        HotKey("b", "open a browser", lambda: webbrowser.open(server.base)),
        HotKey("c", "clear", lambda: print(_CLEAR, end="", flush=True)),
        HotKey("x", "exit", server.stop),
        HotKey("q", "exit", server.stop),
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
            say(
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
            say(
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
                say(f"error: {error.message}\nThe worker keeps running with the old configuration.")
                return
        if await self.deploy(config):
            say(f"Reloaded in {(time.perf_counter() - began) * 1000:.0f} ms")
        if fixed := _only_at_start(before, loaded):
            say(f"Changes of {', '.join(fixed)} take effect when `edge dev` is started again")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            say(text)


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
