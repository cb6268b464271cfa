"""The step loop: one thread that owns all sequences and runs one step after the other.

Other threads only put commands into its inbox, which it empties between steps: no state is shared, so there are
no locks. What it has to say leaves through `emit`.

This module knows nothing about sockets, tokenizing prompts or loading models.
"""

from __future__ import annotations

import queue
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edge.config import EngineConfig
from edge.engine.generation import Generation, shares
from edge.engine.runner import ModelRunner
from edge.engine.sampler import Row, sample
from edge.engine.scheduler import Chunk, Scheduler
from edge.engine.tokenizer import Tokenizer
from edge.errors import EdgeError, UnknownModel
from edge.frames import Delta, Done, Failed, MoreDeltas, Ping, Pong, Started
from workers._wire import Cancel, Frame


class LoadedModel:
    """A model that can run: its runner and tokenizer, and the queues of its sequences."""

    def __init__(self, name: str, runner: ModelRunner, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.name = name
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            runner.allocator,
            step_tokens=config.step_tokens,
            max_running=config.max_batch_size,
            max_waiting=config.max_waiting,
        )
        self.max_length = min(runner.model.config.context_length, self.scheduler.max_sequence_tokens)
        """Tokens that a sequence can have, prompt and answer."""


@dataclass(frozen=True, slots=True)
class Install:
    """From now on, run steps of `model`."""

    model: LoadedModel


@dataclass(frozen=True, slots=True)
class Remove:
    """From now on, run no steps of the model named `model`; its generations fail."""

    model: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue `generation`, which was made for `model`."""

    model: LoadedModel
    generation: Generation


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after the current step."""


Command = Install | Remove | Submit | Cancel | MoreDeltas | Ping | Stop


class StepLoop:
    """Runs steps of all models in turn, as long as there is work."""

    def __init__(self, emit: Callable[[list[Frame]], None]) -> None:
        """`emit` is called in the loop's thread with the frames of a step or command, in order."""
        self._emit = emit
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._models: dict[str, LoadedModel] = {}
        self._generations: dict[int, tuple[LoadedModel, Generation]] = {}

    def post(self, command: Command) -> None:
        """Have `command` done before the next step; from any thread."""
        self._inbox.put(command)

    def run(self) -> None:
        """The body of the loop's thread; returns after `Stop`."""
        while True:
            working = [model for model in self._models.values() if model.scheduler.has_work]
            for command in self._commands(wait=not working):
                if isinstance(command, Stop):
                    return
                self._do(command)
            for model in working:
                self._step(model)

    def _commands(self, *, wait: bool) -> list[Command]:
        commands = [self._inbox.get()] if wait else []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def _do(self, command: Command) -> None:
        match command:
            case Install(model):
                self._models[model.name] = model
            case Remove(name):
                self._remove_model(self._models.pop(name))
            case Submit(model, generation):
                self._submit(model, generation)
            case MoreDeltas(id, num_deltas):
                if id in self._generations:
                    self._generations[id][1].sequence.credit += num_deltas
            case Cancel(id):
                if id in self._generations:
                    _, generation = self._generations[id]
                    self._remove(generation)
                    self._emit([Done(id, "cancelled", generation.usage)])
            case Ping(number):
                schedulers = [model.scheduler for model in self._models.values()]
                self._emit(
                    [Pong(number, sum(len(s.waiting) for s in schedulers), sum(len(s.running) for s in schedulers))]
                )

    def _submit(self, model: LoadedModel, generation: Generation) -> None:
        try:
            if self._models.get(model.name) is not model:
                raise _removed(model)
            model.scheduler.add(generation.sequence)
        except EdgeError as error:
            self._emit([_failed(generation, error)])
            return
        self._generations[generation.id] = (model, generation)
        self._emit([Started(generation.id, generation.sequence.num_prompt_tokens)])

    def _remove_model(self, model: LoadedModel) -> None:
        orphans = [generation for owner, generation in self._generations.values() if owner is model]
        for generation in orphans:
            self._remove(generation)
        self._emit([_failed(generation, _removed(model)) for generation in orphans])

    def _step(self, model: LoadedModel) -> None:
        started_ns = time.perf_counter_ns()
        chunks = model.scheduler.schedule()
        if not chunks:
            return
        members = [self._generations[chunk.sequence.id][1] for chunk in chunks]
        try:
            tokens = _next_tokens(model, chunks, members)
            results = [_advance(model, *member) for member in zip(chunks, members, tokens, strict=True)]
        except Exception as error:  # whatever breaks in a step ends its sequences, not the engine
            traceback.print_exc(file=sys.stderr)
            results = [_Broken(f"the engine failed in a step: {type(error).__name__}: {error}")] * len(chunks)
        step_us = (time.perf_counter_ns() - started_ns) // 1000
        for generation, share in zip(members, shares(step_us, [chunk.num_tokens for chunk in chunks]), strict=True):
            generation.charge(share)
        self._emit([frame for member in zip(members, results, strict=True) for frame in self._frames(model, *member)])

    def _frames(self, model: LoadedModel, generation: Generation, result: _Result) -> list[Frame]:
        """What the node gets to know of one sequence's part in a step."""
        frames: list[Frame] = []
        if isinstance(result, _Broken):
            model.runner.cache.clear(generation.sequence.pages)
            self._remove(generation)
            return [_failed(generation, EdgeError(result.message))]
        if result.text or result.finish_reason is None:  # without text, it says what a call that is lost has used
            generation.sequence.credit -= 1
            frames.append(Delta(generation.id, result.text, generation.usage))
        if result.finish_reason is not None:
            self._remove(generation)
            frames.append(Done(generation.id, result.finish_reason, generation.usage))
        return frames

    def _remove(self, generation: Generation) -> None:
        model, _ = self._generations.pop(generation.id)
        model.scheduler.remove(generation.sequence)


@dataclass(frozen=True, slots=True)
class _Grown:
    """The step added `text`, perhaps empty; `finish_reason` if it was the last."""

    text: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Broken:
    """The sequence cannot go on."""

    message: str


_Result = _Grown | _Broken
_NOT_YET = -1


def _removed(model: LoadedModel) -> UnknownModel:
    return UnknownModel(f"model {model.name!r} was removed; `edge models list` shows those that are installed")


def _failed(generation: Generation, error: EdgeError) -> Failed:
    return Failed(generation.id, error.code, error.message, generation.usage, error.param)


def _next_tokens(model: LoadedModel, chunks: list[Chunk], members: list[Generation]) -> list[int | None]:
    """Run the step; for each chunk its sequence's next token, `_NOT_YET`, or None where the logits are broken."""
    with torch.inference_mode():
        logits = model.runner.run(chunks)
        rows = [
            Row(generation.sampler, chunk.sequence.tokens, chunk.sequence.num_prompt_tokens)
            for chunk, generation in zip(chunks, members, strict=True)
            if chunk.completes
        ]
        chosen = iter(sample(logits, rows) if rows else [])
    return [next(chosen) if chunk.completes else _NOT_YET for chunk in chunks]


def _advance(model: LoadedModel, chunk: Chunk, generation: Generation, token: int | None) -> _Result:
    model.scheduler.computed(chunk)
    if token is None:
        return _Broken(
            "the model computed values that are no numbers (NaN or infinite) for this request. If that happens again, "
            f"its file is damaged: remove it (edge models rm {model.name}) and add it again"
        )
    if token == _NOT_YET:
        return _Grown()
    return _Grown(*generation.accept(token))
