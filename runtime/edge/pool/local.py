"""A pool of one engine process on this machine: starts it, watches it, and starts it again when it dies.

Without a model there is no engine: the first one that is installed starts it.

The process is `python -m edge.engine` at the other end of a socket pair. It ends when the socket closes and when
this process dies, so that nothing is left running whatever happens here. When the engine dies, calls in flight
fail with `EngineLost`, and calls made meanwhile wait for the new one.

This module knows nothing about torch, models' files or billing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from edge.config import EngineConfig
from edge.errors import (
    BY_CODE,
    ConfigError,
    EdgeError,
    EngineLost,
    OutOfCapacity,
    RequestTooLarge,
    UnknownModel,
    WeightsError,
)
from edge.frames import (
    CountTokens,
    Delta,
    Done,
    Encode,
    Encoded,
    EngineReady,
    Failed,
    Generate,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    MoreDeltas,
    Ping,
    Pong,
    Started,
    TokenCount,
    ToNode,
    UnloadModel,
)
from edge.pool.base import OnUsage
from workers._wire import Cancel, Frame, FrameDecoder, FrameError, encode

PING_INTERVAL_S = 5.0
MAX_MISSED_PINGS = 12
"""An engine that leaves so many pings unanswered is killed: it hangs."""
MAX_MISSED_PINGS_LOADING = 120
"""The same while it starts or loads a model, which can hold up everything else for long."""
READY_TIMEOUT_S = 120.0
"""How long a call waits for the engine and its model."""
EXIT_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 5.0
"""How long a cancelled call is heard out: a step, unless the engine hangs."""
STABLE_S = 30.0
"""An engine that dies younger than this counts as a failed start."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses before the next start, by the number of failed starts in a row."""
MAX_FAILED_STARTS = 3
"""After so many starts in a row that did not even get ready, calls fail at once instead of waiting."""
MAX_ATTEMPTS = 2
"""How many engines a call is given to, as long as they die before they have accepted it."""
MAX_COUNTING = 8
"""Prompts whose tokens are counted at a time, beside the calls of which `max_waiting` may wait."""
MAX_UNSENT_BYTES = 64 << 20
"""While more waits to be read by the engine, calls are refused."""
READ_BYTES = 1 << 20
ENGINE_COMMAND = (sys.executable, "-P", "-m", "edge.engine")
"""What an engine is started with, before what it is told; `bench wire` measures with one that answers at once."""

_Request = Generate | Encode | CountTokens
_Reply = Started | Delta | Done | Encoded | TokenCount | Failed
_LAST = (Done, Encoded, TokenCount)

_SHUTTING_DOWN = "the engine is not running: the node is shutting down"

_log = logging.getLogger(__name__)


