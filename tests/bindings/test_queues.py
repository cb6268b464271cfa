from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bindings import queue_store, queues
from edge.bindings.queue_store import QueueStore, Retry
from edge.bindings.queues import Queues
from edge.config import QueueConsumerConfig
from edge.errors import ConfigError, HandlerFailed, InvalidInput, IsolateLost, OutOfCapacity, WorkerStartFailed
from edge.isolates.base import Binding, Bundle, InboundEvent, WorkerKey

HANG_S = 30
SENDER = Bundle("sender", "v1", "/", "worker.py", account="acme")
KEY = ("acme", "consumer")
BINDING = Binding("queue", {"queue": "jobs", "delay_s": 0})


class Consumer:
    """Stands for the worker that consumes: `answer` gives the outcome of a batch, or raises."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.answer: Callable[[list[dict[str, Any]]], Any] = lambda messages: {"acks": [], "retries": [], "error": None}

    async def deliver(self, key: WorkerKey, event: InboundEvent) -> Any:
        assert (key, event.kind) == (KEY, "queue")
        self.batches.append(event.payload["messages"])
        result = self.answer(event.payload["messages"])
        return await result if asyncio.iscoroutine(result) else result

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for batch in self.batches for message in batch]


@contextlib.asynccontextmanager
async def running(state_dir: Path, consumer: Consumer, said: list[str]) -> AsyncIterator[Queues]:
    running = Queues(state_dir, consumer.deliver, said.append)
    try:
        yield running
    finally:
        await running.close()


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def node(tmp_path: Path, consumer: Consumer, said: list[str]) -> AsyncIterator[Queues]:
    async with running(tmp_path, consumer, said) as node:
        yield node


async def send(node: Queues, *bodies: bytes, binding: Binding = BINDING, **options: Any) -> None:
    await node.call(SENDER, binding, "send", [[{"body": body, **options} for body in bodies]], None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - polled, as it changes in other tasks
            await asyncio.sleep(0.005)


def consume(queue: str = "jobs", **options: Any) -> list[QueueConsumerConfig]:
    return [QueueConsumerConfig(queue, **{"max_batch_timeout": 0, **options})]


async def num_left(state_dir: Path, queue: str = "jobs") -> int:
    """Messages in the file, those in flight not counted."""
    store = QueueStore(state_dir / "queues" / "acme" / "all")
    try:
        later_ms = 1 << 50
        return (await store.look(queue, 10_000, later_ms)).num_visible
    finally:
        await store.close()


async def test_what_is_sent_is_delivered_once_and_in_order(node: Queues, consumer: Consumer, tmp_path: Path) -> None:
    await send(node, b"1", b"2")
    await send(node, b"3")
    node.consume(KEY, consume())
    await until(lambda: len(consumer.bodies) == 3)
    await send(node, b"4")
    await until(lambda: len(consumer.bodies) == 4)
    assert consumer.bodies == [b"1", b"2", b"3", b"4"]
    first = consumer.batches[0][0]
    assert (first["attempts"], len(first["id"])) == (1, 32)
    await node.close()
    assert await num_left(tmp_path) == 0


async def test_batches_are_as_large_as_configured(node: Queues, consumer: Consumer) -> None:
    await send(node, *[b"x"] * 25)
    node.consume(KEY, consume(max_batch_size=10))
    await until(lambda: len(consumer.bodies) == 25)
    assert [len(batch) for batch in consumer.batches] == [10, 10, 5]


async def test_a_batch_that_is_not_full_waits_for_more(node: Queues, consumer: Consumer) -> None:
    node.consume(KEY, consume(max_batch_size=3, max_batch_timeout=60))
    await send(node, b"1")
    await send(node, b"2")
    assert consumer.batches == []
    await send(node, b"3")
    await until(lambda: len(consumer.batches) == 1)
    assert consumer.bodies == [b"1", b"2", b"3"]


async def test_acks_and_retries_of_single_messages(node: Queues, consumer: Consumer, tmp_path: Path) -> None:
    def answer(messages: list[dict[str, Any]]) -> Any:
        bad = [message["id"] for message in messages if message["body"] == b"bad" and message["attempts"] < 3]
        return {"acks": [], "retries": [[id, 0] for id in bad], "error": None}

    consumer.answer = answer
    node.consume(KEY, consume())
    await send(node, b"good", b"bad")
    await until(lambda: len(consumer.bodies) == 4)
    assert consumer.bodies == [b"good", b"bad", b"bad", b"bad"]
    assert [batch[-1]["attempts"] for batch in consumer.batches] == [1, 2, 3]
    await node.close()
    assert await num_left(tmp_path) == 0


async def test_what_was_acknowledged_before_the_handler_failed_is_done(node: Queues, consumer: Consumer) -> None:
    def answer(messages: list[dict[str, Any]]) -> Any:
        if messages[0]["attempts"] > 1:
            return {}
        return {"acks": [messages[0]["id"]], "error": {"type": "ValueError", "message": "no", "traceback": "…"}}

    consumer.answer = answer
    node.consume(KEY, consume())
    await send(node, b"acked", b"not")
    await until(lambda: len(consumer.batches) == 2)
    assert [message["body"] for message in consumer.batches[1]] == [b"not"]


@pytest.mark.parametrize("error", [HandlerFailed("boom", type="ValueError"), IsolateLost("it died")])
async def test_after_the_last_retry_messages_go_to_the_dead_letter_queue(
    node: Queues, consumer: Consumer, said: list[str], tmp_path: Path, error: Exception
) -> None:
    def answer(messages: list[dict[str, Any]]) -> Any:
        raise error

    consumer.answer = answer
    node.consume(KEY, consume(max_retries=2, dead_letter_queue="dead"))
    await send(node, b"poison")
    await until(lambda: any("1 messages are in 'dead' after 2 retries" in line for line in said))
    assert [batch[0]["attempts"] for batch in consumer.batches] == [1, 2, 3]
    await node.close()
    assert (await num_left(tmp_path), await num_left(tmp_path, "dead")) == (0, 1)


async def test_without_a_dead_letter_queue_they_are_dropped(
    node: Queues, consumer: Consumer, said: list[str], tmp_path: Path
) -> None:
    consumer.answer = lambda messages: {"error": {"message": "no"}}
    node.consume(KEY, consume(max_retries=0))
    await send(node, b"poison")
    await until(lambda: any("dropped after 0 retries" in line for line in said))
    await node.close()
    assert await num_left(tmp_path) == 0


@pytest.mark.parametrize("nonsense", [None, 7, {"acks": 3}, {"retries": [["id", "soon"]]}, {"retries": [["id", -1]]}])
async def test_an_answer_that_makes_no_sense_is_a_failure(
    node: Queues, consumer: Consumer, said: list[str], nonsense: Any
) -> None:
    consumer.answer = lambda messages: nonsense if messages[0]["attempts"] == 1 else {}
    node.consume(KEY, consume())
    await send(node, b"1")
    await until(lambda: len(consumer.batches) == 2)
    assert any("answered in a way it must not" in line for line in said)


async def test_ids_that_are_not_in_the_batch_mean_nothing(node: Queues, consumer: Consumer, tmp_path: Path) -> None:
    consumer.answer = lambda messages: {"acks": ["other"], "retries": [["another", None]]}
    await send(node, b"1", binding=Binding("queue", {"queue": "other"}))
    node.consume(KEY, consume())
    await send(node, b"1")
    await until(lambda: len(consumer.batches) == 1)
    await node.close()
    assert (await num_left(tmp_path), await num_left(tmp_path, "other")) == (0, 1)


async def test_a_worker_that_cannot_be_started_costs_no_attempts(
    node: Queues, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_BACKOFF_S", 0.01)

    def answer(messages: list[dict[str, Any]]) -> Any:
        if len(consumer.batches) < 6:
            raise WorkerStartFailed("no")
        return {}

    consumer.answer = answer
    node.consume(KEY, consume(max_retries=1))
    await send(node, b"1")
    await until(lambda: len(consumer.batches) == 6)
    assert [batch[0]["attempts"] for batch in consumer.batches] == [1] * 6


async def test_delays_of_messages_of_bindings_and_of_retries(node: Queues, consumer: Consumer, tmp_path: Path) -> None:
    consumer.answer = lambda messages: {"retries": [[message["id"], None] for message in messages]}
    node.consume(KEY, consume(retry_delay=3600))
    await send(node, b"now")
    await send(node, b"later", delay_s=3600)
    await send(node, b"later too", binding=Binding("queue", {"queue": "jobs", "delay_s": 3600}))
    await send(node, b"now too", binding=Binding("queue", {"queue": "jobs", "delay_s": 3600}), delay_s=0)
    await until(lambda: len(consumer.bodies) == 2)
    await node.close()
    assert consumer.bodies == [b"now", b"now too"]
    assert await num_left(tmp_path) == 4


async def test_a_delay_ends(node: Queues, consumer: Consumer) -> None:
    node.consume(KEY, consume())
    await send(node, b"1", delay_s=0.2)
    await until(lambda: len(consumer.bodies) == 1)


async def test_concurrency_is_bounded(node: Queues, consumer: Consumer) -> None:
    running, most = 0, 0
    release = asyncio.Event()

    async def answer() -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return {}

    consumer.answer = lambda messages: answer()
    await send(node, *[b"x"] * 10)
    node.consume(KEY, consume(max_batch_size=1, max_concurrency=3))
    await until(lambda: running == 3)
    release.set()
    await until(lambda: len(consumer.bodies) == 10)
    assert most == 3


async def test_one_consumer_for_each_queue(node: Queues, consumer: Consumer) -> None:
    node.consume(KEY, consume())
    with pytest.raises(ConfigError, match="'jobs' is consumed by another worker, consumer already"):
        node.consume(("acme", "other"), consume())
    with pytest.raises(ConfigError, match="consumed by this worker already"):
        node.check(KEY, consume() * 2)
    node.consume(("elsewhere", "other"), consume())  # another account's queue of the same name
    node.consume(KEY, [])
    node.consume(("acme", "other"), [])


async def test_a_consumer_with_new_settings_takes_over(node: Queues, consumer: Consumer) -> None:
    release = asyncio.Event()

    async def answer() -> Any:
        await release.wait()
        return {}

    consumer.answer = lambda messages: answer()
    node.consume(KEY, consume())
    await send(node, b"1")
    await until(lambda: len(consumer.bodies) == 1)
    node.consume(KEY, consume(max_batch_size=2))
    await send(node, b"2", b"3", b"4")
    release.set()
    await until(lambda: len(consumer.bodies) == 4)
    assert [len(batch) for batch in consumer.batches] == [1, 2, 1]


async def test_of_two_nodes_one_consumes_and_the_other_takes_over_what_it_had_in_flight(
    node: Queues, consumer: Consumer, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "POLL_S", 0.01)
    consumer.answer = lambda messages: asyncio.Event().wait()
    node.consume(KEY, consume())
    await send(node, b"1")
    await until(lambda: len(consumer.bodies) == 1)
    second = Consumer()
    async with running(tmp_path, second, said) as other:
        other.consume(KEY, consume())
        await send(other, b"2")  # goes to the first, which looks for what others have sent
        await asyncio.sleep(0.2)  # for which there is nothing to wait: the second stays idle
        assert second.bodies == []
        await node.stop()
        await until(lambda: len(second.bodies) == 2)
    attempts = {message["body"]: message["attempts"] for batch in second.batches for message in batch}
    assert attempts == {b"1": 2, b"2": 1}


async def test_accounts_do_not_see_each_other_s_messages(node: Queues, consumer: Consumer, tmp_path: Path) -> None:
    other = Bundle("sender", "v1", "/", "worker.py", account="other")
    await node.call(other, BINDING, "send", [[{"body": b"theirs"}]], None)
    await send(node, b"ours")
    node.consume(KEY, consume())
    await until(lambda: len(consumer.bodies) == 1)
    assert consumer.bodies == [b"ours"]


async def test_a_consumer_that_cannot_go_on_says_so(node: Queues, said: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "queues" / "acme" / "all"
    folder.mkdir(parents=True)
    (folder / "jobs.lock").mkdir()
    node.consume(KEY, consume())
    await until(lambda: any("queue jobs is not consumed any more: [Errno 21]" in line for line in said))


@pytest.mark.parametrize(
    ("method", "args", "problem"),
    [
        ("purge", [], "a queue has no method 'purge'"),
        ("send", [], "0 arguments"),
        ("send", ["text"], "Expected `array`"),
        ("send", [[{"body": "text"}]], "Expected|Invalid"),
        ("send", [[{"body": b"x", "delay_s": -1}]], "delay_s"),
        ("send", [[{"body": b"x", "delay_s": 43_201}]], "delay_s"),
        ("send", [[{"body": b"x", "content_type": "xml"}]], "content_type"),
        ("send", [[]], "it must be 1 to 100"),
        ("send", [[{"body": b"x"}] * 101], "101 messages"),
        ("send", [[{"body": bytes(128 * 1024 + 1)}]], "over the limit of 131072"),
        ("send", [[{"body": bytes(128 * 1024)}] * 3], "the limit is 262144"),
    ],
)
async def test_calls_that_are_wrong(node: Queues, method: str, args: list[Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        await node.call(SENDER, BINDING, method, args, None)


async def test_an_account_s_queues_are_bounded(node: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_store, "MAX_FILE_BYTES", 1 << 20)
    for _ in range(8):
        await send(node, bytes(128 << 10))
    with pytest.raises(OutOfCapacity, match="hold over 1 MB"):
        await send(node, b"x")


async def test_messages_that_nobody_consumes_expire(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    await store.send("jobs", [(b"old", 0)], 1000)
    await store.send("jobs", [(b"new", 0)], 2000)
    assert await store.remove_expired(1001 + queue_store.RETENTION_MS) == 1
    assert [message.body for message in await store.take("jobs", 10, 5000)] == [b"new"]
    await store.close()


NODE = """
import asyncio, sys
from pathlib import Path
from edge.bindings.queues import Queues
from edge.config import QueueConsumerConfig
from edge.isolates.base import Binding, Bundle

