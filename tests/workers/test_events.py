from __future__ import annotations

from datetime import datetime

import pytest

from workers._events import Message, MessageBatch, ScheduledController
from workers._rpc import pack


def batch_of(*ids: str) -> MessageBatch:
    return MessageBatch("jobs", [Message(id, 1_700_000_000_123, pack({"id": id}), 1) for id in ids])


def test_a_scheduled_event():
    controller = ScheduledController("*/5 * * * *", 1_700_000_000_000)
    assert (controller.cron, controller.scheduledTime, controller.scheduled_time, controller.type) == (
        "*/5 * * * *", 1_700_000_000_000, 1_700_000_000_000, "scheduled",
    )  # fmt: skip
    assert not controller.is_final
    controller.noRetry()
    assert controller.is_final


def test_a_batch_is_a_sequence_of_messages():
    batch = batch_of("a", "b")
    assert (batch.queue, len(batch), [message.id for message in batch]) == ("jobs", 2, ["a", "b"])
    message = batch.messages[0]
    assert message.body.id == "a"
    assert message.body is message.body
    assert message.timestamp == datetime.fromtimestamp(1_700_000_000.123)
    assert message.attempts == 1


def test_a_body_that_cannot_be_read_harms_only_who_reads_it():
    batch = MessageBatch("jobs", [Message("a", 0, b"\xc1", 1), Message("b", 0, pack(1), 1)])
    assert batch.messages[1].body == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="not a value of RPC"):
            _ = batch.messages[0].body


def test_outcomes():
    batch = batch_of("a", "b", "c", "d")
    a, b, c, _ = batch.messages
    a.ack()
    b.retry()
    c.retry({"delaySeconds": 5})
    assert batch.outcome() == (["a"], [("b", None), ("c", 5)])
    b.ack()
    batch.retryAll(delaySeconds=7)
    assert batch.outcome() == (["a", "b"], [("c", 5), ("d", 7)])
    batch.ackAll()
    assert batch.outcome() == (["a", "b", "d"], [("c", 5)])
    assert batch_of("a").outcome() == ([], [])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"delay": 5}, TypeError, "no option delay; it has delaySeconds"),
        ({"delaySeconds": "5"}, TypeError, "must be a whole number"),
        ({"delaySeconds": 1.5}, TypeError, "must be a whole number"),
        ({"delaySeconds": True}, TypeError, "must be a whole number"),
        ({"delaySeconds": -1}, ValueError, "must be 0 to 43200"),
        ({"delaySeconds": 43201}, ValueError, "must be 0 to 43200"),
    ],
)
def test_wrong_delays(options, error, text):
    batch = batch_of("a")
    with pytest.raises(error, match=text):
        batch.retryAll(options)
    with pytest.raises(error, match=text):
        batch.messages[0].retry(**options)
    assert batch.outcome() == ([], [])
