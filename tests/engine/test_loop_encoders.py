"""The step loop with an encoder and a tiny generating model, as the engine process drives it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_encoders
import tiny_models
import torch

from edge.engine.encoder_tokenizer import EncoderTokenizer
from edge.engine.encoding import Encoding, LoadedEncoder
from edge.engine.generation import Generation
from edge.engine.loop import Install, Remove, StepLoop, Stop, Submit, SubmitTexts
from edge.engine.models.encoder import Encoder
from edge.engine.pace import IDLE_TEXTS_US, MIN_TEXTS_US, SHARE
from edge.errors import UnknownModel
from edge.frames import Delta, Done, Encode, Encoded, Failed, Ping, Pong, Started
from edge.weights.encoder_checkpoint import EncoderCheckpoint
from workers._wire import Cancel, Frame

HANG_S = 60


class Loop:
    """A running step loop with the models `tiny` and `encoder`."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny_models.load(tiny_models.save_folder(folder / "tiny"))
        tiny_encoders.save(folder / "encoder")
        checkpoint = EncoderCheckpoint(folder / "encoder")
        encoder = Encoder(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
        tokenizer = EncoderTokenizer(checkpoint.tokenizer_json(), encoder.config.max_tokens)
        self.encoder = LoadedEncoder("encoder", encoder, tokenizer, max_waiting=8)
        self.arrived: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.steps = StepLoop(lambda frames: [self.arrived.put(frame) for frame in frames] and None)
        self.steps.post(Install(self.model))
        self.steps.post(Install(self.encoder))
        self._thread = threading.Thread(target=self.steps.run)

    def start(self) -> None:
        self._thread.start()

    def generate(self, id: int, **changes: Any) -> None:
        request = tiny_models.request(id=id, **changes)
        self.steps.post(Submit(self.model, Generation(request, self.model)))

    def encode(self, id: int, *texts: str, **changes: Any) -> None:
        encoding = Encoding(Encode(id, "encoder", list(texts), **changes), self.encoder.tokenizer, "mean")
        self.steps.post(SubmitTexts(self.encoder, encoding))

    def slices(self) -> list[tuple[bool, float]]:
        """From now on, of each turn of the encoder: whether somebody decodes meanwhile, and how long it may take."""
        slices: list[tuple[bool, float]] = []
        advance = self.encoder.advance

        def noting(slice_us: float) -> list[Frame]:
            running = self.model.scheduler.running
            slices.append((any(each.num_output_tokens > 0 for each in running), slice_us))
            return advance(slice_us)

        self.encoder.advance = noting  # type: ignore[method-assign]
        return slices

    def until_last(self, *ids: int) -> list[Frame]:
        """All frames up to the one that is the last of the last of `ids`."""
        frames, open_ids = [], set(ids)
        while open_ids:
            frames.append(frame := self.arrived.get(timeout=HANG_S))
            if isinstance(frame, Done | Encoded | Failed):
                open_ids.discard(frame.id)
        return frames

    def stop(self) -> None:
        self.steps.post(Stop())
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path)
    yield loop
    loop.stop()


def test_a_step_of_generation_runs_between_any_two_batches(loop: Loop) -> None:
    loop.generate(1, max_tokens=100)
    loop.encode(2, *["hello world good bad"] * 400)
    loop.start()
    frames = loop.until_last(1, 2)
    assert isinstance(frames[-1], Encoded | Done)
    kinds = "".join("g" if frame.id == 1 else "e" for frame in frames if isinstance(frame, Delta | Encoded))
    beside = kinds[: kinds.rindex("g")]
    assert beside.count("e") > 1, "texts are not computed beside generation"
    assert "ee" not in beside, "generation was held up by more than one batch"
    encoded = next(frame for frame in frames if isinstance(frame, Encoded))
    assert len(encoded.rows) == 400 * 24 * 4
    assert encoded.usage.input_tokens == 400 * 6


