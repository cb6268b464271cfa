"""What text encoders are called, and what can be said of one without its weights. It knows nothing about torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from edge.errors import WeightsError
from edge.weights.folder import HEAD_FILE, read_json

EncoderTask = Literal["text-embeddings", "text-classification"]


class Family(msgspec.Struct, frozen=True):
    """An architecture: `prefix` may stand before the names of its tensors."""

    prefix: str
    counts_padding: bool
    """Whether positions are counted from the one after that of padding, as fairseq does."""

    def first_position(self, config: dict[str, Any]) -> int:
        """The position of a text's first token."""
        padding = config.get("pad_token_id", 1)
        return (padding if type(padding) is int and padding >= 0 else 1) + 1 if self.counts_padding else 0


ENCODERS = {
    "bert": Family("bert", False),
    "roberta": Family("roberta", True),
    "xlm-roberta": Family("roberta", True),
    "distilbert": Family("distilbert", False),
}
"""By `model_type`."""


def encoder_task(folder: Path, config: dict[str, Any]) -> EncoderTask:
    """What the encoder in `folder` with that `config` is for."""
    is_classifying = is_classifier(config) or (folder / HEAD_FILE).is_file()
    return "text-classification" if is_classifying else "text-embeddings"


def is_encoder(path: Path) -> bool:
    """Whether there is an encoder in `path`."""
    return path.is_dir() and read_json(path / "config.json", dict[str, Any]).get("model_type") in ENCODERS


def is_classifier(config: dict[str, Any]) -> bool:
    """Whether a checkpoint with that `config` ends in a classifier."""
    classes = config.get("architectures")
    return isinstance(classes, list) and str(classes[:1]).endswith("ForSequenceClassification']")


def max_text_tokens(folder: Path, config: dict[str, Any]) -> int:
    """Tokens of a text that are read: what sentence-transformers was told, but not more than there are positions.

    Raises:
        WeightsError: a number is missing or impossible.
    """
    num_positions = config.get("max_position_embeddings")
    limit = 0
    if type(num_positions) is int:
        limit = num_positions - ENCODERS[str(config.get("model_type"))].first_position(config)
    settings_file = folder / "sentence_bert_config.json"
    settings = read_json(settings_file, dict[str, Any]) if settings_file.is_file() else {}
    asked = settings.get("max_seq_length")
    if type(asked) is int:
        limit = min(limit, asked)
    if not 2 < limit <= 1 << 20:  # room for more than the special tokens
        raise WeightsError(f"{folder / 'config.json'}: texts of at most {limit} tokens cannot be read")
    return limit
