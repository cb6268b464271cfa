import asyncio
from contextlib import aclosing, suppress

import pytest
from doubles import MODEL, PRINCIPAL, STAND_IN, ListMeter, ScriptedPool, answer, make_gate
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.ai.gate import Event, Gate
from edge.ai.schemas import TextGeneration, native
from edge.billing.meter import UsageRecord
from edge.errors import EngineLost, MeteringUnavailable, OutOfCapacity
from edge.frames import Delta, Done, Sampling, Started, Usage

REQUEST = native({"prompt": "hi"})


async def run(gate: Gate, model: str = STAND_IN, request: TextGeneration = REQUEST) -> list[Event]:
    return [event async for event in gate.run(PRINCIPAL, gate.catalogue.resolve(model), request)]


def only(meter: ListMeter) -> UsageRecord:
    (record,) = meter.records
    return record


async def test_events_are_handed_on_and_the_call_is_recorded() -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("a", "b"))
    gate = make_gate(pool, meter)
    assert await run(gate) == pool.script
    record = only(meter)
    assert (record.status, record.error_code) == ("ok", None)
    assert (record.input_tokens, record.cached_input_tokens, record.output_tokens, record.compute_us) == (10, 5, 2, 200)
    assert (record.model, record.served_by, record.task) == (STAND_IN, MODEL, "text-generation")
    assert (record.account, record.worker, record.version) == ("dev", "demo", "v1")
    assert (record.trigger, record.request_id) == ("binding", "r-1")
    assert record.price_version == gate.catalogue.prices.id
    assert record.ended_at - record.started_at == record.wall_us >= 0


async def test_the_pool_gets_the_installed_model_and_every_field() -> None:
    pool = ScriptedPool(*answer("a"))
    inputs = {"prompt": "hi", "raw": True, "max_tokens": 3, "stop": ["x"], "seed": 4, "lora": "a", "guided_json": {}}
    await run(make_gate(pool), request=native(inputs))
    (sent,) = pool.requests
    assert (sent.model, sent.prompt, sent.messages, sent.raw) == (MODEL, "hi", None, True)
    assert (sent.max_tokens, sent.stop, sent.sampling) == (3, ["x"], Sampling(temperature=0.6, seed=4))
    assert (sent.account, sent.adapter, sent.json_schema, sent.tools) == ("dev", "a", "{}", None)
    assert sent.credit > 0
    await run(make_gate(pool), request=native({"prompt": "hi", "tools": [{"name": "f"}]}))
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert pool.requests[-1].tools == [{"type": "function", "function": function}]


async def test_accounts_share_cached_prompts_only_if_they_say_so() -> None:
    pool, meter = ScriptedPool(*answer("a")), ListMeter()
    gate = make_gate(pool, meter)
    for gate.sharing in (frozenset({"other"}), frozenset({"other", PRINCIPAL.account})):
        await run(gate)
    assert [sent.account for sent in pool.requests] == [PRINCIPAL.account, ""]
    assert [record.account for record in meter.records] == [PRINCIPAL.account] * 2


async def test_the_priority_of_a_principal_goes_along() -> None:
    pool = ScriptedPool(*answer("a"))
    gate = make_gate(pool)
    principal = replace(PRINCIPAL, priority=7)
    assert [event async for event in gate.run(principal, gate.catalogue.resolve(MODEL), REQUEST)] == pool.script
    assert pool.requests[-1].priority == 7


async def test_the_record_is_durable_before_the_last_event_is_seen() -> None:
    meter = ListMeter()
    meter.may_write.clear()
    gate = make_gate(ScriptedPool(*answer("a")), meter)
    events = gate.run(PRINCIPAL, gate.catalogue.resolve(MODEL), REQUEST)
    assert [type(await anext(events)) for _ in range(2)] == [Started, Delta]
    last = asyncio.ensure_future(anext(events))
    await meter.is_waiting.wait()
    await asyncio.sleep(0.01)
    assert not last.done()
    meter.may_write.set()
    assert isinstance(await last, Done)
    assert only(meter).status == "ok"
    await events.aclose()
    assert len(meter.records) == 1


async def test_without_a_record_there_is_no_last_event() -> None:
    meter = ListMeter(fails=True)
    gate = make_gate(ScriptedPool(*answer("a")), meter)
    events = gate.run(PRINCIPAL, gate.catalogue.resolve(MODEL), REQUEST)
    assert [type(await anext(events)) for _ in range(2)] == [Started, Delta]
    with pytest.raises(MeteringUnavailable, match="the disk is full"):
        await anext(events)


