import asyncio
from typing import Any

import pytest
from doubles import MODEL, PRINCIPAL, STAND_IN, ListMeter, ScriptedPool, answer, make_gate
from helpers import sse_events

from edge.ai.answers import AnswerStream
from edge.ai.native import run_binding
from edge.errors import EngineLost, InvalidInput, InvalidJson, PromptTooLong, UnknownModel

USAGE = {
    "prompt_tokens": 15,
    "completion_tokens": 2,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 5},
    "neurons": (15 * 2457 + 2 * 18252) / 10**6,
    "cost": (15 * 2457 + 2 * 18252) * 11 / 10**12,  # 0.011 dollars per 1,000 neurons
}


async def stream(pool: ScriptedPool, meter: ListMeter | None = None) -> AnswerStream:
    result = await run_binding(make_gate(pool, meter), PRINCIPAL, MODEL, {"prompt": "hi", "stream": True}, {})
    assert isinstance(result, AnswerStream)
    return result


async def events(pool: ScriptedPool, meter: ListMeter | None = None) -> list[Any]:
    return sse_events(b"".join([chunk async for chunk in await stream(pool, meter)]))


async def test_result() -> None:
    result = await run_binding(make_gate(ScriptedPool(*answer("1", "2"))), PRINCIPAL, STAND_IN, {"prompt": "hi"}, {})
    assert result == {"response": "12", "finish_reason": "stop", "usage": USAGE}


async def test_stream() -> None:
    frames = await events(ScriptedPool(*answer("1", "é\n")))
    assert [frame["response"] for frame in frames[:-1]] == ["1", "é\n", ""]
    assert [set(frame) for frame in frames[:2]] == [{"response", "p"}] * 2
    assert frames[2] == {"response": "", "finish_reason": "stop", "usage": USAGE}
    assert frames[3:] == ["[DONE]"]


async def test_a_delta_without_text_makes_no_event() -> None:
    frames = await events(ScriptedPool(*answer("", "1", "")))
    assert [frame["response"] for frame in frames[:-1]] == ["1", ""]


async def test_an_error_in_a_stream_is_told_in_both_dialects_and_is_not_the_end_of_a_complete_one() -> None:
    frames = await events(ScriptedPool(*answer("1")[:2], EngineLost("it died")))
    assert frames[-1] == {
        "response": "",
        "success": False,
        "result": None,
        "errors": [{"code": 3043, "message": "AiError: it died (r-1)"}],
        "messages": [],
        "error": {"message": "AiError: it died (r-1)", "type": "server_error", "param": None, "code": "3043"},
    }
    assert len(frames) == 2


async def test_an_unwritten_record_withholds_the_end_of_the_stream() -> None:
    frames = await events(ScriptedPool(*answer("1")), ListMeter(fails=True))
    assert frames[-1]["errors"][0]["code"] == 3044
    assert "[DONE]" not in frames


async def test_what_is_wrong_with_a_streaming_call_is_raised_before_the_stream() -> None:
    with pytest.raises(PromptTooLong):
        await stream(ScriptedPool(PromptTooLong("9000 tokens do not fit")))


@pytest.mark.parametrize("num_read", [0, 1])
async def test_closing_a_stream_cancels_the_call_even_if_nothing_was_read(num_read: int) -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("1", "2"))
    opened = await stream(pool, meter)
    for _ in range(num_read):
        await anext(opened)
    await opened.aclose()
    assert pool.num_cancelled == 1
    assert [record.status for record in meter.records] == ["cancelled"]


async def test_a_cancelled_call_is_recorded() -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("1")[:2], asyncio.Event())
    gate = make_gate(pool, meter)
    task = asyncio.create_task(run_binding(gate, PRINCIPAL, MODEL, {"prompt": "hi"}, {}))
    await pool.is_called.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [record.status for record in meter.records] == ["cancelled"]


async def test_wrong_calls_are_refused_and_not_recorded() -> None:
    meter = ListMeter()
    gate = make_gate(ScriptedPool(), meter)
    for model, inputs, options, error in (
        ("nope", {"prompt": "hi"}, {}, UnknownModel),
        (MODEL, {}, {}, InvalidInput),
        (MODEL, None, {}, InvalidJson),
        (MODEL, {"prompt": "hi"}, {"websocket": True}, InvalidInput),
    ):
        with pytest.raises(error):
            await run_binding(gate, PRINCIPAL, model, inputs, options)
    assert meter.records == []


