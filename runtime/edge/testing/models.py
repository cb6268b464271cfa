"""The installed models, for tests that ask them: the node's catalogue, gate and engine without its HTTP side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.ai.catalogue import SERVED, Catalogue
from edge.ai.gate import Gate, Principal
from edge.ai.listing import list_models
from edge.ai.native import run_binding
from edge.billing.meter import Meter, new_id
from edge.billing.prices import PriceBook
from edge.config import Config
from edge.isolates.base import Bundle, JsonAnswer, StreamAnswer
from edge.pool.local import LocalPool
from edge.weights.store import ModelStore


class InstalledModels:
    """The models in the state directory of `config`, from `start` until `close`.

    Args:
        meter: gets the usage record of each call.
    """

    def __init__(self, config: Config, prices: PriceBook, meter: Meter) -> None:
        store = ModelStore.in_state_dir(config.state_dir)
        installed = store.list()
        paths = {each.name: store.root / each.name / each.file for each in installed if each.task in SERVED}
        stand_ins = config.ai.models if config.ai is not None else {}
        self._pool = LocalPool(paths, config.engine, config.state_dir / "cache" / "kernels")
        self._gate = Gate(self._pool, Catalogue(installed, stand_ins, prices), meter)

    async def start(self) -> None:
        """Start the engine in the background."""
        await self._pool.start()

    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer | StreamAnswer:
        """One model call; it is metered. Raises EdgeError as the gate does."""
        principal = Principal(
            account=caller.account,
            trigger="binding",
            request_id=new_id(),
            worker=caller.worker,
            version=caller.version,
        )
        answer = await run_binding(self._gate, principal, model, inputs, options)
        info = {"requestId": principal.request_id, "status": 200}
        if isinstance(answer, dict | list):
            return JsonAnswer(answer, info)
        return StreamAnswer(200, [("content-type", "text/event-stream")], answer, info)

    async def models(self, params: Mapping[str, Any]) -> JsonAnswer:
        """The installed models. Raises InvalidInput as the node does."""
        return JsonAnswer(list_models(self._gate.catalogue, params))

    async def close(self) -> None:
        """Stop the engine."""
        await self._pool.close()
        await self._gate.close()
