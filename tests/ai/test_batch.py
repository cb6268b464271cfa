import asyncio
import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from batches import PROMPT, Clock, content, created, done, ended, principal, running, submit, until
from doubles import MODEL, ListMeter, ScriptedPool, answer, catalogue, manifest

from edge.ai import batch, batch_calls, batch_disk, batch_native, batch_openai, batch_rows
from edge.ai.batch_calls import CALLS, problem_of, usage_sum
from edge.ai.catalogue import TEXT_EMBEDDINGS, Catalogue
from edge.ai.gate import Gate
from edge.billing.bill import call_costs
from edge.billing.ledger import Ledger, latest_records
from edge.billing.prices import load_prices
from edge.errors import DiskFull, EngineLost, InvalidInput, OutOfCapacity, RequestTooLarge, UnknownBatch, UnknownModel
from edge.frames import Usage

OK = answer("1", "2")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.02)
    monkeypatch.setattr(batch, "PAUSES_S", (0.01,))


def line(custom_id: str, **changes: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": CHAT, **changes}
    return json.dumps(request).encode() + b"\n"


# -- native ------------------------------------------------------------------------------------------------


async def test_requests_are_answered_in_their_order_with_references_and_one_usage(tmp_path: Path) -> None:
    pool, meter = ScriptedPool(*OK), ListMeter()
    async with running(tmp_path, pool, meter) as batches:
        id = await submit(batches, {**PROMPT, "external_reference": "a"}, PROMPT, {**PROMPT, "external_reference": "a"})
        answered = await done(batches, id)
    assert answered.keys() == {"responses", "usage"}
    assert [response["id"] for response in answered["responses"]] == [0, 1, 2]
    assert [response.get("external_reference") for response in answered["responses"]] == ["a", None, "a"]
    assert all(response["success"] for response in answered["responses"])
    assert answered["responses"][1]["result"]["response"] == "12"
    usage = answered["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (45, 6, 51)
    assert usage["neurons"] == pytest.approx(3 * 0.073359, abs=1e-9)
    assert {record.trigger for record in meter.records} == {"batch"}
    assert len({record.id for record in meter.records}) == 3
    assert {request.priority for request in pool.requests} == {-100}


async def test_everything_that_is_wrong_is_said_with_its_index_and_nothing_is_stored(tmp_path: Path) -> None:
    async with running(tmp_path) as batches:
        with pytest.raises(InvalidInput) as caught:
            await submit(batches, PROMPT, {"prompt": 5}, {**PROMPT, "stream": True}, {"requests": []})
        message = caught.value.message
        assert "$.requests[1].prompt is 5, must be" in message
        assert "$.requests[2].stream is true" in message
        assert "$.requests[3] is itself a batch" in message
        assert "requests[0]" not in message
        with pytest.raises(UnknownModel):
            await batches.answer(principal(), "none", {"requests": [PROMPT]})
        for wrong in ([], {}, [PROMPT] * 10_001, "x"):
            with pytest.raises(InvalidInput, match="list of 1 to 10000"):
                await batches.answer(principal(), MODEL, {"requests": wrong})
        with pytest.raises(InvalidInput, match=r"\$\.requests\[0\]\.external_reference"):
            await submit(batches, {**PROMPT, "external_reference": 5})
        with pytest.raises(RequestTooLarge, match="10485760 bytes"):
            await submit(batches, *[{"prompt": "x" * 1_100_000}] * 10)
        assert await batches.store.count("dev") == 0


async def test_a_single_call_can_be_queued_and_is_a_batch_of_one(tmp_path: Path) -> None:
    async with running(tmp_path) as batches:
        queued = await batches.answer(principal(), MODEL, PROMPT)
        (response,) = (await done(batches, queued["request_id"]))["responses"]
        assert (response["id"], response["result"]["response"]) == (0, "12")
        with pytest.raises(InvalidInput, match=r"\$\.prompt is 5"):
            await batches.answer(principal(), MODEL, {"prompt": 5})


@pytest.mark.parametrize("is_native", [True, False])
async def test_others_have_their_turn_while_many_requests_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    num_turns, turns = 0, []

    async def checked(*arguments: Any) -> Any:
        turns.append(num_turns)
        return await problem_of(*arguments)

    monkeypatch.setattr(batch_calls, "SLICE_S", 0)
    for form in (batch_native, batch_openai):
        monkeypatch.setattr(form, "problem_of", checked)
    async with running(tmp_path) as batches:
        if is_native:
            making = asyncio.create_task(submit(batches, *[PROMPT] * 100))
        else:
            making = asyncio.create_task(created(batches, b"".join(line(str(i)) for i in range(100))))
        while len(turns) < 100:
            num_turns += 1
            await asyncio.sleep(0)
        await making
    assert len(set(turns)) > 50


async def test_the_answers_of_a_batch_are_put_together_on_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, decode = set(), batch_native.decoded

    def noted(body: bytes) -> Any:
        threads.add(threading.current_thread())
        return decode(body)

    monkeypatch.setattr(batch_native, "decoded", noted)
    async with running(tmp_path) as batches:
        await done(batches, await submit(batches, PROMPT))
    assert threads
    assert threading.main_thread() not in threads


async def test_a_poll_before_the_end_tells_how_far_it_is(tmp_path: Path) -> None:
    go = asyncio.Event()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool, concurrency=1) as batches:
        id = await submit(batches, PROMPT, PROMPT)
        await until(lambda: pool.requests)
        polled = await batches.answer(principal(), MODEL, {"request_id": id})
        assert (polled["status"], polled["request_id"], polled["model"]) == ("running", id, MODEL)
        assert polled["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
        go.set()
        await done(batches, id)


async def test_a_request_that_fails_fails_alone(tmp_path: Path) -> None:
    meter = ListMeter()
    pool = ScriptedPool(scripts=[OK, [InvalidInput("no such adapter", param="lora")], [RuntimeError("a bug")]])
    async with running(tmp_path, pool, meter, concurrency=1) as batches:
        good, bad, ugly = (await done(batches, await submit(batches, PROMPT, PROMPT, PROMPT)))["responses"]
    assert good["success"]
    assert (bad["success"], bad["result"], bad["error"]["code"]) == (False, None, 5006)
    assert "no such adapter" in bad["error"]["message"]
    assert (ugly["success"], ugly["error"]["code"]) == (False, 1000)
    assert "a bug" not in ugly["error"]["message"]


async def test_what_the_node_cannot_do_now_is_done_later_and_billed_once(tmp_path: Path) -> None:
    meter = ListMeter()
    pool = ScriptedPool(scripts=[[OutOfCapacity("full")], [EngineLost("died")], [OutOfCapacity("full")], OK])
    async with running(tmp_path, pool, meter) as batches:
        (response,) = (await done(batches, await submit(batches, PROMPT)))["responses"]
    assert response["success"]
    assert [record.status for record in meter.records] == ["error", "error", "error", "ok"]
    assert len({record.id for record in meter.records}) == 4


async def test_a_request_that_ends_engines_is_given_up(tmp_path: Path) -> None:
    pool = ScriptedPool(EngineLost("died"))
    async with running(tmp_path, pool) as batches:
        (response,) = (await done(batches, await submit(batches, PROMPT)))["responses"]
    assert (response["success"], response["error"]["code"]) == (False, 3043)
    assert len(pool.requests) == batch.MAX_ATTEMPTS


async def test_a_call_whose_record_may_be_written_is_made_again_under_the_same_id(tmp_path: Path) -> None:
    class Unsure(ListMeter):
        async def record(self, record: Any) -> None:
            self.records.append(record)
            if len(self.records) == 1:
                await ListMeter(fails=True).record(record)

    meter = Unsure()
    async with running(tmp_path, ScriptedPool(*OK), meter) as batches:
        (response,) = (await done(batches, await submit(batches, PROMPT)))["responses"]
    assert response["success"]
    assert len(meter.records) == 2
    assert len({record.id for record in meter.records}) == 1


@pytest.mark.parametrize(
    ("changes", "endpoint"),
    [
        ({"model": MODEL, "prompt": ["x", "y"]}, "/v1/completions"),
        ({**CHAT, "n": 2}, "/v1/chat/completions"),
    ],
)
async def test_of_a_request_that_fails_in_part_nothing_is_charged_twice(
    tmp_path: Path, changes: dict[str, Any], endpoint: str
) -> None:
    meter = ListMeter()
    lost, full = [EngineLost("died")], [OutOfCapacity("full")]
    pool = ScriptedPool(scripts=[OK, lost, OK, full, OK, OK])
    async with running(tmp_path, pool, meter, concurrency=1) as batches:
        lines = line("a", url=endpoint, body=changes)
        over = await ended(batches, await created(batches, lines, endpoint=endpoint))
        assert over["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    charged = {record.id for record in meter.records if record.status != "error"}
    failed = [record.id for record in meter.records if record.status == "error"]
    first = min(charged, key=len)
    # What was charged is made again under its id, which the ledger takes once; what has failed is not.
    assert charged == {first, f"{first}.1-2"}
    assert sorted(failed) == [f"{first}.1", f"{first}.1-1"]


async def test_a_choice_that_was_cancelled_with_another_is_charged_once(tmp_path: Path) -> None:
    meter = ListMeter()
    hangs = [*OK[:1], Usage(input_tokens=1), asyncio.Event()]
    pool = ScriptedPool(scripts=[OK, hangs, [EngineLost("died")], OK, OK, OK])
    async with running(tmp_path, pool, meter, concurrency=1) as batches:
        await ended(batches, await created(batches, line("a", body={**CHAT, "n": 3})))
    by_id: dict[str, set[str]] = {}
    for record in meter.records:
        by_id.setdefault(record.id, set()).add(record.status)
    first = min(by_id, key=len)
    assert by_id == {
        first: {"ok"},
        f"{first}.1": {"cancelled", "ok"},
        f"{first}.2": {"error"},
        f"{first}.2-1": {"ok"},
    }


async def test_choices_have_records_of_their_own(tmp_path: Path) -> None:
    meter = ListMeter()
    async with running(tmp_path, ScriptedPool(*OK), meter) as batches:
        await ended(batches, await created(batches, line("a", body={**CHAT, "n": 3})))
    ids = sorted(record.id for record in meter.records)
    assert [id.removeprefix(ids[0]) for id in ids] == ["", ".1", ".2"]


async def test_a_batch_of_one_form_is_none_of_the_other(tmp_path: Path) -> None:
    async with running(tmp_path) as batches:
        id = await submit(batches, PROMPT)
        made = await created(batches, line("a"))
        with pytest.raises(UnknownBatch):
            await batches.answer(principal(), MODEL, {"request_id": made["id"]})
        for batch, is_native in ((id, False), (made["id"], True)):
            with pytest.raises(UnknownBatch):
                await batches.store.get("dev", batch, is_native=is_native)
            with pytest.raises(UnknownBatch):
                await batches.store.cancel("dev", batch, batches.now, is_native=is_native)
        await done(batches, id)
        assert (await ended(batches, made))["status"] == "completed"


async def test_nothing_of_a_batch_is_anybody_elses(tmp_path: Path) -> None:
    async with running(tmp_path) as batches:
        id = await submit(batches, PROMPT)
        for request_id in (id, "none", "x" * 10_000):
            with pytest.raises(UnknownBatch):
                await batches.answer(principal("other"), MODEL, {"request_id": request_id})
        with pytest.raises(UnknownBatch):
            await batches.store.cancel("other", id, batches.now, is_native=True)
        assert await batches.store.page("other", is_native=True, limit=10) == []
        with pytest.raises(InvalidInput, match="request_id must be the string"):
            await batches.answer(principal(), MODEL, {"request_id": 5})


# -- when it runs ------------------------------------------------------------------------------------------


async def test_accounts_take_turns(tmp_path: Path) -> None:
    go = asyncio.Event()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool, concurrency=1) as batches:
        first = await submit(batches, *[PROMPT] * 4, account="a")
        await until(lambda: pool.requests)
        second = await submit(batches, *[PROMPT] * 2, account="b")
        go.set()
        await done(batches, first, "a")
        await done(batches, second, "b")
    assert [request.account for request in pool.requests] == ["a", "b", "a", "b", "a", "a"]


async def test_beside_other_calls_only_one_request_runs(tmp_path: Path) -> None:
    go = asyncio.Event()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool, concurrency=4) as batches:
        batches.gate.num_interactive = 1
        id = await submit(batches, *[PROMPT] * 6)
        await until(lambda: pool.requests)
        for _ in range(3):  # it looks again, and finds no room
            batches.wake()
            await batches.store.finished()
        assert len(pool.requests) == 1
        batches.gate.num_interactive = 0
        await until(lambda: len(pool.requests) == 4)
        go.set()
        await done(batches, id)


async def test_the_gate_counts_those_that_somebody_waits_for(tmp_path: Path) -> None:
    go = asyncio.Event()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool) as batches:
        id = await submit(batches, PROMPT)
        await until(lambda: pool.requests)
        assert batches.gate.num_interactive == 0
        call = asyncio.create_task(CALLS["/v1/chat/completions"](batches.gate, principal(), "", CHAT))
        await until(lambda: len(pool.requests) == 2)
        assert batches.gate.num_interactive == 1
        go.set()
        await call
        assert batches.gate.num_interactive == 0
        await done(batches, id)