def test_texts_have_little_time_beside_answers_of_a_higher_priority_and_all_without(loop: Loop) -> None:
    slices = loop.slices()
    loop.generate(1, max_tokens=60)
    loop.encode(2, *["hello world good bad"] * 400, priority=-100)
    loop.start()
    loop.until_last(1, 2)
    beside = [slice_us for is_beside, slice_us in slices if is_beside]
    assert beside
    assert set(beside) == {MIN_TEXTS_US}
    del slices[:]
    loop.encode(3, "hello", priority=-100)
    loop.until_last(3)
    assert set(slices) == {(False, IDLE_TEXTS_US)}


def test_texts_take_a_share_of_the_step_beside_answers_of_their_priority(loop: Loop) -> None:
    slices, run = loop.slices(), loop.model.runner.run
    steps_us: list[float] = []

    def slow(*arguments: Any) -> Any:
        started = time.perf_counter()
        time.sleep(0.02)
        try:
            return run(*arguments)
        finally:
            steps_us.append((time.perf_counter() - started) * 1e6)

    loop.model.runner.run = slow  # type: ignore[method-assign]
    loop.generate(1, max_tokens=10)
    loop.encode(2, *["hello world good bad"] * 400)
    loop.start()
    loop.until_last(1, 2)
    beside = [slice_us for is_beside, slice_us in slices if is_beside]
    assert min(beside) >= SHARE * 20_000
    assert min(beside) < min(steps_us), "a step takes twice as long beside texts"


def test_several_encoders_take_turns(loop: Loop) -> None:
    other = LoadedEncoder("other", loop.encoder.encoder, loop.encoder.tokenizer, max_waiting=8)
    slices = loop.slices()
    loop.steps.post(Install(other))
    loop.encode(2, *["hello world good bad"] * 400, priority=-100)
    encoding = Encoding(Encode(3, "other", ["hello world"] * 400), other.tokenizer, "mean")
    loop.steps.post(SubmitTexts(other, encoding))
    loop.start()
    frames = loop.until_last(2, 3)
    assert {frame.id for frame in frames if isinstance(frame, Encoded)} == {2, 3}
    assert slices[0][1] == MIN_TEXTS_US, "the texts of the other encoder are more urgent"


def test_a_removed_encoder_fails_its_calls_and_the_others_go_on(loop: Loop) -> None:
    loop.generate(1, max_tokens=20)
    loop.encode(2, *["hello"] * 100)
    loop.steps.post(Remove("encoder"))
    loop.encode(3, "hello")
    loop.start()
    frames = loop.until_last(1, 2, 3)
    failures = {frame.id: frame for frame in frames if isinstance(frame, Failed)}
    assert {id: failure.code for id, failure in failures.items()} == {2: UnknownModel.code, 3: UnknownModel.code}
    assert "'encoder' was removed" in failures[2].message


def test_cancel_and_ping_see_encoders_too(loop: Loop) -> None:
    loop.encode(1, "hello")
    loop.encode(2, "hello")
    loop.steps.post(Ping(7))
    loop.steps.post(Cancel(1))
    loop.start()
    frames = loop.until_last(1, 2)
    assert [type(frame) for frame in frames] == [Started, Started, Pong, Done, Encoded]
    assert frames[2] == Pong(7, 2, 0)
    assert isinstance(frames[3], Done)
    assert frames[3].finish_reason == "cancelled"


def test_a_batch_that_breaks_fails_its_calls_and_not_the_engine(loop: Loop) -> None:
    whole = loop.encoder.encoder.encode

    def broken(*arguments: Any) -> Any:
        loop.encoder.encoder.encode = whole  # type: ignore[method-assign]
        raise MemoryError("no room")

    loop.encoder.encoder.encode = broken  # type: ignore[method-assign]
    loop.encode(1, "hello")
    loop.start()
    failed = loop.until_last(1)[-1]
    assert isinstance(failed, Failed)
    assert "MemoryError: no room" in failed.message
    loop.encode(2, "hello")
    assert isinstance(loop.until_last(2)[-1], Encoded)
