import time
from typing import Any

import pytest
from doubles import MODEL, PRINCIPAL, STAND_IN, ListMeter, ScriptedPool, answer, catalogue, make_gate
from helpers import sse_events

from edge.ai.answers import AnswerStream
from edge.ai.gate import Gate
from edge.ai.openai import chat_completion, model_list
from edge.errors import EngineLost, UnknownModel
from edge.frames import Delta, TokenLogprob

BODY = {"model": STAND_IN, "messages": [{"role": "user", "content": "hi"}]}


async def chunks(pool: ScriptedPool, **extra: Any) -> list[Any]:
    result = await chat_completion(make_gate(pool), PRINCIPAL, {**BODY, "stream": True, **extra})
    assert isinstance(result, AnswerStream)
    return sse_events(b"".join([chunk async for chunk in result]))


async def test_completion() -> None:
    result = await chat_completion(make_gate(ScriptedPool(*answer("a", "b", finish_reason="length"))), PRINCIPAL, BODY)
    assert isinstance(result, dict)
    assert abs(result.pop("created") - time.time()) < 60
    assert result == {
        "id": "chatcmpl-r-1",
        "object": "chat.completion",
        "model": STAND_IN,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 15,
            "completion_tokens": 2,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 5},
            "neurons": 0.073359,
            "cost": 0.000000806949,
        },
    }


async def test_chunks() -> None:
    *got, end = await chunks(ScriptedPool(*answer("", "a", "", "b")))
    assert end == "[DONE]"
    assert {(chunk["object"], chunk["id"], chunk["model"]) for chunk in got} == {
        ("chat.completion.chunk", "chatcmpl-r-1", STAND_IN)
    }
    assert [chunk["choices"][0]["delta"] for chunk in got] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None, None, None, "stop"]
    assert {chunk["choices"][0]["index"] for chunk in got} == {0}
    assert not any("usage" in chunk for chunk in got)


async def test_usage_chunk_comes_last_and_only_if_asked_for() -> None:
    *got, usage, _ = await chunks(ScriptedPool(*answer("a")), stream_options={"include_usage": True})
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 16)
    assert not any("usage" in chunk for chunk in got)


async def test_an_error_in_a_stream_ends_it_without_done() -> None:
    got = await chunks(ScriptedPool(*answer("a")[:2], EngineLost("it died")))
    assert got[-1]["error"]["message"] == "AiError: it died (r-1)"
    assert len(got) == 3


async def test_unknown_model() -> None:
    with pytest.raises(UnknownModel):
        await chat_completion(make_gate(ScriptedPool()), PRINCIPAL, {**BODY, "model": "gpt-4"})


def test_model_list() -> None:
    listed = model_list(catalogue())
    assert listed["object"] == "list"
    assert listed["data"][0] == {"id": STAND_IN, "object": "model", "created": 1796040000, "owned_by": "meta"}
    assert [model["id"] for model in listed["data"]] == [STAND_IN, MODEL]


# -- tools, log-probabilities, choices ---------------------------------------------------------------------

TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
FORCED = {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def completion(pool: ScriptedPool, **extra: Any) -> Any:
    return await chat_completion(make_gate(pool), PRINCIPAL, {**BODY, **extra})


def deltas(got: list[Any]) -> list[Any]:
    return [choice["delta"] for chunk in got if chunk != "[DONE]" for choice in chunk["choices"]]


@pytest.mark.parametrize(
    ("texts", "extra", "content", "num_calls"),
    [
        (['{"name": "f", "argum', 'ents": {"a"', ": 1}}"], FORCED, None, 1),
        ([CALL], TOOLS, None, 1),
        (["Wait. ", CALL[:5], CALL[5:], "\n", CALL], TOOLS, "Wait.", 2),
    ],
)
async def test_tool_calls(texts: list[str], extra: dict[str, Any], content: str | None, num_calls: int) -> None:
    [choice] = (await completion(ScriptedPool(*answer(*texts)), **extra))["choices"]
    calls = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["logprobs"]) == (content, "tool_calls", None)
    assert len({call["id"] for call in calls}) == num_calls
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * num_calls

    got = await chunks(ScriptedPool(*answer(*texts)), **extra)
    assert "".join(delta.get("content") or "" for delta in deltas(got)) == (content or "")
    assert got[-2]["choices"][0]["finish_reason"] == "tool_calls"
    streamed: dict[int, Any] = {}
    for delta in deltas(got):
        for piece in delta.get("tool_calls", []):
            if piece["index"] not in streamed:
                assert (piece["type"], piece["function"]["name"], piece["function"]["arguments"]) == (
                    "function",
                    "f",
                    "",
                )
                streamed[piece["index"]] = [piece["id"], ""]
            else:
                assert piece.keys() == {"index", "function"}
                assert piece["function"].keys() == {"arguments"}
                streamed[piece["index"]][1] += piece["function"]["arguments"]
    assert [arguments for _, arguments in streamed.values()] == ['{"a": 1}'] * num_calls
    assert len({id for id, _ in streamed.values()}) == num_calls


