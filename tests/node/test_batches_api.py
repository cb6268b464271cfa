"""Batches and files over HTTP: the routes, not what stands behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batches import LIMIT_S, running, until
from doubles import MODEL, ScriptedPool, answer
from starlette.applications import Starlette

from edge.ai import batch
from edge.node.api import files, routes

ACCOUNT = "/client/v4/accounts/dev/ai"
V1 = f"{ACCOUNT}/v1"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LINES = b"".join(
    json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": CHAT}).encode() + b"\n"
    for name in ("a", "b")
)


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(batch, "POLL_S", 0.02)
    async with answering(tmp_path) as client:
        yield client


@asynccontextmanager
async def answering(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node that keeps its batches in `folder`."""
    async with running(folder, ScriptedPool(*answer("1", "2")), **options) as batches:
        app = Starlette(routes=routes(batches.gate, tokens={"dev": "dev", "t2": "other"}))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://node",
            headers={"authorization": "Bearer dev"},
            timeout=LIMIT_S,
        ) as client:
            yield client


async def uploaded(client: httpx.AsyncClient, content: bytes = LINES, **fields: Any) -> httpx.Response:
    fields = {"purpose": "batch"} | fields
    return await client.post(f"{V1}/files", data=fields, files={"file": ("input.jsonl", content)})


