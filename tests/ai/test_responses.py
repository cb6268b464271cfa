import json
from typing import Any

import pytest
from doubles import PRINCIPAL, STAND_IN, ListMeter, ScriptedPool, Step, answer, make_gate

from edge.ai.answers import AnswerStream
from edge.ai.responses import count_response_tokens, response
from edge.errors import EngineLost, InvalidInput, InvalidJson, OutOfCapacity, UnknownModel
from edge.frames import Delta, TokenLogprob

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
FORCED = ('{"name": "f", "argum', 'ents": {"a"', ": 1}}")


async def responded(pool: ScriptedPool, meter: ListMeter | None = None, **body: Any) -> Any:
    return await response(make_gate(pool, meter), PRINCIPAL, {"model": STAND_IN, "input": "hi", **body})


async def stream(pool: ScriptedPool, **body: Any) -> tuple[list[dict[str, Any]], bool]:
    """The events of a stream, and whether it ended with `[DONE]`."""
    result = await responded(pool, stream=True, **body)
    assert isinstance(result, AnswerStream)
    *blocks, end = b"".join([chunk async for chunk in result]).decode().split("\n\n")
    assert end == ""
    is_done = blocks[-1] == "data: [DONE]"
    events = []
    for number, block in enumerate(blocks[:-1] if is_done else blocks):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events, is_done


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def messages_of(body: Any) -> Any:
    """What the engine gets of it."""
    pool = ScriptedPool(*answer("a"))
    await responded(pool, input=body)
    return pool.requests[0].messages


async def test_response() -> None:
    pool, meter = ScriptedPool(*answer("Hel", "lo")), ListMeter()
    got = await responded(pool, meter, instructions="Be terse.", metadata={"a": "b"}, max_output_tokens=5)
    assert (got["object"], got["status"], got["model"], got["id"]) == ("response", "completed", STAND_IN, "resp_r1")
    assert (got["metadata"], got["instructions"], got["error"], got["store"]) == ({"a": "b"}, "Be terse.", None, False)
    [item] = got["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    assert got["usage"] == {
        "input_tokens": 15,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
        "neurons": 0.073359,
        "cost": 0.000000806949,
    }
    (request,) = pool.requests
    assert request.messages == [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "hi"}]
    assert (request.max_tokens, len(meter.records)) == (5, 1)


async def test_the_events_of_a_text() -> None:
    events, is_done = await stream(ScriptedPool(*answer("Hel", "", "lo")))
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert is_done
    assert events[0]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[2]["item"]["content"]) == ([], [])
    assert [event["delta"] for event in events if event["type"].endswith("text.delta")] == ["Hel", "lo"]
    assert (events[6]["text"], events[7]["part"]["text"]) == ("Hello", "Hello")
    last = events[-1]["response"]
    assert last["output"] == [events[8]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}
    assert (last["status"], last["usage"]["output_tokens"]) == ("completed", 3)


@pytest.mark.parametrize(("texts", "choice"), [(FORCED, "required"), ((CALL[:20], CALL[20:]), "auto")])
async def test_function_calls(texts: tuple[str, ...], choice: str) -> None:
    got = await responded(ScriptedPool(*answer(*texts)), tools=[TOOL], tool_choice=choice)
    [item] = got["output"]
    assert (item["type"], item["name"], item["arguments"], item["status"]) == (
        "function_call",
        "f",
        '{"a": 1}',
        "completed",
    )
    assert (item["id"][:3], item["call_id"][:5], got["status"]) == ("fc_", "call_", "completed")
    assert (got["tools"], got["tool_choice"]) == ([TOOL], choice)

    events, _ = await stream(ScriptedPool(*answer(*texts)), tools=[TOOL], tool_choice=choice)
    assert types(events)[2] == "output_item.added"
    assert types(events)[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(types(events)[3:-3]) == {"function_call_arguments.delta"}
    assert "".join(event["delta"] for event in events[3:-3]) == events[-3]["arguments"] == '{"a": 1}'
    assert (events[2]["item"]["arguments"], events[-2]["item"]["arguments"]) == ("", '{"a": 1}')
    assert events[2]["item"]["call_id"] == events[-1]["response"]["output"][0]["call_id"]


async def test_text_and_calls_are_items_of_their_own() -> None:
    events, _ = await stream(ScriptedPool(*answer("<think>Hm.</think>Wait. ", CALL, CALL)), tools=[TOOL])
    items = events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert len({item["id"] for item in items}) == 4
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


async def test_an_answer_that_is_cut_short_is_incomplete() -> None:
    events, is_done = await stream(ScriptedPool(*answer("a", finish_reason="length")))
    last = events[-1]["response"]
    assert (types(events)[-1], last["status"], is_done) == ("incomplete", "incomplete", True)
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["status"] == "incomplete"


async def test_an_empty_answer_has_an_empty_message() -> None:
    got = await responded(ScriptedPool(*answer()))
    assert got["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("error", "code"), [(EngineLost("it died"), "server_error"), (OutOfCapacity("it is full"), "rate_limit_exceeded")]
)
async def test_a_call_that_fails_half_way_ends_with_a_failed_response(error: Exception, code: str) -> None:
    script: list[Step] = [*answer("a")[:2], error]
    events, is_done = await stream(ScriptedPool(*script))
    assert (types(events)[-1], is_done) == ("failed", False)
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", code)
    assert failed["error"]["message"] == f"AiError: {error} (r-1)"
    with pytest.raises(type(error)):
        await responded(ScriptedPool(*script))


async def test_logprobs() -> None:
    script = answer("a")
    assert isinstance(script[1], Delta)
    script[1].logprobs = [TokenLogprob("a", -0.5, [97], [TokenLogprob("b", -1.0, [98])])]
    events, _ = await stream(ScriptedPool(*script), top_logprobs=1, include=["message.output_text.logprobs"])
    told = [
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}]}
    ]
    assert [event["logprobs"] for event in events if event["type"].endswith("text.delta")] == [told]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == told


