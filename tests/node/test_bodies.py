"""Bodies over a real socket: JSON, raw bytes and forms, and what none of them may do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles import MODEL, ScriptedPool, answer, make_gate
from local_server import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from edge.ai import batch_disk
from edge.ai.inputs import Binary
from edge.errors import EdgeError
from edge.node.api import routes
from edge.node.api.bodies import Bodies
from edge.node.api.forms import MAX_FIELDS_BYTES, MAX_PARTS

BASE = "/client/v4/accounts/dev/ai"
AUTH = {"authorization": "Bearer dev"}
FORM = {"content-type": "multipart/form-data; boundary=xyz"}


def shown(value: Any) -> Any:
    if isinstance(value, Binary):
        return [value.content_type, value.data.decode()]
    return {key: shown(each) for key, each in value.items()} if isinstance(value, dict) else value


class Echo:
    """Says what `Bodies` has read, or why it has not."""

    def __init__(self, folder: Path) -> None:
        self.bodies = Bodies()
        self.folder = folder
        self.app = Starlette(
            routes=[
                Route("/inputs", self.inputs, methods=["POST"]),
                Route("/small", self.small, methods=["POST"]),
                Route("/disk", self.disk, methods=["POST"]),
            ]
        )

    async def inputs(self, request: Request) -> JSONResponse:
        return await self.told(self.bodies.inputs_of(request), shown)

    async def small(self, request: Request) -> JSONResponse:
        return await self.told(self.bodies.form_of(request, max_bytes=1000), lambda form: form.fields)

    async def disk(self, request: Request) -> JSONResponse:
        reading = self.bodies.form_of(request, max_bytes=1 << 30, folder=self.folder)
        return await self.told(
            reading, lambda form: [[f.name, f.filename, f.path.stat().st_size, len(f.data)] for f in form.files]
        )

    async def told(self, reading: Any, what: Any) -> JSONResponse:
        try:
            async with reading as value:
                return JSONResponse(what(value))
        except EdgeError as error:
            return JSONResponse([error.code, error.message], error.status)


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncIterator[tuple[Echo, httpx.AsyncClient]]:
    echo = Echo(tmp_path)
    async with serving(echo.app) as url, httpx.AsyncClient(base_url=url) as client:
        yield echo, client


async def test_what_a_body_is_taken_for(echo: tuple[Echo, httpx.AsyncClient]) -> None:
    server, client = echo
    for content_type, kind in (
        ("application/json", "json"),
        ("text/plain;charset=UTF-8", "json"),
        ("application/x-www-form-urlencoded", "json"),
        ("audio/wav", "bytes"),
        ("IMAGE/png; x=y", "bytes"),
        ("application/octet-stream", "bytes"),
    ):
        response = await client.post("/inputs", content=b'{"a": 1}', headers={"content-type": content_type})
        assert response.json() == ({"a": 1} if kind == "json" else [content_type, '{"a": 1}'])
    response = await client.post("/inputs", data={"prompt": "hi ö"}, files={"image": ("a.png", b"123", "image/png")})
    assert response.json() == {"prompt": "hi ö", "image": ["image/png", "123"]}
    assert server.bodies.num_bytes == 0


async def test_a_compressed_body_is_refused(echo: tuple[Echo, httpx.AsyncClient]) -> None:
    _, client = echo
    response = await client.post("/inputs", content=b"x", headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "without compression" in response.json()[1]
    assert (await client.post("/inputs", content=b"{}", headers={"content-encoding": "identity"})).json() == {}


def part(disposition: str, content: str = "x", headers: str = "") -> str:
    return f"--xyz\r\nContent-Disposition: form-data; {disposition}\r\n{headers}\r\n{content}\r\n"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("", 400, "cut short"),
        (part('name="a"'), 400, "cut short"),
        (part('name="a"', "\r\n--xyzz" * 20_000), 400, "choose one that is not in the files"),
        ("--other\r\n", 400, "no form with the boundary"),
        (part("") + "--xyz--\r\n", 400, "has no name"),
        (part('name="a"', headers="X: " + "y" * 9000 + "\r\n") + "--xyz--\r\n", 400, "no form"),
        (part('name="a"', headers="X: y\r\n" * 20) + "--xyz--\r\n", 400, "no form"),
        (part('name="a"') * (MAX_PARTS + 1) + "--xyz--\r\n", 413, "more than 100 parts"),
        (part('name="a"', "x" * (MAX_FIELDS_BYTES + 1)) + "--xyz--\r\n", 413, "over 1048576 bytes"),
    ],
)
async def test_bad_forms(echo: tuple[Echo, httpx.AsyncClient], body: str, status: int, reason: str) -> None:
    server, client = echo
    response = await client.post("/inputs", content=body.encode(), headers=FORM)
    assert response.status_code == status, response.text
    assert reason in response.json()[1]
    assert server.bodies.num_bytes == 0


@pytest.mark.parametrize(
    ("content_type", "reason"),
    [
        ("multipart/form-data", "names no boundary"),
        ("multipart/form-data; boundary=" + "x" * 5000, "cannot be used"),
        ("text/plain", "send a form"),
    ],
)
async def test_a_form_needs_its_content_type(
    echo: tuple[Echo, httpx.AsyncClient], content_type: str, reason: str
) -> None:
    _, client = echo
    response = await client.post("/small", content=b"--x--\r\n", headers={"content-type": content_type})
    assert response.status_code in (400, 415)
    assert reason in response.json()[1]


async def test_text_that_is_none_is_refused(echo: tuple[Echo, httpx.AsyncClient]) -> None:
    _, client = echo
    body = part('name="a"').encode().replace(b"\r\nx\r\n", b"\r\n\xff\r\n") + b"--xyz--\r\n"
    response = await client.post("/small", content=body, headers=FORM)
    assert (response.status_code, response.json()[1]) == (400, "the field 'a' in the form is not UTF-8")


async def test_a_large_form_goes_to_disk_and_is_not_held(echo: tuple[Echo, httpx.AsyncClient]) -> None:
    server, client = echo
    large = b"0123456789" * 1_000_000
    response = await client.post("/disk", files={"file": ("../../x", large), "b": ("b", b"12")}, data={"a": "1"})
    assert response.json() == [["file", "../../x", 10_000_000, 0], ["b", "b", 2, 0]]
    assert server.bodies.num_bytes == 0
    assert sorted(path.name for path in server.folder.iterdir()) == ["part-2", "part-3"]
    assert (server.folder / "part-2").read_bytes() == large
    response = await client.post("/small", files={"file": ("x", large)})
    assert (response.status_code, response.json()[0]) == (413, 3006)


async def test_a_form_leaves_the_node_what_it_needs_of_the_disk(
    echo: tuple[Echo, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = echo
    monkeypatch.setattr(batch_disk, "MIN_FREE_BYTES", 1 << 60)
    response = await client.post("/disk", files={"file": ("x", b"12")})
    assert (response.status_code, list(server.folder.iterdir())) == (507, [])
    assert "uploads and batches may not use: free some space" in response.json()[1]
    assert (await client.post("/inputs", files={"file": ("x", b"12")})).status_code == 200  # what is held in memory


# -- ai/run ------------------------------------------------------------------------------------------------


@pytest.fixture
async def node() -> AsyncIterator[tuple[ScriptedPool, httpx.AsyncClient]]:
    pool = ScriptedPool(*answer("1", "2"))
    app = Starlette(routes=routes(make_gate(pool), tokens={"dev": "dev"}))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, headers=AUTH) as client:
        yield pool, client


async def test_a_text_model_takes_a_form_of_text_but_no_bytes(node: tuple[ScriptedPool, httpx.AsyncClient]) -> None:
    pool, client = node
    response = await client.post(f"{BASE}/run/{MODEL}", files={"prompt": (None, "hi")})
    assert response.json()["result"]["response"] == "12"
    assert pool.requests[0].prompt == "hi"
    response = await client.post(f"{BASE}/run/{MODEL}", content=b"RIFF", headers={"content-type": "audio/wav"})
    assert (response.status_code, response.json()["errors"][0]["code"]) == (415, 1004)
    assert "its task is 'text-generation'; send a JSON object" in response.json()["errors"][0]["message"]
    response = await client.post(f"{BASE}/run/none", content=b"RIFF", headers={"content-type": "audio/wav"})
    assert response.json()["errors"][0]["code"] == 5007
    response = await client.post(f"{BASE}/run/{MODEL}", files={"prompt": ("a.txt", b"hi")})
    assert response.json()["errors"][0]["code"] == 5006


async def test_what_a_form_says_is_read_as_the_input_that_it_is(node: tuple[ScriptedPool, httpx.AsyncClient]) -> None:
    pool, client = node
    messages = [{"role": "user", "content": "5"}]
    form = {"messages": json.dumps(messages), "max_tokens": "5", "temperature": "0.5", "stream": "True", "stop": "7"}
    response = await client.post(f"{BASE}/run/{MODEL}", files={key: (None, value) for key, value in form.items()})
    assert response.headers["content-type"] == "text/event-stream"
    response = await client.post(f"{BASE}/run/{MODEL}", files={"prompt": (None, "5"), "raw": (None, "true")})
    first, second = pool.requests
    assert (first.messages, first.max_tokens, first.sampling.temperature, first.stop) == (messages, 5, 0.5, ["7"])
    assert (second.prompt, second.raw) == ("5", True)
    for wrong in ("five", "5 6", "[" * 10_000, "-1"):
        response = await client.post(f"{BASE}/run/{MODEL}", files={"prompt": (None, "5"), "max_tokens": (None, wrong)})
        assert "$.max_tokens is " in response.json()["errors"][0]["message"]


async def test_a_form_of_the_wrong_type_says_what_to_send(node: tuple[ScriptedPool, httpx.AsyncClient]) -> None:
    _, client = node
    response = await client.post(f"{BASE}/run/{MODEL}", data={"prompt": "hi"})
    error = response.json()["errors"][0]
    assert (response.status_code, error["code"]) == (400, 3003)
    assert "send JSON with the header Content-Type: application/json, or a multipart form" in error["message"]
    response = await client.post(f"{BASE}/run/{MODEL}", content=b"{", headers={"content-type": "application/json"})
    assert "x-www-form-urlencoded" not in response.text


async def test_who_would_not_wait_says_so_in_any_body(node: tuple[ScriptedPool, httpx.AsyncClient]) -> None:
    pool, client = node
    for path, given in (("completions", {"prompt": "a"}), ("responses", {"input": "a"})):
        for options in ({"rejectIfBusy": True}, {}):
            body = {"model": MODEL, **given, "options": options}
            response = await client.post(f"{BASE}/v1/{path}", json=body)
            assert response.status_code == 200, response.text
    assert [request.reject_if_busy for request in pool.requests] == [True, False, True, False]


async def test_options_come_in_the_query_or_the_body(node: tuple[ScriptedPool, httpx.AsyncClient]) -> None:
    pool, client = node
    sent = [
        ("?rejectIfBusy=true", {}),
        ("", {"options": {"rejectIfBusy": True, "tags": ["a:b", "c/d@1.2-3"], "gateway": {"id": "x"}, "other": 1}}),
        ("?rejectIfBusy=false&tags=a,b", {}),
        ("", {"rejectIfBusy": True}),
    ]
    for query, extra in sent:
        response = await client.post(f"{BASE}/run/{MODEL}{query}", json={"prompt": "hi", **extra})
        assert response.status_code == 200, response.text
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "options": {"rejectIfBusy": True}}
    assert (await client.post(f"{BASE}/v1/chat/completions", json=body)).status_code == 200
    assert [request.reject_if_busy for request in pool.requests] == [True, True, False, False, True]


@pytest.mark.parametrize(
    "options",
    [
        {"rejectIfBusy": "maybe"},
        {"rejectIfBusy": 3},
        {"tags": "a b"},
        {"tags": [1]},
        {"tags": {"a": 1}},
        {"tags": ["x" * 51]},
        {"tags": [""]},
        {"tags": list("abcdef")},
    ],
)
async def test_bad_options(node: tuple[ScriptedPool, httpx.AsyncClient], options: dict[str, Any]) -> None:
    pool, client = node
    response = await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi", "options": options})
    assert (response.status_code, response.json()["errors"][0]["code"]) == (400, 5006)
    assert next(iter(options)) in response.json()["errors"][0]["message"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "options": options}
    response = await client.post(f"{BASE}/v1/chat/completions", json=body)
    assert response.json()["error"]["param"] == f"options.{next(iter(options))}"
    assert pool.requests == []


async def test_equal_tags_are_one(node: tuple[ScriptedPool, httpx.AsyncClient]) -> None:
    _, client = node
    options = {"tags": ["a"] * 9}
    assert (await client.post(f"{BASE}/run/{MODEL}", json={"prompt": "hi", "options": options})).status_code == 200
    body = json.dumps({"prompt": "hi", "options": None}).encode()
    headers = {"x-session-affinity": "ses_1", "content-type": "application/json"}
    assert (await client.post(f"{BASE}/run/{MODEL}", content=body, headers=headers)).status_code == 200
