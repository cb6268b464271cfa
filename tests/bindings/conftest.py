"""Real providers on a state folder, and SDK objects that call them without a process in between."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import msgspec
import pytest

from edge.bindings.base import Provider
from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.r2 import R2
from edge.config import S3Config
from edge.errors import EdgeError
from edge.isolates.base import Binding, Bundle, JsonAnswer
from workers._wire import ResultHead
from workers.bindings import BindingError
from workers.bindings.d1 import D1Database
from workers.bindings.kv import KvNamespace
from workers.bindings.r2 import R2Bucket
from workers.streams import ReadableStream
from workers.values import plain

OTHER_STORE = os.environ.get("EDGE_TEST_S3", "")
CALLER = Bundle("worker", "v1", "/", "main.py")


class LocalCalls:
    """What `workers.bindings.BindingCalls` is in an isolate: arguments and results go through msgpack here, too."""

    def __init__(self, provider: Provider, binding: Binding, account: str = "dev") -> None:
        self.provider = provider
        self._binding = binding
        self._caller = msgspec.structs.replace(CALLER, account=account)

    async def call(self, method: str, *args: Any, body: Any = None) -> Any:
        answer = await self._answer(method, args, body)
        assert isinstance(answer, JsonAnswer)
        return _through_msgpack(answer.value)

    async def stream(self, method: str, *args: Any, body: Any = None) -> tuple[ResultHead, ReadableStream]:
        answer = await self._answer(method, args, body)
        assert not isinstance(answer, JsonAnswer)
        return ResultHead(1, answer.status, answer.headers, True, "", answer.info), ReadableStream(answer.body)

    async def _answer(self, method: str, args: tuple[Any, ...], body: Any) -> Any:
        sent = _through_msgpack([plain(arg, "an argument") for arg in args])
        chunks = None if body is None else _chunks(body)
        try:
            return await self.provider.call(self._caller, self._binding, method, sent, chunks)
        except EdgeError as error:
            raise BindingError(error.message, name=error.name, code=error.code, status=error.status) from error


def _through_msgpack(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


async def _chunks(body: Any) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]
        return
    async for chunk in body:
        yield bytes(chunk)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def open_kv(tmp_path: Path, clock: Clock) -> AsyncIterator[Callable[..., KvNamespace]]:
    """Opens a namespace; each call does so anew, as after a restart, unless `again` is False."""
    async with _opened(lambda: Kv(tmp_path, clock), KvNamespace, "kv") as open_one:
        yield open_one


@pytest.fixture
def make_r2(tmp_path: Path, clock: Clock) -> Callable[[], R2]:
    return lambda: R2(tmp_path, clock)


@pytest.fixture
async def open_r2(make_r2: Callable[[], R2]) -> AsyncIterator[Callable[..., R2Bucket]]:
    async with _opened(make_r2, R2Bucket, "r2") as open_one:
        yield open_one


@pytest.fixture
async def open_d1(tmp_path: Path) -> AsyncIterator[Callable[..., D1Database]]:
    async with _opened(lambda: D1(tmp_path, timeout_s=5), D1Database, "d1") as open_one:
        yield open_one


class _opened:
    def __init__(self, make: Callable[[], Provider], cls: type, kind: str) -> None:
        self._make = make
        self._cls = cls
        self._kind = kind
        self._provider: Provider | None = None

    async def __aenter__(self) -> Callable[..., Any]:
        return self._open

    async def __aexit__(self, *_: object) -> None:
        if self._provider is not None:
            await self._provider.close()

    async def _open(self, id: str = "ID", account: str = "dev", again: bool = False) -> Any:
        if again or self._provider is None:
            await self.__aexit__()
            self._provider = self._make()
        return self._cls("NAME", {}, LocalCalls(self._provider, Binding(self._kind, {"id": id}), account))


class S3Server:
    """moto's S3, as a process of its own, and a client of it for tests to look behind the bindings.

    A store at the address in $EDGE_TEST_S3 takes its place, with the credentials in AWS's variables.
    """

    def __init__(self) -> None:
        command = ["true"] if OTHER_STORE else [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self.url = OTHER_STORE or f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.client = botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=os.environ["AWS_ACCESS_KEY_ID"] if OTHER_STORE else "test",
            aws_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"] if OTHER_STORE else "test",
        )

    def new_bucket(self) -> str:
        name = f"bucket-{secrets.token_hex(8)}"
        self.client.create_bucket(Bucket=name)
        return name

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of the environment alone, which the imitation does not look at."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if not OTHER_STORE:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-access-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> str:
    """A new bucket in S3."""
    return s3_server.new_bucket()


@pytest.fixture
def make_r2_in_s3(
    s3_server: S3Server, s3_bucket: str, credentials: None, tmp_path: Path, clock: Clock
) -> Callable[[], R2]:
    """A provider whose buckets are in S3: `ID`, and `a` and `b`, each in one bucket for the accounts dev and other."""
    places = {"ID": s3_bucket, "a": s3_bucket, "b": s3_server.new_bucket()}

    def make() -> R2:
        provider = R2(tmp_path, clock)
        for account in ("dev", "other"):
            provider.use_s3(
                (account, CALLER.worker),
                {id: S3Config(bucket=bucket, endpoint=s3_server.url) for id, bucket in places.items()},
            )
        return provider

    return make