async def main():
    async def deliver(key, event):
        for message in event.payload["messages"]:
            print("taken", message["body"].decode(), flush=True)
        await asyncio.sleep(3600)
    queues = Queues(Path(sys.argv[1]), deliver, print)
    queues.consume(("acme", "consumer"), [QueueConsumerConfig("jobs", 5, 0)])
    sender = Bundle("sender", "v1", "/", "worker.py", account="acme")
    for number in range(1_000_000):
        await queues.call(sender, Binding("queue", {"queue": "jobs"}), "send", [[{"body": b"%d" % number}]], None)
        print("sent", number, flush=True)

asyncio.run(main())
"""


def lines_until_killed(state_dir: Path) -> list[str]:
    """What a process prints that sends and consumes, and is killed meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", NODE, str(state_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not ("sent 50" in lines and any(line.startswith("taken") for line in lines)):
            lines.append(process.stdout.readline().strip())
            assert lines[-1], "it ended"
    finally:
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
    return lines + rest.splitlines()


async def test_what_was_acknowledged_survives_kill_9_in_flight_or_not(
    tmp_path: Path, consumer: Consumer, said: list[str]
) -> None:
    lines = lines_until_killed(tmp_path)
    sent = {line.split()[1].encode() for line in lines if line.startswith("sent")}
    taken = {line.split()[1].encode() for line in lines if line.startswith("taken")}
    assert taken
    async with running(tmp_path, consumer, said) as node:
        node.consume(KEY, consume(max_batch_size=100))
        await until(lambda: sent <= set(consumer.bodies))
    attempts = {message["body"]: message["attempts"] for batch in consumer.batches for message in batch}
    assert {attempts[body] for body in taken} == {2}
    assert set(Counter(consumer.bodies).values()) == {1}


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["send", "take", "done", "retry", "dead", "release", "reopen"]), max_size=40))
def test_the_store_is_a_list_with_a_place_for_what_is_in_flight(steps: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(follow_steps(Path(folder), steps))


async def follow_steps(folder: Path, steps: list[str]) -> None:
    """Do `steps` to a store and to two plain lists of bodies, and compare."""
    store = QueueStore(folder)
    waiting: list[bytes] = []
    in_flight: list[queue_store.Message] = []
    num_dead, now_ms = 0, 1000
    for number, step in enumerate(steps):
        now_ms += 1
        match step:
            case "send":
                body = b"%d" % number
                await store.send("jobs", [(body, now_ms)], now_ms)
                waiting.append(body)
            case "take":
                taken = await store.take("jobs", 2, now_ms)
                assert [message.body for message in taken] == waiting[:2]
                waiting, in_flight = waiting[2:], in_flight + taken
            case "done" if in_flight:
                await store.settle([in_flight.pop(0).seq], [], [], "", now_ms)
            case "retry" if in_flight:
                message = in_flight.pop(0)
                await store.settle([], [Retry(message.seq, now_ms)], [], "", now_ms)
                waiting.append(message.body)
            case "dead" if in_flight:
                await store.settle([], [], [in_flight.pop(0).seq], "dead", now_ms)
                num_dead += 1
            case "release":
                await store.release("jobs")
                # Those go back to where they were: in front, in the order in which they were visible.
                waiting, in_flight = [message.body for message in in_flight] + waiting, []
            case "reopen":
                await store.close()
                store = QueueStore(folder)
        assert (await store.look("jobs", 1000, now_ms)).num_visible == len(waiting)
        assert (await store.look("dead", 1000, now_ms)).num_visible == num_dead
    await store.close()
