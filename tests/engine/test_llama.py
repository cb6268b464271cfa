"""Logits against `transformers`, through the scheduler and the paged cache: the same 1e-4 for every way to run."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from edge.engine.attention import paged_attention_reference
from edge.engine.models import load_model
from edge.engine.pages import PageAllocator
from edge.engine.runner import PAGE_SIZE, ModelRunner
from edge.engine.scheduler import Chunk, Sequence
from edge.errors import WeightsError
from edge.weights.checkpoint import open_checkpoint

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "multi_query": {"num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
}


def expected_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """(T, V) logits of `transformers`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]


def make_runner(path: Path, num_pages: int = 64) -> ModelRunner:
    model = load_model(open_checkpoint(path), dtype=torch.float32, device=torch.device("cpu"))
    return ModelRunner(model, PageAllocator(num_pages, PAGE_SIZE), dtype=torch.float32, device=torch.device("cpu"))


def make_sequence(runner: ModelRunner, tokens: list[int], number: int = 0) -> Sequence:
    sequence = Sequence(number, list(tokens), len(tokens), credit=1)
    sequence.pages = runner.allocator.take(runner.allocator.pages_for(len(tokens)))
    return sequence


def step(runner: ModelRunner, *parts: tuple[Sequence, int]) -> torch.Tensor:
    """One step that computes the given numbers of tokens; the logits of those that are complete."""
    chunks = [Chunk(sequence, num_tokens) for sequence, num_tokens in parts]
    logits = runner.run(chunks)
    for chunk in chunks:
        chunk.sequence.num_computed_tokens += chunk.num_tokens
    return logits


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_prefill_and_decode_match_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny_models.save_folder(tmp_path, **changes)
    tokens = random_tokens(90, seed=1)
    expected = expected_logits(folder, tokens)
    runner = make_runner(folder)

    whole = make_sequence(runner, tokens)
    torch.testing.assert_close(step(runner, (whole, 90))[0], expected[-1], atol=TOLERANCE, rtol=0)

    # The same tokens again: a prompt of 70 of them, then one by one.
    growing = make_sequence(runner, tokens)
    growing.tokens = tokens[:70]
    assert step(runner, (growing, 70)).shape == (1, tiny_models.VOCAB_SIZE)
    for length in range(71, 91):
        growing.tokens = tokens[:length]
        torch.testing.assert_close(step(runner, (growing, 1))[0], expected[length - 1], atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    return expected_logits(folder, random_tokens(90, seed=2))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 33, 89])
def test_chunked_prefill_matches_transformers(folder: Path, expected: torch.Tensor, chunk_size: int) -> None:
    runner = make_runner(folder)
    sequence = make_sequence(runner, random_tokens(90, seed=2))
    while sequence.num_missing_tokens > 0:
        logits = step(runner, (sequence, min(chunk_size, sequence.num_missing_tokens)))
    torch.testing.assert_close(logits[0], expected[-1], atol=TOLERANCE, rtol=0)


def test_a_mixed_batch_matches_transformers(folder: Path) -> None:
    """Decodes of very different lengths, a prompt's last chunk and one that is not the last, in one step."""
    runner = make_runner(folder)
    lengths = [3, 200, 40, 75, 60]
    all_tokens = [random_tokens(length, seed=length) for length in lengths]
    sequences = [make_sequence(runner, tokens, i) for i, tokens in enumerate(all_tokens)]
    step(runner, *((sequence, sequence.num_tokens - 1) for sequence in sequences[:3]), (sequences[3], 20))
    logits = step(runner, *((s, 1) for s in sequences[:3]), (sequences[3], 55), (sequences[4], 30))
    assert logits.shape[0] == 4
    for row, tokens in zip(logits, all_tokens[:4], strict=True):
        torch.testing.assert_close(row, expected_logits(folder, tokens)[-1], atol=TOLERANCE, rtol=0)


def test_the_used_attention_equals_the_reference(folder: Path) -> None:
    tokens = [random_tokens(50, seed=5), random_tokens(20, seed=6), random_tokens(33, seed=7)]
    outputs = []
    for attention in (None, paged_attention_reference):
        runner = make_runner(folder)
        for layer in runner.model.layers:
            layer.attention = attention or layer.attention
        a, b, c = (make_sequence(runner, t, i) for i, t in enumerate(tokens))
        step(runner, (a, 49), (b, 19))
        outputs.append(step(runner, (a, 1), (b, 1), (c, 33)))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=0)


def test_a_gguf_file_and_a_folder_are_the_same_model(folder: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    runner = make_runner(tiny_models.save_gguf(tmp_path / "m.gguf"))
    sequence = make_sequence(runner, random_tokens(90, seed=2))
    torch.testing.assert_close(step(runner, (sequence, 90))[0], expected[-1], atol=TOLERANCE, rtol=0)


def test_a_qwen2_gguf_has_biases_and_rows_in_order(tmp_path: Path) -> None:
    changes = VARIANTS["qwen2"]
    expected = expected_logits(tiny_models.save_folder(tmp_path, **changes), random_tokens(30, seed=3))
    runner = make_runner(tiny_models.save_gguf(tmp_path / "m.gguf", arch="qwen2"))
    sequence = make_sequence(runner, random_tokens(30, seed=3))
    torch.testing.assert_close(step(runner, (sequence, 30))[0], expected[-1], atol=TOLERANCE, rtol=0)


def test_bfloat16_is_close(folder: Path, expected: torch.Tensor) -> None:
    model = load_model(open_checkpoint(folder), dtype=torch.bfloat16, device=torch.device("cpu"))
    runner = ModelRunner(model, PageAllocator(8, PAGE_SIZE), dtype=torch.bfloat16, device=torch.device("cpu"))
    logits = step(runner, (make_sequence(runner, random_tokens(90, seed=2)), 90))[0]
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected[-1], dim=0) > 0.999


def test_a_failed_sequence_leaves_no_nan_behind(folder: Path, expected: torch.Tensor) -> None:
    runner = make_runner(folder, num_pages=7)
    runner.cache.keys[0].fill_(torch.nan)
    runner.cache.values[1].fill_(torch.nan)
    runner.cache.clear(list(range(7)))
    sequence = make_sequence(runner, random_tokens(90, seed=2))
    torch.testing.assert_close(step(runner, (sequence, 90))[0], expected[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"architecture 'mamba' are not supported \(supported: llama, mistral, qwen2\)"),
        ({"num_hidden_layers": 4}, r"9 tensors are missing, for example layers\.3\."),
        ({"num_hidden_layers": 2}, r"tensor layers\.2\..* has no place|no place for"),
        ({"intermediate_size": 81}, r"has the shape \(48, 80\), not \(48, 81\)"),
        ({"tie_word_embeddings": True, "attention_bias": True}, r"12 tensors are missing"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps(tiny_models.CONFIG | changes))
    with pytest.raises(WeightsError, match=message):
        make_runner(broken)
