from typing import Any

import pytest
from doubles import MODEL, PRINCIPAL, STAND_IN, ListMeter, ScriptedPool, answer, catalogue, make_gate
from helpers import sse_events

from edge.ai.answers import AnswerStream
from edge.ai.completions import completion
from edge.ai.gate import Gate
from edge.ai.rate_limits import RateLimits
from edge.errors import EngineLost, InvalidInput, TooManyRequests, UnknownModel
from edge.frames import Delta, TokenLogprob


async def completed(pool: ScriptedPool, meter: ListMeter | None = None, **body: Any) -> Any:
    return await completion(make_gate(pool, meter), PRINCIPAL, {"model": STAND_IN, "prompt": "a b", **body})


async def chunks(pool: ScriptedPool, **body: Any) -> list[Any]:
    result = await completed(pool, stream=True, **body)
    assert isinstance(result, AnswerStream)
    return sse_events(b"".join([chunk async for chunk in result]))


async def test_a_completion_continues_the_prompt_as_it_is() -> None:
    pool = ScriptedPool(*answer(" c", " d", finish_reason="length"))
    got = await completed(pool)
    assert (got["object"], got["id"], got["model"]) == ("text_completion", "cmpl-r-1", STAND_IN)
    assert got["choices"] == [{"index": 0, "text": " c d", "logprobs": None, "finish_reason": "length"}]
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (15, 2)
    (request,) = pool.requests
    assert (request.prompt, request.raw, request.messages) == ("a b", True, None)
    assert (request.max_tokens, request.sampling.temperature) == (16, 1.0)


async def test_chunks() -> None:
    *got, usage, end = await chunks(ScriptedPool(*answer(" c", "", " d")), stream_options={"include_usage": True})
    assert end == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in got] == [" c", " d", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None, None, "stop"]
    assert {(chunk["id"], chunk["object"]) for chunk in (*got, usage)} == {("cmpl-r-1", "text_completion")}
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 18)
    assert not any("usage" in chunk for chunk in await chunks(ScriptedPool(*answer("c"))) if chunk != "[DONE]")


async def test_several_prompts_with_several_choices_are_numbered_through_and_each_metered() -> None:
    meter, pool = ListMeter(), ScriptedPool(scripts=[answer(text) for text in "abcd"])
    got = await completed(pool, meter, prompt=["1", "2"], n=2, echo=True)
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [
        (0, "1a"),
        (1, "1b"),
        (2, "2c"),
        (3, "2d"),
    ]
    assert [request.prompt for request in pool.requests] == ["1", "1", "2", "2"]
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (30, 4)
    assert len(meter.records) == 4
    pool = ScriptedPool(scripts=[answer(text) for text in "abcd"])
    *streamed, usage, _ = await chunks(pool, prompt=["1", "2"], n=2, echo=True, stream_options={"include_usage": True})
    texts = ["", "", "", ""]
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["1a", "1b", "2c", "2d"]
    assert usage["usage"] == got["usage"]


async def test_prompts_of_token_ids_are_handed_on_as_they_are() -> None:
    pool = ScriptedPool(*answer("c"))
    assert (await completed(pool, prompt=[5, 0, 7]))["choices"][0]["text"] == "c"
    assert len((await completed(pool, prompt=[[5], "a", [6, 7]]))["choices"]) == 3
    assert [request.prompt for request in pool.requests] == [[5, 0, 7], [5], "a", [6, 7]]


async def test_each_choice_of_several_prompts_is_a_call_for_the_rate_limit() -> None:
    limits = RateLimits({"text-generation": 11})
    gate = Gate(ScriptedPool(*answer("a")), catalogue(), ListMeter(), rate_limits=limits)
    body = {"model": STAND_IN, "prompt": ["1", "2", "3"], "n": 2}
    assert len((await completion(gate, PRINCIPAL, body))["choices"]) == 6  # type: ignore[index]
    with pytest.raises(TooManyRequests):
        await completion(gate, PRINCIPAL, body)


