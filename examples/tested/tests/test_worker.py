"""Every fixture of the test kit. `python -m pytest` runs the handlers in pytest's process, within milliseconds;
`python -m pytest --edge-mode subprocess` runs the same tests as `edge dev` would, in sandboxed processes."""

import json
from decimal import Decimal

import pytest

MODEL = "smollm2-135m-instruct"


def test_a_note_is_kept(worker, env):
    answer = worker.fetch("/shopping", method="PUT", body="apples, pears")
    assert answer.status == 202
    assert env.NOTES.get("shopping", "json") == {"text": "apples, pears"}
    assert env.TO_SUMMARIZE.messages() == [{"id": "shopping"}]


def test_a_note_is_shown(worker, env):
    env.NOTES.put("shopping", json.dumps({"text": "apples"}))
    answer = worker.fetch("/shopping")
    assert (answer.status, answer.json()) == (200, {"text": "apples"})
    assert answer.headers["Content-Type"].startswith("application/json")


def test_state_is_new_in_each_test(worker, env):
    assert worker.fetch("/shopping").status == 404
    assert env.NOTES.list()["keys"] == []


def test_without_text_there_is_no_note(worker, env):
    assert worker.fetch("/shopping", method="PUT", body=" ").json() == {"error": "a note needs text"}
    assert env.TO_SUMMARIZE.messages() == []


def test_work_after_the_response_is_waited_for(worker, logs):
    worker.fetch("/shopping", method="PUT", body="apples")
    assert logs.lines("log") == ["kept shopping"]


def test_a_note_expires(worker, clock):
    clock.freeze("2026-11-30T12:00:00Z")
    worker.fetch("/secret", method="PUT", body="rosebud", headers={"x-ttl": "60"})
    assert worker.fetch("/secret").status == 200
    clock.advance(minutes=1)
    assert worker.fetch("/secret").status == 404


def test_a_note_is_summarized(worker, env, ai, usage):
    ai.answers(MODEL, "Fruit to buy.", input_tokens=30, output_tokens=4)
    worker.fetch("/shopping", method="PUT", body="apples, pears")
    assert worker.deliver().done == [{"id": "shopping"}]
    assert env.NOTES.get("shopping", "json")["summary"] == "Fruit to buy."
    assert env.TO_SUMMARIZE.messages() == []
    [call] = ai.calls
    assert call.inputs["messages"][0]["content"].endswith("apples, pears")
    assert (usage.input_tokens, usage.output_tokens) == (30, 4)
    assert [each.kind for each in usage.invocations] == ["fetch", "queue"]


def test_a_summary_is_tried_again_and_then_given_up(worker, env, ai, clock):
    ai.answers(MODEL, "")
    worker.fetch("/shopping", method="PUT", body="apples")
    clock.freeze()
    for _ in range(2):
        batch = worker.deliver()
        assert batch.retried == [{"id": "shopping"}]
        assert "shopping" in str(batch.error)
        assert worker.deliver().retried == []  # not yet
        clock.advance(30)
    assert worker.deliver().dead == [{"id": "shopping"}]
    assert worker.messages("not-summarized") == [{"id": "shopping"}]
    assert env.TO_SUMMARIZE.messages() == []


def test_a_batch_of_messages(worker, env, ai):
    ai.answers(MODEL, ["One.", "Two."])
    for name in ("a", "b"):
        env.NOTES.put(name, json.dumps({"text": name}))
    batch = worker.queue([{"id": "a"}, {"id": "gone"}, {"id": "b"}])
    assert [message.state for message in batch] == ["done"] * 3
    assert env.NOTES.get("b", "json")["summary"] == "Two."


def test_what_a_handler_raises_is_raised_here(worker, env, ai):
    ai.answers(MODEL, "")
    env.NOTES.put("a", json.dumps({"text": "a"}))
    with pytest.raises(Exception, match="a") as caught:
        worker.queue([{"id": "a"}])
    assert "NoSummary" in (type(caught.value).__name__, getattr(caught.value, "type", ""))


def test_an_answer_is_streamed(worker, env, ai):
    env.NOTES.put("a", json.dumps({"text": "apples"}))
    ai.answers(MODEL, stream=["App", "les", "."])
    answer = worker.fetch("/a", body="What shall I buy?")
    assert "".join(event["response"] for event in answer.events()) == "Apples."
    assert ai.calls[0].inputs["messages"][1]["content"] == "What shall I buy?"


def test_the_morning_count(worker, env, clock, logs):
    env.NOTES.put("a", "{}")
    clock.freeze("2026-12-01T06:00:00Z")
    worker.scheduled()
    assert logs.lines("warning") == [f"1 notes at {clock.now_ms}"]


def test_a_method_for_other_workers(worker, env):
    for name in ("x1", "x2", "y"):
        env.NOTES.put(name, "{}")
    assert worker.rpc("num_notes", "x") == 2


def test_another_model(worker, env, ai, usage):
    env.override(MODEL="@cf/meta/llama-3.2-1b-instruct")
    ai.answers("@cf/meta/llama-3.2-1b-instruct", {"response": "Fruit."}, input_tokens=1_000_000)
    env.NOTES.put("a", json.dumps({"text": "apples"}))
    worker.queue([{"id": "a"}])
    assert usage.ai[0].model == "@cf/meta/llama-3.2-1b-instruct"
    assert usage.neurons > Decimal(0)
    assert usage.dollars == usage.neurons * Decimal("0.011") / 1000


@pytest.mark.edge(ai="replay")
def test_with_an_answer_of_the_real_model(worker, env):
    """Recorded with: pytest --edge-ai record -k real_model"""
    env.NOTES.put("a", json.dumps({"text": "The hall is being painted, so we meet on Thursday and not on Tuesday."}))
    worker.queue([{"id": "a"}])
    assert "Thursday" in env.NOTES.get("a", "json")["summary"]
