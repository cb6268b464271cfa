"""Logits against `transformers`, through the paged cache: the same 1e-4 for every family and every way to run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from helpers import mostly_slow

import edge.engine.kernels.linear as native_linear
from edge.config import ModelOptions
from edge.engine.attention import paged_attention_reference
from edge.engine.kernels import Kernels
from edge.engine.kv_cache import KvCache
from edge.engine.layers import QuantizedLinear
from edge.engine.models import load_model
from edge.engine.models.decoder import Decoder
from edge.engine.step import build_step
from edge.weights.checkpoint import open_checkpoint

TOLERANCE = 1e-4
PAGE_SIZE = 16
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
}
GEMMA3 = tiny_models.FAMILIES["gemma3"]
QWEN2 = tiny_models.FAMILIES["qwen2"]
VARIANTS: dict[str, dict[str, Any]] = tiny_models.FAMILIES | {
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "multi_query": {"num_key_value_heads": 1},
    "mistral_without_window": tiny_models.FAMILIES["mistral"] | {"sliding_window": None},
    "mistral_long_window": tiny_models.FAMILIES["mistral"] | {"sliding_window": 61},
    "qwen2_with_windows": QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "gemma2_listed_layers": tiny_models.FAMILIES["gemma2"]
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 33},
    "gemma3_new_ropes": {k: v for k, v in GEMMA3.items() if not k.startswith("rope")} | {"rope_parameters": ROPES},
}


@dataclass
class Text:
    """A sequence and, as it has only one at a time, its chunk."""

    tokens: list[int]
    pages: list[int]
    num_computed_tokens: int = 0
    num_tokens: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def sequence(self) -> Text:
        return self


class Run:
    """A model with a cache, run step by step."""

    def __init__(self, path: Path, *, kv: str = "float32", num_pages: int = 64, **options: Any) -> None:
        dtype = options.pop("dtype", torch.float32)
        kernels = options.pop("kernels", None)
        self.model: Decoder = load_model(
            open_checkpoint(path), options=ModelOptions(kv=kv, **options), dtype=dtype, device=CPU, kernels=kernels
        )
        config = self.model.config
        self.cache = KvCache(
            kv,
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=CPU,
        )
        self._free = list(range(num_pages))

    def text(self, tokens: list[int]) -> Text:
        """A new sequence, with pages."""
        num_pages = -(-len(tokens) // PAGE_SIZE)
        pages, self._free = self._free[-num_pages:], self._free[:-num_pages]
        return Text(tokens, pages)

    @torch.inference_mode()
    def step(self, *parts: tuple[Text, int]) -> torch.Tensor:
        """Compute the next tokens of each text; the logits (T, V) of all of them."""
        for text, num_tokens in parts:
            text.num_tokens = num_tokens
        hidden = self.model(build_step([text for text, _ in parts], PAGE_SIZE, CPU), self.cache)
        for text, num_tokens in parts:
            text.num_computed_tokens += num_tokens
        return self.model.logits(hidden)


WIDE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
"""What to change of a model so that its heads have native attention in every KV format."""


def expected_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """(T, V) logits of `transformers`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_prefill_and_decode_match_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny_models.save_folder(tmp_path, **changes)
    tokens = random_tokens(90, seed=1)
    expected = expected_logits(folder, tokens)
    assert expected.std() > 0.5  # random weights can make logits that say nothing
    run = Run(folder)
    assert_same(run.step((run.text(tokens), 90)), expected)
    growing = run.text(tokens)
    assert_same(run.step((growing, 70)), expected[:70])
    for position in range(70, 90):
        assert_same(run.step((growing, 1))[0], expected[position])


@pytest.mark.parametrize("family", list(tiny_models.FAMILIES))
@pytest.mark.parametrize("chunk_size", mostly_slow([7, 33, 1, 16, 89], 2))
def test_chunked_prefill_matches_transformers(tmp_path: Path, family: str, chunk_size: int) -> None:
    folder = tiny_models.save_folder(tmp_path, **tiny_models.FAMILIES[family])
    tokens = random_tokens(90, seed=2)
    run = Run(folder)
    text = run.text(tokens)
    logits = [run.step((text, min(chunk_size, 90 - start))) for start in range(0, 90, chunk_size)]
    assert_same(torch.cat(logits), expected_logits(folder, tokens))


@pytest.mark.parametrize("family", list(tiny_models.FAMILIES))
def test_a_mixed_batch_matches_transformers(tmp_path: Path, family: str) -> None:
    """Decodes of very different lengths, a prompt's last chunk and one that is not the last, in one step."""
    folder = tiny_models.save_folder(tmp_path, **tiny_models.FAMILIES[family])
    all_tokens = [random_tokens(length, seed=length) for length in (3, 200, 40, 75, 60)]
    run = Run(folder)
    texts = [run.text(tokens) for tokens in all_tokens]
    run.step(*((text, len(text.tokens) - 1) for text in texts[:3]), (texts[3], 20))
    logits = run.step(*((text, 1) for text in texts[:3]), (texts[3], 55), (texts[4], 30))
    rows = [0, 1, 2, 3 + 54]
    for row, tokens in zip(rows, all_tokens[:4], strict=True):
        assert_same(logits[row], expected_logits(folder, tokens)[-1])
    assert_same(logits[-30:], expected_logits(folder, all_tokens[4])[:30])


