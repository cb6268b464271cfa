"""Encoders against `transformers`, on tiny random models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_encoders
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from edge.engine.models.encoder import MAX_PADDING, Encoder, similar
from edge.errors import WeightsError
from edge.weights.encoder_checkpoint import EncoderCheckpoint

CPU = torch.device("cpu")
TEXTS = [list(range(4, 4 + length)) for length in (37, 30, 12, 11, 11, 10, 3, 1)]
"""Of other lengths each, some alike, so that there are groups with padding, without, and of a single text."""


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    return Encoder(EncoderCheckpoint(folder), dtype=dtype, device=CPU)


def encode(encoder: Encoder, texts: Sequence[Sequence[int]], *poolings: str) -> torch.Tensor:
    """The rows of `texts`; a single one of `poolings`, by default the mean, is for all of them."""
    work = encoder.encode(texts, poolings if len(poolings) > 1 else list(poolings or ["mean"]) * len(texts))
    num_layers = 0
    while True:
        try:
            next(work)
            num_layers += 1
        except StopIteration as end:
            assert num_layers == encoder.config.num_layers
            return end.value


@torch.no_grad()
def expected(model: PreTrainedModel, text: list[int], pooling: str) -> torch.Tensor:
    hidden = model(torch.tensor([text])).last_hidden_state[0]  # (L, C)
    return F.normalize(hidden[0] if pooling == "cls" else hidden.mean(0), dim=0)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", tiny_encoders.FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    model = tiny_encoders.save(tmp_path, family)
    rows = encode(load(tmp_path), TEXTS, pooling)
    for row, text in zip(rows, TEXTS, strict=True):
        torch.testing.assert_close(row, expected(model, text, pooling), atol=1e-5, rtol=0)
    assert rows.std(0).max() > 0.05, "the texts must differ, or nothing is shown"


@pytest.mark.parametrize("labels", [("bad", "good"), ("a", "b", "c"), ("relevant",)])
@pytest.mark.parametrize("family", tiny_encoders.FAMILIES)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, labels: tuple[str, ...]) -> None:
    model = tiny_encoders.save(tmp_path, family, labels=labels)
    encoder = load(tmp_path)
    assert encoder.config.labels == labels
    rows = encode(encoder, TEXTS)
    for row, text in zip(rows, TEXTS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0]
        scores = logits.sigmoid() if len(labels) == 1 else logits.softmax(0)
        torch.testing.assert_close(row, scores, atol=1e-5, rtol=0)


def test_a_head_over_the_vectors_is_a_linear_classifier(tmp_path: Path) -> None:
    model = tiny_encoders.save(tmp_path, "bert", id2label={0: "NEGATIVE", 1: "POSITIVE"})
    weight, bias = torch.randn(2, 24), torch.randn(2)
    save_file({"weight": weight, "bias": bias}, tmp_path / "classification_head.safetensors")
    encoder = load(tmp_path)
    assert encoder.config.labels == ("NEGATIVE", "POSITIVE")
    for row, text in zip(encode(encoder, TEXTS), TEXTS, strict=True):
        scores = (weight @ expected(model, text, "mean") + bias).softmax(0)
        torch.testing.assert_close(row, scores, atol=1e-5, rtol=0)


def test_bfloat16_weights_give_nearly_the_same_vectors(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path)
    exact, rough = encode(load(tmp_path), TEXTS), encode(load(tmp_path, torch.bfloat16), TEXTS)
    assert rough.dtype == torch.float32
    assert F.cosine_similarity(exact, rough).min() > 0.999


def test_each_text_can_have_its_own_pooling(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path)
    encoder = load(tmp_path)
    both = encode(encoder, [TEXTS[0], TEXTS[0]], "mean", "cls")
    torch.testing.assert_close(both[:1], encode(encoder, TEXTS[:1], "mean"), atol=1e-6, rtol=0)
    torch.testing.assert_close(both[1:], encode(encoder, TEXTS[:1], "cls"), atol=1e-6, rtol=0)


def test_what_sentence_transformers_says_is_followed(tmp_path: Path) -> None:
    model = tiny_encoders.save(tmp_path)
    tiny_encoders.save_pooling(tmp_path, mode="cls_token", normalizes=False, max_tokens=20)
    encoder = load(tmp_path)
    assert (encoder.config.pooling, encoder.config.max_tokens) == ("cls", 20)
    with torch.no_grad():
        raw = model(torch.tensor([TEXTS[2]])).last_hidden_state[0, 0]
    torch.testing.assert_close(encode(encoder, TEXTS[2:3], "cls")[0], raw, atol=1e-5, rtol=0)


def test_roberta_has_two_positions_fewer_than_its_table(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path, "xlm-roberta")
    assert load(tmp_path).config.max_tokens == 38


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position_embedding_type": "relative_key"}, "relative position embeddings are not supported"),
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not supported"),
        ({"num_attention_heads": 5}, "5 heads cannot share a width of 24"),
        ({"num_hidden_layers": 4}, "tensor 'layers.3.q.weight' is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"hidden_size": 48}, r"is of shape \(\d+, 24\), not \(\d+, 48\)"),
        ({"max_position_embeddings": 2}, "texts of at most 2 tokens cannot be read"),
        ({"model_type": "gpt2"}, "'gpt2' is no encoder"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    tiny_encoders.save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(WeightsError, match=reason):
        load(tmp_path)


def test_other_ways_of_pooling_are_refused(tmp_path: Path) -> None:
    tiny_encoders.save(tmp_path)
    tiny_encoders.save_pooling(tmp_path, mode="max_tokens")
    with pytest.raises(WeightsError, match="pooling_mode_max_tokens is not supported"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tensors: tensors | {"extra.weight": torch.zeros(1)}, "'extra.weight' has no place in a bert encoder"),
        (
            lambda tensors: {name: values / 0 if "query" in name else values for name, values in tensors.items()},
            "values that are no finite numbers",
        ),
        (
            lambda tensors: {name: values.int() if "query" in name else values for name, values in tensors.items()},
            "stored as torch.int32",
        ),
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, damage, reason: str) -> None:
    tiny_encoders.save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(damage(load_file(file)), file)
    with pytest.raises(WeightsError, match=reason):
        load(tmp_path)


@given(st.lists(st.integers(1, 600), max_size=80).map(lambda lengths: sorted(lengths, reverse=True)))
def test_groups_hold_every_text_once_and_little_padding(lengths: list[int]) -> None:
    groups = similar(lengths)
    assert [i for start, end in groups for i in range(start, end)] == list(range(len(lengths)))
    for start, end in groups:
        num_places = lengths[start] * (end - start)
        assert sum(lengths[start:end]) >= (1 - MAX_PADDING) * num_places - 1e-6
