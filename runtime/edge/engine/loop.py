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

from edge.engine.encoding import Encoding, LoadedEncoder
from edge.engine.generation import Generation, Growth, shares
from edge.engine.kernels import Kernels
from edge.engine.loaded import LoadedModel
from edge.engine.models.decoder import Decoder
from edge.engine.pace import Prompts, texts_us
from edge.engine.sampler import Choice, sample
from edge.engine.scheduler import Chunk
from edge.errors import EdgeError, InvalidInput, UnknownModel
from edge.frames import Delta, Done, Failed, MoreDeltas, Ping, Pong, Started
from workers._wire import Cancel, Frame


@dataclass(frozen=True, slots=True)
class Install:
    """From now on, run steps of `model`."""

    model: LoadedModel | LoadedEncoder


@dataclass(frozen=True, slots=True)
class Remove:
    """From now on, run no steps of the model named `model`; its calls fail."""

    model: str


@dataclass(frozen=True, slots=True)
class Upgrade:
    """From now on, compute `model` with `decoder`, which is the same on native kernels."""

    model: LoadedModel
    decoder: Decoder
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue `generation`, which was made for `model`."""

    model: LoadedModel
    generation: Generation


@dataclass(frozen=True, slots=True)
class SubmitTexts:
    """Queue `encoding`, which was made for `model`."""

    model: LoadedEncoder
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after the current step."""


Command = Install | Remove | Upgrade | Submit | SubmitTexts | Cancel | MoreDeltas | Ping | Stop


