"""What was acknowledged survives kill -9: this file, run as a program, writes until it is killed, and a test looks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.r2 import R2
from edge.isolates.base import Binding, Bundle

CALLER = Bundle("worker", "v1", "/", "main.py")
PROVIDERS: dict[str, Any] = {"kv": Kv, "d1": D1, "r2": R2}
NUM_WRITERS = 8
NUM_WRITES = 60


def value_of(name: str) -> bytes:
    """Some values are short, some are long enough to be files."""
    return name.encode() * (1 if len(name) % 2 else 30_000)


async def body_of(name: str) -> AsyncIterator[bytes]:
    yield value_of(name)


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_no_acknowledged_write_is_lost(kind: str, tmp_path: Path) -> None:
    names = [name for _ in range(2) for name in acknowledged_until_killed(kind, tmp_path)]
    assert len(names) >= 2 * NUM_WRITES
    provider = PROVIDERS[kind](tmp_path)
    binding = Binding(kind, {"id": "x"})

    async def call(method: str, *args: Any) -> Any:
        return await provider.call(CALLER, binding, method, list(args), None)

    if kind == "d1":
        answer = (await call("query", [["SELECT name FROM t", []]])).value
        assert set(names) <= {name for (name,) in answer["results"][0]["rows"]}
    for name in names if kind != "d1" else []:
        found = (await call("get", name, *([{}] if kind == "r2" else []))).value
        data = found.get("value", found.get("data"))
        if data is None:
            version = [found["record"]["version"], 0, found["record"]["size"]] if kind == "r2" else []
            data = b"".join([chunk async for chunk in (await call("read", name, *version)).body])
        assert data == value_of(name)
    await provider.close()


def acknowledged_until_killed(kind: str, state_dir: Path) -> list[str]:
    """The writes that were acknowledged before a process got kill -9, at least `NUM_WRITES`."""
    command = [sys.executable, __file__, kind, str(state_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [process.stdout.readline().strip() for _ in range(NUM_WRITES)]
        process.kill()
        *rest, _unfinished = process.stdout.read().split("\n")
        assert process.wait() == -signal.SIGKILL
    return [*first, *rest]


async def write(kind: str, state_dir: Path) -> None:
    """Print a line for each write that was acknowledged, for ever."""
    provider = PROVIDERS[kind](state_dir)
    binding = Binding(kind, {"id": "x"})
    if kind == "d1":
        await provider.call(CALLER, binding, "exec", ["CREATE TABLE IF NOT EXISTS t (name TEXT)"], None)

    async def writes(writer: int) -> None:
        for number in range(1_000_000):
            name = f"{writer}-{number}"
            if kind == "d1":
                statements = [["INSERT INTO t VALUES (?)", [name]]]
                await provider.call(CALLER, binding, "query", [statements], None)
            else:
                await provider.call(CALLER, binding, "put", [name, None, {}], body_of(name))
            print(name, flush=True)

    await asyncio.gather(*(writes(writer) for writer in range(NUM_WRITERS)))


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], Path(sys.argv[2])))
