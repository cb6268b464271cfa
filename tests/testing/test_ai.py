"""The fixtures `ai` and `usage`, and cassettes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.ai.answers import sse
from edge.errors import ConfigError, OutOfCapacity, UnknownModel
from edge.isolates.base import Bundle, JsonAnswer, StreamAnswer
from edge.testing.ai import Ai, AiMode
from edge.testing.cassette import Cassette, Recorded
from edge.testing.worker import Response

MODEL = "@cf/meta/llama-3.2-1b-instruct"
CALLER = Bundle("w", "v1", "/", "w.py")

BOTH = [pytest.param(mode, marks=pytest.mark.edge(mode=mode)) for mode in ("inprocess", "subprocess")]
pytestmark = pytest.mark.edge(config="project/wrangler-like.toml")


@pytest.mark.parametrize("mode", BOTH)
def test_a_text_is_an_answer(worker: Any, ai: Any, usage: Any, mode: str) -> None:
    ai.answers(MODEL, "Paris.", input_tokens=1_000_000, output_tokens=2_000_000)
    answer = worker.fetch("/ask").json()
    assert (answer["response"], answer["usage"]["total_tokens"]) == ("Paris.", 3_000_000)
    [call] = ai.calls
    assert (call.model, call.inputs, call.options) == (MODEL, {"prompt": "?"}, {})
    assert (usage.input_tokens, usage.output_tokens) == (1_000_000, 2_000_000)
    neurons = Decimal(2457) + 2 * Decimal(18252)
    assert usage.neurons == neurons
    assert usage.dollars == neurons * Decimal("0.011") / 1000


@pytest.mark.parametrize("mode", BOTH)
def test_a_stream_comes_in_its_pieces(worker: Any, ai: Any, mode: str) -> None:
    ai.answers(MODEL, stream=["Pa", "ris."], output_tokens=2)
    events = worker.fetch("/ask?stream").events()
    assert [event["response"] for event in events] == ["Pa", "ris.", ""]
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert worker.fetch("/ask").json()["response"] == "Paris."  # not asked to stream


def test_a_text_is_streamed_where_that_is_asked_for(worker: Any, ai: Any) -> None:
    ai.answers(MODEL, "Paris.")
    answer = worker.fetch("/ask?stream")
    assert "".join(event["response"] for event in answer.events()) == "Paris."
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_dict_is_the_result_as_it_is(worker: Any, ai: Any, usage: Any) -> None:
    ai.answers(MODEL, {"data": [[0.5]], "usage": {"prompt_tokens": 7, "completion_tokens": 0}})
    assert worker.fetch("/ask").json() == {"data": [[0.5]], "usage": {"prompt_tokens": 7, "completion_tokens": 0}}
    assert usage.ai[0].input_tokens == 7


def test_a_list_is_answered_in_turn(worker: Any, ai: Any) -> None:
    ai.answers(MODEL, ["one", {"response": "two"}])
    assert [worker.fetch("/ask").json()["response"] for _ in range(2)] == ["one", "two"]
    with pytest.raises(Exception, match=r"more often than the list in ai\.answers\(\) has answers \(2\)"):
        worker.fetch("/ask")


def test_functions_are_called_with_the_inputs(worker: Any, ai: Any) -> None:
    ai.answers("*", lambda inputs: inputs["prompt"] * 3)
    assert worker.fetch("/ask").json()["response"] == "???"

    async def with_options(inputs: Any, options: Any) -> Any:
        return {"got": [inputs, options]}

    ai.answers(MODEL, with_options)
    assert worker.fetch("/ask").json() == {"got": [{"prompt": "?"}, {}]}
    ai.answers(MODEL, lambda inputs: inputs["nothing"])
    with pytest.raises(Exception, match="raised KeyError: 'nothing'"):
        worker.fetch("/ask")


def test_a_call_can_fail(worker: Any, ai: Any, usage: Any) -> None:
    ai.answers(MODEL, [OutOfCapacity("full"), "then not"])
    with pytest.raises(Exception, match="3040: full"):
        worker.fetch("/ask")
    assert worker.fetch("/ask").json()["response"] == "then not"
    assert [call.status for call in usage.ai] == ["error", "ok"]


def test_an_unknown_model_says_what_to_do(worker: Any) -> None:
    with pytest.raises(Exception, match=r"no answer for the model '@cf/meta.*': add ai\.answers\('@cf/meta"):
        worker.fetch("/ask")


def test_answers_of_wrong_types(ai: Any) -> None:
    with pytest.raises(TypeError, match="one of them"):
        ai.answers(MODEL)
    with pytest.raises(TypeError, match="one of them"):
        ai.answers(MODEL, "text", stream=["text"])
    with pytest.raises(TypeError, match="not int"):
        ai.answers(MODEL, 3)
    with pytest.raises(TypeError, match="not float"):
        ai.answers(MODEL, ["text", 0.5])


def test_an_unpriced_model_has_no_cost(worker: Any, ai: Any, usage: Any, env: Any) -> None:
    ai.answers(MODEL, "text")
    worker.fetch("/ask")
    assert usage.dollars == 0
    usage.ai[0] = type(usage.ai[0])("mine", "ok", 1, 0, 1, None)
    with pytest.raises(ValueError, match=r"no price for mine; add one to a book of your own"):
        _ = usage.dollars


# -- cassettes ---------------------------------------------------------------------------------------------


class Installed:
    """A model that says how often it was asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> Any:
        self.num_calls += 1
        usage = {"prompt_tokens": 5, "completion_tokens": self.num_calls}
        if not inputs.get("stream"):
            return JsonAnswer({"response": f"answer {self.num_calls}", "usage": usage})

        async def body() -> AsyncIterator[bytes]:
            yield sse({"response": "an", "p": "abc" * self.num_calls}) + sse({"response": "swer"})
            yield sse({"response": "", "usage": usage})
            yield b"data: [DONE]\n\n"

        return StreamAnswer(200, [], body())


