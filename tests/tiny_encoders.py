"""Tiny text encoders with random weights for tests, saved by `transformers`, which is what they are compared with."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "good", "bad", "##s", ".", *string.ascii_lowercase]
WORDS += [f"##{letter}" for letter in string.ascii_lowercase if letter != "s"]
_SHAPE = {
    "vocab_size": len(WORDS) + 3,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_DISTILBERT = {"vocab_size": len(WORDS) + 3, "dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 40}
_FAMILIES: dict[str, tuple[type, dict[str, Any], type, type]] = {
    "bert": (BertConfig, _SHAPE, BertModel, BertForSequenceClassification),
    "roberta": (RobertaConfig, {**_SHAPE, "type_vocab_size": 1}, RobertaModel, RobertaForSequenceClassification),
    "xlm-roberta": (
        XLMRobertaConfig,
        {**_SHAPE, "pad_token_id": 1, "type_vocab_size": 1},
        XLMRobertaModel,
        XLMRobertaForSequenceClassification,
    ),
    "distilbert": (
        DistilBertConfig,
        {**_DISTILBERT, "max_position_embeddings": 40, "pad_token_id": 0},
        DistilBertModel,
        DistilBertForSequenceClassification,
    ),
}
FAMILIES = tuple(_FAMILIES)


def save(folder: Path, family: str = "bert", *, labels: tuple[str, ...] = (), **changes: Any) -> PreTrainedModel:
    """Save a random encoder, or with `labels` a classifier, and its tokenizer in `folder`; returns the original."""
    config_type, shape, encoder, classifier = _FAMILIES[family]
    torch.manual_seed(len(family))
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    config = config_type(**(shape | changes | (names if labels else {})))
    model = (classifier if labels else encoder)(config).eval()
    with torch.no_grad():  # as they are initialised, all texts are nearly alike
        for name, weight in model.named_parameters():
            if "LayerNorm" not in name and "layer_norm" not in name:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(7)  # files say so, of other limits than the model's
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))


def save_pooling(folder: Path, *, mode: str = "mean_tokens", normalizes: bool = True, max_tokens: int = 20) -> None:
    """What sentence-transformers writes beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