async def test_cancelling_finishes_what_has_begun(tmp_path: Path) -> None:
    go, meter = asyncio.Event(), ListMeter()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool, meter, concurrency=1) as batches:
        id = await submit(batches, PROMPT, PROMPT, PROMPT)
        await until(lambda: pool.requests)
        assert (await batches.store.cancel("dev", id, batches.now, is_native=True)).status == "cancelling"
        go.set()
        answered = await done(batches, id)
        assert answered["status"] == "cancelled"
        assert [response["success"] for response in answered["responses"]] == [True, False, False]
        assert "cancelled before" in answered["responses"][1]["error"]["message"]
        assert (await batches.store.cancel("dev", id, batches.now, is_native=True)).status == "cancelled"
    assert (len(pool.requests), len(meter.records)) == (1, 1)


async def test_batches_and_files_are_removed_after_their_time(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, retention_days=7, clock=clock) as batches:
        id = await submit(batches, PROMPT)
        await done(batches, id)
        made = await created(batches, line("a"))
        over = await ended(batches, made)
        clock.now += 6 * 86_400
        await done(batches, id)
        clock.now += 2 * 86_400

        async def is_gone() -> bool:
            files = await batches.store.files.page("dev", purpose=None, after=None, limit=10)
            return not files and not await batches.store.page("dev", is_native=True, limit=1)

        await until(is_gone)
        with pytest.raises(UnknownBatch, match="removed"):
            await batches.answer(principal(), MODEL, {"request_id": id})
        assert not batches.store.files.path(await _file(over["output_file_id"])).exists()


