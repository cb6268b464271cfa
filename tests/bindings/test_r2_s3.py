"""What R2 buckets in S3 have of their own; that they behave like those in files is in `test_r2.py`."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click.testing
import httpx
import msgspec
import pytest

from edge.bindings.r2 import R2
from edge.cli import cli
from edge.config import S3Config
from edge.config.file import load
from edge.errors import ConfigError, InvalidInput
from edge.isolates.base import Binding, Bundle, InboundRequest, JsonAnswer
from edge.isolates.dispatch import Isolates
from edge.node.hub import Hub
from workers.bindings import BindingError
from workers.bindings.r2 import R2Bucket

pytestmark = pytest.mark.usefixtures("credentials")

UNUSABLE = "cannot be used: the node's log has the reason"


@pytest.fixture
def make_r2(make_r2_in_s3: Callable[[], R2]) -> Callable[[], R2]:
    return make_r2_in_s3


@pytest.fixture
async def bucket(open_r2: Any) -> R2Bucket:
    opened: R2Bucket = await open_r2()
    return opened


@pytest.fixture
def at(open_r2: Any) -> Callable[..., Any]:
    """Opens a bucket at another place in S3."""

    async def open_at(place: S3Config, account: str = "dev") -> R2Bucket:
        bucket: R2Bucket = await open_r2(account=account)
        calls: Any = bucket._calls
        calls.provider.use_s3((account, "worker"), {"ID": place})
        return bucket

    return open_at


async def test_metadata_comes_back_as_it_was_given(bucket: R2Bucket, s3_server: Any, s3_bucket: str) -> None:
    metadata = {
        "plain": "text, of two words",
        "Case": "x",
        "ünï": "cödé",
        "empty": "",
        "spaced": " x ",
        "edge-mine": "x",
    }
    put = await bucket.put("k", b"data", customMetadata=metadata, httpMetadata={"contentType": "text/x"})
    assert dict(put.customMetadata) == metadata
    assert dict((await bucket.get("k")).customMetadata) == metadata
    (listed,) = (await bucket.list(include=["customMetadata"])).objects
    assert dict(listed.customMetadata) == metadata
    in_s3 = s3_server.client.head_object(Bucket=s3_bucket, Key="dev/k")
    assert (in_s3["ContentType"], in_s3["Metadata"]["plain"]) == ("text/x", "text, of two words")


async def test_objects_of_other_programs(bucket: R2Bucket, s3_server: Any, s3_bucket: str) -> None:
    s3_server.client.put_object(
        Bucket=s3_bucket,
        Key="dev/theirs",
        Body=b"data",
        Metadata={"who": "them", "edge-more": "no base64"},
        CacheControl="no-store",
        Expires=datetime(2030, 1, 2, tzinfo=UTC),
        StorageClass="STANDARD_IA",
    )
    found = await bucket.get("theirs")
    assert (await found.text(), found.storageClass, dict(found.customMetadata)) == (
        "data",
        "InfrequentAccess",
        {"who": "them"},
    )
    assert found.httpMetadata.cacheExpiry.astimezone(UTC) == datetime(2030, 1, 2, tzinfo=UTC)
    assert (found.httpMetadata.cacheControl, found.httpMetadata.get("contentType")) == ("no-store", None)


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        ("k", {"customMetadata": {"a": "x" * 1800}}, r"1801 of 1792 bytes that S3 keeps of customMetadata. \(10012\)"),
        ("k", {"customMetadata": {"a": "é" * 700}}, r"of 1792 bytes that S3 keeps of customMetadata. \(10012\)"),
        ("k", {"httpMetadata": {"contentType": "text/é"}}, "httpMetadata.contentType is a header in S3"),
        ("k", {"httpMetadata": {"contentType": "a\r\nx: y"}}, "httpMetadata.contentType is a header in S3"),
        ("../other/k", {}, r"no part between slashes may be . or .., .*\(10020\)"),
        ("a/./k", {}, r"no part between slashes may be . or .., .*\(10020\)"),
        ("k" * 1021, {}, r"with the prefix of the bucket in S3 it has 1025 bytes and may have 1024. \(10020\)"),
    ],
)
async def test_what_s3_cannot_keep(bucket: R2Bucket, key: str, options: Any, message: str) -> None:
    with pytest.raises(BindingError, match=message) as refused:
        await bucket.put(key, "v", options)
    assert refused.value.status in (400, 413)
    assert (await bucket.list()).objects == []


async def test_odd_keys(bucket: R2Bucket) -> None:
    keys = ["a b", "a+b%20c", "é/\U0001f600", "quote\"'<&>", "tab\there", "..a/b..", "?x=1#y"]
    for key in keys:
        await bucket.put(key, key)
        assert await (await bucket.get(key)).text() == key
    assert [each.key for each in (await bucket.list()).objects] == sorted(keys, key=str.encode)
    await bucket.delete([*keys, "missing"])
    assert (await bucket.list()).objects == []


async def test_where_objects_are(at: Any, s3_server: Any, s3_bucket: str) -> None:
    place = S3Config(bucket=s3_bucket, endpoint=s3_server.url)
    await (await at(place)).put("k", "v")
    await (await at(place, "other")).put("k", "v")
    await (await at(msgspec.structs.replace(place, prefix="photos/2026/"))).put("k", "v")
    await (await at(msgspec.structs.replace(place, prefix=""))).put("k", "v")
    keys = [each["Key"] for each in s3_server.client.list_objects_v2(Bucket=s3_bucket)["Contents"]]
    assert keys == ["dev/k", "k", "other/k", "photos/2026/k"]
    assert [each.key for each in (await (await at(place)).list()).objects] == ["k"]


async def test_a_bucket_that_is_not_there(at: Any, s3_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    bucket = await at(S3Config(bucket="nowhere", endpoint=s3_server.url))
    for call in (bucket.put("k", "v"), bucket.head("k"), bucket.get("k"), bucket.list()):
        caplog.clear()
        with pytest.raises(BindingError, match=UNUSABLE) as refused:
            await call
        assert refused.value.status == 503
        assert "there is no S3 bucket 'nowhere': create it, or correct `s3` in [[r2_buckets]]" in caplog.text


async def test_credentials_that_s3_refuses(
    bucket: R2Bucket, s3_server: Any, s3_bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    denied = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{s3_bucket}/*"}
    policy = msgspec.json.encode({"Version": "2012-10-17", "Statement": [denied]}).decode()
    s3_server.client.put_bucket_policy(Bucket=s3_bucket, Policy=policy)
    with pytest.raises(BindingError, match=UNUSABLE):
        await bucket.put("k", "v")
    assert "S3 refuses the credentials (403): check AWS_ACCESS_KEY_ID" in caplog.text
    assert "a-secret-key" not in caplog.text


async def test_no_credentials(
    bucket: R2Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(BindingError, match=UNUSABLE):
        await bucket.put("k", "v")
    assert "there are no credentials for S3: set AWS_ACCESS_KEY_ID" in caplog.text


@pytest.mark.slow
async def test_a_store_that_is_down(at: Any, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        bucket = await at(S3Config(bucket="bucket", endpoint=f"http://127.0.0.1:{unused.getsockname()[1]}"))
        with pytest.raises(BindingError, match=UNUSABLE) as refused:
            await bucket.get("k")
    assert refused.value.status == 503
    assert "Could not connect to the endpoint URL" in caplog.text


async def test_a_store_that_ignores_conditions(at: Any, s3_server: Any) -> None:
    s3_server.client.create_bucket(Bucket="ignores-conditions")
    bucket = await at(S3Config(bucket="ignores-conditions", endpoint=s3_server.url))
    for _ in range(2):
        with pytest.raises(BindingError, match="ignores If-Match and If-None-Match") as refused:
            await bucket.put("k", "v", onlyIf={"etagDoesNotMatch": "*"})
        assert refused.value.status == 400
    assert (await bucket.list()).objects == []
    await bucket.put("k", "v")
    assert await (await bucket.get("k", onlyIf={"etagMatches": "*"})).text() == "v"


async def test_a_conditional_write_whose_answer_is_lost_has_happened(bucket: R2Bucket) -> None:
    first = await bucket.put("loses-an-answer", "mine", onlyIf={"etagDoesNotMatch": "*"})
    assert first is not None
    assert await bucket.put("loses-an-answer", "late", onlyIf={"etagDoesNotMatch": "*"}) is None
    assert await (await bucket.get("loses-an-answer")).text() == "mine"


@pytest.mark.slow
async def test_etags_and_conditions_by_time(bucket: R2Bucket) -> None:
    put = await bucket.put("k", "v")
    assert await bucket.put("k", "w", onlyIf={"uploadedAfter": put.uploaded}) is None
    assert await bucket.put("k", "w", onlyIf={"etagMatches": ["other", put.etag]}) is not None
    assert await bucket.put("k", "x", onlyIf={"etagDoesNotMatch": put.etag}) is not None
    assert await (await bucket.get("k")).text() == "x"


@pytest.mark.slow
async def test_lists_that_include_metadata_are_shorter(
    bucket: R2Bucket, s3_server: Any, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.bindings.r2.s3.MAX_DESCRIBED_PER_LIST", 2)
    for number in range(3):
        s3_server.client.put_object(Bucket=s3_bucket, Key=f"dev/{number}", Body=b"", Metadata={"a": f"{number}"})
    first = await bucket.list(include=["customMetadata"])
    assert ([each.customMetadata.a for each in first.objects], first.truncated) == (["0", "1"], True)
    rest = await bucket.list(include=["customMetadata"], cursor=first.cursor)
    assert ([each.customMetadata.a for each in rest.objects], rest.truncated) == (["2"], False)
    assert len((await bucket.list()).objects) == 3


@pytest.mark.slow
async def test_a_handler_in_a_process(make_r2: Callable[[], R2], tmp_path: Path) -> None:
    """It streams both ways, and the node's credentials and where the objects are stay with the node."""
    source = """
        import os
        from workers import Response, WorkerEntrypoint

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                await self.env.BUCKET.put("long", request.body)
                found = await self.env.BUCKET.get("long")
                known = f"{dict(os.environ)} {vars(self.env.BUCKET)}"
                return Response(found.body, headers={"known": known})
    """
    (tmp_path / "entry.py").write_text(textwrap.dedent(source))
    hub = Hub(NoAi(), {"r2": make_r2()})
    isolates = Isolates(hub, lambda *_: None)
    await isolates.start()
    try:
        bindings = {"BUCKET": Binding("r2", {"id": "ID"})}
        bundle = Bundle("worker", "v1", str(tmp_path), "entry.py", bindings=bindings)
        await isolates.deploy(bundle)

        async def body() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100_000

        response = await isolates.fetch(bundle.key, InboundRequest("PUT", "http://test/", [], body()))
        assert response.body is not None
        assert b"".join([chunk async for chunk in response.body]) == b"x" * 2_000_000
    finally:
        await isolates.close()
        await hub.close()
    known = dict(response.headers)["known"]
    assert "PATH" in known
    assert not [each for each in ("AWS_", "an-access-key", "a-secret-key", "127.0.0.1") if each in known]