async def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    read = await messages_of(
        [
            {"role": "developer", "content": "Be terse."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "id": "msg",
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Wait."}],
            },
            call,
            {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
            {**call, "call_id": "c3"},
        ]
    )
    function = {"name": "f", "arguments": {"a": 1}}

    def calls(*ids: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": function, "id": id} for id in ids]

    assert read == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls("c1", "c2")},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "wet"},
        {"role": "assistant", "content": "", "tool_calls": calls("c3")},
    ]


async def test_the_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    pool = ScriptedPool(*answer("{}"))
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    got = await responded(pool, text=wanted)
    assert json.loads(pool.requests[0].json_schema or "") == {**schema, "additionalProperties": False}
    assert got["text"] == wanted
    await responded(pool, text={"format": {"type": "json_object"}})
    assert pool.requests[1].json_schema == '{"type":"object"}'
    await responded(pool, text={"format": {"type": "text"}, "verbosity": "low"})
    assert pool.requests[2].json_schema is None


async def test_how_much_to_reason_is_for_the_chat_template() -> None:
    pool = ScriptedPool(*answer("a"))
    await responded(pool, reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"x": 1})
    await responded(pool, reasoning={"effort": "none"})
    await responded(pool, reasoning={"effort": None})
    assert [request.template_options for request in pool.requests] == [
        {"reasoning_effort": "low", "x": 1},
        {"enable_thinking": False},
        {},
    ]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input": None}, r"\$\.input is missing"),
        ({"input": []}, r"\$\.input is an empty list, must be a text"),
        ({"input": [7]}, r"\$\.input\[0\] is 7, must be an item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"\$\.input\[0\]\.content\[0\]\.type is"),
        ({"input": [{"type": "web_search_call"}]}, r"\$\.input\[0\]\.type is \"web_search_call\", which is not supp"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"\$\.input\[0\] is a reference .* nothing is stored"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, r"\$\.input\[0\]\.call_id is null"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, r"\$\.input\[0\]\.arguments is"),
        ({"previous_response_id": "resp_1"}, r"\$\.previous_response_id is .* but nothing is stored: send the whole"),
        ({"conversation": {"id": "a"}}, r"\$\.conversation is an object, but nothing is stored"),
        ({"tools": [{"type": "web_search"}]}, r"\$\.tools\[0\]\.type is .*only functions are"),
        ({"text": {"format": {"type": "xml"}}}, r"\$\.text\.format\.type is \"xml\""),
        ({"text": {"format": {"type": "json_schema"}}}, r"\$\.text\.format\.schema is null"),
        ({"background": True}, r"\$\.background is true, which is not supported yet"),
        ({"truncation": "auto"}, r"\$\.truncation is \"auto\", which is not supported yet"),
        ({"max_output_tokens": 0}, r"\$\.max_output_tokens is 0"),
        ({"metadata": "a"}, r"\$\.metadata is \"a\", must be an object"),
        ({"include": "a"}, r"\$\.include is \"a\", must be a list of names"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
            r"\$\.tool_choice\.name is \"g\", must be one",
        ),
    ],
)
async def test_what_is_wrong_is_said(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        await responded(ScriptedPool(), **body)


async def test_wrong_bodies() -> None:
    with pytest.raises(InvalidJson):
        await response(make_gate(ScriptedPool()), PRINCIPAL, [])
    with pytest.raises(UnknownModel):
        await responded(ScriptedPool(), model="gpt-4")


async def test_what_clients_send_by_default_is_accepted() -> None:
    nulls = dict.fromkeys(("instructions", "previous_response_id", "conversation", "text", "reasoning", "metadata"))
    more = {"include": [], "tools": [], "store": False, "truncation": "disabled", "stream_options": {}, "user": "u"}
    pool = ScriptedPool(*answer("a"))
    assert (await responded(pool, **nulls, **more))["status"] == "completed"
    await responded(pool, include=["reasoning.encrypted_content"], parallel_tool_calls=True, service_tier="auto")


async def test_token_counts() -> None:
    pool, meter = ScriptedPool(), ListMeter()
    body = {"model": STAND_IN, "input": "one two three", "instructions": "four"}
    got = await count_response_tokens(make_gate(pool, meter), PRINCIPAL, body)
    assert got == {"object": "response.input_tokens", "input_tokens": 4}
    assert meter.records == []
