"""The engine process between its socket and its step loop.

The main thread reads and writes frames. One thread runs steps, one loads models, and a few turn prompts into
tokens, so that neither a long prompt nor a large model holds up the tokens of others. Requests with a JSON schema
have a thread of their own: however many schemas come at once, plain prompts do not wait for them.

This module knows nothing about who started the process.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.structs import replace

from edge.config import EngineConfig, ModelOptions
from edge.engine import kernels as native
from edge.engine import runner
from edge.engine.encoder_tokenizer import EncoderTokenizer
from edge.engine.encoding import Encoding, LoadedEncoder
from edge.engine.generation import Generation, prompt_tokens
from edge.engine.kernels import Kernels, KernelsUnavailable
from edge.engine.loaded import LoadedModel
from edge.engine.loop import Install, Remove, StepLoop, Submit, SubmitTexts, Upgrade
from edge.engine.lora import AdapterStore
from edge.engine.models.decoder import Decoder
from edge.engine.models.encoder import Encoder
from edge.engine.tokenizer import Tokenizer
from edge.errors import ConfigError, EdgeError, OutOfCapacity, UnknownModel, WeightsError
from edge.frames import (
    CountTokens,
    Done,
    Encode,
    EngineReady,
    Failed,
    Generate,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    MoreDeltas,
    Ping,
    ToEngine,
    TokenCount,
    UnloadModel,
    Usage,
)
from edge.weights.checkpoint import open_checkpoint
from edge.weights.encoder_checkpoint import EncoderCheckpoint
from edge.weights.encoder_facts import is_encoder
from edge.weights.store import ADAPTERS_NAME
from workers._wire import Cancel, Frame, FrameDecoder, encode

M = TypeVar("M", LoadedModel, LoadedEncoder)

READ_BYTES = 1 << 20
NUM_TOKENIZER_THREADS = 2
MAX_COUNTED_TOKENS = 1 << 24
KERNELS_TIMEOUT_S = 0.5
"""How long the load of a model waits for the kernels: long enough to find compiled ones, but not to compile."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread of Python may keep the others waiting: a step hands the lock over at each of its kernels."""


