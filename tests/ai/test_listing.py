from decimal import Decimal
from typing import Any

import msgspec
import pytest
from doubles import MODEL, STAND_IN, catalogue, manifest

from edge.ai.catalogue import TASKS, TEXT_CLASSIFICATION, TEXT_EMBEDDINGS, Catalogue
from edge.ai.listing import catalogue_item, list_models, openrouter_item, search_authors, search_models, search_tasks
from edge.billing.prices import load_prices
from edge.errors import InvalidInput

PRICES = load_prices()
MIXED = Catalogue(
    [
        manifest(),
        manifest("minilm", task=TEXT_EMBEDDINGS, context_length=512, dimensions=384),
        manifest("draw", task="text-to-image"),
    ],
    {STAND_IN: MODEL, "@hf/baai/minilm": "minilm", "@cf/x/draw": "draw"},
    PRICES,
)


def names(**params: Any) -> list[str]:
    return [item["name"] for item in search_models(MIXED, params)["result"]]


def test_search_chooses_by_name_author_task_and_source() -> None:
    assert names() == [STAND_IN, "@hf/baai/minilm", "minilm", MODEL]
    assert names(search="LLAMA-3.2") == [STAND_IN]
    assert names(author="Meta") == [STAND_IN]
    assert names(author="local") == ["minilm", MODEL]
    for task in ("Text Embeddings", "text-embeddings", "0137cdcf-162a-4108-94f2-1ca59e8c65ee"):
        assert names(task=task) == ["@hf/baai/minilm", "minilm"]
    assert names(task="Text-to-Image") == names(task="nothing") == []
    assert names(source="2") == ["@hf/baai/minilm"]
    assert names(source=1, search="", hide_experimental="true", include_deprecated="1", unknown="x") == names(source=1)


def test_pages_end_with_empty_ones() -> None:
    assert [names(page=page, per_page="3") for page in (1, 2, 3, 10**9)] == [names()[:3], names()[3:], [], []]
    assert search_models(MIXED, {"page": "2", "per_page": "3"})["result_info"] == {
        "page": 2,
        "per_page": 3,
        "count": 1,
        "total_count": 4,
        "total_pages": 2,
    }


@pytest.mark.parametrize(
    "params",
    [
        *({"page": value} for value in ("0", "x", "-1", "²", "1" * 100, 0)),
        {"per_page": "1001"},
        {"source": "3"},
        {"format": "xml"},
        {"hide_experimental": "maybe"},
        {"search": 1},
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any]) -> None:
    (key,) = params
    with pytest.raises(InvalidInput, match=rf"\$\.{key} is "):
        search_models(MIXED, params)


def test_tasks_and_authors_are_those_of_the_models_that_can_be_called() -> None:
    tasks = search_tasks(MIXED, {})
    assert [task["name"] for task in tasks["result"]] == ["Text Generation", "Text Embeddings"]
    assert tasks["result"][0]["id"] == "c329a1f9-323d-4e91-b2aa-582dd4188d34"
    assert search_tasks(MIXED, {"page": "2"})["result"] == []
    authors = search_authors(MIXED, {"per_page": "2"})
    assert [author["name"] for author in authors["result"]] == ["baai", "local"]
    assert authors["result_info"]["total_pages"] == 2
    assert [author["name"] for author in search_authors(MIXED, {"search": "ME"})["result"]] == ["meta"]
    assert len({task.id for task in TASKS.values()}) == len(TASKS)


def test_item_has_the_shape_of_the_published_catalogue() -> None:
    models = catalogue()
    item = catalogue_item(models.resolve(STAND_IN), models.prices)
    assert item == {
        "id": item["id"],
        "source": 1,
        "name": STAND_IN,
        "description": "SmolLM2 135M Instruct (served here by smollm2-135m-instruct)",
        "task": {
            "id": "c329a1f9-323d-4e91-b2aa-582dd4188d34",
            "name": "Text Generation",
            "description": "Family of generative text models, such as large language models (LLM).",
        },
        "created_at": "2026-11-30 12:00:00.123",
        "tags": [],
        "properties": [
            {"property_id": "context_window", "value": "8192"},
            {
                "property_id": "price",
                "value": [
                    {"unit": "per M input tokens", "price": Decimal("0.027027"), "currency": "USD"},
                    {"unit": "per M output tokens", "price": Decimal("0.200772"), "currency": "USD"},
                ],
            },
            {"property_id": "max_output_tokens", "value": "8192"},
            {"property_id": "function_calling", "value": "true"},
            {"property_id": "lora", "value": "true"},
        ],
    }
    assert item["id"] != catalogue_item(models.resolve(MODEL), models.prices)["id"]


def test_properties_of_models_that_give_no_text() -> None:
    item = catalogue_item(MIXED.resolve("minilm", TEXT_EMBEDDINGS, TEXT_CLASSIFICATION), PRICES)
    assert item["properties"] == [
        {"property_id": "context_window", "value": "512"},
        {"property_id": "max_input_tokens", "value": "512"},
        {"property_id": "output_dimensions", "value": "384"},
    ]


def test_the_format_of_openrouter() -> None:
    answer = search_models(MIXED, {"format": "openrouter", "search": "llama"})
    (item,) = answer["result"]
    assert answer["data"] == answer["result"]
    assert item == openrouter_item(MIXED.resolve(STAND_IN), PRICES)
    assert item["pricing"] == {"prompt": "0.000000027027", "completion": "0.000000200772"}
    assert (item["id"], item["name"], item["context_length"]) == (STAND_IN, "llama-3.2-1b-instruct", 8192)
    assert (item["created"], item["max_output_length"], item["output_modalities"]) == (1796040000, 8192, ["text"])
    assert "pricing" not in openrouter_item(MIXED.resolve("minilm"), PRICES)


@pytest.mark.parametrize(
    ("task", "modalities"),
    [("text-generation", ["text"]), ("text-embeddings", ["embeddings"]), ("text-classification", ["text"])],
)
def test_what_openrouter_is_told_that_comes_out(task: str, modalities: list[str]) -> None:
    models = Catalogue([manifest("mine", task=task)], {}, PRICES)
    (item,) = search_models(models, {"format": "openrouter"})["data"]
    assert (item["input_modalities"], item["output_modalities"]) == (["text"], modalities)


def test_models_of_the_binding() -> None:
    every = list_models(catalogue(), {})
    assert {MODEL, STAND_IN} <= {each["name"] for each in every}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(every)) == every  # it can travel to a handler
    prices = [entry for each in every for entry in each["properties"] if entry["property_id"] == "price"]
    assert all(isinstance(unit["price"], float | int) for price in prices for unit in price["value"])
    assert [each["name"] for each in list_models(catalogue(), {"search": STAND_IN})] == [STAND_IN]
    assert list_models(catalogue(), {"task": "Text-to-Image"}) == []
    assert list_models(catalogue(), {"page": 2, "per_page": 1}) == every[1:2]


@pytest.mark.parametrize("params", [{"page": 0}, {"per_page": "many"}, {"search": 1}, {"per_page": 10**9}])
def test_wrong_parameters_of_models(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"env\.AI\.models"):
        list_models(catalogue(), params)
