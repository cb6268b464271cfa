from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.generation import Generation, shares
from edge.engine.tokenizer import Tokenizer
from edge.errors import InvalidInput, PromptTooLong
from edge.frames import Usage
from edge.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tiny_models.save_folder(tmp_path_factory.mktemp("tiny"))
    return Tokenizer(open_checkpoint(folder).tokenizer_files())


def make(tokenizer: Tokenizer, prompt: str = "hello", max_length: int = 60, **changes: Any) -> Generation:
    return Generation(tiny_models.request(prompt, **changes), tokenizer, max_length)


def feed(generation: Generation, tokenizer: Tokenizer, text: str) -> tuple[str, str | None]:
    shown, reason = "", None
    for token in tokenizer.encode(text, 1000):
        assert reason is None, "nothing follows the last token"
        piece, reason = generation.accept(token)
        shown += piece
    return shown, reason


def test_eos_ends_the_text_and_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer)
    assert feed(generation, tokenizer, "hi<|im_end|>") == ("hi", "stop")
    assert generation.usage.output_tokens == 3


def test_max_tokens_ends_the_text(tokenizer: Tokenizer) -> None:
    assert feed(make(tokenizer, max_tokens=3), tokenizer, "abc") == ("abc", "length")
    # Half a character is not shown, a held back possible stop string is.
    generation = make(tokenizer, max_tokens=3)
    assert [generation.accept(token) for token in tokenizer.encode("abé", 100)[:3]] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]
    assert feed(make(tokenizer, max_tokens=3, stop=["bcd"]), tokenizer, "abc") == ("abc", "length")


def test_without_max_tokens_the_context_is_filled(tokenizer: Tokenizer) -> None:
    assert feed(make(tokenizer, max_length=12, max_tokens=None), tokenizer, "1234567") == ("1234567", "length")


def test_a_stop_string_over_token_borders_ends_the_text(tokenizer: Tokenizer) -> None:
    assert feed(make(tokenizer, stop=["\n\n", "END"]), tokenizer, "one EN two END") == ("one EN two ", "stop")
    assert feed(make(tokenizer, stop=["😀"]), tokenizer, "smile é😀") == ("smile é", "stop")
    assert feed(make(tokenizer, stop=["END"], max_tokens=3), tokenizer, "END") == ("", "stop")


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "message"),
    [
        ("x" * 60, {}, PromptTooLong, "the prompt has 60 tokens, but only 59 fit"),
        ("x" * 30, {"max_tokens": 31}, PromptTooLong, "30 tokens and max_tokens is 31, together 61, but .* 60 tokens"),
        ("", {}, InvalidInput, "the prompt is empty"),
        ("x", {"max_tokens": 0}, InvalidInput, "max_tokens is 0"),
        ("x", {"stop": [""]}, InvalidInput, "stop string"),
        ("x", {"prompt": None}, InvalidInput, "neither `messages` nor `prompt`"),
    ],
)
def test_what_is_refused(
    tokenizer: Tokenizer, prompt: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    request = tiny_models.request(**({"prompt": prompt} | changes))
    with pytest.raises(error, match=message):
        Generation(request, tokenizer, 60)


def test_what_just_fits_is_accepted(tokenizer: Tokenizer) -> None:
    assert make(tokenizer, "x" * 30, max_tokens=30).sequence.num_tokens == 30
    assert make(tokenizer, "x" * 59, max_tokens=None).sequence.num_tokens == 59


def test_a_prompt_is_a_user_message_unless_raw(tokenizer: Tokenizer) -> None:
    chat = make(tokenizer, "hi", raw=False).sequence.tokens
    assert chat == make(tokenizer, messages=[{"role": "user", "content": "hi"}], prompt=None).sequence.tokens
    assert chat[0] == tiny_models.START
    assert len(make(tokenizer, "hi").sequence.tokens) == 2


def test_usage_counts_each_prompt_token_once_even_if_it_is_computed_twice(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, "x" * 10)
    assert generation.usage == Usage()
    generation.sequence.num_computed_tokens = 4
    generation.charge(100)
    assert generation.usage == Usage(input_tokens=4, compute_us=100)
    generation.sequence.num_computed_tokens = 0  # preempted
    generation.charge(50)
    assert generation.usage == Usage(input_tokens=4, compute_us=150)
    generation.sequence.num_computed_tokens = 10
    generation.accept(0)
    generation.charge(1)
    assert generation.usage == Usage(input_tokens=10, output_tokens=1, compute_us=151)


@given(total=st.integers(0, 10**9), weights=st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_shares_sum_to_the_total_and_are_fair(total: int, weights: list[int]) -> None:
    parts = shares(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * w / sum(weights)) <= 1 for part, w in zip(parts, weights, strict=True))
