"""JavaScript's objects over Python's values."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workers
from workers import _js
from workers._js import ffi, http
from workers._js_exception import JsException
from workers.streams import ReadableStream
from workers.values import JsBytes, JsDict, JsList, plain, wrap

js = type("js", (), {name: staticmethod(_js.lookup(name)) for name in _js.PLACES})

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON_VALUES)
def test_json_goes_through_javascript_and_back(value) -> None:
    assert js.JSON.parse(js.JSON.stringify(value)) == value
    assert json.loads(js.JSON.stringify(wrap(value))) == value


@pytest.mark.slow
@given(st.dictionaries(st.text(), JSON_VALUES))
def test_converted_dicts_are_still_what_they_were(value) -> None:
    as_object = ffi.to_js(value, dict_converter=js.Object.fromEntries)
    as_map = ffi.to_js(value)
    assert as_object == as_map == value
    assert as_object.to_py() == as_map.to_py() == value
    assert plain(as_map, "inputs") == plain(as_object, "inputs") == value


@given(st.binary())
def test_bytes_go_through_buffers_and_back(data: bytes) -> None:
    array = ffi.to_js(data)
    assert array.to_bytes() == bytes(array.buffer.to_bytes()) == bytes(array.to_py()) == data
    assert js.Uint8Array.new(array.buffer).to_bytes() == data
    assert plain(array, "inputs") == data
    assert base64.b64decode(js.btoa(data.decode("latin-1"))) == data
    assert js.atob(js.btoa(data.decode("latin-1"))).encode("latin-1") == data


def test_json_stringify_is_compact_and_knows_dates_and_buffers() -> None:
    value = {"a": [1, 2.5], "d": js.Date.new(0), "b": js.Uint8Array.new([1, 2]), "é": None}
    assert js.JSON.stringify(value) == '{"a":[1,2.5],"d":"1970-01-01T00:00:00.000Z","b":[1,2],"é":null}'
    assert js.JSON.stringify({"a": 1, "b": 2}, ["a"]) == '{"a":1}'
    assert js.JSON.stringify([1], None, 2) == "[\n  1\n]"
    with pytest.raises(JsException, match="Expecting value") as caught:
        js.JSON.parse("{]"[1:])
    assert caught.value.name == "SyntaxError"


def test_object() -> None:
    made = js.Object.fromEntries([["a", 1], ["b", {"c": 2}]])
    assert (made.a, made.b.c) == (1, 2)
    assert js.Object.fromEntries({"x": 1}.items()).to_py() == {"x": 1}
    assert js.Object.keys(made) == ["a", "b"]
    assert js.Object.entries(made)[0] == ["a", 1]
    assert js.Object.assign(js.Object.new(), made, {"a": 3}) == {"a": 3, "b": {"c": 2}}
    assert isinstance(made, js.Object)
    assert isinstance(js.Array.new(1, 2), js.Array)
    assert getattr(js.Array, "from")("ab") == js.Array.from_(["a", "b"]) == ["a", "b"]


def test_what_counts_as_a_proxy() -> None:
    for value in (JsDict(a=1), JsList(), JsBytes(b""), ffi.to_js({}), ffi.to_js(b""), ReadableStream(iter([]))):
        assert isinstance(value, ffi.JsProxy), value
    for other in ({}, [], b"", "text", 1, None):
        assert not isinstance(other, ffi.JsProxy), other


def test_to_js_of_each_type() -> None:
    assert isinstance(ffi.to_js({"a": 1}), ffi.JsMap)
    assert ffi.to_js({"a": {1, 2}}).get("a").has(2)
    assert ffi.to_js((1, [2])).to_py() == [1, [2]]
    assert ffi.to_js(datetime(2026, 1, 2), default_converter=lambda value, convert, cache: value.year) == 2026
    same = JsDict(a=1)
    assert ffi.to_js(same) is same


def test_proxies_of_python_objects() -> None:
    calls: list[int] = []
    proxy = ffi.create_proxy(calls.append)
    proxy(1)
    proxy.destroy()
    assert calls == [1]
    assert ffi.create_once_callable(len)("ab") == 2


def test_typed_arrays() -> None:
    array = js.Uint8Array.new(4)
    array.set([1, 2, 300], 1)
    assert list(array) == [0, 1, 2, 44]
    view = js.Uint8Array.new(array.buffer, 1, 2)
    view[0] = 9
    assert array.to_bytes() == b"\0\x09\x02\x2c"
    assert array.subarray(1, 3).to_bytes() == b"\x09\x02"
    copy = array.slice(1)
    copy[0] = 5
    assert array[1] == 9
    assert js.Int8Array.new([255])[0] == -1
    assert js.Uint8ClampedArray.new([300, -5]).to_bytes() == b"\xff\x00"
    assert list(js.Float32Array.new([0.5, 2])) == [0.5, 2.0]
    assert js.Float32Array.new([0.5]).byteLength == 4
    assert isinstance(array, js.Uint8Array)
    assert not isinstance(array, js.Int8Array)


def test_text_decoders() -> None:
    assert js.TextDecoder.new().decode(JsBytes("é".encode())) == "é"
    assert js.TextDecoder.new().decode(js.TextEncoder.new().encode("é").buffer) == "é"
    assert js.TextDecoder.new("latin1").decode(b"\xe9") == "é"
    stream = js.TextDecoder.new()
    assert [stream.decode(piece, {"stream": True}) for piece in (b"\xc3", b"\xa9")] == ["", "é"]
    assert js.TextDecoder.new().decode(b"\xff") == "�"
    with pytest.raises(JsException, match="invalid start byte"):
        js.TextDecoder.new("utf-8", fatal=True).decode(b"\xff")
    with pytest.raises(JsException, match="nonsense"):
        js.TextDecoder.new("nonsense")


def test_urls() -> None:
    url = js.URL.new("../x?a=1&b=2#top", "https://user:pw@Example.com:8443/one/two/")
    assert url.href == str(url) == "https://user:pw@example.com:8443/one/x?a=1&b=2#top"
    assert (url.protocol, url.hostname, url.port, url.host) == ("https:", "example.com", "8443", "example.com:8443")
    assert (url.pathname, url.search, url.hash) == ("/one/x", "?a=1&b=2", "#top")
    assert (url.origin, url.username, url.password) == ("https://example.com:8443", "user", "pw")
    url.searchParams.set("a", "x y")
    url.pathname = "new"
    url.hash = ""
    assert url.href == "https://user:pw@example.com:8443/new?a=x+y&b=2"
    assert js.URL.canParse("http://a") is True
    assert js.URL.canParse("nonsense") is False
    with pytest.raises(JsException, match="Invalid URL: 'nonsense'"):
        js.URL.new("nonsense")


def test_search_params() -> None:
    params = js.URLSearchParams.new({"q": "ä b", "n": 1})
    params.append("q", "2")
    assert params.toString() == "q=%C3%A4+b&n=1&q=2"
    assert (params.get("q"), params.getAll("q"), params.get("none")) == ("ä b", ["ä b", "2"], None)
    params.set("q", "3")
    assert list(params) == [("q", "3"), ("n", "1")]
    params.delete("n")
    assert dict(js.Object.fromEntries(params)) == {"q": "3"}
    assert not params.has("n")


async def test_responses_and_requests() -> None:
    headers = js.Headers.new({"X-A": "1"})
    headers.append("x-a", "2")
    headers.append("Set-Cookie", "a=1")
    headers.append("Set-Cookie", "b=2")
    response = js.Response.new("hello", {"status": 201, "headers": headers})
    assert isinstance(response, workers.Response)
    assert isinstance(response, js.Response)
    assert (response.status, response.headers["x-a"], await response.text()) == (201, "1, 2", "hello")
    assert response.headers.get_all("set-cookie") == ["a=1", "b=2"]
    assert headers.getSetCookie() == ["a=1", "b=2"]
    assert js.Response.new("x", status=404, headers=[("a", "b")]).status == 404
    answer = js.Response.json({"a": [1]}, {"status": 500})
    assert (answer.status, answer.headers["content-type"]) == (500, "application/json")
    assert await answer.text() == '{"a":[1]}'
    assert js.Response.redirect("http://a.b/c").headers["location"] == "http://a.b/c"
    request = js.Request.new(js.URL.new("http://a/"), {"method": "POST", "body": js.URLSearchParams.new("a=b")})
    assert (request.method, request.url, await request.text()) == ("POST", "http://a/", "a=b")
    assert request.headers["content-type"] == "application/x-www-form-urlencoded;charset=UTF-8"
    assert await js.Response.new(js.Uint8Array.new([104, 105]).buffer).text() == "hi"
    assert (await js.Response.new(js.Blob.new(["hi"], {"type": "text/html"})).text()) == "hi"
    file = js.File.new(["hi"], "a.txt", type="text/plain")
    assert (file.name, file.type, file.size) == ("a.txt", "text/plain", 2)


async def test_streams() -> None:
    chunks = []

    def start(controller) -> None:
        controller.enqueue("one ")
        controller.enqueue(js.Uint8Array.new(b"two"))
        controller.close()

    async for chunk in js.ReadableStream.new({"start": start}):
        chunks.append(chunk.to_bytes())
    assert chunks == [b"one ", b"two"]

    numbers = iter(range(3))

    async def pull(controller) -> None:
        number = next(numbers, None)
        controller.close() if number is None else controller.enqueue(str(number))

    assert await js.Response.new(js.ReadableStream.new(pull=pull)).text() == "012"

    transform = js.TransformStream.new()
    response = workers.Response(transform.readable)
    writer = transform.writable.getWriter()

    async def write() -> None:
        for word in ("a", "b"):
            await writer.write(word)
        await writer.close()

    text, _ = await asyncio.gather(response.text(), write())
    assert text == "ab"
    upper = js.TransformStream.new(transform=lambda chunk, controller: controller.enqueue(chunk.upper()))
    await upper.writable.getWriter().write("abc")
    await upper.writable.close()
    assert await workers.Response(upper.readable).text() == "ABC"


async def test_a_stream_that_nobody_reads_on_tells_its_source() -> None:
    cancelled = []
    stream = js.ReadableStream.new(start=lambda controller: controller.enqueue("a"), cancel=cancelled.append)
    assert await anext(stream) == b"a"
    await stream.cancel()
    assert cancelled == [None]
    broken = js.ReadableStream.new(start=lambda controller: controller.error("reason"))
    with pytest.raises(JsException, match="reason"):
        await anext(broken)


async def test_crypto() -> None:
    assert len(js.crypto.randomUUID()) == 36
    filled = js.crypto.getRandomValues(js.Uint8Array.new(32))
    assert filled.to_bytes() != bytes(32)
    digest = await js.crypto.subtle.digest("SHA-256", js.TextEncoder.new().encode("x"))
    assert digest.to_bytes() == hashlib.sha256(b"x").digest()
    assert (await js.crypto.subtle.digest({"name": "SHA-1"}, b"x")).to_bytes() == hashlib.sha1(b"x").digest()
    with pytest.raises(JsException, match="Unrecognized"):
        await js.crypto.subtle.digest("ROT13", b"x")


async def test_timers_and_promises() -> None:
    fired: list[str] = []
    done = asyncio.Event()

    async def slow(*words: str) -> None:
        fired.extend(words)
        done.set()

    js.setTimeout(ffi.create_proxy(slow), 1, "late")
    cleared = js.setTimeout(fired.append, 0, "never")
    js.clearTimeout(cleared)
    js.queueMicrotask(lambda: fired.append("soon"))
    async with asyncio.timeout(20):
        await done.wait()
    assert fired == ["soon", "late"]

    ticks: list[int] = []
    interval = js.setInterval(
        lambda: (ticks.append(1), len(ticks) == 3 and (js.clearInterval(interval), ticked.set())), 1
    )
    ticked = asyncio.Event()
    async with asyncio.timeout(20):
        await ticked.wait()
    assert len(ticks) == 3

    assert await js.Promise.all([js.Promise.resolve(1), asyncio.sleep(0, 2), 3]) == [1, 2, 3]
    assert await js.Promise.new(lambda resolve, reject: js.setTimeout(resolve, 1, "x")) == "x"
    settled = await js.Promise.allSettled([js.Promise.reject("why"), 1])
    assert [one.status for one in settled] == ["rejected", "fulfilled"]
    with pytest.raises(JsException, match="why"):
        await js.Promise.reject("why")


def test_numbers_text_and_dates() -> None:
    assert (js.Number("12"), js.Number("0x10"), js.Number(""), js.Number(True)) == (12, 16, 0, 1)
    assert js.Number.isNaN(js.Number("x"))
    assert (js.String(2.0), js.String(None), js.String(True)) == ("2", "null", "true")
    assert (js.Math.floor(-1.5), js.Math.round(2.5), js.Math.max(1, 3), js.Math.sign(-2)) == (-2, 3, 3, -1)
    date = js.Date.new("2026-03-01T12:30:00.250Z")
    assert (date.getTime(), date.toISOString()) == (1772368200250, "2026-03-01T12:30:00.250Z")
    assert (date.getMonth(), date.getUTCDay(), date.getMilliseconds()) == (2, 0, 250)
    assert js.Date.new(2026, 2, 1, 12, 30, 0, 250) == date
    assert date.to_py() == datetime(2026, 3, 1, 12, 30, 0, 250000, UTC)
    assert js.Date.now() > 1_700_000_000_000
    with pytest.raises(AttributeError, match="getNonsense"):
        date.getNonsense()


def test_errors_are_exceptions_with_a_name() -> None:
    with pytest.raises(JsException, match="too far") as caught:
        raise js.RangeError.new("too far")
    assert (caught.value.name, caught.value.message, caught.value.stack) == (
        "RangeError",
        "too far",
        "RangeError: too far",
    )
    assert isinstance(caught.value, js.Error)


def test_copies_are_deep() -> None:
    inner = {"a": [1]}
    copy = js.structuredClone(inner)
    copy["a"].append(2)
    assert inner == {"a": [1]}
    assert copy.a == [1, 2]


def test_the_console_prints(capsys: pytest.CaptureFixture[str]) -> None:
    js.console.log("a", 1, {"b": 2})
    js.console.error("bad")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("a 1 {'b': 2}\n", "bad\n")


@pytest.mark.parametrize(("name", "advice"), [("HTMLRewriter", "html.parser"), ("WebAssembly", "native code")])
def test_what_is_missing_says_what_to_use(name: str, advice: str) -> None:
    with pytest.raises(NotImplementedError, match=advice):
        _js.lookup(name).new()


def test_unknown_names() -> None:
    assert _js.lookup("undefined") is None
    with pytest.raises(AttributeError, match=r"js\.nonsense does not exist in this runtime; there are: Array, "):
        _js.lookup("nonsense")
    with pytest.raises(AttributeError, match=r"js\.Math\.fround does not exist"):
        _ = js.Math.fround
    with pytest.raises(TypeError, match=r"js\.Math is not a constructor"):
        js.Math.new()


def test_js_modules() -> None:
    import sys

    ffi.register_js_module("made_up_js", {"x": 1})
    assert sys.modules["made_up_js"].x == 1
    ffi.unregister_js_module("made_up_js")
    with pytest.raises(ValueError, match="made_up_js"):
        ffi.unregister_js_module("made_up_js")


def test_http_names() -> None:
    assert http.FetchResponse is workers.Response
    assert issubclass(http.HttpStatusError, OSError)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        ("js.Response.new('x')", "Response"),
        ("js.Request.new('http://x/')", "Request"),
        ("js.Headers.new()", "Headers"),
        ("js.FormData.new()", "FormData"),
        ("js.Blob.new([])", "Blob"),
        ("js.File.new([], 'x')", "File"),
        ("js.URL.new('http://x/')", "URL"),
        ("js.URLSearchParams.new('a=1')", "URLSearchParams"),
        ("js.Uint8Array.new(2)", "Uint8Array"),
        ("js.ArrayBuffer.new(2)", "ArrayBuffer"),
        ("js.Map.new()", "Map"),
        ("js.Set.new()", "Set"),
        ("js.Date.new(0)", "Date"),
        ("js.Object.new()", "Object"),
        ("js.Response.new('x').body", "ReadableStream"),
        ("js.JSON.parse('[1]')", "Array"),
    ],
)
def test_objects_say_of_which_class_they_are(make: str, name: str) -> None:
    made = eval(make, {"js": js})
    assert made.constructor.name == name


def test_a_key_may_be_called_constructor() -> None:
    assert js.JSON.parse('{"constructor": 1}')["constructor"] == 1