class NoAi:
    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer:
        raise InvalidInput("no models here")


def test_the_library_is_loaded_only_when_it_is_needed(tmp_path: Path) -> None:
    program = "import sys; import edge.bindings.r2; sys.exit('botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


async def test_the_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edge.bindings.r2.s3", raising=False)
    monkeypatch.delattr("edge.bindings.r2.s3", raising=False)
    monkeypatch.setitem(sys.modules, "botocore", None)
    provider = R2(tmp_path)
    provider.use_s3(("dev", "worker"), {})
    with pytest.raises(ConfigError, match=r"pip install 'edge-workers-ai\[s3\]'"):
        provider.use_s3(("dev", "worker"), {"ID": S3Config(bucket="bucket")})
    await provider.close()


CONFIG = """
name = "shop"
main = "main.py"
account_id = "mine"
[[r2_buckets]]
binding = "PHOTOS"
bucket_name = "photos"
s3 = {{ bucket = "{bucket}", endpoint = "{endpoint}", region = "eu-central-1", prefix = {prefix} }}
"""


@pytest.mark.parametrize(
    ("endpoint", "prefix", "message"),
    [
        ("http://user:secret@host", '"a/"', "r2_buckets[0].s3.endpoint: expected an address"),
        ("ftp://host", '"a/"', "r2_buckets[0].s3.endpoint: expected an address"),
        ("http://host", '"a"', "r2_buckets[0].s3.prefix: expected what keys begin with, which ends in /"),
        ("http://host", '"../"', "r2_buckets[0].s3.prefix: expected what keys begin with, which ends in /"),
        ("http://host", '"a/../b/"', "r2_buckets[0].s3.prefix: expected what keys begin with, which ends in /"),
    ],
)
def test_configurations_that_are_wrong(tmp_path: Path, endpoint: str, prefix: str, message: str) -> None:
    (tmp_path / "edge.toml").write_text(CONFIG.format(bucket="bucket", endpoint=endpoint, prefix=prefix))
    (tmp_path / "main.py").write_text("")
    with pytest.raises(ConfigError) as wrong:
        load(None, tmp_path)
    assert message in str(wrong.value)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any, s3_bucket: str) -> None:
    (tmp_path / "edge.toml").write_text(CONFIG.format(bucket=s3_bucket, endpoint=s3_server.url, prefix='"pics/"'))
    (tmp_path / "main.py").write_text("")
    (tmp_path / "cat.png").write_bytes(b"cat" * 50_000)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(cli, ["r2", "object", *arguments])
        assert result.exit_code == 0, result.output
        return result

    run("put", "photos/cat.png", "--file", "cat.png")
    in_s3 = s3_server.client.get_object(Bucket=s3_bucket, Key="pics/cat.png")
    assert (in_s3["ContentType"], in_s3["Body"].read()) == ("image/png", b"cat" * 50_000)
    assert run("get", "photos/cat.png", "--pipe").stdout_bytes == b"cat" * 50_000
    assert "cat.png" in run("list").stdout
    run("delete", "photos/cat.png")
    assert "Contents" not in s3_server.client.list_objects_v2(Bucket=s3_bucket)