def num_cores() -> int:
    """Cores that this process may use: its affinity, and its cgroup's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


async def serve(sock: socket.socket, config: EngineConfig, cache_dir: Path) -> None:
    """Serve the node at the other end of `sock` until it closes; compiled kernels are kept in `cache_dir`.

    Raises:
        FrameError: the node sent something that is no frame.
        ConfigError: the device cannot be used.
    """
    num_threads = config.num_threads or num_cores()
    torch.set_num_threads(num_threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _check_device(config.device)
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    engine = _Engine(config, writer)
    if config.kernels and config.device == "cpu":
        engine.build_kernels(cache_dir, num_threads)
    engine.send([EngineReady(config.device, num_threads, str(torch.__version__))])
    decoder = FrameDecoder(ToEngine)
    try:
        while data := await reader.read(READ_BYTES):
            for frame in decoder.feed(data):
                engine.receive(frame)
    except ConnectionError:
        return


def _check_device(device: str) -> None:
    try:
        torch.ones(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise ConfigError(
            f'the device {device!r} cannot be used: {error}; set `device` of [engine] to "cpu", or install the '
            "CUDA build of torch (see README.md)"
        ) from error


class _Engine:
    """What the main thread keeps: the models that are usable, and the prompts that are being tokenized."""

    def __init__(self, config: EngineConfig, writer: asyncio.StreamWriter) -> None:
        self._config = config
        self._writer = writer
        self._event_loop = asyncio.get_running_loop()
        self._models: dict[str, LoadedModel | LoadedEncoder] = {}
        self._paths: dict[str, str] = {}
        self._loaded: dict[str, ModelLoaded] = {}
        self._preparing: dict[int, _Preparing] = {}
        self._counting: dict[int, _Preparing] = {}
        self._load_lock = asyncio.Lock()
        self._kernels: Kernels | None = None
        self._building: asyncio.Task[None] | None = None
        self._loader = ThreadPoolExecutor(1, "load")
        self._tokenizers = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, "tokenize")
        self._compilers = ThreadPoolExecutor(1, "schema")
        self._counters = ThreadPoolExecutor(1, "count")
        self._readers = ThreadPoolExecutor(1, "texts")
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps = StepLoop(self._send_from_loop)
        threading.Thread(target=self._run_steps, name="steps", daemon=True).start()

    def build_kernels(self, cache_dir: Path, num_threads: int) -> None:
        """Find the native kernels, or compile them; models that were loaded before change over to them then."""
        self._building = self._event_loop.create_task(self._build_kernels(cache_dir, num_threads))

    async def _build_kernels(self, cache_dir: Path, num_threads: int) -> None:
        try:
            kernels = await asyncio.to_thread(native.load, cache_dir)
        except KernelsUnavailable as error:
            print(f"engine: no native kernels, models run on torch's operators: {error}", file=sys.stderr, flush=True)
            return
        kernels.num_threads = num_threads
        self._kernels = kernels
        async with self._load_lock:
            for model in self._models.values():
                if isinstance(model, LoadedModel):
                    await self._upgrade(model, kernels)

    async def _upgrade(self, model: LoadedModel, kernels: Kernels) -> None:
        if model.runner.has_kernels or model.options.weights == "float32":
            return
        path = Path(self._paths[model.name])
        try:
            decoder = await self._event_loop.run_in_executor(self._loader, _load_decoder, path, model, kernels)
        except Exception as error:  # its files went meanwhile, say, or memory is short; it runs as it is
            why = f"{type(error).__name__}: {error}"
            print(f"engine: {model.name} stays on torch's operators: {why}", file=sys.stderr, flush=True)
            return
        self._steps.post(Upgrade(model, decoder, kernels))
        self._loaded[model.name] = replace(self._loaded[model.name], weights=decoder.weights_description)
        self.send([self._loaded[model.name]])
        print(f"engine: {model.name} runs on native kernels from now on", file=sys.stderr, flush=True)

    def send(self, frames: list[Frame]) -> None:
        """Write `frames` to the node."""
        self._writer.write(b"".join(encode(frame) for frame in frames))

    def _send_from_loop(self, frames: list[Frame]) -> None:
        self._event_loop.call_soon_threadsafe(self.send, frames)

    def receive(self, frame: Frame) -> None:
        """Do what the node asks for."""
        match frame:
            case LoadModel():
                self._spawn(self._load(frame))
            case UnloadModel(name):
                self._spawn(self._unload(name))
            case Generate():
                self._generate(frame)
            case CountTokens(id, request):
                if (model := self._found(id, request.model, LoadedModel)) is not None:
                    counting = self._counting[id] = _Preparing(0)
                    self._spawn(self._count(id, request, model, counting))
            case Encode():
                if (encoder := self._admitted(frame.id, frame.model, LoadedEncoder)) is not None:
                    self._spawn(self._read_texts(frame, encoder))
            case MoreDeltas(id, num_deltas) if id in self._preparing:
                self._preparing[id].credit += num_deltas
            case Cancel(id) if id in self._preparing:
                self._preparing[id].cancelled = True
            case Cancel(id) if id in self._counting:
                self._counting[id].cancelled = True
            case Cancel() | MoreDeltas() | Ping():
                self._steps.post(frame)

    def _generate(self, request: Generate) -> None:
        if (model := self._admitted(request.id, request.model, LoadedModel)) is not None:
            preparing = self._preparing[request.id] = _Preparing(request.credit)
            self._spawn(self._prepare(request, model, preparing))

    def _admitted(self, id: int, name: str, kind: type[M]) -> M | None:
        """The model `name`; None, and the request `id` is refused, if there is none or too many requests wait."""
        model = self._found(id, name, kind)
        if model is not None and len(self._preparing) >= self._config.max_waiting:
            self._refuse(id, OutOfCapacity(f"{len(self._preparing)} prompts are waiting to be read; try again later"))
            return None
        return model

    def _found(self, id: int, name: str, kind: type[M]) -> M | None:
        """The model `name`; None, and the request `id` is refused, if there is none for its task."""
        model = self._models.get(name)
        if not isinstance(model, kind):
            why = "is not loaded in this engine" if model is None else "is for another task"
            self._refuse(id, UnknownModel(f"model {name!r} {why}"))
            return None
        return model

    async def _read_texts(self, request: Encode, encoder: LoadedEncoder) -> None:
        preparing = self._preparing[request.id] = _Preparing(0)
        try:
            encoding = await self._event_loop.run_in_executor(
                self._readers, Encoding, request, encoder.tokenizer, encoder.encoder.config.pooling
            )
        except Exception as error:
            self._refuse(request.id, _unreadable(error))
            return
        finally:
            del self._preparing[request.id]
        if preparing.cancelled:
            self.send([Done(request.id, "cancelled", Usage())])
            return
        self._steps.post(SubmitTexts(encoder, encoding))

    async def _count(self, id: int, request: Generate, model: LoadedModel, counting: _Preparing) -> None:
        def num_tokens() -> int | None:
            """None: nobody wants to know any more, by the time that it is its turn."""
            if counting.cancelled:
                return None
            return len(prompt_tokens(request, model.tokenizer, MAX_COUNTED_TOKENS))

        try:
            counted = await self._event_loop.run_in_executor(self._counters, num_tokens)
            self.send([Done(id, "cancelled", Usage()) if counted is None else TokenCount(id, counted)])
        except Exception as error:
            self._refuse(id, _unreadable(error))
        finally:
            del self._counting[id]

    async def _prepare(self, request: Generate, model: LoadedModel, preparing: _Preparing) -> None:
        reader = self._tokenizers if request.json_schema is None else self._compilers
        try:
            generation = await self._event_loop.run_in_executor(reader, Generation, request, model)
        except Exception as error:
            self._refuse(request.id, _unreadable(error))
            return
        finally:
            del self._preparing[request.id]
        if preparing.cancelled:
            self.send([Done(request.id, "cancelled", Usage())])
            return
        generation.sequence.credit = preparing.credit
        self._steps.post(Submit(model, generation))

    def _refuse(self, id: int, error: EdgeError) -> None:
        self.send([Failed(id, error.code, error.message, Usage(), error.param)])

    async def _load(self, request: LoadModel) -> None:
        async with self._load_lock:  # a model that is asked for twice is loaded once
            self.send([self._loaded.get(request.model) or await self._load_new(request)])

    async def _unload(self, name: str) -> None:
        async with self._load_lock:  # in the order in which the node asked
            self._loaded.pop(name, None)
            self._paths.pop(name, None)
            if self._models.pop(name, None) is not None:
                self._steps.post(Remove(name))

    async def _load_new(self, request: LoadModel) -> ModelLoaded | ModelFailed:
        if self._building is not None:
            await asyncio.wait({self._building}, timeout=KERNELS_TIMEOUT_S)
        try:
            model, loaded = await self._event_loop.run_in_executor(
                self._loader, _load, request, self._config, self._kernels
            )
        except EdgeError as error:
            return ModelFailed(request.model, error.message)
        except Exception as error:  # out of memory, or a file that fools every check: this model, not the engine
            traceback.print_exc(file=sys.stderr)
            return ModelFailed(request.model, f"{request.path}: {type(error).__name__}: {error}")
        self._models[request.model], self._loaded[request.model] = model, loaded
        self._paths[request.model] = request.path
        self._steps.post(Install(model))
        return loaded

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._event_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run_steps(self) -> None:
        try:
            self._steps.run()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)  # without its loop the process would look alive and answer nobody


def _unreadable(error: Exception) -> EdgeError:
    """What to tell the caller: a prompt that breaks a tokenizer must not leave them without an answer."""
    if isinstance(error, EdgeError):
        return error
    traceback.print_exception(error, file=sys.stderr)
    return EdgeError(f"the prompt cannot be read: {type(error).__name__}: {error}")


class _Preparing:
    """What arrived for a request while its prompt was being tokenized."""

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.cancelled = False


def _load(
    request: LoadModel, config: EngineConfig, kernels: Kernels | None
) -> tuple[LoadedModel | LoadedEncoder, ModelLoaded]:
    started = time.perf_counter()
    path, options = Path(request.path), request.options
    if is_encoder(path):
        encoder, loaded = _load_encoder(request.model, path, options, config)
        return encoder, replace(loaded, load_ms=round((time.perf_counter() - started) * 1000))
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer(checkpoint.tokenizer_files())
    device = torch.device(config.device)
    running = runner.load_runner(
        checkpoint,
        options=options,
        device=device,
        kernels=kernels,
        kv_tokens=config.kv_tokens,
        max_running=config.max_batch_size,
        step_tokens=config.step_tokens,
    )
    shape = running.model.config
    if tokenizer.num_tokens > shape.vocab_size:
        raise WeightsError(
            f"{path}: the tokenizer has {tokenizer.num_tokens} tokens but the model only {shape.vocab_size}; "
            "they do not belong together"
        )
    adapters = AdapterStore(path.parent / ADAPTERS_NAME, shape, device)
    model = LoadedModel(request.model, running, tokenizer, adapters, options, config)
    loaded = ModelLoaded(
        model=request.model,
        architecture=checkpoint.architecture,
        context_length=model.max_length,
        num_parameters=running.model.num_parameters,
        size_bytes=checkpoint.size_bytes,
        load_ms=round((time.perf_counter() - started) * 1000),
        weights=running.model.weights_description,
        kv=running.cache.format,
    )
    return model, loaded


def _load_encoder(
    name: str, path: Path, options: ModelOptions, config: EngineConfig
) -> tuple[LoadedEncoder, ModelLoaded]:
    checkpoint = EncoderCheckpoint(path)
    device = torch.device(config.device)
    is_half = options.weights == "bfloat16" or (options.weights == "auto" and device.type != "cpu")
    dtype = torch.bfloat16 if is_half else torch.float32
    encoder = Encoder(checkpoint, dtype=dtype, device=device)
    tokenizer = EncoderTokenizer(checkpoint.tokenizer_json(), encoder.config.max_tokens)
    if tokenizer.num_tokens > encoder.config.vocab_size:
        raise WeightsError(
            f"{path}: the tokenizer has {tokenizer.num_tokens} tokens but the model only {encoder.config.vocab_size}; "
            "they do not belong together"
        )
    loaded = ModelLoaded(
        model=name,
        architecture=checkpoint.architecture,
        context_length=encoder.config.max_tokens,
        num_parameters=encoder.num_parameters,
        size_bytes=checkpoint.size_bytes,
        load_ms=0,
        weights=str(dtype).removeprefix("torch."),
        kv="none",
    )
    return LoadedEncoder(name, encoder, tokenizer, config.max_waiting), loaded


def _load_decoder(path: Path, model: LoadedModel, kernels: Kernels) -> Decoder:
    """The model in `path` once more, for `kernels`."""
    device = model.runner.device
    return runner.load(open_checkpoint(path), options=model.options, device=device, kernels=kernels)