async def _file(id: str) -> Any:
    return batch_rows.StoredFile(id=id, account="", name="", purpose="", size_bytes=0, created_at=0)


async def test_a_second_node_on_the_same_folder_leaves_the_running_to_the_first(tmp_path: Path) -> None:
    idle = ScriptedPool(RuntimeError("not mine to run"))
    async with running(tmp_path) as first:
        assert await first.store.become_runner()
        async with running(tmp_path, idle) as second:
            assert not await second.store.become_runner()
            answered = await done(second, await submit(second, PROMPT))
    assert answered["responses"][0]["success"]
    assert idle.requests == []


@pytest.mark.parametrize("error", [RuntimeError("a bug"), PermissionError("not yours"), DiskFull("bad sector")])
async def test_a_batch_that_cannot_be_validated_keeps_nobody_elses_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    validate, bad = batch_openai.validate, ""

    async def fails(batches: Any, batch: Any) -> None:
        if batch.id == bad:
            raise error
        await validate(batches, batch)

    monkeypatch.setattr(batch_openai, "validate", fails)
    async with running(tmp_path) as batches:
        await batches.stop()
        made = await created(batches, line("a"))
        bad = made["id"]
    async with running(tmp_path) as batches:
        good = await created(batches, line("b"), account="other")
        native = await submit(batches, PROMPT, account="third")
        assert (await ended(batches, good, "other"))["status"] == "completed"
        assert (await done(batches, native, "third"))["responses"][0]["success"]
        if isinstance(error, DiskFull):  # it has its turn again
            assert (await batches.store.get("dev", bad, is_native=False))[0].status == "validating"
            bad = ""
            monkeypatch.setattr(batches, "_settle_at", {})
            assert (await ended(batches, made))["status"] == "completed"
        else:
            over = await ended(batches, made)
            assert over["status"] == "failed"
            assert "internal error" in over["errors"]["data"][0]["message"]