@pytest.mark.parametrize(
    ("texts", "choice", "content"),
    [
        (['{"name": "f", "argum', 'ents": {"a"', ": 1}}"], {"name": "f"}, None),
        (["Wait. ", CALL[:5], CALL[5:-12]], "auto", "Wait."),  # the engine stops before the tag that closes the call
    ],
)
async def test_a_call_of_a_function_is_answered_in_the_older_form(
    texts: list[str], choice: Any, content: str | None
) -> None:
    extra = {"functions": [{"name": "f", "parameters": {"type": "object"}}], "function_call": choice}
    pool = ScriptedPool(*answer(*texts))
    [got] = (await completion(pool, **extra))["choices"]
    assert got["message"].pop("refusal", None) is None
    assert got["message"] == {
        "role": "assistant",
        "content": content,
        "function_call": {"name": "f", "arguments": '{"a": 1}'},
    }
    assert got["finish_reason"] == "function_call"
    assert [tool["function"]["name"] for tool in pool.requests[0].tools] == ["f"]

    events = await chunks(ScriptedPool(*answer(*texts)), **extra)
    pieces = [delta["function_call"] for delta in deltas(events) if "function_call" in delta]
    assert pieces[0] == {"name": "f", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == '{"a": 1}'
    assert not any("name" in piece for piece in pieces[1:])
    assert not any("tool_calls" in each for each in deltas(events))
    assert events[-2]["choices"][0]["finish_reason"] == "function_call"


async def test_the_arguments_of_a_forced_call_come_in_pieces() -> None:
    got = await chunks(ScriptedPool(*answer('{"name": "f", "arguments": {', '"a"', ": 1", "}", "}")), **FORCED)
    pieces = [piece["function"]["arguments"] for delta in deltas(got) for piece in delta.get("tool_calls", [])]
    assert pieces == ["", "{", '"a"', ": 1", "}"]


async def test_a_forced_call_that_is_cut_short_has_what_there_is_of_its_arguments() -> None:
    pool = ScriptedPool(*answer('{"name": "f", "arguments": {"a": 1', finish_reason="length"))
    [choice] = (await completion(pool, **FORCED))["choices"]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == (
        "length",
        '{"a": 1',
    )


async def test_json_mode_gives_text() -> None:
    pool = ScriptedPool(*answer('{"a": 1}'))
    got = await completion(pool, response_format={"type": "json_object"})
    assert got["choices"][0]["message"]["content"] == '{"a": 1}'
    assert pool.requests[0].json_schema == '{"type":"object"}'


def with_logprobs(*texts: str) -> list[Any]:
    script = answer(*texts)
    for event in script[1:-1]:
        assert isinstance(event, Delta)
        top = [TokenLogprob(event.text, -0.5, list(event.text.encode())), TokenLogprob("x", -9999.0, [120])]
        event.logprobs = [TokenLogprob(event.text, -0.5, list(event.text.encode()), top)]
    return script


async def test_logprobs() -> None:
    shown = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    entry = {**shown, "top_logprobs": [shown, {"token": "x", "logprob": -9999.0, "bytes": [120]}]}
    extra = {"logprobs": True, "top_logprobs": 2}
    got = await completion(ScriptedPool(*with_logprobs("é", "é")), **extra)
    assert got["choices"][0]["logprobs"] == {"content": [entry, entry], "refusal": None}
    *streamed, _ = await chunks(ScriptedPool(*with_logprobs("é", "é")), **extra)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert logprobs == [None, {"content": [entry], "refusal": None}, {"content": [entry], "refusal": None}, None]
    assert [delta.get("content") for delta in deltas(streamed)] == ["", "é", "é", None]


async def test_logprobs_come_also_where_text_is_held_back() -> None:
    for texts, extra in (((CALL[:9], CALL[9:]), TOOLS), (("", "a"), {})):
        got = await chunks(ScriptedPool(*with_logprobs(*texts)), logprobs=True, **extra)
        tokens = [
            each["token"]
            for chunk in got[:-1]
            for choice in chunk["choices"]
            for each in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert tokens == list(texts)


async def test_choices() -> None:
    scripts = [answer("a", "b"), answer("c", finish_reason="length")]
    got = await completion(ScriptedPool(scripts=scripts), n=2)
    assert [(choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in got["choices"]] == [
        (0, "ab", "stop"),
        (1, "c", "length"),
    ]
    usage = got["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (15, 3, 18)
    assert usage["neurons"] == (2 * 15 * 2457 + 3 * 18252) / 10**6

    *streamed, last, end = await chunks(ScriptedPool(scripts=scripts), n=2, stream_options={"include_usage": True})
    assert (last["usage"], end) == (usage, "[DONE]")
    for index, text in enumerate(("ab", "c")):
        mine = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [("stop", "length")[index]]


async def test_a_model_whose_name_looks_like_a_chunk() -> None:
    name = 'x","delta":{"content":""}'
    gate = Gate(ScriptedPool(*answer("a")), catalogue(name), ListMeter())
    stream = await chat_completion(gate, PRINCIPAL, {**BODY, "model": name, "stream": True})
    assert isinstance(stream, AnswerStream)
    got = sse_events(b"".join([chunk async for chunk in stream]))
    assert (got[1]["model"], got[1]["choices"][0]["delta"]) == (name, {"content": "a"})