@pytest.mark.parametrize("family", list(tiny_models.FAMILIES))
def test_the_used_attention_equals_the_reference(tmp_path: Path, family: str) -> None:
    folder = tiny_models.save_folder(tmp_path, **tiny_models.FAMILIES[family])
    tokens = [random_tokens(50, seed=5), random_tokens(20, seed=6), random_tokens(33, seed=7)]
    outputs = []
    for attention in (None, paged_attention_reference):
        run = Run(folder)
        for layer in run.model.layers:
            layer.attention = attention or layer.attention
        a, b, c = map(run.text, tokens)
        run.step((a, 49), (b, 19))
        outputs.append(run.step((a, 1), (b, 1), (c, 33)))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


GGUF = {
    "llama": {},
    "qwen2": QWEN2,
    "qwen3": tiny_models.FAMILIES["qwen3"],
    "gemma2": tiny_models.FAMILIES["gemma2"] | {"query_pre_attn_scalar": 8},
    "gemma3": GEMMA3 | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 6, "num_hidden_layers": 7},
}


@pytest.mark.parametrize(("arch", "changes"), GGUF.items(), ids=GGUF)
def test_a_gguf_file_and_a_folder_are_the_same_model(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    tokens = random_tokens(60, seed=3)
    expected = expected_logits(tiny_models.save_folder(tmp_path / "m", **changes), tokens)
    run = Run(tiny_models.save_gguf(tmp_path / "m.gguf", arch=arch, **changes))
    assert_same(run.step((run.text(tokens), 60)), expected)


@pytest.mark.parametrize("family", list(tiny_models.FAMILIES))
def test_bfloat16_is_close(tmp_path: Path, family: str) -> None:
    folder = tiny_models.save_folder(tmp_path, **tiny_models.FAMILIES[family])
    tokens = random_tokens(90, seed=2)
    run = Run(folder, kv="bfloat16", dtype=torch.bfloat16, weights="bfloat16")
    assert run.model.weights_description == "bfloat16"
    logits = run.step((run.text(tokens), 90))
    assert logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(logits, expected_logits(folder, tokens), dim=1)
    assert similarity.min() > 0.99


def test_a_failed_sequence_leaves_no_nan_behind(tmp_path: Path) -> None:
    folder = tiny_models.save_folder(tmp_path)
    tokens = random_tokens(90, seed=2)
    run = Run(folder, num_pages=6)
    run.cache.keys[0].fill_(torch.nan)
    run.cache.values[1].fill_(torch.nan)
    run.cache.clear(list(range(6)))
    assert_same(run.step((run.text(tokens), 90)), expected_logits(folder, tokens))


def test_no_rows_give_no_logits(tmp_path: Path) -> None:
    run = Run(tiny_models.save_folder(tmp_path))
    assert run.model.logits(torch.empty(0, 48)).shape == (0, tiny_models.VOCAB_SIZE)


@pytest.mark.parametrize("family", mostly_slow(tiny_models.FAMILIES, 2))
def test_native_kernels_differ_from_torch_by_the_rounding_of_their_inputs(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = tiny_models.save_folder(tmp_path, **tiny_models.FAMILIES[family] | WIDE)
    tokens = random_tokens(90, seed=2)
    run = Run(folder, kernels=kernels, weights="int4")
    assert (run.model.weights_description, run.model.is_row_independent) == ("int4+int8", True)
    got = run.step((run.text(tokens), 90))
    monkeypatch.setattr(
        native_linear, "NativeLinear", lambda parts, bias, kernels: QuantizedLinear(parts, bias, torch.float32)
    )
    reference = Run(folder, kernels=kernels, weights="int4")
    for layer in reference.model.layers:
        layer.attention = paged_attention_reference
    expected = reference.step((reference.text(tokens), 90))
    similarity = torch.nn.functional.cosine_similarity(got, expected, dim=1)
    assert similarity.min() > 0.995
    assert similarity.mean() > 0.9995


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", mostly_slow(tiny_models.FAMILIES))
def test_native_kernels_give_the_same_bits_however_a_text_is_computed(
    tmp_path: Path, kernels: Kernels, family: str, kv: str
) -> None:
    folder = tiny_models.save_folder(tmp_path, **tiny_models.FAMILIES[family] | WIDE)
    run = Run(folder, kernels=kernels, weights="int4", kv=kv, num_pages=128)
    assert_row_independent(run)


def test_floats_give_the_same_bits_however_a_text_is_computed_where_that_is_asked_for(
    tmp_path: Path, kernels: Kernels
) -> None:
    folder = tiny_models.save_folder(tmp_path, **WIDE)
    run = Run(folder, kernels=kernels, weights="bfloat16", dtype=torch.bfloat16, deterministic=True, num_pages=128)
    assert (run.model.weights_description, run.model.is_row_independent) == ("bfloat16", True)
    assert_row_independent(run)
    other = Run(folder, kernels=kernels, weights="bfloat16", dtype=torch.bfloat16)
    assert not other.model.is_row_independent


def assert_row_independent(run: Run) -> None:
    """Whole, in chunks, one by one, and beside others: the logits are equal to the last bit."""
    tokens = random_tokens(150, seed=2)
    whole = run.step((run.text(tokens), 150))
    for chunk_size in (1, 7, 64):
        text = run.text(tokens)
        chunks = [run.step((text, min(chunk_size, 150 - start))) for start in range(0, 150, chunk_size)]
        assert torch.equal(torch.cat(chunks), whole)
    beside, other, short = run.text(tokens), run.text(random_tokens(200, seed=3)), run.text(random_tokens(5, seed=4))
    logits = run.step((other, 100), (beside, 149))
    assert torch.equal(logits[100:], whole[:149])
    logits = run.step((short, 4), (beside, 1), (other, 1))
    assert torch.equal(logits[4], whole[149])