async def test_logprobs() -> None:
    script = answer("é", "ab")
    for event in script[1:-1]:
        assert isinstance(event, Delta)
        event.logprobs = [TokenLogprob(event.text, -0.5, [], [TokenLogprob("x", -1.0, [])])]
    expected = {
        "tokens": ["é", "ab"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"x": -1.0}, {"x": -1.0}],
        "text_offset": [0, 1],
    }
    got = await completed(ScriptedPool(*script), logprobs=1)
    assert got["choices"][0]["logprobs"] == expected
    streamed = await chunks(ScriptedPool(*script), logprobs=1)
    gathered: dict[str, list[Any]] = {key: [] for key in expected}
    for chunk in streamed[:-2]:
        for key, values in chunk["choices"][0]["logprobs"].items():
            gathered[key] += values
    assert gathered == expected


async def test_json_mode() -> None:
    pool = ScriptedPool(*answer("{}"))
    await completed(pool, response_format={"type": "json_object"})
    assert pool.requests[0].json_schema == '{"type":"object"}'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": None}, r"\$\.prompt is missing"),
        ({"prompt": ""}, r"\$\.prompt is \"\", must be a string of at least one character"),
        ({"prompt": ["a", ""]}, r"\$\.prompt\[1\] is \"\""),
        ({"prompt": []}, r"\$\.prompt is an empty list, must be a string .*or a list of 1 to 64 of them"),
        ({"prompt": [1, -2]}, r"\$\.prompt\[1\] is -2, must be a token id, an integer from 0 to 2147483647"),
        ({"prompt": [1, True]}, r"\$\.prompt\[1\] is true, must be a token id"),
        ({"prompt": [1, "a"]}, r"\$\.prompt\[1\] is \"a\", must be a token id"),
        ({"prompt": [[1], [2**31]]}, r"\$\.prompt\[1\]\[0\] is 2147483648, must be a token id"),
        ({"prompt": [[1], []]}, r"\$\.prompt\[1\] is an empty list, must be a string of at least one character or a"),
        ({"prompt": {}}, r"\$\.prompt is an object"),
        ({"prompt": [1, 2], "echo": True}, r"\$\.echo is true, which is not supported for prompts of token ids"),
        ({"prompt": ["a"] * 5, "n": 128}, r"\$\.n is 128 for 5 prompts: 512 answers are the most"),
        ({"n": 128, "logprobs": 1}, r"\$\.n makes 128 choices with 2 log-probabilities a token: at most 168"),
        ({"suffix": "z"}, r"\$\.suffix is \"z\", which is not supported yet"),
        ({"best_of": 3}, r"\$\.best_of is 3, which is not supported yet"),
        ({"echo": True, "logprobs": 1}, r"\$\.echo is true, which is not supported together with logprobs"),
        ({"n": 129}, r"\$\.n is 129, must be an integer from 1 to 128"),
        ({"logprobs": True}, r"\$\.logprobs is true, must be an integer"),
    ],
)
async def test_what_is_wrong_is_said(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        await completed(ScriptedPool(), **body)


async def test_nulls_and_harmless_values_are_accepted() -> None:
    nulls = dict.fromkeys(("stop", "suffix", "best_of", "logprobs", "echo", "stream", "stream_options", "n", "user"))
    got = await completed(ScriptedPool(*answer("a")), **nulls)
    assert got["choices"][0]["text"] == "a"
    await completed(ScriptedPool(*answer("a")), best_of=1, suffix="")


async def test_failures() -> None:
    with pytest.raises(UnknownModel):
        await completed(ScriptedPool(), model="gpt-4")
    got = await chunks(ScriptedPool(*answer("a")[:2], EngineLost("it died")), model=MODEL)
    assert (got[-1]["error"]["message"], len(got)) == ("AiError: it died (r-1)", 2)
