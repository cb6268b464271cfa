"""The fixtures `worker` and `logs`, in both modes on a real worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edge.errors import ConfigError, HandlerFailed, HandlerTimeout
from edge.testing.worker import Settled

BOTH = [pytest.param(mode, marks=pytest.mark.edge(mode=mode)) for mode in ("inprocess", "subprocess")]

pytestmark = [
    pytest.mark.edge(config="project/wrangler-like.toml"),
    pytest.mark.parametrize("mode", BOTH),
]


def type_of(error: BaseException) -> str:
    """The name of the exception's class in the handler."""
    return error.type if isinstance(error, HandlerFailed) else type(error).__name__


# -- requests ----------------------------------------------------------------------------------------------


def test_a_request_arrives_as_it_was_written(worker: Any, mode: str) -> None:
    answer = worker.fetch("/", params={"q": "ä b"}, json={"n": 1}, headers={"X-One": "1"})
    assert (answer.status, answer.ok) == (200, True)
    echo = answer.json()
    assert (echo["method"], echo["url"], echo["body"]) == ("POST", "http://localhost/?q=%C3%A4+b", '{"n":1}')
    assert echo["headers"]["x-one"] == "1"
    assert echo["headers"]["content-type"] == "application/json"
    assert echo["headers"]["host"] == "localhost"
    assert worker.fetch("/echo").json()["method"] == "GET"
    assert worker.fetch("/echo", method="PUT", body=b"raw").json()["body"] == "raw"
    assert worker.fetch("/echo", body=iter([b"in ", b"pieces"])).json()["body"] == "in pieces"
    assert worker.fetch("https://example.com/", method="DELETE", entrypoint="Named").text == "named"


def test_a_response_keeps_its_pieces(worker: Any, mode: str) -> None:
    answer = worker.fetch("/stream")
    assert answer.text == "one two three"
    assert answer.chunks == [b"one ", b"two ", b"three"]
    assert worker.fetch("/greet").headers["Content-Type"] == "text/plain;charset=UTF-8"
    with pytest.raises(ValueError, match="the response is no JSON"):
        answer.json()


def test_assets_and_rate_limits_are_there(worker: Any, mode: str, clock: Any) -> None:
    assert worker.fetch("/asset").text == "an asset\n"
    clock.freeze()
    assert [worker.fetch("/limit").json()["success"] for _ in range(2)] == [True, False]
    clock.advance(10)
    assert worker.fetch("/limit").json()["success"]


# -- errors ------------------------------------------------------------------------------------------------


def test_what_the_handler_raises_is_raised_by_the_call(worker: Any, mode: str) -> None:
    with pytest.raises(Exception, match="on purpose") as caught:
        worker.fetch("/broken")
    assert type_of(caught.value) == "Broken"
    assert worker.fetch("/greet").text == "hello 2"  # and the worker goes on


def test_a_wrong_response_is_an_error(worker: Any, mode: str) -> None:
    with pytest.raises(Exception, match="is a `return` missing"):
        worker.fetch("/nothing")
    with pytest.raises(HandlerFailed, match="status 700"):
        worker.fetch("/bad_status")
    with pytest.raises(Exception, match="on purpose"):
        worker.fetch("/broken_body")
    with pytest.raises(Exception, match="unexpected keyword argument 'colour'"):
        worker.fetch("/", colour="red")


def test_a_handler_that_takes_too_long_is_stopped(worker: Any, mode: str) -> None:
    with pytest.raises(HandlerTimeout, match=r"limits\.timeout_s"):
        worker.fetch("/hang")
    assert worker.fetch("/greet").ok


# -- other events ------------------------------------------------------------------------------------------


def test_scheduled(worker: Any, env: Any, clock: Any, mode: str) -> None:
    clock.freeze("2026-11-30T06:00:00+00:00")
    assert worker.scheduled().no_retry
    assert env.KV.get("cron") == f"*/5 * * * * {clock.now_ms}"
    worker.scheduled("0 0 * * *", time=1.5)
    assert env.KV.get("cron") == "0 0 * * * 1500"
    with pytest.raises(ConfigError):
        worker.scheduled("every day")


