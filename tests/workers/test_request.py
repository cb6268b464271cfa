from __future__ import annotations

from http import HTTPMethod

import pytest

from workers import Request


def received(content=b"", **changes):
    values = {"method": "POST", "url": "http://example.com/a", "headers": [("x-a", "1")], "content": content, "cf": {}}
    return Request._received(**values | changes)


async def test_from_a_url():
    request = Request("http://Example.com")
    assert (request.url, request.method, request.body, request.cf) == ("http://example.com/", "GET", None, None)
    assert await request.text() == ""
    with pytest.raises(TypeError, match="Invalid URL"):
        Request("/a")


async def test_options():
    request = Request("http://a/", method="post", headers={"X-A": "1"}, body="hi", cf={"colo": "X"})
    assert request.method is HTTPMethod.POST
    assert request.headers["x-a"] == "1"
    assert request.headers["content-type"] == "text/plain;charset=UTF-8"
    assert request.cf.colo == "X"
    assert await request.text() == "hi"


async def test_from_another_request():
    first = Request("http://a/", method="POST", headers={"x": "1"}, body="hi")
    second = Request(first, headers={"y": "2"})
    assert (second.url, second.method, second.headers.get("x"), second.headers["y"]) == ("http://a/", "POST", None, "2")
    assert await second.text() == "hi"
    assert first.body_used


def test_methods_beyond_the_standard_are_str():
    request = received(method="PROPFIND")
    assert request.method == "PROPFIND"
    assert type(received().method) is HTTPMethod
    with pytest.raises(ValueError, match="no HTTP method"):
        Request("http://a/", method="GET /")


def test_a_get_has_no_body():
    with pytest.raises(TypeError, match="GET request cannot have a body"):
        Request("http://a/", body="x")


def test_what_clients_send_is_never_refused():
    request = received(url="http://a b/", method="M-SEARCH")
    assert (request.url, request.method) == ("http://a b/", "M-SEARCH")


def test_redirect_option():
    assert Request("http://a/", redirect="manual").redirect == "manual"
    with pytest.raises(ValueError, match="follow, manual, error"):
        Request("http://a/", redirect="maybe")


def test_options_must_be_known():
    with pytest.raises(TypeError, match="unexpected keyword argument 'mode'"):
        Request("http://a/", mode="cors")


def test_cf_has_attributes():
    assert received(cf={"country": "XX", "tls": {"v": 1}}).cf.tls.v == 1
    assert received(cf={}).cf is None


async def test_json_has_attributes_and_options():
    assert (await received(b'{"a": {"b": 1}}').json()).a.b == 1
    assert await received(b"1.5").json(parse_float=str) == "1.5"


async def test_the_body_is_iterated_in_chunks():
    request = received(b"ab")
    assert [chunk.to_bytes() async for chunk in request.body] == [b"ab"]
    with pytest.raises(OSError, match="Body already used"):
        await request.bytes()


async def test_clone_before_use():
    request = received(b"ab")
    copy = request.clone()
    assert await copy.text() == await request.text() == "ab"
    assert copy.headers["x-a"] == "1"
    with pytest.raises(OSError, match="Body already used"):
        request.clone()


def test_repr():
    assert repr(received()) == "Request(method='POST', url='http://example.com/a')"


async def test_all_ways_to_read_a_body():
    assert await received(b"ab").string() == "ab"
    assert await received(b"ab").bytes() == b"ab"
    assert (await received(b"ab").buffer()).to_bytes() == b"ab"
    assert (await received(b"ab").arrayBuffer()).to_py().tolist() == [97, 98]
    assert (await received(b"ab").memoryview()).tolist() == [97, 98]
    assert await (await received(b"ab").blob()).text() == "ab"
    form = received(b"a=1", headers=[("content-type", "application/x-www-form-urlencoded")])
    assert (await form.formData())["a"] == "1"
    with pytest.raises(OSError, match="Body already used"):
        await form.form_data()
    with pytest.raises(TypeError, match="the body is no form"):
        await received(b"a=1").form_data()


def test_it_is_its_own_javascript_object():
    request = received()
    assert request.js_object is request._js_request is request
    assert (request.mode, request.credentials, request.keepalive, request.referrer_policy) == (
        "cors", "same-origin", False, "",
    )  # fmt: skip


def test_received_headers_are_joined_and_can_be_changed():
    request = received(headers=[("X-A", "1"), ("x-a", " 2 "), ("cookie", "a=1"), ("cookie", "b=2")])
    assert (request.headers["x-a"], request.headers["cookie"]) == ("1, 2", "a=1; b=2")
    del request.headers["x-a"]
    assert "x-a" not in request.headers
    assert list(request.clone().headers.items()) == [("cookie", "a=1; b=2")]
