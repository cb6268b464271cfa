"""The step loop with an encoder and a tiny generating model, as the engine process drives it."""

from __future__ import annotations

import queue
import threading
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

    def encode(self, id: int, *texts: str) -> None:
        encoding = Encoding(Encode(id, "encoder", list(texts)), self.encoder.tokenizer, "mean")
        self.steps.post(SubmitTexts(self.encoder, encoding))

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
