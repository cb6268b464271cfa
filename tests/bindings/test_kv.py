from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.bindings import storage
from edge.bindings.kv import MAX_VALUE_BYTES, end_of_prefix
from workers.bindings import BindingError
from workers.bindings.kv import KvNamespace
from workers.streams import ReadableStream


async def test_each_type_of_value(open_kv: Any) -> None:
    kv = await open_kv()
    await kv.put("text", "héllo")
    assert await kv.get("text") == "héllo"
    assert await kv.get("text", "text") == "héllo"
    buffer = await kv.get("text", type="arrayBuffer")
    assert buffer.to_bytes() == "héllo".encode()
    stream = await kv.get("text", {"type": "stream"})
    assert b"".join([chunk async for chunk in stream]) == "héllo".encode()
    await kv.put("json", json.dumps({"a": [1, {"b": 2}]}))
    value = await kv.get("json", "json")
    assert value.a[1].b == 2
    assert value.to_py() == {"a": [1, {"b": 2}]}
    await kv.put("bytes", b"\x00\xff")
    assert bytes(await kv.get("bytes", "arrayBuffer")) == b"\x00\xff"
    assert await kv.get("missing") is None
    assert await kv.get("missing", "stream") is None


async def test_metadata_in_both_styles_of_options(open_kv: Any) -> None:
    kv = await open_kv()
    await kv.put("a", "1", metadata={"x": [1]})
    await kv.put("b", "2", {"metadata": "text"})
    await kv.put("c", "3")
    found = await kv.getWithMetadata("a")
    assert (found.value, found.metadata.x, found.cacheStatus) == ("1", [1], None)
    assert (await kv.getWithMetadata("b", "arrayBuffer")).metadata == "text"
    assert (await kv.getWithMetadata("c")).metadata is None
    missing = await kv.getWithMetadata("missing")
    assert (missing.value, missing.metadata) == (None, None)
    await kv.put("a", "1")
    assert (await kv.getWithMetadata("a")).metadata is None, "a new put replaces the metadata, too"


async def test_many_keys_at_once(open_kv: Any) -> None:
    kv = await open_kv()
    await kv.put("a", "[1]", metadata=7)
    assert await kv.get(["a", "b"]) == {"a": "[1]", "b": None}
    assert (await kv.get(["a"], "json")).a == [1]
    assert (await kv.getWithMetadata(["a", "b"]))["a"].metadata == 7
    with pytest.raises(BindingError, match="maximum of 100 keys"):
        await kv.get([f"k{number}" for number in range(101)])
    with pytest.raises(TypeError, match="text or json"):
        await kv.get(["a"], "stream")


async def test_long_values_are_streamed_both_ways(open_kv: Any) -> None:
    kv = await open_kv()
    data = bytes(range(256)) * 2000

    async def chunks() -> Any:
        for start in range(0, len(data), 100_000):
            yield data[start : start + 100_000]

    await kv.put("long", ReadableStream(chunks()), metadata={"n": 1})
    assert bytes(await kv.get("long", "arrayBuffer")) == data
    found = await kv.getWithMetadata("long", "stream")
    assert found.metadata == {"n": 1}
    assert b"".join([chunk async for chunk in found.value]) == data
    await kv.put("bytes", data)
    assert await kv.get("bytes") == data.decode(errors="replace")
    for number in range(60):
        await kv.put(f"many{number}", data)
    with pytest.raises(BindingError, match="over the limit"):
        await kv.get([f"many{number}" for number in range(60)])


async def test_a_stream_that_nobody_reads_lets_go_of_its_file(open_kv: Any) -> None:
    kv = await open_kv()
    await kv.put("long", b"x" * 1_000_000)
    unread, half_read = await kv.get("long", "stream"), await kv.get("long", "stream")
    await unread.aclose()
    assert await anext(half_read)
    await half_read.aclose()
    assert [each async for each in half_read] == []


async def test_an_upload_that_breaks_off_changes_nothing(open_kv: Any) -> None:
    kv = await open_kv()
    await kv.put("key", "before")

    async def broken() -> Any:
        yield b"x" * 200_000
        raise OSError("the client went away")

    with pytest.raises(OSError, match="went away"):
        await kv.put("key", broken())
    assert await kv.get("key") == "before"