async def test_options_without_an_effect_are_accepted() -> None:
    options = {"rejectIfBusy": True, "extraHeaders": {"x-session-affinity": "s"}, "example": 123, "queueRequest": False}
    assert await run_binding(make_gate(ScriptedPool(*answer("1"))), PRINCIPAL, MODEL, {"prompt": "hi"}, options)


# -- JSON mode and tools -----------------------------------------------------------------------------------

TOOLS = {"tools": [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]}
FORCED = {**TOOLS, "tool_choice": "required"}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def result(*texts: str, finish_reason: str = "stop", **inputs: Any) -> Any:
    gate = make_gate(ScriptedPool(*answer(*texts, finish_reason=finish_reason)))
    return await run_binding(gate, PRINCIPAL, MODEL, {"prompt": "hi", **inputs}, {})


async def streamed(*texts: str, finish_reason: str = "stop", **inputs: Any) -> list[Any]:
    got = await result(*texts, finish_reason=finish_reason, stream=True, **inputs)
    *frames, end = sse_events(b"".join([chunk async for chunk in got]))
    assert end == "[DONE]"
    return [{key: value for key, value in frame.items() if key not in ("p", "usage")} for frame in frames]


@pytest.mark.parametrize(
    ("text", "finish_reason", "response"),
    [
        ('{"a": 1}', "stop", {"a": 1}),
        ("12", "stop", 12),
        ("12", "length", "12"),
        ('{"a": 1', "length", '{"a": 1'),
        ("[" * 65 + "]" * 65, "stop", "[" * 65 + "]" * 65),
        ("[" * 100_000, "stop", "[" * 100_000),
    ],
)
async def test_in_json_mode_the_response_is_the_value_if_it_is_complete(
    text: str, finish_reason: str, response: Any
) -> None:
    got = await result(text, finish_reason=finish_reason, guided_json={})
    assert (got["response"], got["finish_reason"]) == (response, finish_reason)
    assert "tool_calls" not in got
    plain = await result(text, finish_reason=finish_reason)
    assert plain["response"] == text


async def test_a_stream_in_json_mode_is_its_text() -> None:
    frames = await streamed('{"a"', ": 1}", guided_json={})
    assert frames == [{"response": '{"a"'}, {"response": ": 1}"}, {"response": "", "finish_reason": "stop"}]


async def test_a_forced_call() -> None:
    texts = '{"name": "f", ', '"arguments": {"a": 1}', "}"
    calls = [{"name": "f", "arguments": {"a": 1}}]
    got = await result(*texts, **FORCED)
    assert (got["response"], got["tool_calls"], got["finish_reason"]) == ("", calls, "tool_calls")
    assert await streamed(*texts, **FORCED) == [
        {"response": "", "tool_calls": calls},
        {"response": "", "finish_reason": "tool_calls"},
    ]


async def test_a_forced_call_that_is_cut_short_is_its_text() -> None:
    texts = '{"name": "f", ', '"arguments": {"a": 1'
    got = await result(*texts, finish_reason="length", **FORCED)
    assert (got["response"], got["finish_reason"]) == ("".join(texts), "length")
    assert "tool_calls" not in got
    assert await streamed(*texts, finish_reason="length", **FORCED) == [
        {"response": "".join(texts)},
        {"response": "", "finish_reason": "length"},
    ]


async def test_calls_among_text() -> None:
    texts = "Wait. ", CALL[:20], CALL[20:], "\n", CALL
    calls = [{"name": "f", "arguments": {"a": 1}}] * 2
    got = await result(*texts, **TOOLS)
    assert (got["response"], got["tool_calls"], got["finish_reason"]) == ("Wait.", calls, "tool_calls")
    assert await streamed(*texts, **TOOLS) == [
        {"response": "Wait."},
        {"response": "", "tool_calls": calls},
        {"response": "", "finish_reason": "tool_calls"},
    ]
    untouched = await result(*texts)
    assert untouched["response"] == "".join(texts)
