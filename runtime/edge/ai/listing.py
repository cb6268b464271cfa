"""Models as callers find them: search with pages and filters, tasks, authors, and each model's properties.

Formats: Workers AI's `models/search` (also `format=openrouter`, OpenRouter's list of a provider's models),
`tasks/search` and `authors/search`. This module knows nothing about HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from decimal import Decimal
from typing import Any

import msgspec

from edge.ai.catalogue import TASKS, TEXT_EMBEDDINGS, TEXT_GENERATION, Catalogue, Model, stable_id
from edge.ai.fields import Boolean, Choice, Fields, Integer, String, Table
from edge.billing.prices import PriceBook, dollars
from edge.errors import InvalidInput

PAGE: Table = {
    "page": Integer("Which page, from 1; one past the end is empty.", default=1, low=1, high=10**9),
    "per_page": Integer("How many a page has at most.", default=100, low=1, high=1000),
}
NAMES: Table = {"search": String("A part of the name."), **PAGE}
"""The parameters of `tasks/search` and `authors/search`."""
MODELS: Table = {
    "search": String("A part of the name, such as `llama`."),
    "author": String("The author, as in `@cf/AUTHOR/NAME`; `local` for models under a name of their own."),
    "task": String("The task: its name, its id, or its name in lower case with dashes."),
    "source": Integer("1 for `@cf` models and installed ones, 2 for `@hf` ones.", low=1, high=2),
    "hide_experimental": Boolean("Has no effect: no model here is experimental."),
    "include_deprecated": Boolean("Has no effect: no model here is deprecated."),
    "format": Choice("The shape of the items.", default="default", values=("default", "openrouter")),
    **PAGE,
}
"""The parameters of `models/search`."""
_BINDING_PER_PAGE = 1000
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "logprobs", "top_logprobs"),
)

_encoder = msgspec.json.Encoder(decimal_format="number")


def search_models(catalogue: Catalogue, params: Mapping[str, Any]) -> dict[str, Any]:
    """A page of the models that `params` choose: `result` and `result_info`; in OpenRouter's format also `data`.

    Prices are exact `Decimal`s, to be sent as numbers. Values of `params` may be texts, as in a query.

    Raises:
        InvalidInput: a parameter is wrong.
    """
    fields = parameters(params, MODELS)
    is_openrouter = fields["format"] == "openrouter"
    filters = {key: fields[key] or "" for key in ("search", "author", "task")}
    fields.raise_problems()
    found = catalogue.models(**filters, source=fields["source"])
    shown, info = _page(found, fields)
    item = openrouter_item if is_openrouter else catalogue_item
    items = [item(model, catalogue.prices) for model in shown]
    return {"result": items, "result_info": info} | ({"data": items} if is_openrouter else {})


def search_tasks(catalogue: Catalogue, params: Mapping[str, Any]) -> dict[str, Any]:
    """A page of the tasks that there are models for.

    Raises:
        InvalidInput: a parameter is wrong.
    """
    slugs = {model.manifest.task for model in catalogue.models()}
    return _named([msgspec.to_builtins(task) for slug, task in TASKS.items() if slug in slugs], params)


def search_authors(catalogue: Catalogue, params: Mapping[str, Any]) -> dict[str, Any]:
    """A page of the authors that there are models of.

    Raises:
        InvalidInput: a parameter is wrong.
    """
    names = sorted({model.author for model in catalogue.models()})
    return _named([{"id": stable_id(f"author {name}"), "name": name} for name in names], params)


def list_models(catalogue: Catalogue, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `env.AI.models(params)` gives: the items of a page, as `search_models` has them.

    Raises:
        InvalidInput: a parameter is wrong.
    """
    try:
        page = search_models(catalogue, {"per_page": _BINDING_PER_PAGE, **params})
    except InvalidInput as error:
        raise InvalidInput(f"env.AI.models(): {error.message}", param=error.param) from error
    return msgspec.json.decode(_encoder.encode(page["result"]), type=list[dict[str, Any]])  # prices as numbers


def catalogue_item(model: Model, prices: PriceBook) -> dict[str, Any]:
    """`model` as `models/search` shows it. Dollars are exact `Decimal`s, to be sent as numbers."""
    manifest = model.manifest
    created_at = manifest.created_at.astimezone(UTC)
    return {
        "id": stable_id(model.id),
        "source": model.source,
        "name": model.id,
        "description": _description(model),
        "task": msgspec.to_builtins(TASKS[manifest.task]),
        "created_at": f"{created_at:%Y-%m-%d %H:%M:%S}.{created_at.microsecond // 1000:03d}",
        "tags": [],
        "properties": _properties(model, prices),
    }


