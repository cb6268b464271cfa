"""Test doubles of the gate's neighbours: a pool that plays a script, a meter that keeps what it gets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any

from edge.ai.catalogue import Catalogue
from edge.ai.gate import Event, Gate, Principal
from edge.billing.meter import UsageRecord, new_id
from edge.billing.prices import load_prices
from edge.errors import MeteringUnavailable
from edge.frames import Delta, Done, Encode, Encoded, Generate, Pooling, Started, Usage
from edge.pool.base import OnUsage
from edge.weights.manifest import DEFAULT_NAME, Manifest

MODEL = DEFAULT_NAME
STAND_IN = "@cf/meta/llama-3.2-1b-instruct"


def answer(*texts: str, finish_reason: str = "stop") -> list[Event]:
    """The events of a call that says `texts`, one token each, after 15 prompt tokens of which 5 are cached."""
    deltas = [
        Delta(0, text, Usage(input_tokens=10, cached_input_tokens=5, output_tokens=i, compute_us=i * 100))
        for i, text in enumerate(texts, start=1)
    ]
    return [Started(0, 15), *deltas, Done(0, finish_reason, deltas[-1].usage if deltas else Usage(10, 5, 0, 50))]


Step = Event | Encoded | Exception | asyncio.Event | Usage


class ScriptedPool:
    """Each call plays `script`: events are yielded, exceptions raised, `asyncio.Event`s awaited, usage told.

    With `scripts`, the first call plays the first of them, and so on.
    """

    def __init__(
        self, *script: Step, usage_at_cancel: Usage | None = None, scripts: Sequence[Sequence[Step]] = ()
    ) -> None:
        self.script = list(script)
        self.scripts = scripts
        self.usage_at_cancel = usage_at_cancel
        self.requests: list[Any] = []
        self.num_cancelled = 0
        self.is_called = asyncio.Event()

    def generate(self, request: Generate, on_usage: OnUsage) -> AsyncGenerator[Event, None]:
        return self._play(request, on_usage)

    def encode(self, request: Encode, on_usage: OnUsage) -> AsyncGenerator[Started | Delta | Encoded, None]:
        return self._play(request, on_usage)

    async def _play(self, request: Generate | Encode, on_usage: OnUsage) -> AsyncGenerator[Any, None]:
        script = self.scripts[len(self.requests)] if self.scripts else self.script
        self.requests.append(request)
        self.is_called.set()
        try:
            for step in script:
                match step:
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        raise step
                    case Usage():
                        on_usage(step)
                    case Started():
                        yield step
                    case _:
                        on_usage(step.usage)
                        yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cancelled += 1
            if self.usage_at_cancel is not None:
                await asyncio.sleep(0)  # a real pool hears it from its engine
                on_usage(self.usage_at_cancel)
            raise

    async def count_tokens(self, request: Generate) -> int:
        """As many as there are words."""
        self.requests.append(request)
        texts = [request.prompt or "", *(str(message["content"]) for message in request.messages or [])]
        return sum(len(text.split()) for text in texts)


class ListMeter:
    """Keeps records in a list; `may_write` holds back a write, `fails` refuses it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.records: list[UsageRecord] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.is_waiting = asyncio.Event()
        self._fails = fails

    async def record(self, record: UsageRecord) -> None:
        self.is_waiting.set()
        await self.may_write.wait()
        if self._fails:
            raise MeteringUnavailable("the disk is full", retry_after_s=5)
        self.records.append(record)


def manifest(name: str = MODEL, **changes: object) -> Manifest:
    fields = {
        "name": name,
        "file": "model.gguf",
        "source": "test",
        "sha256": "0" * 64,
        "size_bytes": 98_362_432,
        "architecture": "llama",
        "context_length": 8192,
        "description": "SmolLM2 135M Instruct",
        "created_at": datetime(2026, 11, 30, 12, 0, 0, 123_000, tzinfo=UTC),
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def catalogue(*names: str, stand_ins: dict[str, str] | None = None) -> Catalogue:
    installed = [manifest(name) for name in names or (MODEL,)]
    return Catalogue(installed, {STAND_IN: MODEL} if stand_ins is None else stand_ins, load_prices())


def usage_record(**changes: object) -> UsageRecord:
    fields = {
        "id": new_id(),
        "request_id": "r-1",
        "started_at": 1_796_040_000_000_000,  # 2026-11-30T12:00:00Z
        "ended_at": 1_796_040_001_000_000,
        "account": "dev",
        "worker": "demo",
        "version": "v1",
        "model": MODEL,
        "served_by": MODEL,
        "task": "text-generation",
        "trigger": "binding",
        "status": "ok",
        "error_code": None,
        "input_tokens": 10,
        "cached_input_tokens": 0,
        "output_tokens": 2,
        "compute_us": 700,
        "wall_us": 1_000_000,
        "price_version": load_prices().id,
    }
    return UsageRecord(**{**fields, **changes})  # type: ignore[arg-type]


ENCODER, CLASSIFIER, BGE_M3 = "all-minilm-l6-v2", "sentiment", "@cf/baai/bge-m3"


def encoders() -> Catalogue:
    """A model for each of the tasks."""
    installed = [
        manifest(),
        manifest(ENCODER, task="text-embeddings", architecture="bert", context_length=256, dimensions=2),
        manifest(CLASSIFIER, task="text-classification", architecture="bert", context_length=256),
    ]
    return Catalogue(installed, {BGE_M3: ENCODER}, load_prices())


def encoded(*rows: Sequence[float], labels: Sequence[str] = (), pooling: Pooling = "mean") -> list[Any]:
    """The replies to texts of 4 tokens each that become `rows`."""
    usage = Usage(input_tokens=4 * len(rows), compute_us=50)
    data = struct.pack(f"<{sum(map(len, rows))}f", *(number for row in rows for number in row))
    return [
        Started(0, usage.input_tokens),
        Delta(0, "", Usage(input_tokens=4)),
        Encoded(0, data, len(rows[0]), usage, None if labels else pooling, list(labels)),
    ]


def make_gate(pool: ScriptedPool, meter: ListMeter | None = None, models: Catalogue | None = None) -> Gate:
    return Gate(pool, models or catalogue(), meter or ListMeter())


PRINCIPAL = Principal(account="dev", trigger="binding", request_id="r-1", worker="demo", version="v1")
