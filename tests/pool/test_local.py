"""The local pool with real engine processes and tiny models."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_encoders
import tiny_models
from helpers import is_alive
from msgspec.structs import replace

from edge.config import EngineConfig, ModelOptions
from edge.errors import (
    ConfigError,
    EngineLost,
    InvalidInput,
    OutOfCapacity,
    PromptTooLong,
    RequestTooLarge,
    TextTooLong,
    UnknownModel,
    WeightsError,
)
from edge.frames import Delta, Done, Encode, Encoded, Generate, Started, Usage
from edge.pool.local import EXIT_TIMEOUT_S, MAX_COUNTING, LocalPool

HANG_S = 60
CACHE = Path(__file__).parent.parent.parent / ".edge" / "cache" / "kernels"
CONFIG = EngineConfig(num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def running(models: dict[str, Path], config: EngineConfig = CONFIG, **options: Any) -> AsyncIterator[LocalPool]:
    pool = LocalPool(models, config, CACHE, **options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture(scope="module")
async def pool(folder: Path) -> AsyncIterator[LocalPool]:
    """A pool for the tests that leave it as they found it."""
    async with running({"tiny": folder}) as pool:
        yield pool


async def collect(pool: LocalPool, request: Generate) -> list[Started | Delta | Done]:
    async with asyncio.timeout(HANG_S):
        return [frame async for frame in pool.generate(request)]


def text(frames: list[Started | Delta | Done]) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, Delta))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - what happens in other processes sets no event
            await asyncio.sleep(0.02)


async def until_dead(pid: int) -> None:
    await until(lambda: not is_alive(pid))


@pytest.mark.slow
async def test_calls_made_before_the_engine_is_ready_are_served(folder: Path) -> None:
    async with running({"tiny": folder}) as pool:
        assert pool.status()["state"] == "starting"
        first, second = await asyncio.gather(*(collect(pool, tiny_models.request()) for _ in range(2)))
        assert isinstance(first[0], Started)
        assert isinstance(first[-1], Done)
        assert text(first) == text(second)
        status = pool.status()
        assert (status["state"], status["num_calls"], status["num_restarts"]) == ("ready", 0, 0)
        assert status["models"]["tiny"]["state"] == "loaded"
        assert status["models"]["tiny"]["load_ms"] >= 0
        pid = status["pid"]
    await until_dead(pid)
    with pytest.raises(EngineLost, match="shutting down"):
        await collect(pool, tiny_models.request())


@pytest.mark.slow
async def test_credit_is_returned_as_deltas_are_read(pool: LocalPool) -> None:
    whole = await collect(pool, tiny_models.request(max_tokens=100))
    for credit in (0, 1, 3):
        assert text(await collect(pool, tiny_models.request(max_tokens=100, credit=credit))) == text(whole)


async def test_refusals_travel_as_exceptions(pool: LocalPool) -> None:
    with pytest.raises(PromptTooLong, match=r"the prompt has about \d+ tokens, but only 511 fit"):
        await collect(pool, tiny_models.request("x" * (1 << 20)))
    with pytest.raises(InvalidInput, match="no tools here") as caught:
        await collect(pool, tiny_models.request(messages=[{"role": "tool", "content": ""}]))
    assert caught.value.param == "messages"
    with pytest.raises(UnknownModel, match="'other' is not installed; `edge models list`"):
        await collect(pool, tiny_models.request(model="other"))
    assert text(await collect(pool, tiny_models.request()))


async def test_a_model_that_cannot_be_loaded_says_why_and_others_work(
    pool: LocalPool, folder: Path, tmp_path: Path
) -> None:
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"not a model, and never was one")
    pool.update({"bad": corrupt, "tiny": folder})
    assert text(await collect(pool, tiny_models.request()))
    with pytest.raises(WeightsError, match=r"model 'bad' cannot be loaded: bad: no GGUF file"):
        await collect(pool, tiny_models.request(model="bad"))
    assert pool.status()["models"]["bad"]["state"] == "failed"
    pool.update({"tiny": folder})


async def test_a_model_that_is_replaced_under_its_name_answers_as_the_new_one(
    pool: LocalPool, folder: Path, tmp_path: Path
) -> None:
    other = tiny_models.save_folder(tmp_path / "other", seed=1)
    first = text(await collect(pool, tiny_models.request()))
    pool.update({})
    with pytest.raises(UnknownModel):
        await collect(pool, tiny_models.request())
    pool.update({"tiny": other})
    second = text(await collect(pool, tiny_models.request()))
    assert second != first
    pool.update({})
    pool.update({"tiny": folder})
    assert text(await collect(pool, tiny_models.request())) == first


@pytest.mark.slow
async def test_there_is_no_engine_before_the_first_model(folder: Path) -> None:
    async with running({}) as pool:
        await asyncio.sleep(0)  # in which an engine would be started
        with pytest.raises(UnknownModel, match="'tiny' is not installed; `edge models list`"):
            await collect(pool, tiny_models.request())
        status = pool.status()
        assert (status["state"], status["pid"], status["models"]) == ("no models", None, {})
        pool.update({"tiny": folder})
        assert pool.status()["state"] == "starting"
        assert text(await collect(pool, tiny_models.request()))
        assert (pool.status()["state"], pool.status()["num_restarts"]) == ("ready", 0)


async def test_a_call_that_waits_for_a_model_hears_that_it_was_removed(folder: Path) -> None:
    async with running({"tiny": folder}) as pool:
        waiting = asyncio.create_task(collect(pool, tiny_models.request()))
        await asyncio.sleep(0)
        pool.update({})
        with pytest.raises(UnknownModel):
            await waiting


async def test_an_engine_that_is_not_ready_does_not_hold_up_the_end(folder: Path) -> None:
    async with running({"tiny": folder}) as pool:
        await until(lambda: pool.status()["pid"] is not None)
        pid = pool.status()["pid"]
        os.kill(pid, signal.SIGSTOP)  # as deaf as one that imports torch
        async with asyncio.timeout(EXIT_TIMEOUT_S - 1):
            await pool.close()
    assert not is_alive(pid)


@pytest.mark.slow
async def test_closing_the_generator_cancels_the_work(folder: Path) -> None:
    async with running({"tiny": folder}, ping_interval_s=0.3) as pool:
        frames = pool.generate(tiny_models.request(max_tokens=400, credit=1000))
        assert isinstance(await anext(frames), Started)
        assert isinstance(await anext(frames), Delta)
        await frames.aclose()
        await until(lambda: pool.status()["num_running"] == pool.status()["num_calls"] == 0)
        assert text(await collect(pool, tiny_models.request()))


async def test_a_cancelled_call_is_told_what_it_used_though_nobody_read_it(pool: LocalPool) -> None:
    used: list[Usage] = []
    frames = pool.generate(tiny_models.request(max_tokens=400, credit=1), used.append)
    started = await anext(frames)
    assert isinstance(started, Started)
    await until(lambda: pool.status()["num_calls"] == 1)
    await asyncio.sleep(0.2)  # for the prompt, and the one token that there is credit for
    await frames.aclose()
    assert used[-1].input_tokens + used[-1].cached_input_tokens == started.num_prompt_tokens
    assert used[-1].output_tokens == 1
    assert used[-1].compute_us > 0


async def test_what_waits_for_a_slow_reader_comes_as_one(pool: LocalPool) -> None:
    whole = await collect(pool, tiny_models.request(max_tokens=20))
    used: list[Usage] = []
    frames = pool.generate(tiny_models.request(max_tokens=20, credit=1000), used.append)
    assert isinstance(await anext(frames), Started)
    await until(lambda: bool(used) and used[-1].output_tokens == 20)
    delta, done = [frame async for frame in frames]
    assert isinstance(delta, Delta)
    assert isinstance(done, Done)
    assert (delta.text, delta.usage.output_tokens) == (text(whole), 20)


@pytest.mark.slow
async def test_each_model_is_loaded_with_its_own_options(folder: Path) -> None:
    config = EngineConfig(num_threads=1, kv="float32", models={"b": ModelOptions(weights="bfloat16", kv="bfloat16")})
    async with running({"a": folder, "b": folder}, config) as pool:
        for model in ("a", "b"):
            assert text(await collect(pool, tiny_models.request(model=model)))
        models = pool.status()["models"]
        assert (models["a"]["kv"], models["b"]["kv"]) == ("float32", "bfloat16")


async def test_what_arrived_and_was_not_read_is_used_all_the_same(pool: LocalPool) -> None:
    used: list[Usage] = []
    frames = pool.generate(tiny_models.request(max_tokens=20, credit=1000), used.append)
    assert isinstance(await anext(frames), Started)
    await until(lambda: bool(used) and used[-1].output_tokens == 20)
    await frames.aclose()


async def test_a_killed_engine_fails_its_calls_and_the_next_ones_work(
    pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    expected, num_restarts = text(await collect(pool, tiny_models.request())), pool.status()["num_restarts"]
    caplog.clear()
    # Without credit they cannot finish before the engine is gone.
    stuck = [pool.generate(tiny_models.request(max_tokens=400, credit=1)) for _ in range(3)]
    for frames in stuck:
        assert isinstance(await anext(frames), Started)
    first_pid = pool.status()["pid"]
    os.kill(first_pid, signal.SIGKILL)
    for frames in stuck:
        with pytest.raises(EngineLost, match="was killed by SIGKILL; a new one is being started") as caught:
            async for _ in frames:
                pass
        assert caught.value.retryable
    assert text(await collect(pool, tiny_models.request())) == expected
    status = pool.status()
    assert status["pid"] != first_pid
    assert (status["num_restarts"], status["last_failure"]) == (num_restarts + 1, "was killed by SIGKILL")
    end, recovery = (record.getMessage() for record in caplog.records if record.name == "edge.pool.local")
    assert end.startswith("the engine process was killed by SIGKILL; starting a new one in ")
    assert re.fullmatch(r"the new engine process is ready, after \d+\.\d s", recovery)


@pytest.mark.slow
async def test_a_call_that_a_dead_engine_had_not_accepted_goes_to_the_next_one(pool: LocalPool) -> None:
    expected, num_restarts = text(await collect(pool, tiny_models.request())), pool.status()["num_restarts"]
    os.kill(pool.status()["pid"], signal.SIGKILL)
    assert text(await collect(pool, tiny_models.request())) == expected  # sent before anybody knows of the death
    assert pool.status()["num_restarts"] == num_restarts + 1


@pytest.mark.slow
async def test_what_waits_for_a_hanging_engine_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running({"tiny": folder}, EngineConfig(num_threads=1, max_waiting=3)) as pool:
        await collect(pool, tiny_models.request())
        pid = pool.status()["pid"]
        os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(collect(pool, tiny_models.request())) for _ in range(3)]
        await until(lambda: pool.status()["num_calls"] == 3)
        with pytest.raises(OutOfCapacity, match="3 calls are waiting for the engine"):
            await collect(pool, tiny_models.request())
        waiting.pop().cancel()
        await until(lambda: pool.status()["num_calls"] == 2)
        monkeypatch.setattr("edge.pool.local.MAX_UNSENT_BYTES", 1 << 20)
        waiting.append(asyncio.create_task(collect(pool, tiny_models.request("x" * (4 << 20)))))
        await until(lambda: pool.status()["num_calls"] == 3)
        waiting.pop(0).cancel()
        await until(lambda: pool.status()["num_calls"] == 2)
        with pytest.raises(OutOfCapacity, match="2 calls are waiting for the engine"):
            await collect(pool, tiny_models.request())
        os.kill(pid, signal.SIGCONT)
        served, refused = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(served, list)
        assert isinstance(refused, PromptTooLong)


async def test_a_request_over_the_limit_of_a_frame_harms_nobody(pool: LocalPool) -> None:
    with pytest.raises(RequestTooLarge, match="too long to be handed to the engine"):
        await collect(pool, tiny_models.request("x" * (33 << 20)))
    assert text(await collect(pool, tiny_models.request()))
    assert pool.status()["num_calls"] == 0


async def test_a_call_in_flight_is_told_that_the_node_shuts_down(folder: Path) -> None:
    async with running({"tiny": folder}) as pool:
        frames = pool.generate(tiny_models.request(max_tokens=400, credit=1))
        assert isinstance(await anext(frames), Started)
        await pool.close()
        with pytest.raises(EngineLost, match="the node is shutting down"):
            async for _ in frames:
                pass


async def test_the_engine_does_not_get_the_signals_of_the_terminal_or_a_service_manager(pool: LocalPool) -> None:
    await collect(pool, tiny_models.request())
    pid = pool.status()["pid"]
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, signal.SIGTERM)
    assert text(await collect(pool, tiny_models.request()))
    assert pool.status()["pid"] == pid


@pytest.mark.slow
async def test_an_engine_that_finds_no_file_descriptors_is_started_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = socket.socketpair, [OSError(errno.EMFILE, "Too many open files")]

    def socketpair() -> tuple[socket.socket, socket.socket]:
        if left:
            raise left.pop()
        return real()

    monkeypatch.setattr("edge.pool.local.socket.socketpair", socketpair)
    async with running({"tiny": folder}) as pool:
        assert text(await collect(pool, tiny_models.request()))
        assert "Too many open files" in pool.status()["last_failure"]


@pytest.mark.slow
async def test_a_hanging_engine_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.pool.local.MAX_MISSED_PINGS", 3)
    async with running({"tiny": folder}, ping_interval_s=0.3) as pool:
        expected = text(await collect(pool, tiny_models.request()))
        first_pid = pool.status()["pid"]
        os.kill(first_pid, signal.SIGSTOP)
        await until_dead(first_pid)
        assert text(await collect(pool, tiny_models.request())) == expected
        assert pool.status()["last_failure"] == "did not answer 3 pings and was killed"


@pytest.mark.slow
async def test_an_engine_that_cannot_start_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.pool.local.BACKOFF_S", (0.0, 60.0))
    monkeypatch.setattr("edge.pool.local.MAX_FAILED_STARTS", 2)
    async with running({"tiny": folder}, EngineConfig(device="cuda:7")) as pool:
        with pytest.raises(EngineLost, match="exited with code 1 in 2 starts in a row"):
            await collect(pool, tiny_models.request())


async def test_waiting_for_the_engine_is_bounded(folder: Path) -> None:
    async with running({"tiny": folder}, EngineConfig(max_waiting=2), ready_timeout_s=0.01) as pool:
        results = await asyncio.gather(
            *(collect(pool, tiny_models.request()) for _ in range(3)), return_exceptions=True
        )
    assert [type(result) for result in results] == [EngineLost, EngineLost, OutOfCapacity]
    assert "it has not started yet" in str(results[0])
    assert "2 calls are waiting" in str(results[2])


def test_a_budget_that_starves_prompts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_tokens \(8\) must be greater than max_batch_size \(8\)"):
        LocalPool({"tiny": folder}, EngineConfig(step_tokens=8, max_batch_size=8), CACHE)


NODE = """
import asyncio, sys
from pathlib import Path
import tiny_models
from edge.config import EngineConfig
from edge.pool.local import LocalPool