def openrouter_item(model: Model, prices: PriceBook) -> dict[str, Any]:
    """`model` as OpenRouter lists models. Prices are dollars per token, exact decimal strings."""
    is_text = model.manifest.task == TEXT_GENERATION
    is_embeddings = model.manifest.task == TEXT_EMBEDDINGS
    item: dict[str, Any] = {
        "id": model.id,
        "name": model.id.rpartition("/")[2],
        "created": int(model.manifest.created_at.timestamp()),
        "description": _description(model),
        "context_length": model.manifest.context_length,
        "input_modalities": ["text"],
        "output_modalities": ["embeddings"] if is_embeddings else ["text"],
        "supported_features": ["tools", "json_mode", "structured_outputs"] if is_text else [],
        "supported_sampling_parameters": list(_SAMPLING) if is_text else [],
    }
    if is_text:
        item["max_output_length"] = model.manifest.context_length
    if model.price is not None:
        per_token = {
            "prompt": model.price.input,
            "completion": model.price.output,
            "input_cache_read": model.price.cached_input,
        }
        item["pricing"] = {
            key: dollars(price * prices.pico_dollars_per_micro_neuron)
            for key, price in per_token.items()
            if price is not None
        }
    return item


def parameters(params: Mapping[str, Any], table: Table) -> Fields:
    """The parameters in `params`, where texts stand for what they say, as they have to in a query."""
    return Fields({key: _parsed(value, table[key]) for key, value in params.items() if key in table}, "params", table)


def _parsed(value: Any, field: Any) -> Any:
    if value == "":
        return None
    if isinstance(field, Boolean):
        return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), value)
    if isinstance(field, Integer) and isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:20])
    return value


def _page(items: Sequence[Any], fields: Fields) -> tuple[Sequence[Any], dict[str, int]]:
    """The items of the page that is asked for, and the `result_info` about it."""
    page, per_page = fields["page"], fields["per_page"]
    shown = items[(page - 1) * per_page : page * per_page]
    return shown, page_info(page, per_page, len(shown), len(items))


def page_info(page: int, per_page: int, num_shown: int, num_all: int) -> dict[str, int]:
    """The `result_info` of a page with `num_shown` of `num_all` items."""
    return {
        "page": page,
        "per_page": per_page,
        "count": num_shown,
        "total_count": num_all,
        "total_pages": -(-num_all // per_page),
    }


def _named(items: list[dict[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    fields = parameters(params, NAMES)
    part = (fields["search"] or "").lower()
    fields.raise_problems()
    shown, info = _page([item for item in items if part in item["name"].lower()], fields)
    return {"result": shown, "result_info": info}


def _description(model: Model) -> str:
    manifest = model.manifest
    if model.id == manifest.name:
        return manifest.description
    return f"{manifest.description} (served here by {manifest.name})".strip()


def _properties(model: Model, prices: PriceBook) -> list[dict[str, Any]]:
    manifest = model.manifest
    values: dict[str, Any] = {"context_window": str(manifest.context_length)}
    if model.price is not None:
        values["price"] = _prices(model, prices)
    if manifest.task == TEXT_GENERATION:
        values |= {"max_output_tokens": str(manifest.context_length), "function_calling": "true", "lora": "true"}
    else:
        values["max_input_tokens"] = str(manifest.context_length)
        if manifest.dimensions is not None:
            values["output_dimensions"] = str(manifest.dimensions)
    return [{"property_id": id, "value": value} for id, value in values.items()]


def _prices(model: Model, prices: PriceBook) -> list[dict[str, Any]]:
    assert model.price is not None, "only models that have a price"
    per_million = {"per M input tokens": model.price.input}
    if model.price.cached_input is not None:
        per_million["per M cached input tokens"] = model.price.cached_input
    if model.manifest.task == TEXT_GENERATION:
        per_million["per M output tokens"] = model.price.output
    return [
        {"unit": unit, "price": _dollars_per_million(price, prices), "currency": "USD"}
        for unit, price in per_million.items()
    ]


def _dollars_per_million(micro_neurons_per_token: int, prices: PriceBook) -> Decimal:
    return Decimal(dollars(micro_neurons_per_token * 10**6 * prices.pico_dollars_per_micro_neuron))
