from __future__ import annotations

from datetime import UTC, datetime

import pytest

from workers import Blob, BlobEnding, File


async def test_parts_are_joined():
    blob = Blob(["ä", b"b", bytearray(b"c"), memoryview(b"d"), Blob("e")], "Text/Plain")
    assert (blob.size, blob.content_type, blob.type) == (6, "text/plain", "text/plain")
    assert await blob.text() == "äbcde"
    assert await blob.bytes() == "äbcde".encode()
    assert (await blob.arrayBuffer()).to_bytes() == "äbcde".encode()
    assert b"".join([chunk async for chunk in blob.stream()]) == "äbcde".encode()


async def test_a_single_part():
    assert await Blob("abc").text() == "abc"
    assert await Blob(b"abc").text() == "abc"
    assert Blob().size == 0


def test_a_single_blob_gives_its_type_on():
    first = Blob(b"x", "image/png")
    assert Blob(first).content_type == "image/png"
    assert Blob(first, "text/css").content_type == "text/css"
    assert Blob([first]).content_type == ""


@pytest.mark.parametrize("part", [5, None, {}, [[]], object()])
def test_parts_of_another_type(part):
    with pytest.raises(TypeError, match="Unsupported type in Blob"):
        Blob([part])


async def test_line_ends():
    assert await Blob(["a\r\nb\rc", b"\r\n"], endings="native").bytes() == b"a\nb\nc\r\n"
    assert await Blob("a\r\n", endings=BlobEnding.TRANSPARENT).text() == "a\r\n"
    with pytest.raises(ValueError, match="dos"):
        Blob("a", endings="dos")


async def test_a_slice_keeps_only_its_own_type():
    part = Blob(b"abcdef", "text/plain").slice(1, -2)
    assert (await part.bytes(), part.content_type) == (b"bcd", "")
    assert Blob(b"abc").slice(1, content_type="a/b").content_type == "a/b"


async def test_a_file():
    file = File(["x"], "a.txt", "text/plain", last_modified=5)
    assert (file.name, file.size, file.content_type, file.last_modified, file.lastModified) == (
        "a.txt", 1, "text/plain", 5, 5,
    )  # fmt: skip
    assert isinstance(file, Blob)
    assert repr(file) == "File(name='a.txt', size=1, content_type='text/plain')"
    assert File("x", "a", last_modified=datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)).last_modified == 1000
    now_ms = datetime.now().timestamp() * 1000
    assert abs(File("x", "a").last_modified - now_ms) < 60_000


def test_a_single_file_gives_its_name_on():
    copy = File(File("x", "a.txt", "text/plain", last_modified=5))
    assert (copy.name, copy.content_type, copy.last_modified) == ("a.txt", "text/plain", 5)
    assert File(copy, "b.txt").name == "b.txt"
    with pytest.raises(TypeError, match="needs a filename"):
        File("x")
