"""What the tests of one session share: the event loop, each project's isolates, and the engine if tests ask models."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge.billing.meter import UsageRecord
from edge.billing.prices import PriceBook, load_prices
from edge.config import Config, IsolatesConfig
from edge.config.file import load
from edge.errors import EdgeError
from edge.isolates.base import Bundle, InvocationUsage, JsonAnswer, StreamAnswer
from edge.isolates.dispatch import Isolates
from edge.node.bundle import bundle_of
from edge.node.dependencies import prepare
from edge.node.dev_vars import load_dev_vars
from edge.testing.ai import Ai, AiMode
from edge.testing.cassette import Cassette
from edge.testing.harness import Harness
from edge.testing.inprocess import InProcessSpawner
from edge.testing.loop import LoopThread

if TYPE_CHECKING:
    from edge.testing.models import InstalledModels

Mode = Literal["inprocess", "subprocess"]
_FOR_EVER = 1 << 31
_IN_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 256 << 20


class Project:
    """One configuration and what runs its worker, in one mode."""

    def __init__(self, config: Config, mode: Mode, keeps_modules: bool) -> None:
        self.config = config
        self.mode = mode
        self.prices: PriceBook = load_prices(config.billing.prices)
        self.harness: Harness | None = None
        """Of the test that runs."""
        self.spawner = InProcessSpawner(keeps_modules) if mode == "inprocess" else None
        self.isolates: Isolates
        self.bundle: Bundle
        self._models: InstalledModels | None = None
        self._starting_models = asyncio.Lock()

    async def start(self) -> None:
        """Make the worker's bundle; start what runs it.

        Raises:
            ConfigError: a file of secrets or the list of dependencies cannot be read.
            DependenciesFailed: the dependencies cannot be installed; in subprocess mode only: in-process, handlers have
                the packages of the tests.
        """
        config = self.config
        secrets = load_dev_vars(config.path) if config.path is not None else {}
        search_paths: tuple[str, ...] = ()
        isolates = config.isolates
        if self.spawner is None:
            search_paths = await prepare(config, config.state_dir, print)
        else:
            isolates = IsolatesConfig(sandbox="none", max_per_worker=1, idle_s=86_400, max_requests=_FOR_EVER)
        self.bundle = bundle_of(config, secrets=secrets, search_paths=search_paths)
        self.isolates = Isolates(
            self,
            self._on_log,
            isolates,
            on_invocation=self._on_invocation,
            hidden_paths=(str(config.state_dir),),
            spawner=self.spawner,
        )
        await self.isolates.start()

    async def close(self) -> None:
        """End all processes."""
        await self.isolates.close()
        if self._models is not None:
            await self._models.close()

    async def models(self) -> InstalledModels:
        """The installed models, whose engine starts when they are first asked for."""
        from edge.testing.models import InstalledModels  # which imports what few tests need, and takes a while to

        async with self._starting_models:
            if self._models is None:
                self._models = InstalledModels(self.config, self.prices, self)
                await self._models.start()
        return self._models

    async def record(self, record: UsageRecord) -> None:
        """Take in the usage record of a model call."""
        if self.harness is not None:
            await self.harness.usage.record(record)

    # -- for the isolates ----------------------------------------------------------------------------------

    async def ai_run(
        self, bundle: Bundle, model: str, inputs: Any, options: dict[str, Any]
    ) -> JsonAnswer | StreamAnswer:
        """See `edge.isolates.base.Bindings`."""
        return await self._current().hub.ai_run(bundle, model, inputs, options)

    async def call(
        self, bundle: Bundle, binding: str, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """See `edge.isolates.base.Bindings`."""
        return await self._current().hub.call(bundle, binding, method, args, body)

    def _current(self) -> Harness:
        if self.harness is None:
            raise EdgeError("the test that this handler was called from is over")
        return self.harness

    def _on_log(self, _bundle: Bundle, _invocation: int, level: str, text: str) -> None:
        if self.harness is not None:
            self.harness.logs.add(level, text)
        if self.spawner is None:
            print(text if level == "log" else f"{level}: {text}")  # for pytest to show if the test fails

    def _on_invocation(self, usage: InvocationUsage) -> None:
        if self.harness is not None:
            self.harness.on_invocation(usage)


class Session:
    """All projects of the session, from the first test that uses one until `close`."""

    def __init__(self, *, keeps_modules: bool) -> None:
        self._keeps_modules = keeps_modules
        self._loop = LoopThread()
        self._projects: dict[tuple[Path, Mode], Project] = {}

    def open(self, config: Path, mode: Mode, ai: AiMode, cassette: Path) -> Harness:
        """The worker of the file `config` for one test, with bindings that are empty.

        Raises:
            ConfigError: the configuration is wrong.
            DependenciesFailed: as `Project.start`.
        """
        return self._loop.run(self._open(config, mode, ai, cassette))

    def close_test(self, harness: Harness) -> None:
        """The test is over."""
        self._loop.run(self._close_test(harness))

    def close(self) -> None:
        """End everything."""
        self._loop.run(self._close())
        self._loop.stop()

    async def _open(self, path: Path, mode: Mode, ai: AiMode, cassette: Path) -> Harness:
        project = self._projects.get((path, mode))
        if project is None:
            project = Project(load(path, path.parent), mode, self._keeps_modules)
            await project.start()
            self._projects[path, mode] = project
        folder = Path(tempfile.mkdtemp(prefix="edge-test-", dir=_state_root()))
        canned = Ai(ai, Cassette(cassette), project.models, project.record)
        project.harness = Harness(project, canned, folder, self._loop)
        return project.harness

    async def _close_test(self, harness: Harness) -> None:
        try:
            await harness.close()
            harness.ai.save()
        finally:
            harness.project.harness = None
            await asyncio.to_thread(shutil.rmtree, harness.folder, ignore_errors=True)

    async def _close(self) -> None:
        for project in self._projects.values():
            await project.close()


def _state_root() -> Path | None:
    """Where the state of tests goes: into memory where there is room, because bindings wait for the disk at each write;
    None: into the system's temporary folder."""
    try:
        has_room = shutil.disk_usage(_IN_MEMORY).free >= _ENOUGH_BYTES and os.access(_IN_MEMORY, os.W_OK)
    except OSError:
        has_room = False
    return _IN_MEMORY if has_room else None
