import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from doubles import MODEL, PRINCIPAL, ListMeter, ScriptedPool, answer, make_gate

from edge.ai.choices import MAX_AT_A_TIME, ChoiceEvent, run_choices
from edge.ai.gate import Gate
from edge.ai.schemas import chat
from edge.errors import EngineLost
from edge.frames import Delta, Done, Started, Usage


def events(gate: Gate, num_choices: int, **extra: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": num_choices, **extra}
    return run_choices(gate, PRINCIPAL, gate.catalogue.resolve(MODEL), chat(body).request)


def texts(got: list[ChoiceEvent], index: int) -> list[str]:
    return [event.text for i, event in got if i == index and isinstance(event, Delta)]


async def test_one_choice_is_one_run() -> None:
    pool = ScriptedPool(*answer("a", "b"))
    assert [event async for event in events(make_gate(pool), 1)] == [(0, event) for event in pool.script]


async def test_each_choice_has_its_own_run_record_and_seed() -> None:
    meter, pool = ListMeter(), ScriptedPool(scripts=[answer("a", "b"), answer("c"), answer("d", "e")])
    got = [event async for event in events(make_gate(pool, meter), 3, seed=2**63 - 1)]
    assert [texts(got, index) for index in range(3)] == [["a", "b"], ["c"], ["d", "e"]]
    assert [request.sampling.seed for request in pool.requests] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert [(record.status, record.request_id) for record in meter.records] == [("ok", "r-1")] * 3
    assert sorted(record.output_tokens for record in meter.records) == [1, 2, 2]
    assert len({record.id for record in meter.records}) == 3


async def test_the_others_start_when_the_prompt_of_the_first_is_computed() -> None:
    may_go_on = asyncio.Event()
    first = [Started(0, 9), Delta(0, "", Usage(9, 0, 0, 1)), may_go_on, *answer("a")[1:]]
    pool = ScriptedPool(scripts=[first, answer("b")])
    async with aclosing(events(make_gate(pool), 2)) as got:
        assert [await anext(got) for _ in range(2)] == [(0, first[0]), (0, first[1])]
        following = asyncio.ensure_future(anext(got))
        await asyncio.sleep(0.01)
        assert len(pool.requests) == 1
        may_go_on.set()
        assert await following == (0, first[3])
        assert [index async for index, _ in got] in ([0, 1, 1, 1], [1, 0, 1, 1])


async def test_many_choices_are_made_a_few_at_a_time() -> None:
    pool = ScriptedPool(scripts=[answer(str(index)) for index in range(128)])
    meter, most = ListMeter(), 0
    got = []
    async with aclosing(events(make_gate(pool, meter), 128)) as all_events:
        async for event in all_events:
            got.append(event)
            most = max(most, len(pool.requests) - sum(isinstance(each, Done) for _, each in got))
    assert [texts(got, index) for index in range(128)] == [[str(index)] for index in range(128)]
    assert len(meter.records) == 128
    assert MAX_AT_A_TIME <= most <= 2 * MAX_AT_A_TIME  # ends are handed on one by one


async def test_choices_are_interleaved() -> None:
    waiting = asyncio.Event()
    pool = ScriptedPool(scripts=[[*answer("a")[:2], waiting, *answer("b")[1:]], answer("c")])
    got = []
    async with aclosing(events(make_gate(pool), 2)) as all_events:
        async for index, event in all_events:
            got.append((index, type(event)))
            if (index, type(event)) == (1, Done):
                waiting.set()
    assert got == [(0, Started), (0, Delta), (1, Started), (1, Delta), (1, Done), (0, Delta), (0, Done)]


async def test_one_that_fails_fails_the_call_and_the_others_are_cancelled() -> None:
    meter = ListMeter()
    pool = ScriptedPool(scripts=[[*answer("a")[:2], asyncio.Event()], [EngineLost("died")]])
    with pytest.raises(EngineLost, match="died"):
        async for _ in events(make_gate(pool, meter), 2):
            pass
    assert sorted(record.status for record in meter.records) == ["cancelled", "error"]
    assert pool.num_cancelled == 1


@pytest.mark.parametrize("num_read", [1, 2, 4])
async def test_closing_cancels_all(num_read: int) -> None:
    meter = ListMeter()
    pool = ScriptedPool(scripts=[[*answer("a", "b")[:3], asyncio.Event()] for _ in range(3)])
    async with aclosing(events(make_gate(pool, meter), 3)) as got:
        for _ in range(num_read):
            await anext(got)
    assert pool.num_cancelled == len(pool.requests) == len(meter.records)
    assert {record.status for record in meter.records} == {"cancelled"}
