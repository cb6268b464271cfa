from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from http import HTTPStatus

import pytest

from workers import Response
from workers.response import HttpStatusError
from workers.streams import ReadableStream


async def chunks():
    yield "a"
    yield b"b"


async def test_arguments_by_position_and_by_keyword():
    response = Response("hi", 201, "Made", {"x-a": "1"})
    assert (response.status, response.status_text, response.headers["X-A"]) == (201, "Made", "1")
    assert Response(body="hi", status=HTTPStatus.CREATED, status_text="Made", headers={"x-a": "1"}).status == 201
    assert await response.text() == "hi"


@pytest.mark.parametrize(
    ("body", "content", "content_type"),
    [
        (None, b"", None),
        ("ä", "ä".encode(), "text/plain;charset=UTF-8"),
        (b"\0\xff", b"\0\xff", None),
        (iter(["a", b"b"]), b"ab", None),
        (io.BytesIO(b"a\nb"), b"a\nb", None),
        (ReadableStream(iter([b"ab"])), b"ab", None),
    ],
)
async def test_bodies(body, content, content_type):
    response = Response(body)
    assert response.headers.get("content-type") == content_type
    assert await response.bytes() == content


async def test_async_generator_body():
    assert await Response(chunks()).bytes() == b"ab"


async def test_body_of_another_response():
    first = Response("hi")
    assert await Response(first.body, 201).text() == "hi"
    with pytest.raises(OSError, match="already used"):
        Response(first.body)


async def test_a_whole_response_is_taken_over_without_options():
    taken = Response(Response("hi", 404, headers={"x": "1"}))
    assert (taken.status, taken.headers["x"], await taken.text()) == (404, "1", "hi")
    with pytest.raises(ValueError, match="Expected no options"):
        Response(Response("hi"), 200)


@pytest.mark.parametrize("body", [{}, [], 5, 1.5, (), bytearray(b""), memoryview(b""), object(), True, {1}])
def test_unsupported_bodies(body):
    with pytest.raises(TypeError) as caught:
        Response(body)
    assert str(caught.value) == f"Unsupported type in Response: {type(body).__name__}"


def test_falsy_options_are_defaults():
    response = Response("", 0, "", {})
    assert (response.status, response.ok, response.status_text) == (200, True, "")


@pytest.mark.parametrize("status", [101, 199, 600, -1])
def test_status_out_of_range(status):
    with pytest.raises(ValueError, match="200 to 599"):
        Response(None, status)


def test_status_of_another_type():
    with pytest.raises(TypeError, match="status must be an int"):
        Response(None, "200")


@pytest.mark.parametrize("status", [204, 205, 304])
def test_statuses_without_body(status):
    assert Response("", status).body is None
    assert Response(None, status).headers.get("content-type") is None
    with pytest.raises(TypeError, match=f"status {status} cannot have a body"):
        Response("x", status)


def test_what_is_no_web_socket():
    with pytest.raises(TypeError, match="web_socket"):
        Response(None, web_socket=object())


def test_own_content_type_wins():
    assert Response("x", headers={"Content-Type": "text/html"}).headers.get_all("content-type") == ["text/html"]


async def test_json_on_the_class_makes_one():
    response = Response.json({"a": [1]}, 201, headers={"x": "1"})
    assert (response.status, response.headers["content-type"], response.headers["x"]) == (201, "application/json", "1")
    assert await response.text() == json.dumps({"a": [1]}) == '{"a": [1]}'
    assert Response.from_json([], headers={"Content-Type": "application/x"}).headers["content-type"] == "application/x"
    with pytest.raises(TypeError, match="not JSON serializable"):
        Response.json({1, 2})


async def test_json_on_an_instance_reads_one():
    value = await Response('{"a": {"b": 1}}').json()
    assert value.a.b == 1
    with pytest.raises(json.JSONDecodeError):
        await Response("nope").json()


def test_redirect():
    response = Response.redirect("http://example.com", 301)
    assert (response.status, response.headers["location"], response.body) == (301, "http://example.com/", None)
    assert Response.redirect("https://example.com/a").status == 302
    with pytest.raises(TypeError, match="Invalid URL"):
        Response.redirect("/relative")
    with pytest.raises(ValueError, match="200 is no redirect status"):
        Response.redirect("http://example.com", 200)


