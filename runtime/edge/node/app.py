"""The node: constructs every part and joins them. Nothing else in the product creates a part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge.ai import rate_limits
from edge.ai.batch import Batches
from edge.ai.batch_store import BatchStore
from edge.ai.catalogue import SERVED, Catalogue
from edge.ai.finetunes import Finetunes
from edge.ai.gate import Gate, Principal
from edge.ai.listing import list_models
from edge.ai.native import run_binding
from edge.auth import store as tokens_file
from edge.auth.authenticator import Authenticator
from edge.billing import ledger
from edge.billing.ledger import Ledger
from edge.billing.meter import new_id
from edge.billing.prices import load_prices
from edge.bindings.assets import Assets, Site
from edge.bindings.base import Provider
from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.queues import Queues
from edge.bindings.r2 import R2
from edge.bindings.ratelimit import RateLimits
from edge.bindings.service import Services
from edge.config import ApiConfig, Config
from edge.errors import ConfigError, IsolateLost, UnknownWorker
from edge.isolates.base import (
    Bundle,
    InboundEvent,
    InboundRequest,
    InvocationUsage,
    JsonAnswer,
    OutboundResponse,
    StreamAnswer,
    WorkerKey,
)
from edge.isolates.dispatch import Isolates
from edge.isolates.egress_rules import Rules
from edge.isolates.sandbox.layers import bitmask
from edge.node import api
from edge.node.access import Access, AccessLogged
from edge.node.api.callers import credential_of
from edge.node.bundle import bundle_of
from edge.node.contained import contained
from edge.node.cron import Cron
from edge.node.dependencies import prepare
from edge.node.direct import Direct
from edge.node.hub import Hub
from edge.node.ingress import Ingress
from edge.node.static import AssetsFirst
from edge.node.triggers import Triggers
from edge.node.triggers import routes as trigger_routes
from edge.pool.local import LocalPool
from edge.weights.manifest import Manifest
from edge.weights.store import ModelStore

_MODELS_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class Node:
    """All parts of one node, running between `async with`'s two ends.

    Args:
        config: of the worker that HTTP requests reach; what concerns the node as a whole is taken from it.
        tokens: bearer token to account, beside the tokens in the state directory.
        show_tracebacks: whether an exception of a handler is answered with its traceback.
        say: where a line for the operator goes.
        access_log: called after every request.
        local_triggers: whether crons can be fired over HTTP, from this machine.
        show_health: whether `/healthz` tells anybody what runs: processes, workers and models.
    """

    def __init__(
        self,
        config: Config,
        *,
        tokens: Mapping[str, str],
        show_tracebacks: bool,
        say: Callable[[str], None],
        access_log: Callable[[Access], None],
        local_triggers: bool = False,
        show_health: bool = False,
    ) -> None:
        self._say = say
        self._store = ModelStore.in_state_dir(config.state_dir)
        prices = load_prices(config.billing.prices)
        self._ledger = Ledger(config.state_dir / ledger.FILE_NAME)
        self._ledger.add_price_book(prices)
        self._served = self._installed()
        self._primary = key_of(config)
        self._ai = {self._primary: config.ai}
        self.catalogue = Catalogue(self._served.values(), self._stand_ins(), prices)
        self.pool = LocalPool(self._paths(self._served), config.engine, config.state_dir / "cache" / "kernels")
        self._gate = Gate(
            self.pool,
            self.catalogue,
            self._ledger,
            rate_limits=rate_limits.of(config.api, self.catalogue.known_ids),
            call_timeout_s=config.api.call_timeout_s,
        )
        self._finetunes = self._gate.finetunes = Finetunes(config.state_dir / "finetunes", self.catalogue, self._store)
        self._batches = self._gate.batches = Batches(
            BatchStore(config.state_dir / "batches", max_account_bytes=config.batches.max_mb_per_account << 20),
            self._gate,
            concurrency=config.batches.concurrency,
            retention_days=config.batches.retention_days,
        )
        self._binding = _AiBinding(self._gate, self._layers_of)
        self.use_ai(config)
        self._queues = Queues(config.state_dir, self.event, say)
        self._assets = Assets()
        self._r2 = R2(config.state_dir)
        services = Services(self)
        providers: dict[str, Provider] = {
            "kv": Kv(config.state_dir),
            "d1": D1(config.state_dir),
            "r2": self._r2,
            "queue": self._queues,
            "service": services,
            "ratelimit": RateLimits(),
            "assets": self._assets,
        }
        self._hub = Hub(self._binding, providers)
        self.isolates = Isolates(
            self._hub,
            self._on_log,
            config.isolates,
            on_invocation=self._on_invocation,
            hidden_paths=(str(config.state_dir),),
        )
        self.triggers = Triggers(self.event, say)
        self._authenticator = Authenticator(config.state_dir / tokens_file.FILE_NAME, fixed=tokens)
        self._health: api.Health = self._status if show_health else dict
        self.app, self.direct = self._doors(config.api, show_tracebacks, local_triggers, access_log)
        self._parts = AsyncExitStack()

    def _doors(
        self,
        config: ApiConfig,
        show_tracebacks: bool,
        local_triggers: bool,
        access_log: Callable[[Access], None],
    ) -> tuple[ASGIApp, Direct]:
        ingress = Ingress(self.isolates, lambda _: self._primary, show_tracebacks=show_tracebacks, error_log=self._say)
        routes = api.routes(self._gate, tokens=self._authenticator, health=self._health, config=config)
        if local_triggers:
            routes += trigger_routes(self.triggers, self._find)
        workers = AssetsFirst(ingress, lambda _: self._assets.sites.get(self._primary))
        doors = Starlette(routes=routes)
        # The default, and not a route for every path, because no route matches a path with a line break (%0A).
        doors.router.default = workers
        doors.router.redirect_slashes = False
        prefixes = tuple(route.path for route in routes if isinstance(route, Route | Mount))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """Most requests are for the workers; they need not pass Starlette's routes, which take their time."""
            path = api.joined(scope.get("path", "/"))
            is_ours = scope["type"] == "lifespan" or path.startswith(prefixes)
            if is_ours and path.startswith(api.OPENAI_PREFIX):
                is_ours = self._is_for_api(scope, config)
            if is_ours and "//" in scope.get(
                "path", ""
            ):  # a base URL with a slash too many: no worker may see its token
                scope = {**scope, "path": path}
            await (doors if is_ours else workers)(scope, receive, send)

        def worker_of(path: str) -> WorkerKey | None:
            """Whom a path belongs to, if it is nobody's but a worker's."""
            is_ours = api.joined(path).startswith(prefixes)
            return None if is_ours or self._primary in self._assets.sites else self._primary

        return AccessLogged(app, access_log), Direct(self.isolates, worker_of, ingress, access_log)

    def _is_for_api(self, scope: Scope, config: ApiConfig) -> bool:
        """Whether a request below `/v1` is for the API: it has a token of this node, or there is no worker.

        A browser's question whether it may send a token has none yet; the origin tells whose it is.
        """
        key = self._primary
        has_worker = key in self.isolates.workers() and self.isolates.status(key).version != ""
        if not has_worker or scope["type"] != "http":
            return not has_worker
        headers = Headers(scope=scope)
        return api.is_preflight(scope["method"], headers, config) or self._authenticator.is_ours(credential_of(headers))

    async def __aenter__(self) -> Self:
        # Closed in the reverse order: what starts handlers first, then handlers and what they call, and the ledger
        # last, since a call that is cut short is recorded as well.
        self._parts.push_async_callback(self._authenticator.close)
        self._parts.callback(self._finetunes.close)
        self._parts.push_async_callback(self._ledger.close)
        self._parts.push_async_callback(self._gate.close)
        self._parts.push_async_callback(self._batches.close)  # what is under way in them ends with the pool
        self._parts.push_async_callback(self.pool.close)
        self._parts.push_async_callback(self._batches.stop)
        self._parts.push_async_callback(self._hub.close)
        self._parts.push_async_callback(self.isolates.close)
        self._parts.push_async_callback(self._queues.stop)
        self._parts.push_async_callback(self.triggers.close)
        try:
            await self.pool.start()
            await self.isolates.start()
            self.triggers.start()
            self._batches.start()
        except BaseException:
            await self._parts.aclose()
            raise
        watching = asyncio.create_task(self._watch_models())
        self._parts.callback(watching.cancel)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all parts; requests in flight fail with an error that says so. Closing again does nothing."""
        await self._parts.aclose()

    async def deploy(
        self, config: Config, *, secrets: Mapping[str, str] | None = None, was: Config | None = None
    ) -> None:
        """Let the worker of `config`, as it is on disk now, take over once it has imported.

        Args:
            secrets: variables that go before those of `config`.
            was: what the worker was called before; that one is then served no more.

        Raises:
            WorkerStartFailed: it could not be imported; what served before goes on serving.
            ConfigError: a cron, a consumer, the assets, `egress` or the list of dependencies is wrong, the library for
                buckets in S3 is missing, or the new name is another worker's; likewise.
            DependenciesFailed: what it depends on cannot be installed; likewise.
        """
        key = key_of(config)
        old = key_of(was) if was is not None and key_of(was) != key else None
        if old is not None and key in self._ai:
            raise ConfigError(
                f"name: {config.name!r} is the name of another worker on this node; choose another one, or start "
                "`edge dev` again if that one has a new name"
            )
        with self._new_ai(config):
            await self._deploy(config, old, secrets)
        if old is not None:
            with suppress(UnknownWorker):  # it could never be imported
                await self.isolates.remove(old)

    @contextmanager
    def _new_ai(self, config: Config) -> Iterator[None]:
        """`[ai]` of `config`, which goes back to what it was if the worker does not come up."""
        key = key_of(config)
        before = self._ai.copy()
        self.use_ai(config)
        try:
            yield
        except BaseException:
            if key in before:
                self._ai[key] = before[key]
            else:
                del self._ai[key]
            self._update_ai()
            raise

    async def _deploy(self, config: Config, old: WorkerKey | None, secrets: Mapping[str, str] | None) -> None:
        key = key_of(config)
        crons = [Cron(expression) for expression in config.triggers.crons]
        site = _site_of(config)
        Rules(config.egress)
        search_paths = await prepare(config, config.state_dir, self._say)
        bundle = await asyncio.to_thread(bundle_of, config, secrets=secrets, search_paths=search_paths)
        self._queues.check(key, config.queues.consumers, instead_of=old)
        with self._r2.new_places(key, config.s3_buckets), self._assets.new_site(key, site):
            await self.isolates.deploy(bundle)
        if old is not None:
            self._take_from(old, key)
        consumers = config.queues.consumers
        if consumers and self._lacks(key, "queue"):
            consumers = []
            self._say(f"warning: {config.name} has no `queue` handler: messages of the queues that it consumes wait")
        if crons and self._lacks(key, "scheduled"):
            self._say(f"warning: {config.name} has no `scheduled` handler: its crons will fail")
        self._queues.consume(key, consumers)
        self.triggers.use(key, crons)

    def _lacks(self, key: WorkerKey, event: str) -> bool:
        """Whether the worker is known to have no handler of `event`: one whose process has just died may have one."""
        status = self.isolates.status(key)
        return bool(status.pids) and event not in status.handlers

    def _take_from(self, old: WorkerKey, key: WorkerKey) -> None:
        """Let nothing but what is in flight, and service bindings, reach the worker `old`."""
        if self._primary == old:
            self._primary = key
        self._queues.consume(old, [])
        self.triggers.remove(old)
        self._assets.sites.pop(old, None)
        self._ai.pop(old, None)
        self._update_ai()

    def serves(self, config: Config) -> bool:
        """Whether some version of that worker is up."""
        key = key_of(config)
        return key in self.isolates.workers() and self.isolates.status(key).version != ""

    def use_ai(self, config: Config) -> None:
        """Take over `[ai]` of `config` for its worker; stand-ins are for all workers, the first one's going first."""
        self._ai[key_of(config)] = config.ai
        self._update_ai()

    def _update_ai(self) -> None:
        self.catalogue.update(self._served.values(), self._stand_ins())
        self._binding.priorities = {key: ai.priority for key, ai in self._ai.items() if ai is not None}
        self._gate.sharing = frozenset(key[0] for key, ai in self._ai.items() if ai is not None and ai.share_prefixes)

    async def fetch(
        self, key: WorkerKey, request: InboundRequest, *, entrypoint: str = "", props: dict[str, Any] | None = None
    ) -> OutboundResponse:
        """The response of another worker, for service bindings."""
        return await self.isolates.fetch(key, request, entrypoint=entrypoint, props=props)

    async def event(self, key: WorkerKey, event: InboundEvent) -> Any:
        """What another worker makes of `event`, for service bindings, queues and crons."""
        return await self.isolates.event(key, event)

    def _layers_of(self, key: WorkerKey) -> Sequence[str]:
        """The sandbox layers of the worker's processes, which are the same for all that one zygote has forked."""
        try:
            return self.isolates.status(key).layers
        except (UnknownWorker, IsolateLost):  # it, or the node, is stopping, and this is one of its last calls
            return ()

    def _find(self, name: str) -> WorkerKey | None:
        if not name:
            return self._primary
        return next((key for key in self.isolates.workers() if key[1] == name), None)

    def _stand_ins(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for _, ai in sorted(self._ai.items(), key=lambda item: item[0] != self._primary):
            found = (ai.models if ai is not None else {}) | found
        return found

    def _installed(self) -> dict[str, Manifest]:
        return {manifest.name: manifest for manifest in self._store.list()}

    def _paths(self, installed: Mapping[str, Manifest]) -> dict[str, Path]:
        """Where the models are that the engine can run."""
        return {
            name: self._store.root / name / manifest.file
            for name, manifest in installed.items()
            if manifest.task in SERVED
        }

    async def _watch_models(self) -> None:
        """Serve what `edge models add` installs while this runs, and nothing that `edge models rm` removed."""
        seen_ns = 0
        while True:
            await asyncio.sleep(_MODELS_INTERVAL_S)
            try:
                if (changed_ns := self._store.changed_ns) == seen_ns:
                    continue
                installed = self._installed()
            except OSError as error:  # looked at in the middle of a change, or not to be read: look again
                _log.warning("the models in %s cannot be listed: %s", self._store.root, error)
                continue
            seen_ns = changed_ns
            if installed != self._served:
                kept = {name: each for name, each in installed.items() if self._served.get(name) == each}
                self._served = installed
                self.catalogue.update(installed.values(), self._stand_ins())
                self.pool.update(self._paths(kept))  # first without those that were replaced under the same name
                self.pool.update(self._paths(installed))
                self._say(f"Models    {', '.join(model.id for model in self.catalogue.models()) or 'none'}")

    def _status(self) -> dict[str, Any]:
        return {"engine": self.pool.status(), "workers": [self.isolates.status(key) for key in self.isolates.workers()]}

    def _on_invocation(self, usage: InvocationUsage) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s of %s %s: %s, cpu %d us, wall %d us%s",
                *(usage.kind, usage.bundle.worker, usage.bundle.version, usage.outcome, usage.cpu_us, usage.wall_us),
                f", cold start {usage.cold_start_us} us" if usage.is_cold else "",
            )

    def _on_log(self, bundle: Bundle, invocation: int, level: str, text: str) -> None:
        self._say(text if level == "log" else f"{level}: {text}")