class StepLoop:
    """Runs steps of all models in turn, as long as there is work."""

    def __init__(self, emit: Callable[[list[Frame]], None]) -> None:
        """`emit` is called in the loop's thread with the frames of a step or command, in order."""
        self._emit = emit
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._models: dict[str, LoadedModel] = {}
        self._encoders: dict[str, LoadedEncoder] = {}
        self._generations: dict[int, tuple[LoadedModel, Generation]] = {}

    def post(self, command: Command) -> None:
        """Have `command` done before the next step; from any thread."""
        self._inbox.put(command)

    def run(self) -> None:
        """The body of the loop's thread; returns after `Stop`."""
        while True:
            working = [model for model in self._models.values() if model.scheduler.has_work]
            encoding = [encoder for encoder in self._encoders.values() if encoder.has_work]
            for command in self._commands(wait=not working and not encoding):
                if isinstance(command, Stop):
                    return
                self._do(command)
            started_ns = time.perf_counter_ns()
            for model in working:
                self._step(model)
            if encoding:
                step_us = (time.perf_counter_ns() - started_ns) / 1000 if working else None
                self._encode_one_of(encoding, step_us)

    def _encode_one_of(self, encoding: list[LoadedEncoder], step_us: float | None) -> None:
        """Give a turn to the encoder whose last one was longest ago: however many there are, a step waits for one."""
        encoder = encoding[0]
        if self._encoders.get(encoder.name) is encoder:  # else it was removed meanwhile
            self._encoders[encoder.name] = self._encoders.pop(encoder.name)
        running = [sequence for model in self._models.values() for sequence in model.scheduler.running]
        decoding = [each.priority for each in running if each.num_output_tokens > 0 and each.credit > 0]
        is_outranked = encoder.priority < max([*decoding, *(each.priority for each in encoding)])
        self._encode(encoder, texts_us(step_us, beside_decoding=bool(decoding), is_outranked=is_outranked))

    def _commands(self, *, wait: bool) -> list[Command]:
        commands = [self._inbox.get()] if wait else []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def _do(self, command: Command) -> None:
        match command:
            case Install(LoadedEncoder() as encoder):
                self._encoders[encoder.name] = encoder
            case Install(LoadedModel() as model):
                self._models[model.name] = model
            case Remove(name) if name in self._encoders:
                self._emit(self._encoders.pop(name).fail_all(_removed(name)))
            case Remove(name):
                self._remove_model(self._models.pop(name))
            case Upgrade(model, decoder, kernels):
                model.use(decoder, kernels)
            case Submit(model, generation):
                self._submit(model, generation)
            case SubmitTexts(encoder, encoding):
                self._submit_texts(encoder, encoding)
            case MoreDeltas(id, num_deltas):
                if id in self._generations:
                    self._generations[id][1].sequence.credit += num_deltas
            case Cancel(id):
                if id in self._generations:
                    _, generation = self._generations[id]
                    self._remove(generation)
                    self._emit([Done(id, "cancelled", generation.usage)])
                else:
                    self._emit([frame for encoder in self._encoders.values() for frame in encoder.cancel(id)])
            case Ping(number):
                self._emit([self._state(number)])

    def _state(self, number: int) -> Pong:
        schedulers, encoders = [model.scheduler for model in self._models.values()], self._encoders.values()
        num_waiting = sum(len(each.waiting) for each in schedulers) + sum(each.num_waiting for each in encoders)
        num_running = sum(len(each.running) for each in schedulers) + sum(each.num_running for each in encoders)
        return Pong(number, num_waiting, num_running)

    def _submit_texts(self, encoder: LoadedEncoder, encoding: Encoding) -> None:
        try:
            if self._encoders.get(encoder.name) is not encoder:
                raise _removed(encoder.name)
            self._emit(encoder.add(encoding))
        except EdgeError as error:
            self._emit([Failed(encoding.id, error.code, error.message, encoding.usage, error.param)])

    def _encode(self, encoder: LoadedEncoder, slice_us: float) -> None:
        try:
            self._emit(encoder.advance(slice_us))
        except Exception as error:  # whatever breaks ends the texts that wait, not the engine
            traceback.print_exc(file=sys.stderr)
            failure = EdgeError(f"the engine failed in a batch of texts: {type(error).__name__}: {error}")
            self._emit(encoder.fail_all(failure))

    def _submit(self, model: LoadedModel, generation: Generation) -> None:
        try:
            if self._models.get(model.name) is not model:
                raise _removed(model.name)
            model.scheduler.add(generation.sequence, reject_if_busy=generation.rejects_if_busy)
        except EdgeError as error:
            self._emit([_failed(generation, error)])
            return
        self._generations[generation.id] = (model, generation)
        if generation.adapter is not None:
            model.runner.adapters[generation.id] = generation.adapter
        self._emit([Started(generation.id, generation.sequence.num_prompt_tokens)])

    def _remove_model(self, model: LoadedModel) -> None:
        orphans = [generation for owner, generation in self._generations.values() if owner is model]
        for generation in orphans:
            self._remove(generation)
        self._emit([_failed(generation, _removed(model.name)) for generation in orphans])

    def _step(self, model: LoadedModel) -> None:
        started_ns = time.perf_counter_ns()
        scheduler = model.scheduler
        for sequence in scheduler.running:
            self._generations[sequence.id][1].guess()
        num_answering = sum(sequence.num_output_tokens > 0 for sequence in scheduler.running)
        num_prompts = len(scheduler.waiting) + len(scheduler.running) - num_answering
        num_seen = max((s.num_computed_tokens for s in scheduler.running if s.num_missing_tokens > 1), default=0)
        scheduler.prefill_tokens = model.pace.prompt_tokens(num_answering, num_prompts, num_seen)
        chunks = scheduler.schedule()
        if not chunks:
            return
        prompts = _prompts(chunks)
        members = [self._generations[chunk.sequence.id][1] for chunk in chunks]
        try:
            results = _compute(model, chunks, members)
        except Exception as error:  # whatever breaks in a step ends its sequences, not the engine
            traceback.print_exc(file=sys.stderr)
            failure = EdgeError(f"the engine failed in a step: {type(error).__name__}: {error}")
            results = [_Broken(failure, taints=True)] * len(chunks)
        step_us = (time.perf_counter_ns() - started_ns) // 1000
        model.pace.observe(sum(_decodes(chunk) for chunk in chunks), prompts, step_us)
        for generation, share in zip(members, shares(step_us, [chunk.num_tokens for chunk in chunks]), strict=True):
            generation.charge(share)
        self._emit([frame for member in zip(members, results, strict=True) for frame in self._frames(model, *member)])

    def _frames(self, model: LoadedModel, generation: Generation, result: Growth | _Broken) -> list[Frame]:
        """What the node gets to know of one sequence's part in a step."""
        frames: list[Frame] = []
        if isinstance(result, _Broken):
            if result.taints:
                model.runner.cache.clear(model.scheduler.discard(generation.sequence))
                self._forget(generation)
            else:
                self._remove(generation)
            return [_failed(generation, result.error)]
        if result.text or result.logprobs or result.finish_reason is None:
            # Without text, it says what a call that is lost has used.
            generation.sequence.credit -= 1
            frames.append(Delta(generation.id, result.text, generation.usage, result.logprobs))
        if result.finish_reason is not None:
            self._remove(generation)
            frames.append(Done(generation.id, result.finish_reason, generation.usage))
        return frames

    def _remove(self, generation: Generation) -> None:
        self._forget(generation).scheduler.remove(generation.sequence)

    def _forget(self, generation: Generation) -> LoadedModel:
        model, _ = self._generations.pop(generation.id)
        model.runner.adapters.pop(generation.id, None)
        return model


