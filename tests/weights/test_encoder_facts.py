"""What the store gets to know of an encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_encoders
import torch
from safetensors.torch import save_file

from edge.errors import WeightsError
from edge.weights.encoder_facts import is_encoder
from edge.weights.facts import read_facts
from edge.weights.store import ModelStore


@pytest.mark.parametrize("family", tiny_encoders.FAMILIES)
def test_encoders_are_for_embeddings_and_classifiers_for_classification(tmp_path: Path, family: str) -> None:
    tiny_encoders.save(tmp_path / "encoder", family)
    facts = read_facts(tmp_path / "encoder")
    assert (facts.architecture, facts.task, facts.dimensions) == (family, "text-embeddings", 24)
    assert facts.context_length == (40 if family in ("bert", "distilbert") else 38 + (family == "roberta"))
    assert is_encoder(tmp_path / "encoder")
    tiny_encoders.save(tmp_path / "classifier", family, labels=("a", "b"))
    facts = read_facts(tmp_path / "classifier")
    assert (facts.task, facts.dimensions) == ("text-classification", None)


def test_a_head_makes_an_encoder_a_classifier(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path)
    without = read_facts(tmp_path).num_parameters
    save_file({"weight": torch.zeros(2, 24), "bias": torch.zeros(2)}, tmp_path / "classification_head.safetensors")
    facts = read_facts(tmp_path)
    assert facts.task == "text-classification"
    assert facts.num_parameters == without


def test_the_store_keeps_what_says_how_vectors_are_made(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path / "source")
    tiny_encoders.save_pooling(tmp_path / "source", mode="cls_token", max_tokens=20)
    store = ModelStore(tmp_path / "models")
    manifest = store.add(str(tmp_path / "source"), "tiny")
    assert (manifest.task, manifest.context_length, manifest.dimensions) == ("text-embeddings", 20, 24)
    assert (store.path("tiny") / "1_Pooling" / "config.json").is_file()
    assert (store.path("tiny") / "modules.json").is_file()


def test_texts_without_room_for_a_word_are_refused(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path)
    tiny_encoders.save_pooling(tmp_path, max_tokens=2)
    with pytest.raises(WeightsError, match="texts of at most 2 tokens cannot be read"):
        read_facts(tmp_path)
