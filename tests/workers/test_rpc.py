from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import Blob, File, FormData, Request, Response
from workers._rpc import DataCloneError, buffered, pack, unpack
from workers.rpc import python_from_rpc, python_to_rpc
from workers.streams import ReadableStream
from workers.values import MAX_DEPTH, JsBytes, JsDict, JsList

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
TIMES = st.datetimes(datetime(1971, 1, 1), datetime(9998, 1, 1))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary()
    | TIMES.map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000))
)
HASHABLE = st.sets(st.none() | st.booleans() | st.integers() | TEXT)
VALUES = st.recursive(
    SCALARS | HASHABLE,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_sent_arrives(value):
    assert unpack(pack(value)) == value


@given(VALUES)
def test_what_arrived_can_be_sent_on(value):
    once = unpack(pack(value))
    assert unpack(pack(once)) == once


@given(st.binary() | VALUES.map(pack) | VALUES.map(lambda value: pack(value)[:-1]))
def test_unpacking_is_safe_on_any_bytes(data):
    try:
        unpack(data)
    except ValueError as error:
        assert str(error).startswith("not a value of RPC")  # noqa: PT017


@given(st.integers(-10, 20), st.binary(max_size=40))
def test_unpacking_is_safe_on_any_object(code, data):
    packed = msgspec.msgpack.encode([msgspec.msgpack.Ext(code, data)])
    try:
        unpack(packed)
    except ValueError as error:
        assert str(error).startswith("not a value of RPC")  # noqa: PT017


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc6\xff\xff\xff\xff", b"\x81\xc0\xc0"]
)
def test_bytes_that_are_no_value(bad):
    with pytest.raises(ValueError, match="not a value of RPC"):
        unpack(bad)


def test_types_on_arrival():
    value = unpack(pack({"list": [{"x": 1}], "bytes": b"ab", "set": {1}, "frozen": frozenset({2})}))
    assert type(value) is JsDict
    assert type(value.list) is JsList
    assert value.list[0].x == 1
    assert type(value.bytes) is JsBytes
    assert value.bytes.to_bytes() == value.bytes.tobytes() == b"ab"
    assert (value.set, value.frozen) == ({1}, {2})
    assert value.to_py()["list"] == [{"x": 1}]


def test_numbers():
    assert unpack(pack([2**200, -(2**64), 2**64 - 1, -(2**63), True])) == [2**200, -(2**64), 2**64 - 1, -(2**63), True]
    assert math.isnan(unpack(pack(float("nan"))))
    assert unpack(pack({1: "a"})) == {"1": "a"}


def test_times_arrive_naive_local_and_in_ms():
    moment = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=timezone(timedelta(hours=5)))
    arrived = unpack(pack(moment))
    assert arrived.tzinfo is None
    assert arrived.astimezone(UTC) == moment.astimezone(UTC).replace(microsecond=123000)


def test_exceptions_arrive_as_exceptions():
    arrived = unpack(pack([KeyError("gone"), ValueError("bad")]))
    assert [(type(error), str(error)) for error in arrived] == [(Exception, "'gone'"), (Exception, "bad")]


async def coroutine():
    return 1


@pytest.mark.parametrize(
    ("value", "name"),
    [((1,), "tuple"), (bytearray(b"x"), "bytearray"), (re.compile("x"), "Pattern"), (coroutine, "function")],
)
@pytest.mark.parametrize("nest", [lambda v: v, lambda v: [v], lambda v: {"a": [{"b": v}]}])
def test_what_cannot_be_sent(value, name, nest):
    with pytest.raises(TypeError, match=f"{name} cannot be sent over RPC"):
        pack(nest(value))


def test_awaitables_and_streams_cannot_be_sent():
    with pytest.raises(TypeError, match=r"coroutine cannot be sent over RPC\. Is an `await` missing"):
        pack(coroutine())
    with pytest.raises(TypeError, match="ReadableStream cannot be sent over RPC"):
        pack([ReadableStream(iter(["x"]))])


def test_objects_of_own_classes():
    class Own:
        pass

    class Standing:
        def __init__(self):
            self.js_object = {"a": 1}

    class Proxy:
        def to_py(self):
            return [1]

    with pytest.raises(DataCloneError, match="Own cannot be sent over RPC"):
        pack(Own())
    with pytest.raises(DataCloneError):
        pack(Own)
    assert unpack(pack([Standing(), Proxy()])) == [{"a": 1}, [1]]


def test_depth():
    deep: list = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert unpack(pack(deep)) == deep
    with pytest.raises(ValueError, match="nested deeper"):
        pack([deep])
    loop: list = []
    loop.append(loop)
    with pytest.raises(ValueError, match="containing itself"):
        pack(loop)


def test_keys_and_text():
    with pytest.raises(TypeError, match="keys must be str"):
        pack({(1, 2): 3})
    with pytest.raises(ValueError, match="lone surrogate"):
        pack("\ud800")
    with pytest.raises(ValueError, match="cannot be sent over RPC"):
        pack(datetime.min)


async def test_requests_and_responses_are_sent_whole():
    async def chunks():
        yield "a"
        yield b"b"

    request = Request("http://a/x", method="POST", headers={"x-a": "1"}, body=chunks(), cf={"colo": "X"})
    response = Response("hi", 404, "Gone away", [("set-cookie", "a"), ("set-cookie", "b")])
    with pytest.raises(TypeError, match="its body streams"):
        pack([request])
    sent = {"list": [request, response]}
    arrived = unpack(pack(await buffered(sent)))["list"]
    assert (arrived[0].method, arrived[0].url, arrived[0].headers["x-a"], arrived[0].cf.colo) == (
        "POST", "http://a/x", "1", "X",
    )  # fmt: skip
    assert await arrived[0].text() == "ab"
    assert (arrived[1].status, arrived[1].status_text, arrived[1].headers.get_all("set-cookie")) == (
        404, "Gone away", ["a", "b"],
    )  # fmt: skip
    assert await arrived[1].text() == "hi"
    assert unpack(pack(Response(None, 204))).body is None


async def test_forms_and_files():
    form = FormData({"a": "1", "f": File("x", "f.txt", "text/css", last_modified=7)})
    arrived, blob = unpack(pack([form, Blob(b"y", "a/b")]))
    assert arrived["a"] == "1"
    file = arrived["f"]
    assert (file.name, file.content_type, file.last_modified, await file.text()) == ("f.txt", "text/css", 7, "x")
    assert (await blob.text(), blob.content_type) == ("y", "a/b")


def test_the_documented_conversions():
    assert python_from_rpc(python_to_rpc({"a": [1]})) == {"a": [1]}
    with pytest.raises(TypeError, match="tuple cannot be sent"):
        python_to_rpc((1,))