async def made(client: httpx.AsyncClient) -> dict[str, Any]:
    file_id = (await uploaded(client)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    response = await client.post(f"{V1}/batches", json=body)
    assert response.status_code == 200
    return dict(response.json())


async def over(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        found = (await client.get(f"{V1}/batches/{id}")).json()
        return found if found["status"] in ("completed", "failed", "cancelled") else None

    return dict(await until(look))


@pytest.mark.parametrize("query", ["?queueRequest=true", ""])
async def test_native_batches_are_made_and_polled_by_run(client: httpx.AsyncClient, query: str) -> None:
    run = f"{ACCOUNT}/run/{MODEL}{query}"
    queued = (await client.post(run, json={"requests": [{"prompt": "hi", "external_reference": "x"}]})).json()
    assert (queued["success"], queued["result"]["status"], queued["result"]["model"]) == (True, "queued", MODEL)
    request_id = queued["result"]["request_id"]

    async def poll() -> dict[str, Any] | None:
        response = await client.post(run, json={"request_id": request_id})
        assert response.status_code == 200
        result = response.json()["result"]
        return result if "responses" in result else None

    (response,) = (await until(poll))["responses"]
    assert (response["id"], response["success"], response["external_reference"]) == (0, True, "x")
    assert response["result"]["response"] == "12"


async def test_a_body_can_ask_to_be_queued_in_its_options(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "options": {"queueRequest": True}}
    assert (await client.post(f"{ACCOUNT}/run/{MODEL}", json=body)).json()["result"]["status"] == "queued"
    body["options"] = {"queueRequest": False}
    assert (await client.post(f"{ACCOUNT}/run/{MODEL}", json=body)).json()["result"]["response"] == "12"


async def test_native_batches_are_listed_by_page_and_cancelled(client: httpx.AsyncClient) -> None:
    ids = []
    for _ in range(3):
        queued = await client.post(f"{ACCOUNT}/run/{MODEL}", json={"requests": [{"prompt": "hi"}]})
        ids.append(queued.json()["result"]["request_id"])
    listed = (await client.get(f"{ACCOUNT}/batches", params={"per_page": 2})).json()
    assert [each["request_id"] for each in listed["result"]] == ids[:0:-1]
    assert listed["result_info"] == {"page": 1, "per_page": 2, "count": 2, "total_count": 3, "total_pages": 2}
    assert (await client.get(f"{ACCOUNT}/batches", params={"page": 9})).json()["result"] == []
    one = (await client.get(f"{ACCOUNT}/batches/{ids[0]}")).json()["result"]
    assert (one["request_id"], one["request_counts"]["total"]) == (ids[0], 1)
    cancelled = await client.post(f"{ACCOUNT}/batches/{ids[0]}/cancel")
    assert cancelled.json()["result"]["status"] in ("running", "cancelled", "completed")


async def test_openai_batches_from_upload_to_content(client: httpx.AsyncClient) -> None:
    file = (await uploaded(client)).json()
    assert (file["object"], file["bytes"], file["filename"]) == ("file", len(LINES), "input.jsonl")
    assert (await client.get(f"{V1}/files/{file['id']}")).json() == file
    assert (await client.get(f"{V1}/files/{file['id']}/content")).content == LINES
    batch = await made(client)
    done = await over(client, batch["id"])
    assert (done["status"], done["request_counts"]) == ("completed", {"total": 2, "completed": 2, "failed": 0})
    assert done["error_file_id"] is None
    content = await client.get(f"{V1}/files/{done['output_file_id']}/content")
    assert [json.loads(line)["custom_id"] for line in content.text.splitlines()] == ["a", "b"]


async def test_lists_have_pages(client: httpx.AsyncClient) -> None:
    ids = [(await made(client))["id"] for _ in range(3)]
    for id in ids:
        await over(client, id)
    first = (await client.get(f"{V1}/batches", params={"limit": 2})).json()
    assert (first["object"], [each["id"] for each in first["data"]], first["has_more"]) == ("list", ids[:0:-1], True)
    assert (first["first_id"], first["last_id"]) == (ids[2], ids[1])
    second = (await client.get(f"{V1}/batches", params={"limit": 2, "after": first["last_id"]})).json()
    assert ([each["id"] for each in second["data"]], second["has_more"]) == ([ids[0]], False)
    listed = (await client.get(f"{V1}/files", params={"purpose": "batch_output"})).json()
    assert {each["purpose"] for each in listed["data"]} == {"batch_output"}
    assert len(listed["data"]) == 3
    assert len((await client.get(f"{V1}/files", params={"limit": 1})).json()["data"]) == 1


async def test_a_deleted_file_is_gone(client: httpx.AsyncClient) -> None:
    id = (await uploaded(client)).json()["id"]
    deleted = await client.delete(f"{V1}/files/{id}")
    assert deleted.json() == {"id": id, "object": "file", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        response = await client.request(method, f"{V1}/files/{id}{path}")
        assert response.status_code == 404
        assert "no file" in response.json()["error"]["message"]


async def test_nobody_sees_what_another_account_has(client: httpx.AsyncClient) -> None:
    file_id = (await uploaded(client)).json()["id"]
    batch = await over(client, (await made(client))["id"])
    native = (await client.post(f"{ACCOUNT}/run/{MODEL}", json={"requests": [{"prompt": "hi"}]})).json()["result"]
    other = "/client/v4/accounts/other/ai"
    headers = {"authorization": "Bearer t2"}
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("GET", f"/v1/files/{batch['output_file_id']}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ("GET", f"/batches/{native['request_id']}"),
        ("POST", f"/batches/{native['request_id']}/cancel"),
    ):
        for url in (other + path, *([path] if path.startswith("/v1/") else [])):
            response = await client.request(method, url, headers=headers)
            assert response.status_code == 404, url
    for path in ("/v1/files", "/v1/batches"):
        for url in (other + path, path):
            assert (await client.get(url, headers=headers)).json()["data"] == []
    assert (await client.get(f"{other}/batches", headers=headers)).json()["result"] == []
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for url in (f"{other}/v1/batches", "/v1/batches"):
        assert (await client.post(url, json=body, headers=headers)).status_code == 404
    assert (await client.get(f"/v1/files/{file_id}")).status_code == 200  # its owner does
    poll = {"request_id": native["request_id"]}
    assert (await client.post(f"{other}/run/{MODEL}", json=poll, headers=headers)).status_code == 404


async def test_answers_of_batches_count_as_under_way_until_they_are_sent(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{ACCOUNT}/run/{MODEL}"
    queued = (await client.post(run, json={"requests": [{"prompt": "hi"}]})).json()["result"]
    poll = {"request_id": queued["request_id"]}

    async def is_over() -> bool:
        return "responses" in (await client.post(run, json=poll)).json()["result"]

    await until(is_over)
    monkeypatch.setattr("edge.node.api.bodies.MAX_HELD_BYTES", 1500)  # there is room for one such answer, not for two
    for _ in range(3):
        assert (await client.post(run, json=poll)).status_code == 200
    monkeypatch.setattr("edge.node.api.bodies.MAX_HELD_BYTES", 500)
    refused = await client.post(run, json=poll)
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (429, 3040)
    assert (await client.get(f"{ACCOUNT}/batches")).status_code == 200


async def test_what_arrives_counts_for_its_account(tmp_path: Path) -> None:
    half_way, go = asyncio.Event(), asyncio.Event()

    async def body(num_mib: int, *, waits: bool = False) -> AsyncIterator[bytes]:
        yield b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(num_mib):
            yield b"x" * (1 << 20)
        if waits:
            half_way.set()
            await go.wait()
        yield b"\r\n--xyz--\r\n"

    form = {"content-type": "multipart/form-data; boundary=xyz"}
    async with answering(tmp_path, max_bytes=5 << 20) as client:
        first = asyncio.create_task(client.post(f"{V1}/files", content=body(3, waits=True), headers=form))
        await half_way.wait()
        refused = await client.post(f"{V1}/files", content=body(3), headers=form)
        assert refused.status_code == 413
        assert "max_mb_per_account" in refused.json()["error"]["message"]
        other = "/client/v4/accounts/other/ai/v1/files"
        theirs = await client.post(other, content=body(3), headers=form | {"authorization": "Bearer t2"})
        assert theirs.status_code == 200
        go.set()
        kept = await first
        assert kept.status_code == 200
        assert (await client.post(f"{V1}/files", content=body(3), headers=form)).status_code == 413
        await client.delete(f"{V1}/files/{kept.json()['id']}")
        assert (await client.post(f"{V1}/files", content=body(3), headers=form)).status_code == 200


async def test_wrong_uploads_are_refused_and_leave_nothing(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'must be "batch"' in (await uploaded(client, purpose="fine-tune")).json()["error"]["message"]
    no_file = await client.post(f"{V1}/files", files={"purpose": (None, "batch")})
    assert (no_file.status_code, no_file.json()["error"]["param"]) == (400, "file")
    assert (await client.post(f"{V1}/files", json={})).status_code == 415
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    monkeypatch.setattr(files, "_FORM_BYTES", 1000)
    assert (await uploaded(client, b"x" * 10_000)).status_code == 413
    assert (await client.get(f"{V1}/files")).json()["data"] == []
    assert [path for path in (tmp_path / "batches").rglob("*") if path.parent.name in ("scratch", "files")] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=101", "limit=-1", "limit=%F0%9F%99%82", "after=" + "x" * 3000]
)
async def test_odd_pages_are_no_servers_error(client: httpx.AsyncClient, query: str) -> None:
    assert (await client.get(f"{V1}/batches?{query}")).status_code in (200, 400)
    assert (await client.get(f"{V1}/files?{query}")).status_code in (200, 400)
