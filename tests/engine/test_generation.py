from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.generation import Generation, shares
from edge.engine.loaded import LoadedModel
from edge.engine.sampler import Choice
from edge.errors import InvalidInput, PromptTooLong
from edge.frames import Sampling, TokenLogprob, Usage


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_models.load(tiny_models.save_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def model(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(tiny, "max_length", 60)
    return tiny


def make(model: LoadedModel, prompt: str = "hello", **changes: Any) -> Generation:
    return Generation(tiny_models.request(prompt, **changes), model)


def feed(generation: Generation, model: LoadedModel, text: str) -> tuple[str, str | None]:
    shown, reason = "", None
    for token in model.tokenizer.encode(text, 1000):
        assert reason is None, "nothing follows the last token"
        growth = generation.accept([Choice(token)])
        shown, reason = shown + growth.text, growth.finish_reason
    return shown, reason


def test_eos_ends_the_text_and_is_counted_but_not_shown(model: LoadedModel) -> None:
    generation = make(model)
    assert feed(generation, model, "hi<|im_end|>") == ("hi", "stop")
    assert generation.usage.output_tokens == 3


def test_max_tokens_ends_the_text(model: LoadedModel) -> None:
    assert feed(make(model, max_tokens=3), model, "abc") == ("abc", "length")
    # Half a character is not shown, a held back possible stop string is.
    generation = make(model, max_tokens=3)
    growths = [generation.accept([Choice(token)]) for token in model.tokenizer.encode("abé", 100)[:3]]
    assert [(growth.text, growth.finish_reason) for growth in growths] == [("a", None), ("b", None), ("", "length")]
    assert feed(make(model, max_tokens=3, stop=["bcd"]), model, "abc") == ("abc", "length")


def test_without_max_tokens_the_context_is_filled(model: LoadedModel) -> None:
    model.max_length = 12
    assert feed(make(model, max_tokens=None), model, "1234567") == ("1234567", "length")


def test_a_stop_string_over_token_borders_ends_the_text(model: LoadedModel) -> None:
    assert feed(make(model, stop=["\n\n", "END"]), model, "one EN two END") == ("one EN two ", "stop")
    assert feed(make(model, stop=["😀"]), model, "smile é😀") == ("smile é", "stop")
    assert feed(make(model, stop=["END"], max_tokens=3), model, "END") == ("", "stop")


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "message"),
    [
        ("x" * 60, {}, PromptTooLong, "the prompt has 60 tokens, but only 59 fit"),
        ("x" * 30, {"max_tokens": 31}, PromptTooLong, "30 tokens and max_tokens is 31, together 61, but .* 60 tokens"),
        ("", {}, InvalidInput, "the prompt is empty"),
        ("x", {"max_tokens": 0}, InvalidInput, "max_tokens is 0"),
        ("x", {"stop": [""]}, InvalidInput, "stop string"),
        ("x", {"stop": ["}"], "json_schema": "{}"}, InvalidInput, "cut structured output off"),
        ("x", {"prompt": None}, InvalidInput, "neither `messages` nor `prompt`"),
    ],
)
def test_what_is_refused(
    model: LoadedModel, prompt: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    request = tiny_models.request(**({"prompt": prompt} | changes))
    with pytest.raises(error, match=message):
        Generation(request, model)


def test_what_just_fits_is_accepted(model: LoadedModel) -> None:
    assert make(model, "x" * 30, max_tokens=30).sequence.num_tokens == 30
    assert make(model, "x" * 59, max_tokens=None).sequence.num_tokens == 59


def test_a_prompt_is_a_user_message_unless_raw(model: LoadedModel) -> None:
    chat = make(model, "hi", raw=False).sequence.tokens
    assert chat == make(model, messages=[{"role": "user", "content": "hi"}], prompt=None).sequence.tokens
    assert chat[0] == tiny_models.START
    assert len(make(model, "hi").sequence.tokens) == 2


def test_a_prompt_of_token_ids_is_taken_as_it_is(model: LoadedModel) -> None:
    ids = [tiny_models.END, 5, 6]
    assert Generation(tiny_models.request(ids), model).sequence.tokens == ids
    with pytest.raises(InvalidInput, match=f"the token id {tiny_models.VOCAB_SIZE}"):
        Generation(tiny_models.request([tiny_models.VOCAB_SIZE]), model)
    with pytest.raises(InvalidInput, match="the prompt is empty"):
        Generation(tiny_models.request([]), model)


def test_usage_counts_each_prompt_token_once_even_if_it_is_computed_twice(model: LoadedModel) -> None:
    generation = make(model, "x" * 10)
    assert generation.usage == Usage()
    generation.sequence.num_computed_tokens = 4
    generation.charge(100)
    assert generation.usage == Usage(input_tokens=4, compute_us=100)
    generation.sequence.num_computed_tokens = 0  # preempted
    generation.charge(50)
    assert generation.usage == Usage(input_tokens=4, compute_us=150)
    generation.sequence.num_computed_tokens = 10
    generation.accept([Choice(0)])
    generation.charge(1)
    assert generation.usage == Usage(input_tokens=10, output_tokens=1, compute_us=151)


def test_cached_prompt_tokens_are_counted_apart(model: LoadedModel) -> None:
    generation = make(model, "x" * 40, max_tokens=8)
    generation.sequence.num_cached_tokens = generation.sequence.num_computed_tokens = 32
    generation.charge(1)
    assert generation.usage == Usage(cached_input_tokens=32, compute_us=1)
    generation.sequence.num_computed_tokens = 40
    generation.charge(1)
    assert generation.usage == Usage(input_tokens=8, cached_input_tokens=32, compute_us=2)


def test_log_probabilities_come_with_the_bytes_of_their_tokens(model: LoadedModel) -> None:
    generation = make(model, sampling=Sampling(temperature=0, logprobs=1))
    first, second = model.tokenizer.encode("é", 10)
    growth = generation.accept([Choice(first, -0.5, [(second, -0.25)]), Choice(second, -1.0, [])])
    assert growth.text == "é"
    assert growth.logprobs == [
        TokenLogprob("\ufffd", -0.5, [0xC3], [TokenLogprob("\ufffd", -0.25, [0xA9])]),
        TokenLogprob("\ufffd", -1.0, [0xA9]),
    ]


def test_tokens_after_the_end_are_dropped(model: LoadedModel) -> None:
    generation = make(model, stop=["b"])
    growth = generation.accept([Choice(token) for token in model.tokenizer.encode("abc", 10)])
    assert (growth.text, growth.finish_reason) == ("a", "stop")
    assert generation.usage.output_tokens == 2


def test_accounts_do_not_share_pages(model: LoadedModel) -> None:
    salts = {make(model, account=account).sequence.salt for account in ("", "a", "b")}
    assert len(salts) == 3


@given(total=st.integers(0, 10**9), weights=st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_shares_sum_to_the_total_and_are_fair(total: int, weights: list[int]) -> None:
    parts = shares(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * w / sum(weights)) <= 1 for part, w in zip(parts, weights, strict=True))
