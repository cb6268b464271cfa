import time
from typing import Any

import pytest
from doubles import MODEL, PRINCIPAL, STAND_IN, ScriptedPool, answer, catalogue, make_gate
from helpers import sse_events

from edge.ai.answers import AnswerStream
from edge.ai.openai import chat_completion, model_list
from edge.errors import EngineLost, UnknownModel

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
