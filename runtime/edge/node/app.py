"""The node: constructs every part and joins them. Nothing else in the product creates a part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.types import ASGIApp

from edge.ai.catalogue import TEXT_GENERATION, Catalogue
from edge.ai.gate import Gate, Principal
from edge.ai.native import run_binding
from edge.billing import ledger
from edge.billing.ledger import Ledger
from edge.billing.meter import new_id
from edge.billing.prices import load_prices
from edge.config import Config
from edge.errors import InvalidInput
from edge.isolates.base import Bundle, JsonAnswer, StreamAnswer
from edge.isolates.dispatch import Isolates
from edge.node import api
from edge.node.access import Access, AccessLogged
from edge.node.ingress import Ingress
from edge.pool.local import LocalPool
from edge.weights.manifest import Manifest
from edge.weights.store import ModelStore

_MODELS_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class Node:
    """All parts of one node, running between `async with`'s two ends.

    Args:
        tokens: bearer token to account.
        show_tracebacks: whether an exception of a handler is answered with its traceback.
        say: where a line for the operator goes.
        access_log: called after every request.
    """

    def __init__(
        self,
        config: Config,
        *,
        tokens: Mapping[str, str],
        show_tracebacks: bool,
        say: Callable[[str], None],
        access_log: Callable[[Access], None],
    ) -> None:
        self._say = say
        self._store = ModelStore.in_state_dir(config.state_dir)
        prices = load_prices(config.billing.prices)
        self._ledger = Ledger(config.state_dir / ledger.FILE_NAME)
        self._ledger.add_price_book(prices)
        self._served = self._installed()
        self._stand_ins = _stand_ins(config)
        self.catalogue = Catalogue(self._served.values(), self._stand_ins, prices)
        self.pool = LocalPool(self._paths(self._served), config.engine, config.state_dir / "cache" / "kernels")
        self._gate = Gate(self.pool, self.catalogue, self._ledger)
        self._binding = _AiBinding(self._gate, config.account_id)
        self.isolates = Isolates(self._binding, config.limits, self._on_log)
        self.use_ai(config)
        ingress = Ingress(self.isolates, show_tracebacks=show_tracebacks, error_log=say)
        doors = Starlette(routes=api.routes(self._gate, tokens=tokens, health=self._health))
        # The default, and not a route for every path, because no route matches a path with a line break (%0A).
        doors.router.default = ingress
        doors.router.redirect_slashes = False
        self.app: ASGIApp = AccessLogged(doors, access_log)
        self._parts = AsyncExitStack()

    async def __aenter__(self) -> Self:
        # Closed in the reverse order: handlers first, then what they call, and the ledger last, since a call that
        # is cut short is recorded as well.
        self._parts.push_async_callback(self._ledger.close)
        self._parts.push_async_callback(self._gate.close)
        self._parts.push_async_callback(self.pool.close)
        self._parts.push_async_callback(self.isolates.close)
        try:
            await self.pool.start()
            await self.isolates.start()
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

    async def deploy(self, bundle: Bundle) -> None:
        """Let `bundle` take over once it has imported.

        Raises:
            WorkerStartFailed: it could not be imported; what served before goes on serving.
        """
        await self.isolates.deploy(bundle)

    def use_ai(self, config: Config) -> None:
        """Take over `[ai]` of `config`."""
        self._stand_ins = _stand_ins(config)
        self.catalogue.update(self._served.values(), self._stand_ins)
        self._binding.priority = config.ai.priority if config.ai else 0
        self._gate.sharing = frozenset([config.account_id] if config.ai and config.ai.share_prefixes else [])

    def _installed(self) -> dict[str, Manifest]:
        return {manifest.name: manifest for manifest in self._store.list()}

    def _paths(self, installed: Mapping[str, Manifest]) -> dict[str, Path]:
        """Where the models are that the engine can run."""
        return {
            name: self._store.root / name / manifest.file
            for name, manifest in installed.items()
            if manifest.task == TEXT_GENERATION
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
                self.catalogue.update(installed.values(), self._stand_ins)
                self.pool.update(self._paths(kept))  # first without those that were replaced under the same name
                self.pool.update(self._paths(installed))
                self._say(f"Models    {', '.join(model.id for model in self.catalogue.models()) or 'none'}")

    def _health(self) -> dict[str, Any]:
        return {"engine": self.pool.status(), "worker": {"pid": self.isolates.pid, "sandbox": self.isolates.layers}}

    def _on_log(self, bundle: Bundle, invocation: int, level: str, text: str) -> None:
        self._say(text if level == "log" else f"{level}: {text}")


def _stand_ins(config: Config) -> dict[str, str]:
    return config.ai.models if config.ai is not None else {}


class _AiBinding:
    """`env.AI` of a worker: the gate, on the worker's account."""

    def __init__(self, gate: Gate, account: str) -> None:
        self.priority = 0
        self._gate = gate
        self._account = account

    async def ai_run(
        self, bundle: Bundle, model: str, inputs: Any, options: dict[str, Any]
    ) -> JsonAnswer | StreamAnswer:
        """One model call of a handler; EdgeErrors travel to it."""
        principal = Principal(
            account=self._account,
            trigger="binding",
            request_id=new_id(),
            worker=bundle.worker,
            version=bundle.version,
            priority=self.priority,
        )
        answer = await run_binding(self._gate, principal, model, inputs, options)
        info = {"requestId": principal.request_id, "status": 200}
        if isinstance(answer, dict):
            return JsonAnswer(answer, info)
        return StreamAnswer(200, [("content-type", "text/event-stream")], answer, info)

    async def call(
        self, bundle: Bundle, binding: str, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """No other kinds yet."""
        raise InvalidInput(f"env.{binding}.{method}() is not supported yet")