def key_of(config: Config) -> WorkerKey:
    """Account and name of the worker of `config`."""
    return config.account_id, config.name


def _site_of(config: Config) -> Site | None:
    """The assets of the worker of `config`.

    Raises:
        ConfigError: there is no such folder, it is a link out of the project, or the worker's own code would be in it.
    """
    assets = config.assets
    if assets is None:
        return None
    if not assets.directory.is_dir():
        raise ConfigError(f"assets.directory: there is no folder {assets.directory}")
    directory = contained(config.project, assets.directory, "assets.directory")
    if config.main.resolve().is_relative_to(directory):
        raise ConfigError(
            f"assets.directory {assets.directory} holds {config.main}, which would be served to anybody: "
            "keep code and assets in different folders"
        )
    return Site(replace(assets, directory=directory))


class _AiBinding:
    """`env.AI` of workers: the gate, each on its own account."""

    def __init__(self, gate: Gate, layers_of: Callable[[WorkerKey], Sequence[str]]) -> None:
        self.priorities: dict[WorkerKey, int] = {}
        self._gate = gate
        self._layers_of = layers_of

    async def models(self, params: Mapping[str, Any]) -> JsonAnswer:
        """The models of the catalogue."""
        return JsonAnswer(list_models(self._gate.catalogue, params))

    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer | StreamAnswer:
        """One model call of a handler; EdgeErrors travel to it."""
        principal = Principal(
            account=caller.account,
            trigger="binding",
            request_id=new_id(),
            worker=caller.worker,
            version=caller.version,
            priority=self.priorities.get(caller.key, 0),
            sandbox=bitmask(self._layers_of(caller.key)),
        )
        answer = await run_binding(self._gate, principal, model, inputs, options)
        info = {"requestId": principal.request_id, "status": 200}
        if isinstance(answer, dict | list):
            return JsonAnswer(answer, info)
        return StreamAnswer(200, [("content-type", "text/event-stream")], answer, info)
