"""The model for embeddings in float32 against the golden values: what must never change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from edge.engine.encoder_tokenizer import EncoderTokenizer
from edge.engine.models.encoder import Encoder
from edge.weights.encoder_checkpoint import EncoderCheckpoint

FOLDER = Path(__file__).parent.parent / "golden"
GOLDEN = json.loads((FOLDER / "all_minilm_l6_v2.json").read_text())
SENTIMENT = json.loads((FOLDER / "sentiment_minilm_head.json").read_text())

pytestmark = pytest.mark.model


def encode(folder: Path, texts: list[str], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows in the order of `texts`."""
    checkpoint = EncoderCheckpoint(folder)
    encoder = Encoder(checkpoint, dtype=dtype, device=torch.device("cpu"))
    tokenizer = EncoderTokenizer(checkpoint.tokenizer_json(), encoder.config.max_tokens)
    tokens = [tokenizer.encode(text)[0] for text in texts]
    order = sorted(range(len(texts)), key=lambda place: -len(tokens[place]))
    work = encoder.encode([tokens[place] for place in order], [encoder.config.pooling] * len(texts))
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value[torch.tensor(order).argsort()]


def test_tokens_and_vectors(encoder_path: Path) -> None:
    checkpoint = EncoderCheckpoint(encoder_path)
    config = checkpoint.config()
    assert (config.pooling, config.normalize, config.max_tokens, config.labels) == ("mean", True, 256, ())
    tokenizer = EncoderTokenizer(checkpoint.tokenizer_json(), 256)
    assert [tokenizer.encode(text)[0] for text in GOLDEN["sentences"]] == GOLDEN["input_ids"]
    rows = encode(encoder_path, GOLDEN["sentences"])
    torch.testing.assert_close(rows[:, :8], torch.tensor(GOLDEN["embedding_first8"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.sum(1), torch.tensor(GOLDEN["embedding_sum"]), atol=1e-4, rtol=0)
    torch.testing.assert_close(rows @ rows.T, torch.tensor(GOLDEN["cosine_matrix"]), atol=1e-5, rtol=0)


def test_bfloat16_is_close(encoder_path: Path) -> None:
    exact = encode(encoder_path, GOLDEN["sentences"])
    assert F.cosine_similarity(exact, encode(encoder_path, GOLDEN["sentences"], torch.bfloat16)).min() > 0.999


def test_a_sentiment_head(encoder_path: Path, tmp_path: Path) -> None:
    folder = save_sentiment(encoder_path, tmp_path / "sentiment")
    rows = encode(folder, [case["text"] for case in SENTIMENT["cases"]])
    expected = torch.tensor([case["probs_neg_pos"] for case in SENTIMENT["cases"]])
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def save_sentiment(encoder: Path, folder: Path) -> Path:
    """A folder with the encoder and a head over its vectors."""
    shutil.copytree(encoder, folder)
    shutil.copyfile(FOLDER / "sentiment_head_minilm_linear.safetensors", folder / "classification_head.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