class LocalPool:
    """`edge.pool.base.Pool` over one engine process."""

    def __init__(
        self,
        models: Mapping[str, Path],
        engine: EngineConfig,
        cache_dir: Path,
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        """Serve `models`, by name and path of their files, on an engine with the configuration `engine`.

        What it compiles is kept in `cache_dir`.

        Raises:
            ConfigError: the configuration makes no sense.
        """
        if engine.step_tokens <= engine.max_batch_size:
            raise ConfigError(
                f"[engine] step_tokens ({engine.step_tokens}) must be greater than max_batch_size "
                f"({engine.max_batch_size}): with fewer, prompts would not move while all others decode"
            )
        self._models = dict(models)
        self._config = engine
        self._cache_dir = cache_dir
        self._ready_timeout_s = ready_timeout_s
        self._ping_interval_s = ping_interval_s
        self._engine: _Engine | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._last_failure = ""
        self._is_closed = False
        self._num_starts = 0
        self._next_start = 0.0  # on the monotonic clock
        self._ended: float | None = None
        """When the engine ended whose place no other has taken yet, on the monotonic clock."""
        self._num_failed_starts = 0
        self._num_waiting = 0
        self._num_counting = 0
        self._next_id = 0

    async def start(self) -> None:
        """Start the engine in the background, once there is a model, and have it load all; returns at once."""
        assert self._supervisor is None, "a pool is started once"
        self._supervisor = asyncio.create_task(self._supervise())

    def update(self, models: Mapping[str, Path]) -> None:
        """From now on, serve `models`: new ones are loaded at once, those that are gone are unloaded and refused."""
        added = {name: path for name, path in models.items() if name not in self._models}
        removed = self._models.keys() - models.keys()
        self._models = dict(models)
        if self._engine is not None and self._engine.ready is not None:
            self._engine.unload(removed)
            self._engine.load(added, self._config)
        self._notify()

    async def close(self) -> None:
        """Stop the engine; calls in flight fail. Returns when the process is gone."""
        self._is_closed = True
        if self._engine is not None and self._engine.ready is None:
            self._engine.kill("was not ready when the node shut down")  # it would notice once torch is imported
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def generate(
        self, request: Generate, on_usage: OnUsage = lambda usage: None
    ) -> AsyncGenerator[Started | Delta | Done, None]:
        """The frames of one generation; see `edge.pool.base.Pool`.

        A call whose engine dies before it has accepted the prompt goes to the next engine, once. Up to
        `request.credit` deltas are buffered here for a slow reader.

        Raises:
            WeightsError: the model cannot be loaded.
            RequestTooLarge: the request does not fit into a frame.
            EdgeError: as the protocol says.
        """
        credit = max(1, request.credit)
        return self._call(request.model, msgspec.structs.replace(request, credit=credit), credit, on_usage)

    def encode(
        self, request: Encode, on_usage: OnUsage = lambda usage: None
    ) -> AsyncGenerator[Started | Delta | Encoded, None]:
        """The frames of one `Encode`; see `edge.pool.base.Pool`. The same is raised as by `generate`."""
        return self._call(request.model, request, 1, on_usage)

    async def count_tokens(self, request: Generate) -> int:
        """The tokens of a prompt; see `edge.pool.base.Pool`. The same is raised as by `generate`."""
        if self._num_counting >= MAX_COUNTING:
            raise OutOfCapacity(f"the tokens of {MAX_COUNTING} prompts are being counted; try again", retry_after_s=1)
        self._num_counting += 1
        try:
            async with aclosing(self._call(request.model, CountTokens(0, request), 1, lambda usage: None)) as replies:
                count: TokenCount = await anext(replies)
        finally:
            self._num_counting -= 1
        return count.num_tokens

    async def _call(self, model: str, request: _Request, credit: int, on_usage: OnUsage) -> AsyncGenerator[Any, None]:
        """The replies to `request`, which gets an id of its own, up to the last one."""
        for _ in range(MAX_ATTEMPTS):
            if _rejects_if_busy(request) and self._engine_with(model) is None:
                raise OutOfCapacity(
                    f"model {model!r} is not loaded yet, and rejectIfBusy was asked for; try again later",
                    retry_after_s=5,
                )
            engine = await self._ready(model)
            self._next_id += 1
            call = engine.open(
                msgspec.structs.replace(request, id=self._next_id), credit, self._config.max_waiting, on_usage
            )
            try:
                while (frame := await call.read()) is not None:
                    if isinstance(frame, Failed):
                        error = BY_CODE.get(frame.code, EdgeError)
                        raise error(frame.message, retry_after_s=1 if error.retryable else None, param=frame.param)
                    yield frame
                    if isinstance(frame, _LAST):
                        return
            finally:
                await engine.leave(call)
            if call.is_started:  # else nothing was done for it, and the next engine can do it
                break
        raise EngineLost(_SHUTTING_DOWN) if self._is_closed else _lost(engine.end)

    def status(self) -> dict[str, Any]:
        """What the engine and its models are doing, for `/healthz`: values that JSON has."""
        engine, ready = self._engine, None if self._engine is None else self._engine.ready
        waiting: dict[str, Any] = {"state": "waiting"}
        without_engine = "starting" if self._models else "no models"
        return {
            "state": without_engine if ready is None else "ready",
            "pid": None if engine is None else engine.pid,
            "device": self._config.device,
            "num_threads": None if ready is None else ready.num_threads,
            "torch": None if ready is None else ready.torch,
            "num_restarts": max(0, self._num_starts - 1),
            "last_failure": self._last_failure or None,
            "num_calls": 0 if engine is None else len(engine.calls),
            "num_waiting": 0 if engine is None else engine.pong.num_waiting,
            "num_running": 0 if engine is None else engine.pong.num_running,
            "models": {name: waiting if engine is None else engine.model_status(name) for name in self._models},
        }

    async def _ready(self, model: str) -> _Engine:
        """The engine, once `model` is loaded in it."""
        if self._num_waiting >= self._config.max_waiting:
            raise OutOfCapacity(
                f"{self._num_waiting} calls are waiting for the engine to start; try again later", retry_after_s=5
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                while (engine := self._engine_with(model)) is None:
                    await self._changed.wait()
                return engine
        except TimeoutError:
            if self._engine is not None and self._engine.ready is not None:
                raise OutOfCapacity(
                    f"model {model!r} is still being loaded after {self._ready_timeout_s:g} s; try again later",
                    retry_after_s=10,
                ) from None
            raise _lost(self._last_failure or "it has not started yet") from None
        finally:
            self._num_waiting -= 1

    def _engine_with(self, model: str) -> _Engine | None:
        if self._is_closed or self._supervisor is None or self._supervisor.done():
            raise EngineLost(_SHUTTING_DOWN)
        if model not in self._models:  # or not any more
            raise UnknownModel(f"model {model!r} is not installed; `edge models list` shows those that are")
        if self._engine is None and self._num_failed_starts >= MAX_FAILED_STARTS:
            pause_s = math.ceil(max(1.0, self._next_start - time.monotonic()))
            raise _lost(f"{self._last_failure} in {self._num_failed_starts} starts in a row", retry_after_s=pause_s)
        if self._engine is None or self._engine.end:  # the latter: killed, but its socket is not closed yet
            return None
        state = self._engine.models.get(model)
        if isinstance(state, ModelFailed):
            # Where the model's file is, which the log says, is not the caller's affair.
            reason = state.message.replace(str(self._models[model]), model)
            raise WeightsError(f"model {model!r} cannot be loaded: {reason}")
        return self._engine if isinstance(state, ModelLoaded) else None

    # -- supervision ---------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep one engine running, once there is a model, until cancelled."""
        num_failed = 0
        try:
            while True:
                while not self._models:
                    await self._changed.wait()
                started = time.monotonic()
                self._num_starts += 1
                self._last_failure = await self._run_engine()
                ended = time.monotonic()
                self._ended = self._ended or ended
                num_failed = 1 if ended - started >= STABLE_S else num_failed + 1
                pause_s = BACKOFF_S[min(num_failed, len(BACKOFF_S)) - 1]
                self._next_start = ended + pause_s
                _log.warning("the engine process %s; starting a new one in %g s", self._last_failure, pause_s)
                await asyncio.sleep(pause_s)
        finally:
            self._notify()

    async def _run_engine(self) -> str:
        """Start an engine and serve it until it ends; returns how it ended."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # out of file descriptors: that passes
            return f"cannot be started: {error}"
        try:
            with theirs:
                # Its parent-death signal follows the thread that starts it: the event loop's, which lives as long.
                # In a session of its own, it does not get the Ctrl-C of the terminal: the node decides when it ends.
                process = await asyncio.create_subprocess_exec(
                    *ENGINE_COMMAND,
                    *(str(theirs.fileno()), str(os.getpid()), str(self._cache_dir)),
                    msgspec.json.encode(self._config).decode(),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.__stderr__ or asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            return f"cannot be started: {error}"
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        engine = self._engine = _Engine(process, writer)
        heartbeat = asyncio.create_task(engine.keep_pinging(self._ping_interval_s))
        try:
            await self._read(engine, reader)
        finally:
            heartbeat.cancel()
            self._engine = None
            await engine.stop()
            self._num_failed_starts += engine.ready is None
            self._notify()
        return engine.end

    async def _read(self, engine: _Engine, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder(ToNode)
        try:
            while data := await reader.read(READ_BYTES):
                for frame in decoder.feed(data):
                    self._receive(engine, frame)
        except ConnectionError:
            return
        except FrameError as error:
            engine.kill(f"sent {error}")

    def _receive(self, engine: _Engine, frame: Frame) -> None:
        engine.num_missed_pings = 0
        match frame:
            case Delta() | Started() | Done() | Encoded() | TokenCount() | Failed():
                engine.deliver(frame)
            case EngineReady():
                engine.ready = frame
                self._num_failed_starts = 0
                engine.load(self._models, self._config)
            case ModelLoaded() | ModelFailed() if frame.model in engine.loading or frame.model in engine.models:
                engine.models[frame.model] = frame
                engine.loading.discard(frame.model)
                if isinstance(frame, ModelFailed):
                    _log.error("model %s cannot be loaded: %s", frame.model, frame.message)
                if self._ended is not None and not engine.loading:  # as loud as the news of the end
                    _log.warning("the new engine process is ready, after %.1f s", time.monotonic() - self._ended)
                    self._ended = None
                self._notify()
            case Pong():
                engine.pong = frame

    def _notify(self) -> None:
        """Wake everybody who waits for the engine, and the supervisor where it waits for a model."""
        self._changed.set()
        self._changed = asyncio.Event()


class _Engine:
    """One engine process, from start to end."""

    def __init__(self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._writer = writer
        self.loop = asyncio.get_running_loop()
        self.ready: EngineReady | None = None
        self.models: dict[str, ModelLoaded | ModelFailed] = {}
        self.loading: set[str] = set()
        self.calls: dict[int, _Call] = {}
        self.pong = Pong(0, 0, 0)
        self.num_missed_pings = 0
        self.end = ""
        """How it ended, to be read after "the engine process"."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: Frame) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    def load(self, models: Mapping[str, Path], config: EngineConfig) -> None:
        for name, path in models.items():
            self.send(LoadModel(name, str(path), config.options(name)))
        self.loading.update(models)

    def unload(self, names: Iterable[str]) -> None:
        for name in names:
            self.models.pop(name, None)
            self.loading.discard(name)
            self.send(UnloadModel(name))

    def open(self, request: _Request, credit: int, max_waiting: int, on_usage: OnUsage) -> _Call:
        """Send `request`, unless so much is under way already that an engine that hangs would fill this process."""
        num_waiting = sum(not call.is_started and not call.is_count for call in self.calls.values())
        is_count = isinstance(request, CountTokens)  # the pool bounds them
        is_full = num_waiting >= max_waiting and not is_count
        if is_full or self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise OutOfCapacity(
                f"{num_waiting} calls are waiting for the engine to read their prompts; try again later",
                retry_after_s=1,
            )
        try:
            data = encode(request)
        except FrameError as error:
            raise RequestTooLarge(f"the prompt is too long to be handed to the engine: {error}") from error
        self._writer.write(data)
        call = self.calls[request.id] = _Call(self, request.id, credit, on_usage, is_count=is_count)
        return call

    def deliver(self, frame: _Reply) -> None:
        """Hand `frame` to its call; frames that were under way when the call was left are dropped."""
        if (call := self.calls.get(frame.id)) is not None:
            call.deliver(frame)

    async def leave(self, call: _Call) -> None:
        """Forget `call`. One that is not over is stopped and heard out: the end tells what it has used."""
        if not call.over.is_set():
            self.send(Cancel(call.id))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await call.over.wait()
        self.calls.pop(call.id, None)

    def model_status(self, name: str) -> dict[str, Any]:
        state = self.models.get(name)
        if isinstance(state, ModelLoaded):
            return {"state": "loaded", **msgspec.structs.asdict(state)}
        if isinstance(state, ModelFailed):
            return {"state": "failed", "message": state.message}
        return {"state": "waiting" if self.ready is None else "loading"}

    async def keep_pinging(self, interval_s: float) -> None:
        """Kill the process when it does not answer any more. Counts pings, not time: this one may sleep too."""
        number = 0
        while True:
            await asyncio.sleep(interval_s)
            is_busy = self.ready is None or bool(self.loading)
            limit = MAX_MISSED_PINGS_LOADING if is_busy else MAX_MISSED_PINGS
            if self.num_missed_pings >= limit:
                self.kill(f"did not answer {limit} pings and was killed")
                return
            self.num_missed_pings += 1
            number += 1
            self.send(Ping(number))

    def kill(self, reason: str) -> None:
        self.end = reason
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Close the socket, which ends the process; returns when it is gone. Calls in flight get to know."""
        self._writer.close()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            self.kill("did not exit and was killed")
            code = await self._process.wait()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        self.end = self.end or _how_it_ended(code)
        for call in self.calls.values():
            call.deliver(None)


class _Call:
    """One call in an engine: what has arrived for it and was not read yet, by its one reader."""

    def __init__(self, engine: _Engine, id: int, credit: int, on_usage: OnUsage, *, is_count: bool) -> None:
        self.id = id
        self.is_count = is_count
        """Whether tokens are counted for it, and nothing else."""
        self.is_started = False
        self.over = asyncio.Event()
        """Set when nothing more will come."""
        self._frames: deque[_Reply | None] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._engine = engine
        self._on_usage = on_usage
        self._batch = -(-credit // 2)
        self._num_read = 0

    def deliver(self, frame: _Reply | None) -> None:
        """Queue `frame` for the reader, who may never read it: the usage in it counts at once. None: no more engine."""
        match frame:
            case Delta(usage=usage):
                self._on_usage(usage)
            case Started():
                self.is_started = True
            case Done(usage=usage) | Encoded(usage=usage) | Failed(usage=usage):
                self._on_usage(usage)
                self.over.set()
            case TokenCount() | None:
                self.over.set()
        self._frames.append(frame)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> _Reply | None:
        """The next frame; None when there is no more engine. Deltas that wait for a slow reader become one.

        Asking for the next one says that there is room again for those before it.
        """
        self._give_credit()
        while not self._frames:
            self._reader = self._engine.loop.create_future()
            await self._reader
        frame = self._frames.popleft()
        if not isinstance(frame, Delta):
            return frame
        self._num_read += 1
        return self._joined(frame) if self._frames else frame

    def _joined(self, first: Delta) -> Delta:
        """`first` and the deltas that follow it, as one."""
        deltas = [first]
        while self._frames and isinstance(delta := self._frames[0], Delta):
            deltas.append(delta)
            self._frames.popleft()
        self._num_read += len(deltas) - 1
        logprobs = [each for delta in deltas for each in delta.logprobs]
        return Delta(first.id, "".join(delta.text for delta in deltas), deltas[-1].usage, logprobs)

    def _give_credit(self) -> None:
        """Return credit for what was read, in batches, so that not every token costs a frame."""
        if self._num_read >= self._batch:
            self._engine.send(MoreDeltas(self.id, self._num_read))
            self._num_read = 0


def _rejects_if_busy(request: _Request) -> bool:
    return not isinstance(request, CountTokens) and request.reject_if_busy


def _lost(reason: str, *, retry_after_s: int = 1) -> EngineLost:
    message = f"the engine process {reason}; a new one is being started: try again"
    return EngineLost(message, retry_after_s=retry_after_s)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