def _decodes(chunk: Chunk) -> bool:
    return chunk.num_tokens - chunk.num_draft == 1


def _prompts(chunks: list[Chunk]) -> Prompts:
    """What of `chunks`, before they are computed, is of prompts."""
    pieces = [(c.num_tokens - c.num_draft, c.sequence.num_computed_tokens) for c in chunks if not _decodes(c)]
    return Prompts(sum(count for count, _ in pieces), sum(count * before for count, before in pieces))


@dataclass(frozen=True, slots=True)
class _Broken:
    """The sequence cannot go on. If that `taints`, nobody may find what is in its pages."""

    error: EdgeError
    taints: bool


def _removed(model: str) -> UnknownModel:
    return UnknownModel(f"model {model!r} was removed; `edge models list` shows those that are installed")


def _failed(generation: Generation, error: EdgeError) -> Failed:
    return Failed(generation.id, error.code, error.message, generation.usage, error.param)


def _compute(model: LoadedModel, chunks: list[Chunk], members: list[Generation]) -> list[Growth | _Broken]:
    """Run the step; what it came to for each chunk."""
    computed = {chunk.sequence.id for chunk in chunks}
    logits = model.runner.run(chunks, [each for each in model.scheduler.running if each.id not in computed])
    completing = [(chunk, member) for chunk, member in zip(chunks, members, strict=True) if chunk.completes]
    held = [(member.grammar, chunk.sequence.draft[: chunk.num_draft]) for chunk, member in completing if member.grammar]
    masks = iter(model.grammars.masks([grammar for grammar, _ in held], [draft for _, draft in held]) if held else ())
    rows = [row for chunk, member in completing for row in member.rows(chunk.num_draft, masks)]
    choices = iter(sample(logits, rows) if rows else ())
    return [
        _advance(model, chunk, member, [next(choices) for _ in range(1 + chunk.num_draft if chunk.completes else 0)])
        for chunk, member in zip(chunks, members, strict=True)
    ]


def _advance(
    model: LoadedModel, chunk: Chunk, generation: Generation, choices: list[Choice | None]
) -> Growth | _Broken:
    """Take over the choices up to the first one that was guessed wrong: the logits after that one are of no use."""
    if generation.grammar is not None and (reason := generation.grammar.broken):
        return _Broken(InvalidInput(reason, param="response_format"), taints=False)
    good: list[Choice] = []
    for place, choice in enumerate(choices):
        if choice is None:
            chunk.sequence.num_computed_tokens += chunk.num_tokens - chunk.num_draft  # it was, if to no avail
            return _Broken(
                EdgeError(_why_no_numbers(model, generation)),
                taints=True,
            )
        good.append(choice)
        if place < chunk.num_draft and choice.token != chunk.sequence.draft[place]:
            break
    model.scheduler.computed(chunk, max(0, len(good) - 1))
    return generation.accept(good)


def _why_no_numbers(model: LoadedModel, generation: Generation) -> str:
    adapter = "" if generation.adapter is None else f" --adapter {generation.adapter.name}"
    return (
        "the model computed values that are no numbers (NaN or infinite) for this request. If that happens again, the "
        f"file of {'the adapter' if adapter else 'the model'} is damaged: remove it "
        f"(edge models rm {model.name}{adapter}) and add it again"
    )