async def test_expiry(open_kv: Any, clock: Any) -> None:
    kv = await open_kv()
    await kv.put("ttl", "1", expirationTtl=60)
    await kv.put("at", "2", {"expiration": clock.now_s + 100})
    await kv.put("stays", "3")
    keys = (await kv.list())["keys"]
    assert [(key.name, key.get("expiration")) for key in keys] == [
        ("at", clock.now_s + 100),
        ("stays", None),
        ("ttl", clock.now_s + 60),
    ]
    clock.now_s += 61
    assert await kv.get("ttl") is None
    assert await kv.get("at") == "2"
    assert [key.name for key in (await kv.list())["keys"]] == ["at", "stays"]
    await kv.put("ttl", "again")
    clock.now_s += 1000
    assert await kv.get(["ttl", "at", "stays"]) == {"ttl": "again", "at": None, "stays": "3"}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("", "v"), {}, "Key name cannot be empty"),
        ((".", "v"), {}, "not allowed as a key name"),
        (("k" * 513, "v"), {}, "UTF-8 encoded length of 513 exceeds key length limit of 512"),
        (("k", "v"), {"expirationTtl": 59}, "Invalid expiration_ttl of 59. Expiration TTL must be at least 60"),
        (("k", "v"), {"expiration": 1}, "Invalid expiration of 1"),
        (("k", "v"), {"metadata": "x" * 1023}, "Metadata length of 1025 exceeds limit of 1024"),
        (("k", "v"), {"expirationTtl": "soon"}, "Expected `float | null`, got `str`"),
        (("k", b"x" * (MAX_VALUE_BYTES + 1)), {}, "Value length exceeds limit of 26214400"),
    ],
)
async def test_limits(open_kv: Any, arguments: Any, options: Any, message: str) -> None:
    kv = await open_kv()
    with pytest.raises(BindingError, match=message):
        await kv.put(*arguments, **options)
    assert (await kv.list())["keys"] == []


async def test_what_is_just_within_the_limits(open_kv: Any) -> None:
    kv = await open_kv()
    await kv.put("k" * 512, b"x" * MAX_VALUE_BYTES, metadata="x" * 1022)
    assert len(await kv.get("k" * 512, "arrayBuffer")) == MAX_VALUE_BYTES


@pytest.mark.parametrize("value", [None, {"a": 1}, [1], 5, object()])
async def test_wrong_values_are_type_errors(open_kv: Any, value: Any) -> None:
    with pytest.raises(TypeError):
        await (await open_kv()).put("key", value)


async def test_list_by_pages(open_kv: Any) -> None:
    kv = await open_kv()
    for number in range(25):
        await kv.put(f"p:{number:02}", "v")
    await kv.put("q", "v")
    names, cursor, num_pages = [], None, 0
    while True:
        page = await kv.list(prefix="p:", limit=10, cursor=cursor)
        names += [key.name for key in page["keys"]]
        num_pages += 1
        if page.list_complete:
            break
        cursor = page.cursor
    assert (names, num_pages) == ([f"p:{number:02}" for number in range(25)], 3)
    assert "cursor" not in page
    with pytest.raises(BindingError, match="Invalid key_count_limit of 1001"):
        await kv.list({"limit": 1001})
    with pytest.raises(BindingError, match="Invalid cursor"):
        await kv.list(cursor="!")


async def test_accounts_and_namespaces_are_apart(open_kv: Any, tmp_path: Path) -> None:
    await (await open_kv("a")).put("key", "1")
    assert await (await open_kv("b")).get("key") is None
    assert await (await open_kv("a", "other")).get("key") is None
    assert await (await open_kv("A")).get("key") is None
    evil = await open_kv("../../outside\0", "../x")
    await evil.put("key", "2")
    assert await evil.get("key") == "2"
    assert {path.name for path in tmp_path.iterdir()} == {"kv"}
    assert len(list((tmp_path / "kv").iterdir())) == 3


async def test_unknown_methods_and_wrong_arguments_are_refused(open_kv: Any) -> None:
    calls = (await open_kv())._calls
    for method, args in [
        ("drop", []),
        ("get", []),
        ("get", [1]),
        ("get_many", [["a", 1]]),
        ("put", ["k", None, {}]),
        ("put", ["k", b"x" * 65_537, {}]),
    ]:
        with pytest.raises(BindingError) as refused:
            await calls.call(method, *args)
        assert refused.value.status == 400