def ai_of(mode: AiMode, file: Path, installed: Installed, records: list[Any] | None = None) -> Ai:
    async def models() -> Installed:
        return installed

    async def record(record: Any) -> None:
        if records is not None:
            records.append(record)

    return Ai(mode, Cassette(file), models, record)


def events_in(data: bytes) -> list[Any]:
    return Response(200, httpx.Headers(), [data]).events()


async def whole(answer: Any) -> bytes:
    return b"".join([chunk async for chunk in answer.body])


async def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "cassettes" / "test.json"
    installed = Installed()
    recording = ai_of("record", file, installed)
    first = [await recording.run(CALLER, MODEL, {"prompt": "a"}, {}) for _ in range(2)]
    stream = await whole(await recording.run(CALLER, MODEL, {"prompt": "a", "stream": True}, {}))
    recording.save()
    before = file.read_bytes()

    records: list[Any] = []
    replaying = ai_of("replay", file, installed, records)
    again = [await replaying.run(CALLER, MODEL, {"prompt": "a"}, {}) for _ in range(3)]
    assert [answer.value["response"] for answer in again] == ["answer 1", "answer 2", "answer 2"]
    assert again[0].value == first[0].value
    streamed = await whole(await replaying.run(CALLER, MODEL, {"stream": True, "prompt": "a"}, {}))
    assert events_in(streamed) == events_in(stream.replace(b',"p":"abcabcabc"', b""))
    assert streamed.endswith(b"data: [DONE]\n\n")
    assert [(record.input_tokens, record.output_tokens) for record in records] == [(5, 1), (5, 2), (5, 2), (5, 3)]
    assert installed.num_calls == 3
    replaying.save()
    assert file.read_bytes() == before

    with pytest.raises(UnknownModel, match=r"test\.json has no answer of .* --edge-ai record"):
        await replaying.run(CALLER, MODEL, {"prompt": "b"}, {})


async def test_the_same_recorded_again_is_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        ai = ai_of("record", file, Installed())
        await ai.run(CALLER, MODEL, {"b": "ü", "a": 1}, {})
        await whole(await ai.run(CALLER, MODEL, {"stream": True}, {}))
        ai.save()
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "ü" in files[0].read_text()


async def test_canned_answers_go_before_cassettes_and_models(tmp_path: Path) -> None:
    for mode in ("record", "replay", "real"):
        ai = ai_of(mode, tmp_path / "c.json", Installed())
        ai.answers(MODEL, "canned")
        assert (await ai.run(CALLER, MODEL, {}, {})).value["response"] == "canned"
        ai.save()
    assert not (tmp_path / "c.json").exists()


def test_a_damaged_cassette_says_so(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"c\.json cannot be read: .* record it again"):
        Cassette(file).play(MODEL, {}, {})
    file.write_text('{"format": 99, "calls": []}')
    with pytest.raises(ConfigError, match="has the format 99, not 1"):
        Cassette(file).play(MODEL, {}, {})


def test_calls_are_told_apart_by_model_inputs_and_options(tmp_path: Path) -> None:
    cassette = Cassette(tmp_path / "c.json")
    for number, call in enumerate(
        [("m", {"a": 1}, {}), ("n", {"a": 1}, {}), ("m", {"a": 2}, {}), ("m", {"a": 1}, {"o": 1})]
    ):
        cassette.record(Recorded(*call, result=number))
    cassette.save()
    played = Cassette(tmp_path / "c.json")
    assert [played.play("m", {"a": 1}, {"o": 1}).result, played.play("n", {"a": 1}, {}).result] == [3, 1]  # type: ignore[union-attr]
    assert played.play("m", {"a": 3}, {}) is None