@pytest.mark.slow
def test_edge_dev_moves_a_bucket_when_its_configuration_is_saved(
    edge_dev: Any, tmp_path: Path, s3_server: Any, s3_bucket: str
) -> None:
    (tmp_path / "main.py").write_text(
        "from workers import Response, WorkerEntrypoint\n"
        "class Default(WorkerEntrypoint):\n"
        "    async def fetch(self, request):\n"
        "        await self.env.PHOTOS.put('k', 'v')\n"
        "        return Response('stored')\n"
    )

    def keys() -> list[str]:
        return [each["Key"] for each in s3_server.client.list_objects_v2(Bucket=s3_bucket).get("Contents", ())]

    config = tmp_path / "edge.toml"
    config.write_text(CONFIG.format(bucket=s3_bucket, endpoint=s3_server.url, prefix='"one/"'))
    url, process = edge_dev(tmp_path)
    assert "env.PHOTOS  (photos, in S3)" in process.output
    assert httpx.get(url).text == "stored"
    assert keys() == ["one/k"]
    config.write_text(CONFIG.format(bucket=s3_bucket, endpoint=s3_server.url, prefix='"two/"'))
    give_up_at = time.monotonic() + 60
    while "two/k" not in keys():
        assert time.monotonic() < give_up_at, process.output
        assert httpx.get(url).text == "stored"
    assert not list((tmp_path / ".edge").glob("r2/*/*"))
