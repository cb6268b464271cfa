"""What differs between the modes, and how long modules live."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from edge.errors import HandlerFailed, WorkerStartFailed

pytestmark = pytest.mark.edge(config="project/wrangler-like.toml")


@pytest.mark.edge(mode="inprocess")
def test_in_process_it_is_the_exception_itself(worker: Any) -> None:
    with pytest.raises(worker.module.Broken) as caught:
        worker.fetch("/broken")
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-3:] == ["fetch", "broken", "fail"]
    assert frames.index("fetch") < frames.index("broken")
    assert not any("sdk/workers" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))


@pytest.mark.edge(mode="subprocess")
def test_in_another_process_it_is_told_with_its_traceback(worker: Any) -> None:
    with pytest.raises(HandlerFailed) as caught:
        worker.fetch("/broken")
    assert "in fail" in caught.value.traceback
    with pytest.raises(RuntimeError, match="another process"):
        _ = worker.module


def test_cpu_times_are_those_of_a_process(worker: Any, usage: Any) -> None:
    worker.fetch("/greet")
    assert usage.cpu_ms is None
    assert [(each.kind, each.status, each.outcome) for each in usage.invocations] == [("fetch", 200, "ok")]


@pytest.mark.edge(mode="subprocess")
def test_cpu_times_are_measured(worker: Any, usage: Any) -> None:
    worker.fetch("/greet")
    assert usage.cpu_ms > 0
    assert usage.subrequests == 0


@pytest.mark.edge(config="broken/wrangler-like.toml")
def test_an_import_that_fails_is_raised_as_it_is(worker: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        worker.fetch()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "LIMIT = 1 / 0"
    with pytest.raises(ZeroDivisionError):
        _ = worker.module


@pytest.mark.edge(config="broken/wrangler-like.toml", mode="subprocess")
def test_an_import_that_fails_in_another_process(worker: Any) -> None:
    with pytest.raises(WorkerStartFailed, match="ZeroDivisionError: division by zero") as caught:
        worker.fetch()
    assert "LIMIT = 1 / 0" in caught.value.traceback


STATEFUL = """
    from workers import Response, WorkerEntrypoint

    calls = []

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            calls.append(1)
            return Response(str(len(calls)))
"""
FRESH = """
    import sys

    import my_worker

    def test_one(worker):
        assert worker.fetch().text == "1"
        assert my_worker.calls == []
        assert worker.module is not my_worker

    def test_two(worker):
        assert worker.fetch().text == "1"

    def test_after():
        assert sys.modules["my_worker"] is my_worker
        assert not any("_shims" in entry for entry in sys.path)
"""
KEPT = """
    import my_worker

    def test_one(worker):
        assert worker.fetch().text == "1"
        assert my_worker.calls == [1]
        assert worker.module is my_worker

    def test_two(worker):
        assert worker.fetch().text == "2"
"""


@pytest.mark.slow
def test_modules_of_the_worker_are_not_those_that_tests_import(run_tests: Any) -> None:
    done = run_tests("-o", "pythonpath=src", src__my_worker_dot_py=STATEFUL, test_it_dot_py=FRESH)
    assert "3 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_modules_can_be_kept_for_the_session(run_tests: Any) -> None:
    options = ["-o", "pythonpath=src", "--edge-modules", "session"]
    done = run_tests(*options, src__my_worker_dot_py=STATEFUL, test_it_dot_py=KEPT)
    assert "2 passed" in done.stdout, done.stdout
    done = run_tests("--edge-modules", "session", src__my_worker_dot_py=STATEFUL, test_it_dot_py=KEPT)
    assert "No module named 'my_worker'" in done.stdout  # the tests have to find it by themselves