async def test_a_removed_file_is_begun_anew(open_kv: Any, tmp_path: Path) -> None:
    kv = await open_kv()
    await kv.put("key", "1")
    for path in (tmp_path / "kv" / "dev").rglob("*.sqlite*"):
        path.unlink()
    assert await kv.get("key") is None
    await kv.put("key", "2")
    assert await (await open_kv(again=True)).get("key") == "2"


async def test_one_bad_write_does_not_spoil_those_it_shares_a_transaction_with(open_kv: Any) -> None:
    kv = await open_kv()
    database = kv._calls.provider._databases.of(type("Caller", (), {"account": "dev"}), "ID")
    await kv.put("first", "v")

    def bad(connection: Any) -> None:
        connection.execute("INSERT INTO entries (key, value) VALUES ('half', x'')")
        connection.execute("INSERT INTO entries (key, value) VALUES ('null', NULL)")

    results = await asyncio.gather(
        *(kv.put(f"good{number}", "v") for number in range(20)),
        database.write(bad),
        *(kv.put(f"more{number}", "v") for number in range(20)),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results if result is not None] == ["StorageUnavailable"]
    assert len((await kv.list())["keys"]) == 41


async def test_closing_finishes_what_is_queued(open_kv: Any) -> None:
    kv = await open_kv()
    puts = [asyncio.ensure_future(kv.put(f"key{number}", "v")) for number in range(50)]
    await asyncio.sleep(0)
    await kv._calls.provider.close()
    await asyncio.gather(*puts)
    with pytest.raises(BindingError, match="shutting down"):
        await kv.get("key1")
    assert len((await (await open_kv(again=True)).list())["keys"]) == 50


_KEYS = st.sampled_from(["a", "b", "aa", "é", "a:b", "\U0001f600", "z" * 512])
_INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _KEYS, st.binary(max_size=40), st.one_of(st.none(), _INTEGERS, st.text(max_size=5))),
        st.tuples(st.just("delete"), _KEYS),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("list"), st.sampled_from(["", "a", "a:", "é", "x"]), st.integers(1, 3)),
    ),
    max_size=15,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
async def test_it_is_a_dict_that_survives(open_kv: Any, steps: Any) -> None:
    kv: KvNamespace = await open_kv()
    for key in (await kv.list())["keys"]:
        await kv.delete(key.name)
    model: dict[str, tuple[bytes, Any]] = {}
    for step in steps:
        match step:
            case ("put", key, value, metadata):
                await kv.put(key, value, metadata=metadata)
                model[key] = (value, metadata)
            case ("delete", key):
                await kv.delete(key)
                model.pop(key, None)
            case ("reopen",):
                kv = await open_kv(again=True)
            case ("list", prefix, limit):
                names, cursor = [], None
                while True:
                    page = await kv.list(prefix=prefix, limit=limit, cursor=cursor)
                    names += [key.name for key in page["keys"]]
                    if page.list_complete:
                        break
                    cursor = page.cursor
                wanted = sorted((key for key in model if key.startswith(prefix)), key=str.encode)
                assert names == wanted
    for key, (value, metadata) in model.items():
        found = await kv.getWithMetadata(key, "arrayBuffer")
        assert (bytes(found.value), found.metadata) == (value, metadata)


@given(prefix=st.binary(max_size=4), key=st.binary(max_size=6))
def test_end_of_prefix(prefix: bytes, key: bytes) -> None:
    end = end_of_prefix(prefix)
    assert key.startswith(prefix) == (key >= prefix and (end is None or key < end))


async def test_the_disk_is_left_to_the_node_also_by_what_has_begun(
    open_kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = await open_kv()
    await kv.put("long", b"x" * (1 << 20))

    async def body() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * (1 << 20)
            monkeypatch.setattr(storage, "MIN_FREE_BYTES", 1 << 62)

    with pytest.raises(BindingError, match="the disk of the node has less than"):
        await kv.put("key", body())
    assert len(await kv.get("long")) == 1 << 20, "what is there can be read all the same"
    monkeypatch.undo()
    assert (await kv.get("key"), len(await kv.get("long"))) == (None, 1 << 20)
