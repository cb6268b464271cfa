"""`/ai/run` and `env.AI.run` answer in the dialect of the model's family."""

from typing import Any

import pytest
from doubles import MODEL, PRINCIPAL, ListMeter, ScriptedPool, Step, answer, catalogue
from helpers import sse_events

from edge.ai.answers import AnswerStream
from edge.ai.dialects import dialect_of
from edge.ai.gate import Gate
from edge.ai.native import run_binding
from edge.errors import EngineLost, InvalidInput, InvalidJson

CHAT, RESPONSES, LEGACY = "@cf/qwen/qwen3-30b-a3b-fp8", "@cf/openai/gpt-oss-20b", "@cf/meta/llama-3.2-1b-instruct"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = {"tools": [{"name": "f", "parameters": {"type": "object"}}]}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def run(pool: ScriptedPool, model: str, inputs: Any) -> Any:
    gate = Gate(pool, catalogue(stand_ins=dict.fromkeys((CHAT, RESPONSES, LEGACY), MODEL)), ListMeter())
    return await run_binding(gate, PRINCIPAL, model, inputs, {})


async def chunks(model: str, inputs: dict[str, Any], *script: Step) -> list[Any]:
    result = await run(ScriptedPool(*script), model, {**inputs, "stream": True})
    assert isinstance(result, AnswerStream)
    return sse_events(b"".join([chunk async for chunk in result]))


@pytest.mark.parametrize(
    ("model", "dialect"),
    [
        (LEGACY, "legacy"),
        (MODEL, "legacy"),
        ("@cf/deepseek-ai/deepseek-r1-distill-qwen-32b", "legacy"),
        ("@cf/google/gemma-3-12b-it", "legacy"),
        (CHAT, "chat"),
        ("@cf/moonshotai/kimi-k2.6", "chat"),
        ("@cf/zai-org/glm-4.7-flash", "chat"),
        ("@cf/nvidia/nemotron-3-120b-a12b", "chat"),
        ("@cf/google/gemma-4-26b-a4b-it", "chat"),
        ("@cf/deepseek-ai/deepseek-v4-flash-0731", "chat"),
        ("@cf/qwen/qwen3.8-27b", "chat"),
        (RESPONSES, "responses"),
    ],
)
def test_families(model: str, dialect: str) -> None:
    assert dialect_of(model) == dialect


@pytest.mark.parametrize("model", [CHAT, RESPONSES])
async def test_messages_give_a_chat_completion(model: str) -> None:
    pool = ScriptedPool(*answer("<think>Hm.</think>", "Hello"))
    got = await run(pool, model, {**MESSAGES, "model": "ignored", "max_tokens": 9, "reasoning_effort": "low"})
    assert (got["object"], got["model"]) == ("chat.completion", model)
    message = got["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Hello", "Hm.", "Hm.")
    assert got["usage"]["cost"] > 0
    (request,) = pool.requests
    assert (request.max_tokens, request.template_options) == (9, {"reasoning_effort": "low"})


@pytest.mark.parametrize("inputs", [MESSAGES, {"prompt": "hi"}])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_has_its_usage_once(inputs: dict[str, Any], n: int) -> None:
    """Clients add up what they find, and those that leave chunks without choices unread never ask for one."""
    *got, finish, end = await chunks(CHAT, {**inputs, "n": n}, *answer("a", "b"))
    assert end == "[DONE]"
    assert not any("usage" in chunk for chunk in got)
    assert finish["choices"][0]["finish_reason"] == "stop"
    whole = await run(ScriptedPool(*answer("a", "b")), CHAT, {**inputs, "n": n})
    assert finish["usage"] == whole["usage"]
    asked = {**inputs, "n": n, "stream_options": {"include_usage": True}}
    *got, last, end = await chunks(CHAT, asked, *answer("a", "b"))
    assert not any("usage" in chunk for chunk in got)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


