"""Batches on a scripted pool, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from doubles import MODEL, ListMeter, ScriptedPool, answer, make_gate

from edge.ai import batch_openai
from edge.ai.batch import Batches
from edge.ai.batch_store import BatchStore
from edge.ai.gate import Gate, Principal

LIMIT_S = 60
PROMPT = {"prompt": "hi"}


def principal(account: str = "dev") -> Principal:
    return Principal(account=account, trigger="rest", request_id="r")


class Clock:
    """Says whatever time it is told."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(
    folder: Path,
    pool: ScriptedPool | None = None,
    meter: ListMeter | None = None,
    *,
    gate: Gate | None = None,
    max_bytes: int = 1 << 30,
    **options: Any,
) -> AsyncIterator[Batches]:
    """The batches in `folder`, being run."""
    gate = gate or make_gate(pool or ScriptedPool(*answer("1", "2")), meter)
    batches = Batches(BatchStore(folder / "batches", max_account_bytes=max_bytes), gate, **options)
    gate.batches = batches
    batches.start()
    try:
        yield batches
    finally:
        await batches.close()


async def until(condition: Callable[[], Any]) -> Any:
    """What `condition`, or what it gives to await, is once that is true."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)


async def submit(batches: Batches, *requests: dict[str, Any], account: str = "dev") -> str:
    answered = await batches.answer(principal(account), MODEL, {"requests": list(requests)})
    assert answered == {"status": "queued", "request_id": answered["request_id"], "model": MODEL}
    return str(answered["request_id"])


async def done(batches: Batches, request_id: str, account: str = "dev") -> dict[str, Any]:
    """The answer of a poll once the batch is over."""

    async def poll() -> dict[str, Any] | None:
        answered = await batches.answer(principal(account), MODEL, {"request_id": request_id})
        return answered if "responses" in answered else None

    return dict(await until(poll))


async def created(batches: Batches, lines: bytes, *, account: str = "dev", **changes: Any) -> dict[str, Any]:
    """A new batch of OpenAI's form with `lines` as its input file."""
    async with batches.store.files.scratch() as folder:
        path = folder / "input"
        path.write_bytes(lines)
        file = await batches.store.files.add(account, "input.jsonl", "batch", batches.now, path)
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return await batch_openai.create(batches, principal(account), body | changes)


async def ended(batches: Batches, batch: dict[str, Any], account: str = "dev") -> dict[str, Any]:
    """The batch object once the batch is over."""

    async def look() -> dict[str, Any] | None:
        found, progress = await batches.store.get(account, batch["id"], is_native=False)
        return batch_openai.batch_object(found, progress) if found.ended_at is not None else None

    return dict(await until(look))


async def content(batches: Batches, file_id: str | None, account: str = "dev") -> bytes:
    assert file_id is not None
    return batches.store.files.path(await batches.store.files.get(account, file_id)).read_bytes()
