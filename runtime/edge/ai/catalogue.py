"""Which models there are here: the installed ones under their names, and stand-ins under catalogue ids.

This module knows nothing about weights, engines or HTTP.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC
from decimal import Decimal
from typing import Any

import msgspec

from edge.billing.prices import Price, PriceBook, dollars
from edge.errors import UnknownModel
from edge.weights.manifest import DEFAULT_NAME, DEFAULT_SPEC, Manifest

TEXT_GENERATION = "text-generation"

_TASKS = {
    TEXT_GENERATION: {
        "id": "c329a1f9-323d-4e91-b2aa-582dd4188d34",
        "name": "Text Generation",
        "description": "Family of generative text models, such as large language models (LLM).",
    }
}
_IDS = uuid.UUID("7b1c1d3e-5a0c-5b52-9a63-0f6e3c1f6a11")
"""Namespace of the catalogue's own ids: the same model has the same id on every node."""
_MAX_SHOWN = 5
_MAX_ID_CHARS = 200


class Model(msgspec.Struct, frozen=True):
    """A model as it can be called: `id` is what callers write, `manifest` is what runs."""

    id: str
    manifest: Manifest
    price: Price | None
    """None: unpriced."""

    @property
    def author(self) -> str:
        """`meta` of `@cf/meta/llama`; installed names have no author of their own."""
        parts = self.id.split("/")
        return parts[1] if len(parts) == 3 else "local"


class Catalogue:
    """All models that can be called on this node."""

    def __init__(self, installed: Iterable[Manifest], stand_ins: Mapping[str, str], prices: PriceBook) -> None:
        """`stand_ins` maps catalogue ids to names of installed models."""
        self.prices = prices
        self._stand_ins: dict[str, str] = {}
        self._models: dict[str, Model] = {}
        self.update(installed, stand_ins)

    def update(self, installed: Iterable[Manifest], stand_ins: Mapping[str, str]) -> None:
        """From now on, these are the models."""
        self._stand_ins = dict(stand_ins)
        manifests = {manifest.name: manifest for manifest in installed}
        served = {name: name for name in manifests} | {
            id: name for id, name in self._stand_ins.items() if name in manifests
        }
        self._models = {
            id: Model(id, manifests[name], self.prices.price(id, name)) for id, name in sorted(served.items())
        }

    def resolve(self, id: str) -> Model:
        """The model that callers call `id`.

        Raises:
            UnknownModel: there is none; the message names the nearest ones and how to add one.
        """
        model = self._models.get(id)
        if model is None:
            raise UnknownModel(self._why_unknown(id), param="model")
        if model.manifest.task not in _TASKS:
            raise UnknownModel(
                f"model {id!r} is for the task {model.manifest.task!r}, which is not supported yet; "
                "`edge models list` shows the task of each",
                param="model",
            )
        return model

    def models(self, *, search: str = "", task: str = "", author: str = "") -> list[Model]:
        """The models whose id contains `search`, of that task (name, id or slug) and author; empty: of any.

        Case does not matter.
        """
        return [
            model
            for model in self._models.values()
            if search.lower() in model.id.lower()
            and author.lower() in ("", model.author.lower())
            and task.lower() in ("", *_task_names(model.manifest.task))
        ]

    def _why_unknown(self, id: str) -> str:
        stand_in = self._stand_ins.get(id)
        if stand_in is not None:
            return (
                f"model {id!r} is served by {stand_in!r} ([ai.models] in the configuration), which is not installed. "
                f"Install it: edge models add {DEFAULT_SPEC if stand_in == DEFAULT_NAME else 'SPEC'}"
            )
        shown = id if len(id) <= _MAX_ID_CHARS else id[:_MAX_ID_CHARS] + "…"
        if not self._models:
            return f"no model {shown!r}: none is installed. The small default model: edge models add {DEFAULT_SPEC}"
        ways = "See `edge models list`; add one with `edge models add SPEC`"
        if id.startswith("@"):  # of somebody else's catalogue: nothing to install under that name, but to map
            example = f'"{shown}" = "{next(iter(self._models.values())).manifest.name}"'
            ways += f", or let an installed one stand in for it: {example} under [ai.models] in the configuration"
        return f"no model {shown!r}; {self._nearest(shown)} {ways}"

    def _nearest(self, id: str) -> str:
        """The nearest ids, judged by the whole id and by its last part, which is what people misspell."""
        last_parts: dict[str, str] = {}
        for known in self._models:
            last_parts.setdefault(known.rpartition("/")[2], known)
        close = difflib.get_close_matches(id, self._models, n=3) + [
            last_parts[part] for part in difflib.get_close_matches(id.rpartition("/")[2], last_parts, n=3)
        ]
        if close:
            return f"did you mean {' or '.join(dict.fromkeys(close))}?"
        known_ids = list(self._models)
        more = f" and {len(known_ids) - _MAX_SHOWN} more" if len(known_ids) > _MAX_SHOWN else ""
        return f"there are {', '.join(known_ids[:_MAX_SHOWN])}{more}."


def catalogue_item(model: Model, prices: PriceBook) -> dict[str, Any]:
    """`model` in the shape of Workers AI's `models/search`. Dollars are exact `Decimal`s, to be sent as numbers."""
    manifest = model.manifest
    created_at = manifest.created_at.astimezone(UTC)
    description = manifest.description
    if model.id != manifest.name:
        description = f"{description} (served here by {manifest.name})".strip()
    return {
        "id": str(uuid.uuid5(_IDS, model.id)),
        "source": 2 if model.id.startswith("@hf/") else 1,
        "name": model.id,
        "description": description,
        "task": _TASKS.get(manifest.task, {"id": "", "name": manifest.task, "description": ""}),
        "created_at": f"{created_at:%Y-%m-%d %H:%M:%S}.{created_at.microsecond // 1000:03d}",
        "tags": [],
        "properties": _properties(model, prices),
    }


def _properties(model: Model, prices: PriceBook) -> list[dict[str, Any]]:
    properties: list[dict[str, Any]] = [{"property_id": "context_window", "value": str(model.manifest.context_length)}]
    if model.price is not None:
        per_million = {
            "per M input tokens": model.price.input,
            "per M cached input tokens": model.price.cached_input,
            "per M output tokens": model.price.output,
        }
        value = [
            {"unit": unit, "price": _dollars_per_million(price, prices), "currency": "USD"}
            for unit, price in per_million.items()
            if price is not None
        ]
        properties.append({"property_id": "price", "value": value})
    return properties


def _dollars_per_million(micro_neurons_per_token: int, prices: PriceBook) -> Decimal:
    return Decimal(dollars(micro_neurons_per_token * 10**6 * prices.pico_dollars_per_micro_neuron))


def _task_names(task: str) -> tuple[str, ...]:
    known = _TASKS.get(task, {"id": task, "name": task})
    return task.lower(), known["name"].lower(), known["id"]