def test_a_batch_says_what_becomes_of_each_message(worker: Any, mode: str) -> None:
    batch = worker.queue([{"do": "ack"}, {"do": "retry"}, {"do": "nothing"}])
    assert list(batch) == [
        Settled("1", {"do": "ack"}, "done", 0),
        Settled("2", {"do": "retry"}, "retry", 5),
        Settled("3", {"do": "nothing"}, "done", 0),
    ]
    assert (batch.done, batch.retried, batch.dead) == ([{"do": "ack"}, {"do": "nothing"}], [{"do": "retry"}], [])
    assert worker.queue([{"do": "retry"}], attempts=2).dead == [{"do": "retry"}]
    assert worker.queue([{"do": "retry"}], queue="of somebody else", attempts=2).retried == [{"do": "retry"}]


def test_a_batch_that_fails(worker: Any, mode: str) -> None:
    with pytest.raises(Exception, match="on purpose") as caught:
        worker.queue([{"do": "fail"}])
    assert type_of(caught.value) == "Broken"
    batch = worker.queue([{"do": "ack"}, {"do": "fail"}], raises=False)
    assert (batch.done, batch.retried) == ([{"do": "ack"}], [{"do": "fail"}])
    assert type_of(batch.error) == "Broken"
    assert batch[1].delay_s == 10


def test_messages_that_were_sent_are_delivered_when_they_are_due(worker: Any, env: Any, clock: Any, mode: str) -> None:
    clock.freeze("2026-11-30")
    assert len(worker.deliver()) == 0
    env.JOBS.sendBatch([{"body": {"do": "ack", "n": n}} for n in range(3)])
    env.JOBS.send({"do": "retry"}, delaySeconds=60)
    assert [len(worker.deliver()) for _ in range(3)] == [2, 1, 0]
    clock.advance(minutes=1)
    assert worker.deliver("jobs").retried == [{"do": "retry"}]
    assert env.JOBS.messages() == worker.messages("jobs") == [{"do": "retry"}]
    clock.advance(seconds=5)
    assert worker.deliver().dead == [{"do": "retry"}]
    assert (worker.messages("jobs"), worker.messages("dead-jobs")) == ([], [{"do": "retry"}])


def test_a_delivery_that_fails_leaves_the_exception_in_the_batch(worker: Any, env: Any, mode: str) -> None:
    env.JOBS.send({"do": "fail"})
    batch = worker.deliver()
    assert (type_of(batch.error), batch.retried) == ("Broken", [{"do": "fail"}])


def test_rpc(worker: Any, mode: str) -> None:
    assert worker.rpc("add", 1, 2) == {"sum": 3, "caller": None}
    assert worker.rpc("who", entrypoint="Named", props={"caller": "a test"}) == "named, for a test"
    with pytest.raises(Exception, match="does not exist") as caught:
        worker.rpc("_secret")
    assert type_of(caught.value) == "TypeError"


# -- output and what comes after the response ---------------------------------------------------------------


def test_logs(worker: Any, logs: Any, mode: str) -> None:
    worker.fetch("/talk")
    assert logs.lines("log") == ["imported", "to stdout", "from a thread", "without a line end"]
    assert logs.lines("error") == ["to stderr"]
    assert logs.lines("warning") == ["a warning"]
    assert "to stderr" in logs
    assert len(logs) == 6
    logs.clear()
    assert logs.text == ""


def test_output_is_shown_as_well(worker: Any, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    worker.fetch("/talk")
    print("of the test")
    shown = capsys.readouterr()
    assert "to stdout\n" in shown.out
    assert "of the test\n" in shown.out
    assert "to stderr\n" in shown.err + shown.out


def test_work_after_the_response_is_waited_for(worker: Any, logs: Any, mode: str) -> None:
    assert worker.fetch("/later").text == "now"
    assert "later" in logs


def test_modules_are_new_in_each_test_once(worker: Any, mode: str) -> None:
    assert [worker.fetch("/count").text for _ in range(2)] == ["1", "2"]


def test_modules_are_new_in_each_test_twice(worker: Any, mode: str) -> None:
    assert worker.fetch("/count").text == "1"


async def test_requests_at_the_same_time(worker: Any, mode: str) -> None:
    first, second = await asyncio.gather(worker.afetch("/meet"), worker.afetch("/meet"))
    assert (first.text, second.text) == ("met", "met")
    with pytest.raises(Exception, match="on purpose"):
        await worker.afetch("/broken")
    assert worker.fetch("/greet").text == "hello 2"  # calls without await work in coroutines too