async def main():
    pool = LocalPool({"tiny": Path(sys.argv[1])}, EngineConfig(num_threads=1, kernels=False), Path(sys.argv[1]))
    await pool.start()
    async for frame in pool.generate(tiny_models.request(max_tokens=400, credit=1)):
        print(pool.status()["pid"], flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_nothing_is_left_when_the_node_is_killed(folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(tiny_models.__file__).parent)}
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(folder), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert node.stdout is not None
    pid = int(await node.stdout.readline())
    assert is_alive(pid)
    node.kill()
    await node.communicate()
    await until_dead(pid)


async def test_tokens_are_counted_through_the_chat_template_and_beyond_the_context(pool: LocalPool) -> None:
    chat = tiny_models.request(messages=[{"role": "user", "content": "hello"}], prompt=None)
    started = (await collect(pool, chat))[0]
    assert isinstance(started, Started)
    async with asyncio.timeout(HANG_S):
        assert await pool.count_tokens(chat) == started.num_prompt_tokens == len("user: hello") + 3
        assert await pool.count_tokens(tiny_models.request("x" * 5000)) == 5000
        with pytest.raises(InvalidInput, match="no tools here"):
            await pool.count_tokens(tiny_models.request(messages=[{"role": "tool", "content": ""}]))
        with pytest.raises(UnknownModel, match="'other' is not installed"):
            await pool.count_tokens(tiny_models.request(model="other"))
    assert pool.status()["num_calls"] == 0


