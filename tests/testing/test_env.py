"""The fixtures `env` and `clock`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from edge.testing.clock import Clock, seconds_of
from workers.bindings import BindingError

BOTH = [pytest.param(mode, marks=pytest.mark.edge(mode=mode)) for mode in ("inprocess", "subprocess")]

pytestmark = pytest.mark.edge(config="project/wrangler-like.toml")


def test_variables_and_names(env: Any) -> None:
    assert (env.GREETING, env.NESTED.a) == ("hello", [1, 2])
    assert "GREETING" in env
    assert "KV" in env
    assert "NOTHING" not in env
    with pytest.raises(AttributeError, match="no variable or binding 'NOTHING'; it has: GREETING, NESTED, AI, KV"):
        _ = env.NOTHING
    with pytest.raises(AttributeError, match="with the fixture `ai`"):
        _ = env.AI


def test_kv(env: Any, clock: Any) -> None:
    clock.freeze()
    env.KV.put("a", "1", expirationTtl=60, metadata={"m": 1})
    assert env.KV.get("a") == "1"
    assert env.KV.getWithMetadata("a").metadata == {"m": 1}
    assert [key["name"] for key in env.KV.list()["keys"]] == ["a"]
    clock.advance(59)
    assert env.KV.get("a") == "1"
    clock.advance(1)
    assert env.KV.get("a") is None
    with pytest.raises(BindingError, match="Invalid expiration_ttl"):
        env.KV.put("a", "1", expirationTtl=1)
    env.KV.put("long", b"x" * 100_000)  # travels as a body
    assert len(env.KV.get("long", "arrayBuffer")) == 100_000


def test_d1(env: Any) -> None:
    env.DB.exec("CREATE TABLE t (a INTEGER, b TEXT)")
    insert = env.DB.prepare("INSERT INTO t VALUES (?, ?)")
    results = env.DB.batch([insert.bind(1, "one"), insert.bind(2, "two")])
    assert [result.meta.changes for result in results] == [1, 1]
    assert env.DB.prepare("SELECT b FROM t WHERE a = ?").bind(2).first("b") == "two"
    assert env.DB.prepare("SELECT * FROM t").all().results[0] == {"a": 1, "b": "one"}


def test_r2(env: Any, clock: Any) -> None:
    clock.freeze("2026-11-30T12:00:00")
    env.FILES.put("a.txt", "text")
    found = env.FILES.get("a.txt")
    assert (found.text(), found.size) == ("text", 4)
    assert env.FILES.get("b.txt") is None
    assert [each.key for each in env.FILES.list().objects] == ["a.txt"]


def test_other_bindings(env: Any) -> None:
    assert [env.LIMIT.limit({"key": "a"}).success for _ in range(2)] == [True, False]
    response = env.ASSETS.fetch("http://x/note.txt")
    assert (response.status, response.text()) == (200, "an asset\n")


@pytest.mark.parametrize("mode", BOTH)
def test_state_is_that_of_the_handlers(worker: Any, env: Any, mode: str) -> None:
    worker.fetch("/send")
    assert env.JOBS.messages() == [{"n": 1}, {"n": 2}]


def test_state_is_of_one_test(env: Any) -> None:
    assert env.JOBS.messages() == []
    assert env.KV.list()["keys"] == []


@pytest.mark.parametrize("mode", BOTH)
def test_a_value_is_overridden_for_a_while(worker: Any, env: Any, mode: str) -> None:
    with env.override(GREETING="good day"):
        assert env.GREETING == "good day"
        assert worker.fetch("/greet").text == "good day 2"
        with env.override(NESTED={"a": [0, 9]}):
            assert worker.fetch("/greet").text == "good day 9"
    assert (env.GREETING, worker.fetch("/greet").text) == ("hello", "hello 2")
    env.override(GREETING="bye")
    assert worker.fetch("/greet").text == "bye 2"


def test_an_override_ends_with_its_test(worker: Any, env: Any) -> None:
    assert (env.GREETING, worker.fetch("/greet").text) == ("hello", "hello 2")


def test_an_object_in_place_of_a_binding(worker: Any, env: Any) -> None:
    class Other:
        async def add(self, first: int, second: int) -> int:
            return first + second

    with pytest.raises(BindingError, match="'other' does not run in tests of 'kit'"):
        worker.fetch("/other")
    env.override(OTHER=Other())
    assert worker.fetch("/other").text == "3"


@pytest.mark.edge(mode="subprocess")
def test_an_object_cannot_get_into_another_process(worker: Any, env: Any) -> None:
    with pytest.raises(TypeError, match=r"env\.override\(OTHER=…\).*only JSON values"):
        env.override(OTHER=object())
    assert worker.fetch("/greet").text == "hello 2"


@pytest.mark.parametrize("mode", BOTH)
def test_a_worker_can_call_itself(worker: Any, mode: str) -> None:
    assert worker.fetch("/myself").text == "named, for self"


def test_what_runs_in_the_worker_cannot_call_fixtures(worker: Any, env: Any, ai: Any) -> None:
    ai.answers("*", lambda inputs: env.KV.get("a"))
    with pytest.raises(Exception, match="the fixtures cannot be called from handlers"):
        worker.fetch("/ask")


# -- the clock ---------------------------------------------------------------------------------------------


def test_the_clock_goes_unless_frozen() -> None:
    clock = Clock()
    real = datetime.now(UTC)
    assert timedelta(0) <= clock.now - real < timedelta(minutes=1)
    clock.advance(days=1)
    assert timedelta(days=1) <= clock.now - real < timedelta(days=1, minutes=1)
    clock.freeze("2026-11-30T12:00:00+02:00")
    assert clock.now == datetime(2026, 11, 30, 10, tzinfo=UTC) == clock.now
    clock.advance(0.5, minutes=1)
    assert clock.now_ms == 1_796_032_860_500
    clock.resume()
    assert timedelta(0) <= clock.now - datetime(2026, 11, 30, 10, 1, tzinfo=UTC) < timedelta(minutes=1)
    with pytest.raises(ValueError, match=r"would go back\. freeze"):
        clock.advance(-1)


def test_times_without_a_zone_are_utc() -> None:
    assert seconds_of("1970-01-02") == seconds_of(datetime(1970, 1, 2)) == seconds_of(86_400) == 86_400.0
    with pytest.raises(ValueError, match="Invalid isoformat"):
        seconds_of("tomorrow")
