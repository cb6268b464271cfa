from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import Blob, File, FormData, Request, Response
from workers.formdata import MAX_FIELDS, MAX_PART_HEADER_BYTES, encode_multipart, parse_form

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NAMES = TEXT.filter(lambda text: "%" not in text)  # the standard does not escape its escapes
FILES = st.builds(File, st.binary(max_size=200), NAMES, st.sampled_from(["text/plain", "image/png"]))
MULTIPART = "multipart/form-data; boundary=XX"


def part(head: str, data: str = "1") -> str:
    return f"--XX\r\n{head}\r\n\r\n{data}\r\n"


def parse(text: str, content_type: str = MULTIPART) -> FormData:
    return parse_form(text.encode(), content_type)


def fields(form: FormData) -> list:
    return [(name, (v.name, v.content_type, v._data) if isinstance(v, File) else v) for name, v in form.items()]


def as_sent(text: str) -> str:
    return re.sub(r"\r\n|\r|\n", "\r\n", text)


def test_as_a_mapping():
    form = FormData({"a": "1", "b": 2})
    form.append("a", True)
    assert (form["a"], form.get_all("a"), form["missing"], form.get("b")) == ("1", ["1", "true"], None, "2")
    assert ("a" in form, "c" in form, form.has("b"), len(form)) == (True, False, True, 3)
    assert list(form) == list(form.keys()) == ["a", "b", "a"]
    assert list(form.values()) == ["1", "2", "true"]
    form["a"] = "x"
    assert list(form.items()) == [("a", "x"), ("b", "2")]
    del form["a"]
    form.delete("missing")
    assert list(form.entries()) == [("b", "2")]
    form.clear()
    assert len(form) == 0


def test_files_and_blobs():
    form = FormData({"f": File("x", "a.txt")})
    form.append("f", Blob("y", "a/b"))
    form.append("f", File("z", "z.txt"), "other.txt")
    assert [file.name for file in form.get_all("f")] == ["a.txt", "blob", "other.txt"]


@pytest.mark.parametrize("value", [["a"], {"a": 1}, None, b"x"])
def test_values_of_another_type(value):
    with pytest.raises(TypeError, match="Unsupported type in FormData"):
        FormData({"a": value})
    with pytest.raises(TypeError, match="name of a form's field must be str"):
        FormData({5: "a"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="filename goes with a Blob"):
        FormData().append("a", "x", "name")


@given(st.lists(st.tuples(NAMES, TEXT | FILES), max_size=8))
def test_multipart_gives_back_what_was_sent(pairs):
    form, expected = FormData(), FormData()
    for name, value in pairs:
        form.append(name, value)
        expected.append(as_sent(name), as_sent(value) if isinstance(value, str) else value)
    content, content_type = form._as_body()
    assert fields(parse_form(content, content_type)) == fields(expected)


@given(st.lists(st.tuples(TEXT, TEXT), max_size=8))
def test_urlencoded_forms(pairs):
    parsed = parse_form(urlencode(pairs).encode(), "application/x-www-form-urlencoded;charset=UTF-8")
    assert list(parsed.items()) == [(name, value) for name, value in pairs]


@given(st.binary(max_size=300))
def test_any_bytes_are_a_form_or_refused(data):
    for body in (data, b"--XX\r\n" + data, b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + data):
        try:
            parse_form(body, MULTIPART)
        except ValueError as error:
            assert "broken form" in str(error)  # noqa: PT017


def test_what_browsers_and_tools_send():
    head = 'content-disposition: FORM-DATA; name="up"; filename="a b.txt"\r\nContent-Type: text/css; charset=x'
    body = "ignored\r\n" + part(head, "data") + part('Content-Disposition: form-data; filename=""; name="no"', "")
    form = parse(body + "--XX--\r\nignored", 'multipart/form-data; charset=utf-8; boundary="XX"')
    assert fields(form) == [("up", ("a b.txt", "text/css; charset=x", b"data")), ("no", ("", "text/plain", b""))]
    assert fields(parse(part('Content-Disposition: form-data; name="x%22y"', "x--XX") + "--XX--")) == [('x"y', "x--XX")]
    assert fields(parse("--XX--")) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "ends before its last boundary"),
        (part('Content-Disposition: form-data; name="a"'), "ends before its last boundary"),
        ("--XXgarbage\r\n--XX--", "something else than a line break"),
        (part("X-Other: 1") + "--XX--", "Content-Disposition"),
        (part('Content-Disposition: attachment; name="a"') + "--XX--", "Content-Disposition"),
        (part("A: " + "x" * MAX_PART_HEADER_BYTES) + "--XX--", "headers do not end"),
    ],
)
def test_broken_forms(body, message):
    with pytest.raises(ValueError, match=message):
        parse(body)


def test_too_many_fields():
    many = part('Content-Disposition: form-data; name="a"') * (MAX_FIELDS + 1) + "--XX--"
    with pytest.raises(ValueError, match="at most 1000 fields"):
        parse(many)
    with pytest.raises(ValueError, match="at most 1000 fields"):
        parse("a=1&" * (MAX_FIELDS + 1), "application/x-www-form-urlencoded")


def test_what_is_no_form():
    with pytest.raises(TypeError, match="content type is application/json"):
        parse("{}", "application/json")
    with pytest.raises(TypeError, match="content type is missing"):
        parse_form(b"", None)
    with pytest.raises(ValueError, match="no boundary"):
        parse("", "multipart/form-data")


def test_text_cannot_break_out_of_its_part():
    form = FormData({'a"\r\nX: y': 'v\r\n--XX\r\nContent-Disposition: form-data; name="evil"\r\n\r\n1'})
    encoded = encode_multipart(form, "YY")
    assert list(parse_form(encoded, "multipart/form-data; boundary=YY")) == ['a"\r\nX: y']


async def test_a_form_as_body_and_back():
    form = FormData({"a": "1", "f": File("x", "f.txt", "text/plain")})
    request = Request("http://a/", method="POST", body=form)
    assert request.headers["content-type"].startswith("multipart/form-data; boundary=----edge")
    received = await request.form_data()
    assert fields(received) == [("a", "1"), ("f", ("f.txt", "text/plain", b"x"))]
    assert fields(await Response(form).formData()) == fields(received)
    urlencoded = Response("a=1&a=2", headers={"content-type": "application/x-www-form-urlencoded"})
    assert (await urlencoded.form_data()).get_all("a") == ["1", "2"]


async def test_a_blob_as_body_and_back():
    response = Response(Blob(b"x", "image/png"))
    assert response.headers["content-type"] == "image/png"
    blob = await response.blob()
    assert (await blob.bytes(), blob.content_type) == (b"x", "image/png")
    assert "content-type" not in Response(Blob(b"x")).headers