async def test_a_stream_of_chunks() -> None:
    *got, finish, end = await chunks(CHAT, MESSAGES, *answer("a", "b"))
    assert end == "[DONE]"
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got) == "ab"
    assert (finish["choices"][0]["finish_reason"], finish["usage"]["total_tokens"]) == ("stop", 17)


async def test_reasoning_in_a_stream() -> None:
    got = await chunks(CHAT, MESSAGES, *answer("<think>", "Hm", ".</think>", "\n\nHello"))
    deltas = [chunk["choices"][0]["delta"] for chunk in got[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"


async def test_tool_calls() -> None:
    got = await run(ScriptedPool(*answer(CALL)), CHAT, {**MESSAGES, **TOOLS})
    [call] = got["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert got["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_legacy_answer_keeps_reasoning_in_its_text_and_has_no_null_calls() -> None:
    text = "<think>Hm.</think>Hello"
    assert await run(ScriptedPool(*answer(text)), LEGACY, {**MESSAGES, **TOOLS}) == {
        "response": text,
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 15,
            "completion_tokens": 1,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 5},
            "neurons": (15 * 2457 + 18252) / 10**6,
            "cost": (15 * 2457 + 18252) * 11 / 10**12,
        },
    }


async def test_json_mode_streams() -> None:
    inputs = {**MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"type": "object"}}}
    *got, end = await chunks(LEGACY, inputs, *answer('{"a"', ": 1}"))
    assert ("".join(frame["response"] for frame in got), end) == ('{"a": 1}', "[DONE]")
    assert [frame["usage"]["total_tokens"] for frame in got if "usage" in frame] == [17]


async def test_a_prompt_gives_a_text_completion_through_the_chat_template() -> None:
    pool = ScriptedPool(*answer("a", "b"))
    got = await run(pool, CHAT, {"prompt": "hi"})
    assert (got["object"], got["model"], got["choices"][0]["text"]) == ("text_completion", CHAT, "ab")
    await run(pool, CHAT, {"prompt": "hi", "raw": True, "messages": None})
    assert [(request.prompt, request.raw, request.max_tokens) for request in pool.requests] == [
        ("hi", False, None),
        ("hi", True, None),
    ]


async def test_gpt_oss_takes_a_responses_body_too() -> None:
    got = await run(ScriptedPool(*answer("a")), RESPONSES, {"input": "hi", "instructions": "Be terse."})
    assert (got["object"], got["model"], got["output"][0]["content"][0]["text"]) == ("response", RESPONSES, "a")
    result = await run(ScriptedPool(*answer("a")), RESPONSES, {"input": "hi", "stream": True})
    assert isinstance(result, AnswerStream)
    body = b"".join([chunk async for chunk in result])
    assert body.startswith(b"event: response.created\n")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("model", "inputs", "error", "problem"),
    [
        (CHAT, {**MESSAGES, "prompt": "hi"}, InvalidInput, "messages and prompt are given"),
        (RESPONSES, {**MESSAGES, "input": "hi"}, InvalidInput, "messages and input are given"),
        (CHAT, {}, InvalidInput, r"\$\.messages is missing"),
        (CHAT, {"input": "hi"}, InvalidInput, r"\$\.messages is missing"),
        (CHAT, {**MESSAGES, "temperature": 3}, InvalidInput, r"\$\.temperature is 3, must be a number from 0 to 2"),
        (CHAT, {"prompt": "hi", **TOOLS}, InvalidInput, r"\$\.tools is a list of 1, which is not supported"),
        (CHAT, None, InvalidJson, "must be a JSON object"),
        (LEGACY, {"input": "hi"}, InvalidInput, "needs either prompt or messages"),
    ],
)
async def test_what_is_wrong_is_said(model: str, inputs: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        await run(ScriptedPool(), model, inputs)


async def test_an_error_in_a_stream_satisfies_both_families_of_clients() -> None:
    for model in (CHAT, LEGACY):
        got = await chunks(model, MESSAGES, *answer("a")[:2], EngineLost("it died"))
        assert got[-1]["error"]["message"] == got[-1]["errors"][0]["message"] == "AiError: it died (r-1)"
        assert "[DONE]" not in got