async def test_a_batch_whose_files_cannot_be_written_keeps_nobody_elses_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files, bad = batch_openai.write_files, ""

    async def fails(batches: Any, batch: str) -> Any:
        if batch == bad:
            raise RuntimeError("a bug")
        return await write_files(batches, batch)

    monkeypatch.setattr(batch_openai, "write_files", fails)
    async with running(tmp_path) as batches:
        await batches.stop()
        made = await created(batches, line("a"))
        bad = made["id"]
    async with running(tmp_path) as batches:
        good = await created(batches, line("b"), account="other")
        assert (await ended(batches, good, "other"))["status"] == "completed"
        assert (await ended(batches, made))["status"] == "failed"


# -- what is kept ------------------------------------------------------------------------------------------


async def test_a_full_disk_takes_nothing_in_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool) as batches:
        id = await submit(batches, PROMPT)
        monkeypatch.setattr(batch_disk, "MIN_FREE_BYTES", 1 << 62)
        with pytest.raises(DiskFull, match="--state-dir"):
            await submit(batches, PROMPT)
        with pytest.raises(DiskFull):
            await created(batches, line("a"))
        go.set()
        assert (await done(batches, id))["responses"][0]["success"]


async def test_what_is_kept_is_for_its_owner_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as batches:
        await ended(batches, await created(batches, line("a")))
        folder = tmp_path / "batches"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        kept = [path for path in folder.iterdir() if path.name.startswith("index.sqlite")]
        assert kept
        assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


