"""What stands behind `env` of all workers: finds a binding in the worker's bundle and asks the provider for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from edge.bindings.base import Provider, parse
from edge.errors import InvalidInput
from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer


class AiProvider(Protocol):
    """What answers `env.AI.run`."""

    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer | StreamAnswer:
        """One model call of a handler of `caller`."""

    async def models(self, params: Mapping[str, Any]) -> JsonAnswer:
        """What answers `env.AI.models`: the models that can be called."""


class Hub:
    """`edge.isolates.base.Bindings` over one provider for each kind of binding."""

    def __init__(self, ai: AiProvider, providers: Mapping[str, Provider]) -> None:
        self._ai = ai
        self._providers = providers

    async def ai_run(
        self, bundle: Bundle, model: str, inputs: Any, options: dict[str, Any]
    ) -> JsonAnswer | StreamAnswer:
        """`env.AI.run`, for a worker that has an AI binding."""
        if not any(binding.kind == "ai" for binding in bundle.bindings.values()):
            raise InvalidInput("this worker has no AI binding: add [ai] to its configuration")
        return await self._ai.run(bundle, model, inputs, options)

    async def call(
        self, bundle: Bundle, binding: str, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """`env.BINDING.method(*args)`."""
        found = bundle.bindings.get(binding) or _own_entrypoint(bundle, binding)
        if found is not None and found.kind == "ai" and method == "models":
            return await self._ai.models(parse("env.AI.models(params)", args, tuple[dict[str, Any]])[0])
        provider = self._providers.get(found.kind) if found is not None else None
        if found is None or provider is None:
            raise InvalidInput(f"env.{binding[:100]} of this worker is no binding with methods of the node")
        return await provider.call(bundle, found, method, args, body)

    async def close(self) -> None:
        """Close all providers."""
        for provider in self._providers.values():
            await provider.close()


def _own_entrypoint(bundle: Bundle, binding: str) -> Binding | None:
    """`ctx.exports.NAME`: the worker itself, as a service binding."""
    prefix, _, entrypoint = binding.rpartition(".")
    return Binding("service", {"service": bundle.worker, "entrypoint": entrypoint}) if prefix == "ctx.exports" else None
