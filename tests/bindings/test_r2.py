"""R2 buckets in files and in S3: the same tests for both, but for what only one of them has."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import tracemalloc
from collections.abc import Callable
from datetime import datetime, timedelta
from http.client import HTTPMessage
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.bindings.r2 import R2
from edge.bindings.r2 import files as r2_files
from edge.bindings.r2.files import SWEEP_AFTER_S, UPLOAD_EXPIRES_S
from edge.bindings.r2.objects import MIN_PART_BYTES
from workers.bindings import BindingError
from workers.bindings.r2 import R2Bucket, R2Object, R2ObjectBody

LONG = bytes(range(256)) * 4000


def headers(**values: str) -> HTTPMessage:
    message = HTTPMessage()
    for name, value in values.items():
        message[name.replace("_", "-")] = value
    return message


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("files/*/*") if path.is_file()]


async def in_pieces(data: bytes) -> Any:
    for start in range(0, len(data), 70_000):
        yield data[start : start + 70_000]


@pytest.fixture(params=["files", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


in_files = pytest.mark.parametrize("place", ["files"], indirect=True)
quick_in_both = pytest.mark.parametrize("place", ["files", "s3"], indirect=True)


@pytest.fixture
def make_r2(place: str, request: pytest.FixtureRequest, tmp_path: Path, clock: Any) -> Callable[[], R2]:
    if place == "files":
        return lambda: R2(tmp_path, clock)
    return request.getfixturevalue("make_r2_in_s3")


@pytest.fixture
async def bucket(open_r2: Any) -> R2Bucket:
    opened: R2Bucket = await open_r2()
    return opened


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 65_536, b"x" * 65_537, LONG])
async def test_put_head_and_get(bucket: R2Bucket, place: str, clock: Any, data: bytes) -> None:
    put = await bucket.put("a/key", data, httpMetadata={"contentType": "text/plain"}, customMetadata={"who": "me"})
    assert put is not None
    md5 = hashlib.md5(data).hexdigest()
    for found in (put, await bucket.head("a/key"), await bucket.get("a/key")):
        assert found is not None
        assert (found.key, found.size, found.etag, found.httpEtag) == ("a/key", len(data), md5, f'"{md5}"')
        assert (found.version, found.storageClass) == (put.version, "Standard")
        assert found.uploaded == put.uploaded
        assert found.httpMetadata.contentType == "text/plain"
        assert found.customMetadata.who == "me"
        assert found.checksums.toJSON() == {"md5": md5}
    now = datetime.now() if place == "s3" else datetime.fromtimestamp(clock.now_s)
    assert abs(put.uploaded - now) < timedelta(minutes=1)
    body = await bucket.get("a/key")
    assert isinstance(body, R2ObjectBody)
    assert body.range == {"offset": 0, "length": len(data)}
    assert not body.bodyUsed
    assert await body.bytes() == data
    assert body.bodyUsed
    with pytest.raises(OSError, match="already used"):
        await body.text()
    assert await bucket.head("missing") is None
    assert await bucket.get("missing") is None


async def test_ways_to_read(bucket: R2Bucket) -> None:
    await bucket.put(
        "json", '{"a": [1]}', httpMetadata=headers(content_type="application/json", cache_control="no-store")
    )
    assert (await (await bucket.get("json")).json()).a == [1]
    assert (await (await bucket.get("json")).arrayBuffer()).to_bytes() == b'{"a": [1]}'
    assert b"".join([chunk async for chunk in (await bucket.get("json")).body]) == b'{"a": [1]}'
    blob = await (await bucket.get("json")).blob()
    assert (await blob.text(), blob.content_type) == ('{"a": [1]}', "application/json")
    written: dict[str, str] = {}
    (await bucket.head("json")).writeHttpMetadata(written)
    assert written == {"content-type": "application/json", "cache-control": "no-store"}


@quick_in_both
async def test_streams_both_ways(bucket: R2Bucket, place: str, tmp_path: Path) -> None:
    await bucket.put("long", in_pieces(LONG))
    assert len(files_in(tmp_path)) == (1 if place == "files" else 0)
    assert b"".join([chunk async for chunk in (await bucket.get("long")).body]) == LONG
    unread = await bucket.get("long")
    await unread.body.cancel()


async def test_a_long_object_is_never_in_memory(bucket: R2Bucket) -> None:
    num_pieces = 64

    async def long() -> Any:
        for _ in range(num_pieces):
            yield os.urandom(1 << 20)

    await bucket.put("first", b"")  # what is loaded with the first call
    tracemalloc.start()
    try:
        assert (await bucket.put("k", long())).size == num_pieces << 20
        num_bytes = 0
        async for chunk in (await bucket.get("k")).body:
            num_bytes += len(chunk)
        assert num_bytes == num_pieces << 20
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


async def test_metadata_that_expires(bucket: R2Bucket) -> None:
    expiry = datetime(2030, 1, 2, 3, 4, 5)
    found = await bucket.put("k", "v", {"httpMetadata": {"cacheExpiry": expiry}})
    assert found.httpMetadata.cacheExpiry == expiry
    message = headers(expires="never")
    found.writeHttpMetadata(message)
    assert len(message.get_all("expires")) == 1
    again = await bucket.put("k", "v", {"httpMetadata": message})
    assert again.httpMetadata.cacheExpiry == expiry


@pytest.mark.parametrize("data", [b"0123456789", LONG])
@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ({"offset": 2, "length": 3}, 2, 5),
        ({"offset": 4}, 4, None),
        ({"length": 4}, 0, 4),
        ({"suffix": 3}, -3, None),
        ({"suffix": 10**9}, 0, None),
        ({"offset": 8, "length": 10**9}, 8, None),
        (headers(range="bytes=2-4"), 2, 5),
        (headers(range="bytes=5-"), 5, None),
        (headers(range="bytes=-2"), -2, None),
        (headers(range="lines=1-2"), 0, None),
    ],
)
async def test_ranges(bucket: R2Bucket, data: bytes, wanted: Any, start: int, end: int | None) -> None:
    await bucket.put("k", data)
    found = await bucket.get("k", range=wanted)
    part = data[start:end]
    assert await found.bytes() == part
    assert found.range == {"offset": start % len(data), "length": len(part)}
    assert found.size == len(data)


@pytest.mark.parametrize(
    "wanted", [{"offset": 10}, {"offset": -1}, {"suffix": 0}, {"length": 0}, {"offset": 1, "suffix": 1}]
)
async def test_ranges_that_cannot_be(bucket: R2Bucket, wanted: Any) -> None:
    await bucket.put("k", b"0123456789")
    with pytest.raises(BindingError, match=r"\(10039\)"):
        await bucket.get("k", range=wanted)


async def test_conditional_get(bucket: R2Bucket) -> None:
    put = await bucket.put("k", "v")
    etag, uploaded = put.etag, put.uploaded
    hour = timedelta(hours=1)
    for conditions, holds in [
        ({"etagMatches": etag}, True),
        ({"etagMatches": f'"{etag}"'}, True),
        ({"etagMatches": ["other", etag]}, True),
        ({"etagMatches": "*"}, True),
        ({"etagMatches": "other"}, False),
        ({"etagDoesNotMatch": etag}, False),
        ({"etagDoesNotMatch": "other"}, True),
        ({"uploadedBefore": uploaded + hour}, True),
        ({"uploadedBefore": uploaded}, False),
        ({"uploadedAfter": uploaded - hour}, True),
        ({"uploadedAfter": uploaded + hour}, False),
        ({"etagMatches": etag, "uploadedBefore": uploaded - hour}, True),
        ({"etagDoesNotMatch": "other", "uploadedAfter": uploaded + hour}, True),
        (headers(if_match=f'"a", "{etag}"'), True),
        (headers(if_none_match=f'W/"{etag}"'), False),
        (headers(if_modified_since="Tue, 01 Jan 2200 00:00:00 GMT"), False),
        (headers(if_modified_since="whenever"), True),
    ]:
        found = await bucket.get("k", {"onlyIf": conditions})
        assert isinstance(found, R2ObjectBody) == holds, conditions
        assert isinstance(found, R2Object)


@quick_in_both
async def test_conditional_put_is_atomic(bucket: R2Bucket) -> None:
    assert await bucket.put("k", "first", onlyIf={"etagMatches": "*"}) is None
    results = await asyncio.gather(
        *(bucket.put("k", f"{number}" * 70_000, onlyIf={"etagDoesNotMatch": "*"}) for number in range(8))
    )
    winners = [result for result in results if result is not None]
    assert len(winners) == 1
    assert (await bucket.head("k")).version == winners[0].version
    assert await bucket.put("k", "next", onlyIf={"etagMatches": winners[0].etag}) is not None
    assert await bucket.put("k", "late", onlyIf={"etagMatches": winners[0].etag}) is None
    assert await (await bucket.get("k")).text() == "next"


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha256", "sha384", "sha512"])
async def test_checksums(bucket: R2Bucket, algorithm: str) -> None:
    digest = hashlib.new(algorithm, b"data")
    found = await bucket.put("k", b"data", {algorithm: digest.hexdigest().upper()})
    assert found.checksums[algorithm].to_bytes() == digest.digest()
    await bucket.put("k", b"data", {algorithm: digest.digest()})
    with pytest.raises(BindingError, match=rf"The {algorithm} checksum you specified did not match.*\(10037\)"):
        await bucket.put("k", b"other" * 20_000, {algorithm: digest.digest()})
    assert await (await bucket.get("k")).text() == "data"
    with pytest.raises(BindingError, match="multiple hashing algorithms"):
        await bucket.put("k", "v", md5=b"x" * 16, sha1=b"x" * 20)


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        ("", {}, r"object name is not valid.*\(10020\)"),
        ("k" * 1025, {}, r"object name is not valid.*\(10020\)"),
        ("k", {"customMetadata": {"a": "x" * 8192}}, r"metadata size.*\(10012\)"),
        ("k", {"customMetadata": {"a": 1}}, "Expected `str`"),
        ("k", {"storageClass": "Cold"}, "InfrequentAccess"),
        ("k", {"md5": "abc"}, "md5 has 32 digits"),
    ],
)
async def test_limits(bucket: R2Bucket, key: str, options: Any, message: str) -> None:
    with pytest.raises(BindingError, match=message):
        await bucket.put(key, "v", options)
    assert (await bucket.list()).objects == []


@in_files
async def test_replacing_and_deleting_remove_the_files(bucket: R2Bucket, tmp_path: Path) -> None:
    for number in range(3):
        await bucket.put("k", LONG + bytes([number]))
    await bucket.put("other", LONG)
    assert len(files_in(tmp_path)) == 2
    await bucket.put("k", "short")
    assert len(files_in(tmp_path)) == 1
    await bucket.delete(["k", "other", "missing"])
    assert files_in(tmp_path) == []
    assert (await bucket.list()).objects == []
    await bucket.delete("k")


async def test_what_is_being_read_is_read_to_its_end_though_it_is_replaced(bucket: R2Bucket) -> None:
    await bucket.put("k", LONG)
    found = await bucket.get("k")
    await bucket.put("k", b"y" * len(LONG))
    assert await found.bytes() == LONG


async def test_an_upload_that_breaks_off_leaves_nothing(bucket: R2Bucket, tmp_path: Path) -> None:
    async def broken() -> Any:
        yield LONG
        raise OSError("the client went away")

    with pytest.raises(OSError, match="went away"):
        await bucket.put("k", broken())
    assert await bucket.head("k") is None
    assert files_in(tmp_path) == []


@quick_in_both
async def test_multipart(bucket: R2Bucket, place: str, tmp_path: Path) -> None:
    upload = await bucket.createMultipartUpload("big", customMetadata={"a": "b"})
    first, second, last = b"1" * MIN_PART_BYTES, os.urandom(MIN_PART_BYTES), b"end"
    parts = [
        await upload.uploadPart(3, last),
        await upload.uploadPart(1, in_pieces(b"replaced" * 10_000)),
        await upload.uploadPart(2, in_pieces(second)),
    ]
    assert await bucket.head("big") is None
    again = bucket.resumeMultipartUpload("big", upload.uploadId)
    parts[1] = await again.uploadPart(1, first)
    with pytest.raises(BindingError, match=r"could not be found: part 4. \(10025\)"):
        await again.complete([*parts, {"partNumber": 4, "etag": "x"}])
    done = await again.complete(parts)
    whole = first + second + last
    digests = b"".join(hashlib.md5(part).digest() for part in (first, second, last))
    assert (done.size, done.etag) == (len(whole), f"{hashlib.md5(digests).hexdigest()}-3")
    assert done.customMetadata.a == "b"
    assert await (await bucket.get("big")).bytes() == whole
    assert (
        await (await bucket.get("big", range={"offset": MIN_PART_BYTES - 5, "length": 10})).bytes()
        == (whole[MIN_PART_BYTES - 5 : MIN_PART_BYTES + 5])
    )
    assert await (await bucket.get("big", range={"suffix": 4})).bytes() == whole[-4:]
    if place == "files":  # moto fails at parts that come after the end
        with pytest.raises(BindingError, match=r"does not exist. \(10024\)"):
            await again.uploadPart(4, "late")
    await bucket.delete("big")
    assert files_in(tmp_path) == []


async def test_multipart_that_is_wrong_or_given_up(bucket: R2Bucket, place: str, tmp_path: Path) -> None:
    upload = await bucket.createMultipartUpload("big")
    short = [await upload.uploadPart(number, b"x" * (100 + number)) for number in (1, 2)]
    with pytest.raises(BindingError, match=r"smaller than the minimum.*\(10011\)"):
        await upload.complete(short)
    with pytest.raises(BindingError, match="between 1 and 10000"):
        await upload.uploadPart(0, b"x")
    if place == "files":  # moto does not look at the key
        with pytest.raises(BindingError, match=r"\(10024\)"):
            await bucket.resumeMultipartUpload("other", upload.uploadId).uploadPart(1, b"x")
    with pytest.raises(BindingError, match=r"\(10025\)"):
        await upload.complete([])
    await upload.abort()
    assert files_in(tmp_path) == []
    with pytest.raises(BindingError, match=r"\(10024\)"):
        await upload.complete(short)


async def test_list_with_prefix_delimiter_and_pages(bucket: R2Bucket) -> None:
    for key in ("a/1", "a/2", "a/b/1", "c", "c/1", "d/1", "e"):
        await bucket.put(key, key, customMetadata={"key": key})
    plain = await bucket.list(include=["customMetadata"])
    assert [each.key for each in plain.objects] == ["a/1", "a/2", "a/b/1", "c", "c/1", "d/1", "e"]
    assert plain.objects[0].customMetadata == {"key": "a/1"}
    assert (plain.truncated, plain.delimitedPrefixes) == (False, [])
    grouped = await bucket.list(delimiter="/")
    assert ([each.key for each in grouped.objects], grouped.delimitedPrefixes) == (["c", "e"], ["a/", "c/", "d/"])
    assert grouped.objects[0].customMetadata == {}
    inner = await bucket.list(prefix="a/", delimiter="/")
    assert ([each.key for each in inner.objects], inner.delimitedPrefixes) == (["a/1", "a/2"], ["a/b/"])
    assert [each.key for each in (await bucket.list(startAfter="c")).objects] == ["c/1", "d/1", "e"]
    for options in ({}, {"delimiter": "/"}, {"prefix": "a/"}, {"prefix": "a/", "delimiter": "/"}):
        whole = await bucket.list(options)
        for limit in (1, 2, 3):
            found, prefixes, cursor = [], [], None
            while True:
                page = await bucket.list({**options, "limit": limit, "cursor": cursor})
                assert 0 < len(page.objects) + len(page.delimitedPrefixes) <= limit
                found += [each.key for each in page.objects]
                prefixes += page.delimitedPrefixes
                if not page.truncated:
                    break
                cursor = page.cursor
            assert found == [each.key for each in whole.objects], (options, limit)
            assert prefixes == whole.delimitedPrefixes, (options, limit)
    with pytest.raises(BindingError, match=r"\(10022\)"):
        await bucket.list(limit=1001)
    with pytest.raises(BindingError, match="cursor is invalid"):
        await bucket.list(cursor="!")


@in_files
async def test_what_a_crash_leaves_is_swept(open_r2: Any, tmp_path: Path, clock: Any) -> None:
    bucket = await open_r2()
    await bucket.put("k", LONG)
    upload = await bucket.createMultipartUpload("never completed")
    await upload.uploadPart(1, b"x")
    (folder,) = {path.parent.parent for path in files_in(tmp_path)}
    orphan, young = folder / "ab" / ("ab" + "0" * 30), folder / "ab" / ("ab" + "1" * 30)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"orphan")
    young.write_bytes(b"may be being written")
    for path in files_in(tmp_path):
        if path != young:
            os.utime(path, (time.time() - SWEEP_AFTER_S - 60,) * 2)
    clock.now_s += UPLOAD_EXPIRES_S + 1
    again = await open_r2(again=True)
    assert await (await again.get("k")).bytes() == LONG
    await asyncio.gather(*again._calls.provider._sweeps.values())
    assert not orphan.exists()
    assert young.exists()
    assert len(files_in(tmp_path)) == 2
    with pytest.raises(BindingError, match=r"\(10024\)"):
        await again.resumeMultipartUpload(upload.key, upload.uploadId).uploadPart(2, b"x")


@in_files
async def test_a_damaged_file_is_an_error_and_no_wrong_data(bucket: R2Bucket, tmp_path: Path) -> None:
    await bucket.put("k", LONG)
    (file,) = files_in(tmp_path)
    os.truncate(file, 10)
    with pytest.raises(Exception, match="shorter than it should be"):
        await (await bucket.get("k")).bytes()


@quick_in_both
async def test_accounts_and_buckets_are_apart(open_r2: Any) -> None:
    await (await open_r2("a")).put("x/y", LONG)
    assert await (await open_r2("b")).head("x/y") is None
    assert await (await open_r2("a", "other")).head("x/y") is None
    assert (await (await open_r2("a", "other")).list()).objects == []
    assert await (await (await open_r2("a")).get("x/y")).bytes() == LONG


@in_files
async def test_keys_are_no_paths(open_r2: Any, tmp_path: Path) -> None:
    await (await open_r2("a")).put("../../x", LONG)
    assert await (await open_r2("b")).head("../../x") is None
    assert await (await (await open_r2("a")).get("../../x")).bytes() == LONG
    assert {path.name for path in tmp_path.iterdir()} == {"r2"}


@in_files
async def test_no_disk_left(bucket: R2Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    await bucket.put("k", "v")
    monkeypatch.setattr("edge.bindings.storage.MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(BindingError, match="disk of the node has less than") as refused:
        await bucket.put("k", "w")
    assert refused.value.status == 503
    assert await (await bucket.get("k")).text() == "v"


@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    offset=st.integers(0, 30),
    length=st.integers(0, 30),
)
def test_cutting_ranges_out_of_files(sizes: list[int], offset: int, length: int) -> None:
    letters = iter("abcdefghijklmnopqrstuvwxyz0123456789")
    files = {str(number): "".join(next(letters) for _ in range(size)) for number, size in enumerate(sizes)}
    cut = r2_files._cut([(name, len(text)) for name, text in files.items()], offset, length)
    assert (
        "".join(files[name][start : start + num] for name, start, num in cut)
        == ("".join(files.values())[offset : offset + length])
    )


_KEYS = st.sampled_from(["a", "b", "a/b", "é"])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _KEYS, st.sampled_from([b"", b"short", LONG])),
        st.tuples(st.just("delete"), _KEYS),
        st.tuples(st.just("reopen")),
    ),
    max_size=10,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
async def test_it_is_a_dict_that_survives(open_r2: Any, place: str, tmp_path: Path, steps: Any) -> None:
    bucket = await open_r2()
    await bucket.delete([each.key for each in (await bucket.list()).objects])
    model: dict[str, bytes] = {}
    for step in steps:
        match step:
            case ("put", key, data):
                await bucket.put(key, data)
                model[key] = data
            case ("delete", key):
                await bucket.delete(key)
                model.pop(key, None)
            case ("reopen",):
                bucket = await open_r2(again=True)
    assert [each.key for each in (await bucket.list()).objects] == sorted(model, key=str.encode)
    for key, data in model.items():
        assert await (await bucket.get(key)).bytes() == data
    if place == "files":
        assert len(files_in(tmp_path)) == list(model.values()).count(LONG)