async def test_an_answer_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, meter = ScriptedPool(*OK), ListMeter()
    async with running(tmp_path, pool, meter) as batches:
        finish, failures = batches.store.finish, 2

        async def fails(*args: Any) -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise DiskFull("full")
            await finish(*args)

        monkeypatch.setattr(batches.store, "finish", fails)
        assert (await done(batches, await submit(batches, PROMPT)))["responses"][0]["success"]
    assert (len(pool.requests), len(meter.records)) == (1, 1)


async def test_an_account_that_holds_too_much_stores_no_more_and_starts_no_more(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with running(tmp_path, ScriptedPool(go, *answer("x" * 5000)), max_bytes=4000, concurrency=1) as batches:
        id = await submit(batches, PROMPT, PROMPT)
        with pytest.raises(RequestTooLarge, match="max_mb_per_account"):
            await submit(batches, *[PROMPT] * 10)
        with pytest.raises(RequestTooLarge):
            await created(batches, b"x" * 4000)
        go.set()
        first, second = (await done(batches, id))["responses"]
        assert first["success"]
        assert (second["success"], second["error"]["code"]) == (False, 3006)
        await submit(batches, PROMPT, account="other")


async def test_what_was_under_way_when_a_node_died_is_made_again_under_the_same_id(tmp_path: Path) -> None:
    hangs = ScriptedPool(asyncio.Event())
    async with running(tmp_path, hangs) as batches:
        id = await submit(batches, PROMPT, PROMPT)
        await until(lambda: len(hangs.requests) == 2)
        before = {item.usage_id for item in batches._running.values()}
        for task in batches._running:
            task.cancel()  # no chance to put anything back
    meter = ListMeter()
    async with running(tmp_path, ScriptedPool(*OK), meter) as batches:
        answered = await done(batches, id)
    assert [response["success"] for response in answered["responses"]] == [True, True]
    assert {record.id for record in meter.records} == before


async def test_a_request_during_which_the_node_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    for _ in range(batch.MAX_ATTEMPTS):
        hangs = ScriptedPool(asyncio.Event())
        async with running(tmp_path, hangs) as batches:
            if not await batches.store.count("dev"):
                id = await submit(batches, PROMPT)
            await until(lambda pool=hangs: pool.requests)
            for task in batches._running:
                task.cancel()
    pool = ScriptedPool(*OK)
    async with running(tmp_path, pool) as batches:
        (response,) = (await done(batches, id))["responses"]
    assert "the node died 3 times" in response["error"]["message"]
    assert pool.requests == []


async def test_what_ends_with_the_node_counts_as_no_attempt(tmp_path: Path) -> None:
    for _ in range(batch.MAX_ATTEMPTS + 1):
        stop = asyncio.Event()
        pool, meter = ScriptedPool(stop, EngineLost("the node is shutting down")), ListMeter()
        async with running(tmp_path, pool, meter) as batches:
            if not await batches.store.count("dev"):
                id = await submit(batches, PROMPT)
            await until(lambda pool=pool: pool.requests)
            await batches.stop()
            stop.set()
        assert [record.status for record in meter.records] == ["error"]
    async with running(tmp_path) as batches:
        assert (await done(batches, id))["responses"][0]["success"]


# -- money -------------------------------------------------------------------------------------------------


async def test_the_discount_is_in_the_answer_as_it_is_on_the_bill(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(
        'version = "v"\nusd_per_1000_neurons = "0.011"\nbatch_discount = "1/2"\n'
        f'[neurons_per_million_tokens]\n"{MODEL}" = {{ input = 1000, output = 3000, cached_input = 500 }}\n'
    )
    book = load_prices(file)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_price_book(book)
    listed = catalogue()
    models = type(listed)([listed.resolve(MODEL).manifest], {}, book)
    gate = Gate(ScriptedPool(*OK), models, ledger)
    async with running(tmp_path, gate=gate) as batches:
        (response,) = (await done(batches, await submit(batches, PROMPT)))["responses"]
    await ledger.close()
    (cost,) = call_costs(tmp_path / "ledger.sqlite", latest_records(tmp_path / "ledger.sqlite", limit=1))
    assert cost is not None
    assert cost.micro_neurons == (10 * 1000 + 5 * 500 + 2 * 3000) // 2
    assert response["result"]["usage"]["neurons"] == cost.micro_neurons / 10**6


def test_usages_are_added_up_at_every_depth() -> None:
    usage = {"a": 1, "neurons": 0.1, "details": {"b": 2, "c": None}, "ok": True}
    assert usage_sum([usage, {"a": 5}, usage, None]) == {"a": 7, "neurons": 0.2, "details": {"b": 4}}


# -- OpenAI's form -----------------------------------------------------------------------------------------


async def test_a_file_of_requests_becomes_a_file_of_answers(tmp_path: Path) -> None:
    pool = ScriptedPool(scripts=[OK, [InvalidInput("too odd")], OK])
    async with running(tmp_path, pool, concurrency=1) as batches:
        made = await created(batches, line("a") + line("b") + b"\n" + line("c")[:-1], metadata={"k": "v"})
        assert (made["object"], made["status"], made["metadata"]) == ("batch", "validating", {"k": "v"})
        assert made["expires_at"] - made["created_at"] == 86_400
        over = await ended(batches, made)
        assert over["status"] == "completed"
        assert over["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert all(over[f"{status}_at"] for status in ("in_progress", "finalizing", "completed"))
        output = [json.loads(each) for each in (await content(batches, over["output_file_id"])).splitlines()]
        errors = [json.loads(each) for each in (await content(batches, over["error_file_id"])).splitlines()]
    assert [each["custom_id"] for each in output] == ["a", "c"]
    first = output[0]
    assert (first["error"], first["response"]["status_code"]) == (None, 200)
    assert first["id"].startswith("batch_req_")
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "12"
    assert first["response"]["body"]["id"] == f"chatcmpl-{first['response']['request_id']}"
    (failed,) = errors
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("b", 400)
    assert "too odd" in failed["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        (b"", None, "the file is empty"),
        (b"\n\n", None, "the file is empty"),
        (line("a") + b"{", 2, "the line is no request"),
        (line("a") + b"\xff\n", 2, "the line is no request"),
        (line("a") + line("a"), 2, "is there twice"),
        (line(""), 1, "custom_id must have 1 to"),
        (line("a", method="GET"), 1, "must be POST and /v1/chat/completions"),
        (line("a", url="/v1/embeddings"), 1, "must be POST and /v1/chat/completions"),
        (line("a", body={**CHAT, "temperature": "hot"}), 1, "$.body.temperature is"),
        (line("a", body={**CHAT, "model": "none"}), 1, "no model 'none'"),
        (line("a", body={**CHAT, "stream": True}), 1, "$.body.stream is true"),
        (line("a", body=[]), 1, "the line is no request"),
        (b"[" * 100_000, 1, "the line is no request"),
    ],
)
async def test_a_wrong_file_fails_the_batch_with_its_lines(
    tmp_path: Path, lines: bytes, number: int | None, message: str
) -> None:
    pool = ScriptedPool(*OK)
    async with running(tmp_path, pool) as batches:
        over = await ended(batches, await created(batches, lines))
    assert (over["status"], over["output_file_id"], over["request_counts"]["total"]) == ("failed", None, 0)
    error = over["errors"]["data"][0]
    assert (error["line"], over["errors"]["object"]) == (number, "list")
    assert message in error["message"]
    assert pool.requests == []


async def test_many_wrong_lines_are_not_all_told(tmp_path: Path) -> None:
    async with running(tmp_path) as batches:
        over = await ended(batches, await created(batches, b"x\n" * 1000))
    assert len(over["errors"]["data"]) == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "/v1/images"}, r'\$\.endpoint is "/v1/images", must be "/v1/chat/completions" or '),
        ({"completion_window": "1h"}, r'\$\.completion_window is "1h", must be "24h"'),
        ({"metadata": {"k": 1}}, r"\$\.metadata must be"),
        ({"input_file_id": None}, r"\$\.input_file_id is missing"),
        ({"input_file_id": "file-none"}, "no file 'file-none'"),
        ({"input_file_id": 5, "endpoint": None, "completion_window": None}, "input_file_id.*endpoint.*window"),
    ],
)
async def test_a_wrong_body_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    async with running(tmp_path) as batches:
        with pytest.raises(Exception, match=message):
            await created(batches, line("a"), **changes)


