"""The engine process, spoken to over its socket as the node does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models

from edge.config import EngineConfig, ModelOptions
from edge.frames import (
    CountTokens,
    Delta,
    Done,
    EngineReady,
    Failed,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    MoreDeltas,
    Ping,
    Pong,
    Started,
    TokenCount,
    ToNode,
)
from workers._wire import Cancel, Frame, FrameDecoder, encode

HANG_S = 60


class Engine:
    """An engine process and the node's end of its socket."""

    def __init__(self, cache_dir: Path, **config: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(HANG_S)
        settings = msgspec.json.encode(EngineConfig(**({"num_threads": 1, "kernels": False} | config))).decode()
        place = (str(theirs.fileno()), str(os.getpid()), str(cache_dir))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "edge.engine", *place, settings],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self._decoder = FrameDecoder(ToNode)
        self._arrived: list[Frame] = []

    def send(self, *frames: Frame) -> None:
        self.socket.sendall(b"".join(encode(frame) for frame in frames))

    def next(self) -> Frame:
        while not self._arrived:
            data = self.socket.recv(1 << 16)
            assert data, "the engine closed its socket"
            self._arrived += self._decoder.feed(data)
        return self._arrived.pop(0)

    def load(self, path: Path, name: str = "tiny", options: ModelOptions | None = None) -> Frame:
        self.send(LoadModel(name, str(path), options or ModelOptions(weights="float32")))
        return self.next()

    def answer(self, number: int) -> list[Frame]:
        """The frames of `number` up to its last one; those of others are dropped."""
        frames: list[Frame] = []
        while not frames or not isinstance(frames[-1], Done | Failed):
            frame = self.next()
            if getattr(frame, "id", None) == number:
                frames.append(frame)
        return frames

    def wait(self) -> int:
        return self.process.wait(HANG_S)

    def stop(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(**config: Any) -> Engine:
        engines.append(Engine(tmp_path / "cache", **config))
        assert isinstance(engines[-1].next(), EngineReady)
        return engines[-1]

    yield build
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One for the tests that leave it idle."""
    engine = Engine(tmp_path_factory.mktemp("cache"), max_waiting=8)
    assert isinstance(engine.next(), EngineReady)
    yield engine
    engine.stop()


def text(frames: list[Frame]) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, Delta))


def test_from_loading_to_the_last_frame(engine: Engine, folder: Path, tmp_path: Path) -> None:
    loaded = engine.load(folder)
    assert isinstance(loaded, ModelLoaded)
    assert (loaded.model, loaded.architecture, loaded.context_length) == ("tiny", "llama", 512)
    assert loaded.num_parameters == sum(t.numel() for t in tiny_models.tensors(tiny_models.CONFIG).values())

    engine.send(tiny_models.request(id=4))
    frames = engine.answer(4)
    assert frames[0] == Started(4, 5)
    assert isinstance(frames[-1], Done)
    assert frames[-1].finish_reason == "length"
    assert frames[-1].usage.output_tokens == 24

    # A GGUF file of the same weights, as a second model in the same engine, says the same.
    assert isinstance(engine.load(tiny_models.save_gguf(tmp_path / "m.gguf"), "other"), ModelLoaded)
    engine.send(tiny_models.request(id=6, model="other"), tiny_models.request(id=8))
    answers = {6: [], 8: []}
    while not all(a and isinstance(a[-1], Done) for a in answers.values()):
        frame = engine.next()
        answers[frame.id].append(frame)
    assert text(answers[6]) == text(answers[8]) == text(frames)

    engine.send(Ping(3))
    assert engine.next() == Pong(3, 0, 0)
    assert isinstance(engine.load(folder), ModelLoaded)  # again: already there


def test_what_is_refused_harms_nobody(engine: Engine, folder: Path, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(100))
    failed = engine.load(corrupt, "corrupt")
    assert isinstance(failed, ModelFailed)
    assert "corrupt.gguf: GGUF version 0 is not supported" in failed.message
    failed = engine.load(tmp_path / "missing", "missing")
    assert isinstance(failed, ModelFailed)
    assert "there is no such file or folder" in failed.message
    truncated = tiny_models.save_gguf(tmp_path / "truncated.gguf")
    truncated.write_bytes(truncated.read_bytes()[:-100])
    failed = engine.load(truncated, "truncated")
    assert isinstance(failed, ModelFailed)
    assert "truncated: tensor" in failed.message

    assert isinstance(engine.load(folder), ModelLoaded)
    refused = {
        5007: tiny_models.request(id=2, model="corrupt"),
        5021: tiny_models.request("word " * (2 << 20), id=4),
        5006: tiny_models.request(id=6, messages=[{"role": "tool", "content": "x"}]),
    }
    for code, request in refused.items():
        engine.send(request)
        (frame,) = engine.answer(request.id)
        assert isinstance(frame, Failed)
        assert (frame.code, frame.usage.input_tokens) == (code, 0)
    engine.send(tiny_models.request(id=8))
    assert isinstance(engine.answer(8)[-1], Done)
    assert engine.process.poll() is None


@pytest.mark.slow
def test_a_long_prompt_is_tokenized_beside_the_answers_of_others(start: Callable[..., Engine], folder: Path) -> None:
    engine = start()
    engine.load(folder)
    engine.send(tiny_models.request(id=2, max_tokens=300))
    engine.send(*(tiny_models.request("word " * (1 << 20), id=n) for n in (4, 6, 8)))
    assert isinstance(engine.answer(2)[-1], Done)


@pytest.mark.slow
def test_generation_does_not_wait_for_prompts_whose_tokens_are_counted(
    start: Callable[..., Engine], folder: Path
) -> None:
    engine = start(max_waiting=2)
    engine.load(folder)
    long = tiny_models.request("x" * (1 << 20))
    engine.send(*(CountTokens(id, long) for id in range(1, 9)), tiny_models.request(id=9), Cancel(8), Ping(1))
    replies: list[Frame] = []
    while sum(isinstance(frame, TokenCount | Failed | Done) for frame in replies) < 9:
        replies.append(engine.next())
    counts = [frame for frame in replies if isinstance(frame, TokenCount)]
    assert counts == [TokenCount(id, 1 << 20) for id in range(1, 8)]
    ends = {frame.id: frame.finish_reason for frame in replies if isinstance(frame, Done)}
    assert ends == {8: "cancelled", 9: "length"}  # what was not read when it was cancelled is not read


@pytest.mark.slow
def test_plain_prompts_do_not_wait_for_a_flood_of_schemas(start: Callable[..., Engine], folder: Path) -> None:
    engine = start()
    engine.load(folder)
    schemas = [f'{{"type":"integer","multipleOf":{104_729 + 2 * n}}}' for n in range(8)]
    engine.send(*(tiny_models.request(id=2 * n, json_schema=schema) for n, schema in enumerate(schemas, 1)))
    engine.send(tiny_models.request(id=100, max_tokens=1))
    read = []
    while not read or read[-1] != 100:
        if isinstance(frame := engine.next(), Started):
            read.append(frame.id)
    assert len(read) < len(schemas)


def test_cancel_and_credit_reach_a_call_at_any_time(engine: Engine, folder: Path) -> None:
    engine.load(folder)
    # In one write: the prompt is not even tokenized when the cancel is read.
    engine.send(tiny_models.request(id=2), Cancel(2))
    last = engine.answer(2)[-1]
    assert isinstance(last, Done)
    assert last.finish_reason == "cancelled"
    engine.send(tiny_models.request(id=4, credit=0), MoreDeltas(4, 1000))
    assert isinstance(engine.answer(4)[-1], Done)
    engine.send(tiny_models.request(id=6, credit=3, max_tokens=400))
    frames = [engine.next() for _ in range(4)]
    assert [type(frame) for frame in frames] == [Started, Delta, Delta, Delta]
    engine.send(Ping(1))
    assert engine.next() == Pong(1, 0, 1)
    engine.send(Cancel(6))
    assert engine.answer(6)[-1].finish_reason == "cancelled"


def test_the_process_ends_when_its_socket_closes(start: Callable[..., Engine], folder: Path) -> None:
    engine = start()
    engine.load(folder)
    engine.send(tiny_models.request(id=2, max_tokens=400))
    engine.next()
    engine.socket.close()
    assert engine.wait() == 0


@pytest.mark.slow
def test_bytes_that_are_no_frames_end_the_process(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.socket.sendall(b"\0\0\0\1\xc1")
    assert engine.wait() == 1
    assert engine.process.stderr is not None
    assert b"frame of an unknown shape" in engine.process.stderr.read()


def test_ctrl_c_in_the_terminal_is_left_to_the_node(engine: Engine) -> None:
    engine.process.send_signal(signal.SIGINT)
    engine.send(Ping(1))
    assert engine.next() == Pong(1, 0, 0)


def test_a_process_whose_parent_is_gone_does_not_start() -> None:
    sock, theirs = socket.socketpair()
    with sock, theirs:
        command = [sys.executable, "-P", "-m", "edge.engine", str(theirs.fileno()), "1", "{}"]
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=HANG_S, check=False).returncode == 1


# -- native kernels ----------------------------------------------------------------------------------------


def compiler(folder: Path, then: str) -> Path:
    """A C++ compiler that does `then` when it is to compile."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "version of {folder.name}"; exit; }}\n{then}\n')
    script.chmod(0o755)
    return script


def line(engine: Engine, containing: str) -> str:
    assert engine.process.stderr is not None
    for raw in engine.process.stderr:
        if containing in (text := raw.decode()):
            return text
    raise AssertionError(f"the engine ended without saying {containing!r}")


@pytest.mark.slow
def test_a_model_answers_while_kernels_compile_and_changes_over(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    waiting = f'while [ ! -e "{gate}" ]; do sleep 0.05; done; exec c++ "$@"'
    monkeypatch.setenv("CXX", str(compiler(tmp_path, waiting)))
    folder = tiny_models.save_folder(tmp_path / "even", hidden_size=64, head_dim=16, num_attention_heads=4)
    engine = start(kernels=True)
    loaded = engine.load(folder, options=ModelOptions(weights="int8"))
    assert isinstance(loaded, ModelLoaded)
    engine.send(tiny_models.request(id=1))
    assert isinstance(engine.answer(1)[-1], Done)
    gate.touch()
    changed = engine.next()
    assert isinstance(changed, ModelLoaded)
    assert changed.weights == "int8" != loaded.weights
    assert "tiny" in line(engine, "native kernels")
    engine.send(tiny_models.request(id=2))
    assert isinstance(engine.answer(2)[-1], Done)
    # The next engine finds them.
    gate.unlink()
    loaded = start(kernels=True).load(folder, options=ModelOptions(weights="int8"))
    assert isinstance(loaded, ModelLoaded)
    assert loaded.weights == "int8"


@pytest.mark.slow
def test_without_a_working_compiler_models_run_on_torch(
    start: Callable[..., Engine], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "echo 'no such header' >&2; exit 1")))
    engine = start(kernels=True)
    assert "failed: no such header" in line(engine, "no native kernels")
    assert isinstance(engine.load(folder, options=ModelOptions()), ModelLoaded)
    engine.send(tiny_models.request(id=1))
    assert isinstance(engine.answer(1)[-1], Done)
