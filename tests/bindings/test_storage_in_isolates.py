"""KV, D1, R2 and the like as a handler in a real process has them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edge.bindings.d1 import D1
from edge.bindings.kv import Kv
from edge.bindings.r2 import R2
from edge.bindings.ratelimit import RateLimits
from edge.errors import InvalidInput
from edge.isolates.base import Binding, Bundle, InboundRequest, JsonAnswer
from edge.isolates.dispatch import Isolates
from edge.node.hub import Hub

BINDINGS = {
    "KV": Binding("kv", {"id": "kv"}),
    "DB": Binding("d1", {"id": "db"}),
    "BUCKET": Binding("r2", {"id": "bucket"}),
    "LIMIT": Binding("ratelimit", {"id": "1", "limit": 2, "period": 60}),
    "VERSION": Binding("version_metadata", {"id": "v1", "tag": "", "timestamp": "2026-11-30T00:00:00Z"}),
}

Get = Any


class NoAi:
    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer:
        raise InvalidInput("no models here")


@pytest.fixture
async def respond(tmp_path: Path) -> AsyncIterator[Get]:
    """Run the body of a `fetch(self, request, env)` in a process, and give the text of its response."""
    state_dir = tmp_path / "state"
    hub = Hub(NoAi(), {"kv": Kv(state_dir), "d1": D1(state_dir), "r2": R2(state_dir), "ratelimit": RateLimits()})
    isolates = Isolates(hub, lambda *_: None)
    await isolates.start()

    async def respond(source: str, body: Any = None) -> str:
        head = "import json\nfrom workers import Response, WorkerEntrypoint\n\nclass Default(WorkerEntrypoint):\n"
        method = (
            f"async def fetch(self, request):\n    env = self.env\n{textwrap.indent(textwrap.dedent(source), '    ')}"
        )
        (tmp_path / "entry.py").write_text(head + textwrap.indent(method, "    "))
        bundle = Bundle("test", "v1", str(tmp_path), "entry.py", bindings=BINDINGS)
        await isolates.deploy(bundle)
        request = InboundRequest("GET" if body is None else "PUT", "http://test/", [], body)
        response = await isolates.fetch(bundle.key, request)
        assert response.body is not None
        return b"".join([chunk async for chunk in response.body]).decode()

    try:
        yield respond
    finally:
        await isolates.close()
        await hub.close()


async def test_kv(respond: Get) -> None:
    text = await respond(
        """
        await env.KV.put("bar", "baz", metadata={"n": 1})
        await env.KV.put("long", "x" * 300_000)
        found = await env.KV.getWithMetadata("bar")
        listed = await env.KV.list(prefix="b")
        errors = []
        for key, options in (("k" * 600, {}), ("k", {"expirationTtl": 1})):
            try:
                await env.KV.put(key, "v", options)
            except Exception as error:
                errors.append(str(error))
        return Response.json([
            await env.KV.get("bar"), await env.KV.get("none"), found, len(await env.KV.get("long")),
            [key.name for key in listed["keys"]], errors,
        ])
        """
    )
    found = {"value": "baz", "metadata": {"n": 1}, "cacheStatus": None}
    errors = [
        "KV PUT failed: 414 UTF-8 encoded length of 600 exceeds key length limit of 512.",
        "KV PUT failed: 400 Invalid expiration_ttl of 1. Expiration TTL must be at least 60.",
    ]
    assert json.loads(text) == ["baz", None, found, 300_000, ["bar"], errors]


async def test_d1(respond: Get) -> None:
    text = await respond(
        """
        await env.DB.exec("CREATE TABLE quotes (id INTEGER PRIMARY KEY, quote TEXT, data BLOB)")
        insert = env.DB.prepare("INSERT INTO quotes (quote, data) VALUES (?, ?)")
        await env.DB.batch([insert.bind("one", b"\\x01\\x02"), insert.bind("two", None)])
        results = await env.DB.prepare("SELECT quote, data FROM quotes ORDER BY id").all()
        try:
            await env.DB.prepare("SELECT * FROM nope").run()
        except Exception as error:
            message = str(error)
        return Response.json([results.results, results.success, results.results[0].quote, message])
        """
    )
    rows = [{"quote": "one", "data": [1, 2]}, {"quote": "two", "data": None}]
    assert json.loads(text) == [rows, True, "one", "D1_ERROR: no such table: nope: SQLITE_ERROR"]


async def test_r2_from_the_request_to_the_response(respond: Get) -> None:
    async def body() -> AsyncIterator[bytes]:
        for number in range(100):
            yield f"{number:02}".encode() * 15_000

    put = await respond(
        """
        found = await env.BUCKET.put("upload", request.body, httpMetadata={"contentType": "text/plain"})
        return Response.json([found.size, found.etag])
        """,
        body(),
    )
    whole = "".join(f"{number:02}" * 15_000 for number in range(100))
    assert json.loads(put)[0] == len(whole)
    got = await respond(
        """
        found = await env.BUCKET.get("upload")
        headers = {"etag": found.httpEtag}
        found.writeHttpMetadata(headers)
        return Response(found.body, headers=headers)
        """
    )
    assert got == whole
    assert (
        await respond(
            'return Response(await (await env.BUCKET.get("upload", range={"offset": 2, "length": 3})).text())'
        )
        == (whole[2:5])
    )


async def test_rate_limit_and_version(respond: Get) -> None:
    text = await respond(
        """
        outcomes = [(await env.LIMIT.limit({"key": "me"})).success for _ in range(3)]
        return Response.json([outcomes, env.VERSION.id, env.VERSION.timestamp])
        """
    )
    assert json.loads(text) == [[True, True, False], "v1", "2026-11-30T00:00:00Z"]