async def test_what_does_not_begin_in_time_is_given_up(tmp_path: Path) -> None:
    go, clock = asyncio.Event(), Clock()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool, concurrency=1, clock=clock, retention_days=30) as batches:
        made = await created(batches, line("a") + line("b"))
        await until(lambda: pool.requests)
        clock.now += batch_openai.WINDOW_S
        go.set()
        over = await ended(batches, made)
        assert (over["status"], over["expired_at"]) == ("expired", int(clock.now))
        (output,) = (await content(batches, over["output_file_id"])).splitlines()
        (error,) = (await content(batches, over["error_file_id"])).splitlines()
    assert json.loads(output)["custom_id"] == "a"
    assert json.loads(error)["response"] is None
    assert (json.loads(error)["custom_id"], json.loads(error)["error"]["code"]) == ("b", "batch_expired")


async def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    go = asyncio.Event()
    pool = ScriptedPool(go, *OK)
    async with running(tmp_path, pool, concurrency=1) as batches:
        made = await created(batches, line("a") + line("b"))
        await until(lambda: pool.requests)
        await batches.store.cancel("dev", made["id"], batches.now, is_native=False)
        go.set()
        over = await ended(batches, made)
        assert over["status"] == "cancelled"
        assert over["cancelling_at"] <= over["cancelled_at"]
        (error,) = (await content(batches, over["error_file_id"])).splitlines()
    assert json.loads(error)["error"]["code"] == "batch_cancelled"