async def test_a_closed_call_stops_the_engine_and_is_recorded_with_what_it_used() -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("a", "b", "c"))
    gate = make_gate(pool, meter)
    async with aclosing(gate.run(PRINCIPAL, gate.catalogue.resolve(MODEL), REQUEST)) as events:
        for _ in range(3):
            await anext(events)
    assert pool.num_cancelled == 1
    assert (only(meter).status, only(meter).output_tokens, only(meter).error_code) == ("cancelled", 2, None)


async def test_a_call_that_is_cancelled_before_its_first_text_is_recorded_with_its_prompt() -> None:
    meter, pool = ListMeter(), ScriptedPool(Started(0, 15), asyncio.Event(), usage_at_cancel=Usage(15, 0, 0, 900))
    task = asyncio.create_task(run(make_gate(pool, meter)))
    await pool.is_called.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (only(meter).status, only(meter).input_tokens, only(meter).compute_us) == ("cancelled", 15, 900)


async def test_a_cancelled_task_is_recorded_even_if_it_is_cancelled_again() -> None:
    meter, pool = ListMeter(), ScriptedPool(*answer("a")[:2], asyncio.Event())
    meter.may_write.clear()
    gate = make_gate(pool, meter)
    task = asyncio.create_task(run(gate))
    await pool.is_called.wait()
    task.cancel()
    await meter.is_waiting.wait()
    task.cancel()  # while it waits for the ledger
    with suppress(asyncio.CancelledError):
        await task
    assert (meter.records, pool.num_cancelled) == ([], 1)
    meter.may_write.set()
    await gate.close()
    assert (only(meter).status, only(meter).output_tokens) == ("cancelled", 1)


async def test_cancelled_while_the_last_record_is_written_counts_as_complete() -> None:
    meter = ListMeter()
    meter.may_write.clear()
    gate = make_gate(ScriptedPool(*answer("a")), meter)
    task = asyncio.create_task(run(gate))
    await meter.is_waiting.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    meter.may_write.set()
    await gate.close()
    assert only(meter).status == "ok"


async def test_failed_calls_are_recorded_with_their_code() -> None:
    for script, error, tokens in (
        ([OutOfCapacity("full")], OutOfCapacity, 0),
        ([*answer("a", "b")[:3], EngineLost("died")], EngineLost, 2),
        (answer("a")[:2], EngineLost, 1),  # ended without Done
    ):
        meter = ListMeter()
        with pytest.raises(error):
            await run(make_gate(ScriptedPool(*script), meter))
        record = only(meter)
        assert (record.status, record.error_code, record.output_tokens) == ("error", error.code, tokens)


async def test_a_bug_in_the_pool_is_recorded_as_an_internal_error() -> None:
    meter = ListMeter()
    with pytest.raises(KeyError):
        await run(make_gate(ScriptedPool(*answer("a")[:2], KeyError("bug")), meter))
    assert (only(meter).status, only(meter).error_code) == ("error", 1000)


async def test_a_failed_call_keeps_its_own_error_when_it_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OutOfCapacity):
        await run(make_gate(ScriptedPool(OutOfCapacity("full")), ListMeter(fails=True)))
    assert "usage record lost" in caplog.text
    assert '"request_id":"r-1"' in caplog.text


async def test_a_call_that_the_engine_cancelled_is_not_ok() -> None:
    meter = ListMeter()
    await run(make_gate(ScriptedPool(*answer("a", finish_reason="cancelled")), meter))
    assert only(meter).status == "cancelled"


@given(st.integers(0, 5), st.integers(0, 6), st.booleans())
def test_whenever_a_reader_stops_there_is_one_record(num_texts: int, num_read: int, fails: bool) -> None:
    async def scenario() -> None:
        script = [*answer(*"abcde"[:num_texts])]
        if fails:
            script[-1:] = [EngineLost("died")]  # type: ignore[list-item]
        meter = ListMeter()
        gate = make_gate(ScriptedPool(*script), meter)
        with suppress(EngineLost):
            async with aclosing(gate.run(PRINCIPAL, gate.catalogue.resolve(MODEL), REQUEST)) as events:
                for _ in range(num_read):
                    await anext(events, None)
        assert len(meter.records) == (num_read > 0)

    asyncio.run(scenario())


async def test_closing_waits_for_calls_that_are_about_to_end() -> None:
    meter, engine_dies = ListMeter(), asyncio.Event()
    gate = make_gate(ScriptedPool(*answer("a")[:2], engine_dies, EngineLost("closed")), meter)
    task = asyncio.create_task(run(gate))
    await asyncio.sleep(0)
    engine_dies.set()
    await gate.close()
    assert only(meter).status == "error"
    await asyncio.gather(task, return_exceptions=True)