async def test_a_body_is_read_once():
    response = Response("hi")
    assert not response.body_used
    assert await response.text() == "hi"
    assert response.body_used
    assert response.bodyUsed
    with pytest.raises(OSError, match="Body already used"):
        await response.json()
    with pytest.raises(OSError, match="Body already used"):
        response.clone()


async def test_reading_the_stream_uses_the_body():
    response = Response("hi")
    assert [chunk.to_bytes() async for chunk in response.body] == [b"hi"]
    assert response.body_used


async def test_clone_has_the_same_body():
    for original in (Response("ab", 201), Response(chunks(), 201)):
        copy = original.clone()
        assert copy.status == 201
        assert await copy.text() == await original.text() == "ab"


async def test_clone_has_headers_of_its_own():
    original = Response("a", headers=[("set-cookie", "1"), ("set-cookie", "2")])
    copy = original.clone()
    copy.headers["x"] = "1"
    assert "x" not in original.headers
    assert copy.headers.get_all("set-cookie") == ["1", "2"]


async def test_replace_body_keeps_the_rest():
    replaced = Response("a", 404, headers={"x": "1"}).replace_body("b")
    assert (replaced.status, replaced.headers["x"], await replaced.text()) == (404, "1", "b")


async def test_text_is_utf8_without_bom_and_never_fails():
    assert await Response(b"\xef\xbb\xbfa\xff").text() == "a\ufffd"


async def test_buffer():
    assert (await Response(b"ab").buffer()).to_bytes() == b"ab"


def test_raise_for_status():
    Response(None, 399).raise_for_status()
    with pytest.raises(HttpStatusError, match="404 Not Found") as caught:
        Response(None, 404).raise_for_status()
    assert caught.value.status == 404
    assert isinstance(caught.value, OSError)


def test_repr():
    assert repr(Response("a")) == "Response(status=200, content_type='text/plain;charset=UTF-8')"
    assert repr(Response(None, 500, "Oh")) == "Response(status=500, status_text='Oh', content_type=None)"


def test_subclasses_make_their_own_kind():
    class Mine(Response):
        pass

    assert type(Mine.json({})) is Mine
    assert type(Mine.redirect("http://a/")) is Mine


def test_it_is_its_own_javascript_object():
    response = Response("x")
    assert response.js_object is response.js_response is response
    assert response.type == "default"


def test_replace_body_checks_the_status():
    with pytest.raises(TypeError, match="status 204 cannot have a body"):
        Response(None, 204).replace_body("x")


def _archive(kind, name="folder/a.txt"):
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(name, "content")
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            info = tarfile.TarInfo(name)
            info.size = 7
            archive.addfile(info, io.BytesIO(b"content"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "url", "format"),
    [
        ("zip", "http://a/b.zip?x=1", None),
        ("zip", "http://a/b.whl", None),
        ("zip", "", "zip"),
        ("tar", "http://a/b.tar.gz", None),
        ("tar", "", "gztar"),
        ("tar", "http://a/b.zip", ".tgz"),
    ],
)
async def test_archives_are_unpacked(tmp_path, kind, url, format):
    response = Response(_archive(kind))
    response.url = url
    await response.unpack_archive(extract_dir=tmp_path, format=format)
    assert (tmp_path / "folder/a.txt").read_text() == "content"


@pytest.mark.parametrize(("kind", "format"), [("zip", "tar"), ("tar", "zip")])
async def test_what_is_no_such_archive(tmp_path, kind, format):
    with pytest.raises(shutil.ReadError, match="the body is no"):
        await Response(_archive(kind)).unpack_archive(extract_dir=tmp_path, format=format)


async def test_archives_stay_in_their_folder(tmp_path):
    with pytest.raises(tarfile.OutsideDestinationError):
        await Response(_archive("tar", "../a.txt")).unpack_archive(extract_dir=tmp_path / "in", format="tar")
    await Response(_archive("zip", "../a.txt")).unpack_archive(extract_dir=tmp_path / "in", format="zip")
    assert not (tmp_path / "a.txt").exists()


async def test_archives_of_no_known_format(tmp_path):
    with pytest.raises(ValueError, match="give format="):
        await Response(b"").unpack_archive(extract_dir=tmp_path)