async def test_a_batch_that_was_cut_short_at_any_point_is_taken_up_again(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedPool(asyncio.Event())) as batches:
        await batches.stop()
        made = await created(batches, line("a"))  # nobody validates it
        found, _ = await batches.store.get("dev", made["id"], is_native=False)
        await batches.store.add_requests(found, 0, [batch_rows.NewRequest(b"{}", "left from before")])
    async with running(tmp_path) as batches:
        over = await ended(batches, made)
        assert over["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        # Died between the files and the last status: both are written again, under the same ids.
        await batches.stop()
        done_once = await content(batches, over["output_file_id"])

        def set_back(database: Any) -> None:
            database.execute("UPDATE batches SET status = 'finalizing', ended_at = NULL, output_file = NULL")

        await batches.store._disk.write(set_back)
    async with running(tmp_path) as batches:
        again = await ended(batches, made)
        assert again["output_file_id"] == over["output_file_id"]
        assert await content(batches, again["output_file_id"]) == done_once
        assert len(await batches.store.files.page("dev", purpose=None, after=None, limit=10)) == 2


async def test_checking_a_request_makes_no_call() -> None:
    pool, meter = ScriptedPool(*OK), ListMeter()
    models = Catalogue([manifest(), manifest("vectors", task=TEXT_EMBEDDINGS)], {}, load_prices())
    gate = Gate(pool, models, meter)
    bodies: dict[str, tuple[str, Any]] = {
        "ai/run": (MODEL, PROMPT),
        "/v1/chat/completions": ("", {**CHAT, "n": 2}),
        "/v1/completions": ("", {"model": MODEL, "prompt": ["a", "b"]}),
        "/v1/responses": ("", {"model": MODEL, "input": "hi"}),
        "/v1/embeddings": ("", {"model": "vectors", "input": "hi"}),
    }
    for endpoint in CALLS:
        model, body = bodies[endpoint]
        assert await problem_of(gate, principal(), endpoint, model, body) is None
        assert await problem_of(gate, principal(), endpoint, model, {"model": 5}) is not None
        assert await problem_of(gate, principal(), endpoint, model, []) is not None
    assert await problem_of(gate, principal(), "ai/run", "vectors", {"text": ["a"]}) is None
    assert (pool.requests, meter.records) == ([], [])