@pytest.mark.slow
async def test_prompts_that_are_counted_take_no_place_of_a_call(folder: Path) -> None:
    async with running({"tiny": folder}, EngineConfig(num_threads=1, max_waiting=1)) as pool:
        await collect(pool, tiny_models.request())
        long = tiny_models.request("x" * (1 << 20))
        counting = [asyncio.create_task(pool.count_tokens(long)) for _ in range(MAX_COUNTING + 1)]
        await until(lambda: pool.status()["num_calls"] == MAX_COUNTING)
        assert isinstance((await collect(pool, tiny_models.request()))[-1], Done)
        for each in counting[:4]:
            each.cancel()
        async with asyncio.timeout(HANG_S):
            counted = await asyncio.gather(*counting, return_exceptions=True)
        assert isinstance(counted[-1], OutOfCapacity)
        assert counted[4:-1] == [1 << 20] * (MAX_COUNTING - 4)
        assert await pool.count_tokens(tiny_models.request("hello")) == 5


@pytest.mark.slow
async def test_texts_become_rows_beside_generation_and_each_task_has_its_models(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    encoder = tmp_path_factory.mktemp("encoder")
    tiny_encoders.save(encoder)
    usages: list[Usage] = []
    async with running({"tiny": folder, "encoder": encoder}) as pool, asyncio.timeout(HANG_S):
        generation = asyncio.create_task(collect(pool, tiny_models.request(max_tokens=200)))
        started, *_, encoded = [
            frame async for frame in pool.encode(Encode(0, "encoder", ["hello", "good world"]), usages.append)
        ]
        assert isinstance(started, Started)
        assert isinstance(encoded, Encoded)
        assert (len(encoded.rows), encoded.width, encoded.pooling, encoded.labels) == (2 * 24 * 4, 24, "mean", [])
        assert usages[-1] == encoded.usage
        assert (encoded.usage.input_tokens, started.num_prompt_tokens) == (7, 7)
        assert isinstance((await generation)[-1], Done)
        state = pool.status()["models"]["encoder"]
        assert (state["state"], state["architecture"], state["context_length"]) == ("loaded", "bert", 40)
        with pytest.raises(UnknownModel, match="'encoder' is for another task"):
            await collect(pool, tiny_models.request(model="encoder"))
        with pytest.raises(UnknownModel, match="'tiny' is for another task"):
            await anext(pool.encode(Encode(0, "tiny", ["hello"])))
        with pytest.raises(TextTooLong, match="more than the 40 tokens"):
            await anext(pool.encode(Encode(0, "encoder", ["hello " * 50], truncate=False)))


@pytest.mark.slow
async def test_a_call_for_rows_that_is_left_is_cancelled(tmp_path_factory: pytest.TempPathFactory) -> None:
    encoder = tmp_path_factory.mktemp("encoder")
    tiny_encoders.save(encoder)
    usages: list[Usage] = []
    async with running({"encoder": encoder}) as pool, asyncio.timeout(HANG_S):
        texts = ["hello world"] * 20_000
        async with aclosing(pool.encode(Encode(0, "encoder", texts), usages.append)) as frames:
            assert isinstance(await anext(frames), Started)
        assert usages[-1].input_tokens < 4 * len(texts)
        assert pool.status()["num_calls"] == 0
        (*_, last) = [frame async for frame in pool.encode(Encode(0, "encoder", ["good"]))]
        assert isinstance(last, Encoded)


@pytest.mark.slow
async def test_who_would_not_wait_is_refused_by_a_busy_engine(folder: Path) -> None:
    async with running({"tiny": folder}, replace(CONFIG, max_batch_size=1)) as pool:
        with pytest.raises(OutOfCapacity, match="not loaded yet, and rejectIfBusy"):
            await collect(pool, tiny_models.request(reject_if_busy=True))
        first = pool.generate(tiny_models.request(max_tokens=400, credit=1))
        assert isinstance(await anext(first), Started)
        with pytest.raises(OutOfCapacity, match="busy with 1 requests, and rejectIfBusy"):
            await collect(pool, tiny_models.request(reject_if_busy=True))
        await first.aclose()
        assert text(await collect(pool, tiny_models.request(reject_if_busy=True)))
