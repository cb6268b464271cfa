"""Text embeddings and ranking in both dialects, with a scripted pool."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import threading
from typing import Any

import msgspec
import pytest
from doubles import (
    BGE_M3,
    CLASSIFIER,
    ENCODER,
    MODEL,
    PRINCIPAL,
    ListMeter,
    ScriptedPool,
    encoded,
    encoders,
    make_gate,
)

from edge.ai import embeddings
from edge.ai.native import run_binding
from edge.errors import EngineLost, InvalidInput, InvalidJson, OutOfCapacity, UnknownModel
from edge.frames import Encode, Usage

TWO = encoded((0.6, 0.8), (1.0, 0.0))
USAGE = {"prompt_tokens": 8, "total_tokens": 8, "neurons": 0.014728, "cost": 1.62008e-7}


async def native(pool: ScriptedPool, inputs: Any, model: str = ENCODER, meter: ListMeter | None = None) -> Any:
    return await run_binding(make_gate(pool, meter, encoders()), PRINCIPAL, model, inputs, {})


async def openai(pool: ScriptedPool, **body: Any) -> dict[str, Any]:
    body = {"model": ENCODER, "input": ["a", "b"], **body}
    return await embeddings.openai(make_gate(pool, models=encoders()), PRINCIPAL, body)


async def test_native_vectors() -> None:
    pool = ScriptedPool(*TWO)
    result = await native(pool, {"text": ["a", "b"], "pooling": None})
    assert result.pop("usage") == pytest.approx(USAGE)
    assert result == {
        "shape": [2, 2],
        "data": [pytest.approx([0.6, 0.8]), pytest.approx([1.0, 0.0])],
        "pooling": "mean",
    }
    assert pool.requests == [Encode(0, ENCODER, ["a", "b"], None, True, None)]


async def test_a_busy_model_may_be_to_reject_the_call() -> None:
    pool = ScriptedPool(*TWO)
    await run_binding(make_gate(pool, models=encoders()), PRINCIPAL, ENCODER, {"text": "ab"}, {"rejectIfBusy": True})
    await openai(pool, options={"rejectIfBusy": True})
    await openai(pool, options={"rejectIfBusy": False})
    assert [request.reject_if_busy for request in pool.requests] == [True, True, False]
    with pytest.raises(InvalidInput, match="the option rejectIfBusy is 3"):
        await openai(pool, options={"rejectIfBusy": 3})


async def test_the_priority_of_the_caller_is_handed_on() -> None:
    pool = ScriptedPool(*TWO)
    principal = msgspec.structs.replace(PRINCIPAL, priority=-100)
    await run_binding(make_gate(pool, models=encoders()), principal, ENCODER, {"text": "ab"}, {})
    assert [request.priority for request in pool.requests] == [-100]


async def test_a_string_is_a_list_of_one_and_pooling_is_handed_on() -> None:
    pool = ScriptedPool(*encoded((0.6, 0.8), pooling="cls"))
    result = await native(pool, {"text": "a", "pooling": "cls"})
    assert (result["shape"], result["pooling"]) == ([1, 2], "cls")
    assert (pool.requests[0].texts, pool.requests[0].pooling) == (["a"], "cls")


@pytest.mark.parametrize(
    ("model", "inputs", "truncate", "limit"),
    [
        (ENCODER, {}, True, None),
        (ENCODER, {"truncate_inputs": False}, False, None),
        (BGE_M3, {}, False, 60_000),
        (BGE_M3, {"truncate_inputs": True}, True, 60_000),
    ],
)
async def test_long_texts_are_cut_or_refused_as_the_model_of_that_id_does(
    model: str, inputs: dict[str, Any], truncate: bool, limit: int | None
) -> None:
    pool = ScriptedPool(*encoded((0.6, 0.8)))
    await native(pool, {"text": "a", **inputs}, model)
    assert (pool.requests[0].truncate, pool.requests[0].max_total_tokens) == (truncate, limit)


async def test_contexts_are_ranked_by_the_query() -> None:
    pool = ScriptedPool(*encoded((1.0, 0.0), (0.0, 2.0), (3.0, 4.0), (2.0, 0.0), (0.0, 0.0)))
    contexts = [{"text": text} for text in "abcd"]
    result = await native(pool, {"query": "q", "contexts": contexts, "top_k": 3})
    assert pool.requests[0].texts == ["q", "a", "b", "c", "d"]
    assert [each["id"] for each in result["response"]] == [2, 1, 0]
    assert [each["score"] for each in result["response"]] == pytest.approx([1.0, 0.6, 0.0])


async def test_contexts_are_ranked_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, hypot = set(), math.hypot

    def noted(*numbers: float) -> float:
        threads.add(threading.current_thread())
        return hypot(*numbers)

    monkeypatch.setattr(math, "hypot", noted)
    pool = ScriptedPool(*encoded((1.0, 0.0), (0.0, 2.0)))
    await native(pool, {"query": "q", "contexts": [{"text": "a"}]})
    assert threads
    assert threading.main_thread() not in threads


async def test_contexts_alone_are_vectors() -> None:
    result = await native(ScriptedPool(*TWO), {"contexts": [{"text": "a"}, {"text": "b"}]}, BGE_M3)
    assert (result["shape"], result["pooling"]) == ([2, 2], "mean")
    assert result["response"][1] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"\$ needs either text or contexts: there is neither"),
        ({"texts": "a"}, "texts is not text"),
        ({"text": "a", "contexts": [{"text": "b"}]}, "both are given"),
        ({"query": "a", "text": "b"}, r"\$\.query is given, which needs contexts"),
        ({"text": []}, r"\$\.text is an empty list, must be a string or a list of 1 to 100 strings"),
        ({"text": ["a"] * 101}, r"is a list of 101, must be a string or a list of 1 to 100"),
        ({"text": ["a", ""]}, r"\$\.text\[1\] is \"\", must be a string"),
        (
            {"text": ["a", 3], "pooling": "max"},
            r"\$\.text\[1\] is 3.*\$\.pooling is \"max\", must be \"mean\" or \"cls\"",
        ),
        ({"text": "\ud800"}, r"\$\.text is"),
        ({"query": "q", "contexts": [{"txt": "a"}]}, r"\$\.contexts\[0\]\.text is missing"),
        ({"query": "q", "contexts": ["a"]}, r"\$\.contexts\[0\] is \"a\", must be an object"),
        ({"query": "q", "contexts": [{"text": "a"}], "top_k": 0}, r"\$\.top_k is 0"),
    ],
)
async def test_everything_that_is_wrong_is_said(inputs: dict[str, Any], message: str) -> None:
    pool = ScriptedPool(*TWO)
    with pytest.raises(InvalidInput, match=message):
        await native(pool, inputs)
    assert pool.requests == []


async def test_openai_list() -> None:
    result = await openai(ScriptedPool(*TWO), user="u", dimensions=None, encoding_format=None)
    assert result.pop("usage") == pytest.approx(USAGE)
    assert result == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": pytest.approx([0.6, 0.8])},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.0]},
        ],
        "model": ENCODER,
    }


async def test_base64_is_of_little_endian_float32() -> None:
    result = await openai(ScriptedPool(*TWO), encoding_format="base64")
    vectors = [struct.unpack("<2f", base64.b64decode(each["embedding"])) for each in result["data"]]
    assert vectors == [pytest.approx((0.6, 0.8)), (1.0, 0.0)]


async def test_fewer_dimensions_are_of_length_1_again() -> None:
    result = await openai(ScriptedPool(*encoded((0.6, 0.8), (0.0, 1.0))), dimensions=1)
    assert [each["embedding"] for each in result["data"]] == [[1.0], [0.0]]


async def test_more_dimensions_than_there_are_are_refused_before_anything_is_computed() -> None:
    pool = ScriptedPool(*TWO)
    with pytest.raises(InvalidInput, match="dimensions is 3, but the model's vectors have 2"):
        await openai(pool, dimensions=3)
    assert pool.requests == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": None}, r"\$\.input is missing"),
        ({"input": []}, "an empty list"),
        ({"input": ["a", ""]}, r"\$\.input\[1\] is \"\""),
        ({"input": [[1, 2], [3]]}, "is of token ids.*send texts"),
        ({"input": [1, 2]}, "is of token ids.*send texts"),
        ({"input": ["a"] * 2049}, "a list of 2049"),
        ({"encoding_format": "int8"}, r"\$\.encoding_format is \"int8\""),
        ({"dimensions": 0}, r"\$\.dimensions is 0"),
    ],
)
async def test_wrong_openai_bodies(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        await openai(ScriptedPool(*TWO), **body)


async def test_models_of_other_tasks_are_refused_by_name() -> None:
    with pytest.raises(UnknownModel, match=f"is for Text Generation.*use .*{ENCODER}"):
        await openai(ScriptedPool(), model=MODEL)
    with pytest.raises(InvalidJson):
        await native(ScriptedPool(), ["a"])


async def test_classification_gives_all_labels_in_the_order_of_the_model() -> None:
    pool = ScriptedPool(*encoded((0.25, 0.75), labels=("NEGATIVE", "POSITIVE")))
    result = await native(pool, {"text": "fine"}, CLASSIFIER)
    assert result == [{"label": "NEGATIVE", "score": 0.25}, {"label": "POSITIVE", "score": 0.75}]
    for inputs in ({}, {"text": ""}, {"text": ["fine"]}):
        with pytest.raises(InvalidInput, match=r"\$\.text"):
            await native(pool, inputs, CLASSIFIER)


async def test_calls_are_recorded_with_their_task_before_they_are_answered() -> None:
    meter = ListMeter()
    meter.may_write.clear()
    call = asyncio.create_task(native(ScriptedPool(*TWO), {"text": ["a", "b"]}, BGE_M3, meter))
    await meter.is_waiting.wait()
    await asyncio.sleep(0)
    assert not call.done()
    meter.may_write.set()
    await call
    (record,) = meter.records
    assert (record.task, record.model, record.served_by) == ("text-embeddings", BGE_M3, ENCODER)
    assert (record.status, record.input_tokens, record.output_tokens, record.compute_us) == ("ok", 8, 0, 50)


async def test_a_cancelled_call_is_recorded_with_what_it_has_used() -> None:
    meter, pool = ListMeter(), ScriptedPool(Usage(input_tokens=4), asyncio.Event(), usage_at_cancel=Usage(5))
    call = asyncio.create_task(native(pool, {"text": "a"}, meter=meter))
    await pool.is_called.wait()
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert pool.num_cancelled == 1
    assert [(each.status, each.input_tokens) for each in meter.records] == [("cancelled", 5)]


@pytest.mark.parametrize("error", [OutOfCapacity("full"), EngineLost("gone")])
async def test_a_failed_call_is_recorded_with_its_code(error: Exception) -> None:
    meter = ListMeter()
    with pytest.raises(type(error)):
        await native(ScriptedPool(Usage(input_tokens=4), error), {"text": "a"}, meter=meter)
    assert [(each.status, each.error_code, each.input_tokens) for each in meter.records] == [("error", error.code, 4)]
