"""The texts that wait for an encoder, and the batches that are made of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import tiny_encoders
import torch

from edge.engine.encoder_tokenizer import CHARS_PER_TOKEN, EncoderTokenizer
from edge.engine.encoding import MAX_PASSES, Encoding, LoadedEncoder
from edge.engine.models.encoder import Encoder
from edge.errors import EdgeError, OutOfCapacity, TextTooLong
from edge.frames import Delta, Done, Encode, Encoded, Failed, Started
from edge.weights.encoder_checkpoint import EncoderCheckpoint
from workers._wire import Frame

LONG_US = 1e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny_encoders.save(folder)
    tiny_encoders.save_pooling(folder, max_tokens=20)
    return folder


@pytest.fixture
def model(folder: Path) -> LoadedEncoder:
    return load(folder)


def load(folder: Path, max_waiting: int = 8) -> LoadedEncoder:
    checkpoint = EncoderCheckpoint(folder)
    encoder = Encoder(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = EncoderTokenizer(checkpoint.tokenizer_json(), encoder.config.max_tokens)
    return LoadedEncoder("tiny", encoder, tokenizer, max_waiting)


def encoding(model: LoadedEncoder, id: int, *texts: str, **options: Any) -> Encoding:
    return Encoding(Encode(id, "tiny", list(texts), **options), model.tokenizer, "mean")


def drain(model: LoadedEncoder, slice_us: float = LONG_US) -> Iterator[Frame]:
    while model.has_work:
        yield from model.advance(slice_us)


def rows(encoded: Frame) -> np.ndarray:
    assert isinstance(encoded, Encoded)
    return np.frombuffer(encoded.rows, "<f4").reshape(-1, encoded.width)


def test_texts_are_cut_to_the_limit_as_the_tokenizer_does(model: LoadedEncoder) -> None:
    tokens, is_cut = model.tokenizer.encode("hello world")
    assert (tokens, is_cut) == ([2, 4, 5, 3], False)
    tokens, is_cut = model.tokenizer.encode("hello " * 18)
    assert (tokens, is_cut) == ([2, *[4] * 18, 3], False)
    assert model.tokenizer.encode("hello " * 19) == (tokens, True)
    assert model.tokenizer.encode("hello " * 1_000_000) == (tokens, True)
    assert model.tokenizer.encode(" " * 100 * CHARS_PER_TOKEN + "hello") == ([2, 4, 3], False)
    assert model.tokenizer.encode("x" * 100 * CHARS_PER_TOKEN) == ([2, 1, 3], False)  # one word that is unknown


def test_other_threads_run_while_a_long_text_is_read(model: LoadedEncoder) -> None:
    reading = Thread(target=model.tokenizer.encode, args=("\U0001f600" * 100_000,))
    num_turns = 0
    reading.start()
    while reading.is_alive():
        num_turns += 1
        time.sleep(0)
    assert num_turns > 20


def test_what_must_not_be_cut_is_refused(model: LoadedEncoder) -> None:
    with pytest.raises(TextTooLong, match="text 1 has more than the 20 tokens"):
        encoding(model, 1, "hello", "hello " * 19, truncate=False)
    with pytest.raises(TextTooLong, match="more than 30 tokens together"):
        encoding(model, 1, "hello " * 19, "hello " * 19, max_total_tokens=30)
    assert encoding(model, 1, "hello " * 19, "hello " * 8, max_total_tokens=30).num_tokens == 30


def test_rows_come_in_the_order_of_the_texts_whatever_the_batches(model: LoadedEncoder) -> None:
    texts = [f"{'hello ' * (i % 7)}{letter} good" for i, letter in enumerate("abcdefghijklmnop")]
    alone = []
    for id, text in enumerate(texts):
        model.add(encoding(model, id, text))
        alone.append(rows(list(drain(model))[-1])[0])
    assert model.add(encoding(model, 99, *texts)) == [Started(99, sum(map(len, encoding(model, 9, *texts).texts)))]
    together = list(drain(model, slice_us=1))  # a layer at a time, and small batches
    assert all(isinstance(frame, Delta) and frame.text == "" for frame in together[:-1])
    np.testing.assert_allclose(rows(together[-1]), np.stack(alone), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rows(together[-1]), axis=1), 1, atol=1e-5)


def test_a_large_request_does_not_hold_up_a_small_one(model: LoadedEncoder) -> None:
    list(drain(model))
    model.add(encoding(model, 0, "hello"))
    list(drain(model))  # it knows now what a token costs
    model.add(encoding(model, 1, *["hello world"] * 500))
    model.advance(1)  # a batch of the first is under way
    model.add(encoding(model, 2, "bad"))
    ends = [frame.id for frame in drain(model, slice_us=1) if isinstance(frame, Encoded)]
    assert ends == [2, 1]


def test_a_call_that_may_be_rejected_is_if_others_wait_for_more_than_the_batch_under_way(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, "hello"))
    assert model.advance(0.001) == []  # a layer of three: nobody waits
    model.add(encoding(model, 2, "hello", reject_if_busy=True))
    with pytest.raises(OutOfCapacity, match="busy with 2 requests, and rejectIfBusy was asked for"):
        model.add(encoding(model, 3, "hello", reject_if_busy=True))
    model.add(encoding(model, 4, "hello"))
    assert [frame.id for frame in drain(model) if isinstance(frame, Encoded)] == [1, 2, 4]


def test_texts_of_a_higher_priority_go_first_even_before_a_batch_under_way_ends(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, *["hello world"] * 50, priority=-100))
    assert model.priority == -100
    assert model.advance(0.001) == []  # a layer of three
    model.add(encoding(model, 2, "bad", "good"))
    assert model.priority == 0
    frames = list(drain(model))
    assert next(frame.id for frame in frames if isinstance(frame, Delta | Encoded)) == 2
    assert [frame.id for frame in frames if isinstance(frame, Encoded)] == [2, 1]
    assert rows(frames[-1]).shape == (50, 24)
    assert (model.priority, model.num_waiting, model.num_running) == (0, 0, 0)


def test_texts_of_a_lower_priority_do_not_starve(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, *["hello"] * 3, priority=-100))
    model.advance(0.001)  # under way
    ends: list[int] = []
    for id in range(2, 5 * MAX_PASSES):
        model.add(encoding(model, id, "bad", priority=id % 2))
        model.add(encoding(model, 1000 + id, "bad", priority=2))
        ends += [frame.id for _ in range(2) for frame in model.advance(LONG_US) if isinstance(frame, Encoded)]
        if 1 in ends:
            break
    assert ends.index(1) <= 2 * MAX_PASSES


def test_texts_of_a_lower_priority_make_nobody_be_rejected(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, "hello", priority=-100))
    model.add(encoding(model, 2, "hello", reject_if_busy=True))
    with pytest.raises(OutOfCapacity, match="rejectIfBusy was asked for"):
        model.add(encoding(model, 3, "hello", reject_if_busy=True))


def test_requests_of_every_priority_can_be_cancelled_and_fail(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, "hello", priority=-100))
    assert model.advance(0.001) == []
    for id in (2, 3, 4):
        model.add(encoding(model, id, "hello", priority=id % 2))
    assert model.advance(0.001) == []  # the first is set aside
    assert [frame.id for id in (1, 2) for frame in model.cancel(id)] == [1, 2]
    assert [frame.id for frame in drain(model) if isinstance(frame, Encoded)] == [3, 4]
    model.add(encoding(model, 5, "hello", priority=-100))
    assert model.advance(0.001) == []
    model.add(encoding(model, 6, "hello"))
    assert model.advance(0.001) == []
    model.add(encoding(model, 7, "hello"))
    assert sorted(frame.id for frame in model.fail_all(EdgeError("no more"))) == [5, 6, 7]
    assert not model.has_work
    assert model.advance(LONG_US) == []


def test_the_next_batch_takes_what_has_come_meanwhile(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, "hello"))
    assert model.advance(0.001) == []  # a layer of three
    for id in (2, 3, 4):
        model.add(encoding(model, id, "hello world"))
    frames = model.advance(LONG_US)
    assert [frame.id for frame in frames if isinstance(frame, Encoded)] == [1]
    frames = model.advance(LONG_US)
    assert [frame.id for frame in frames if isinstance(frame, Encoded)] == [2, 3, 4]


def test_usage_is_all_tokens_and_the_time_of_the_batches(model: LoadedEncoder) -> None:
    model.add(encoding(model, 1, "hello world", "good"))
    model.add(encoding(model, 2, "bad"))
    first, second = (frame.usage for frame in drain(model) if isinstance(frame, Encoded))
    assert (first.input_tokens, second.input_tokens) == (7, 3)
    assert first.output_tokens == first.cached_input_tokens == 0
    assert first.compute_us > second.compute_us > 0


def test_a_cancelled_request_says_what_it_has_used_and_others_go_on(model: LoadedEncoder) -> None:
    for id in (1, 2, 3):
        model.add(encoding(model, id, "hello world"))
    assert model.advance(0.001) == []
    model.add(encoding(model, 4, "good"))
    (done,) = model.cancel(2)
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.input_tokens) == ("cancelled", 4)
    (done,) = model.cancel(4)
    assert isinstance(done, Done)
    assert done.usage.input_tokens == 0
    assert model.cancel(77) == []
    assert [frame.id for frame in drain(model) if isinstance(frame, Encoded)] == [1, 3]
    model.add(encoding(model, 5, "good"))
    model.advance(0.001)
    model.cancel(5)
    assert list(drain(model)) == []
    assert not model.has_work


def test_too_many_that_wait_are_refused(folder: Path) -> None:
    model = load(folder, max_waiting=2)
    for id in (1, 2):
        model.add(encoding(model, id, "hello"))
    with pytest.raises(OutOfCapacity, match="2 requests with 6 tokens are waiting"):
        model.add(encoding(model, 3, "hello"))
    list(drain(model))
    model.add(encoding(model, 3, "hello"))


def test_a_failure_ends_all_requests_once(model: LoadedEncoder) -> None:
    for id in (1, 2):
        model.add(encoding(model, id, "hello"))
    model.advance(0.001)
    frames = model.fail_all(EdgeError("broken"))
    assert [(frame.id, frame.message) for frame in frames if isinstance(frame, Failed)] == [
        (1, "broken"),
        (2, "broken"),
    ]
    assert not model.has_work


def test_numbers_that_are_none_fail_the_call(model: LoadedEncoder) -> None:
    model.encoder._norm = lambda x: x * float("nan")
    model.add(encoding(model, 1, "hello"))
    (failed,) = drain(model)
    assert isinstance(failed, Failed)
    assert "values that are no numbers" in failed.message
    assert "edge models rm tiny" in failed.message
