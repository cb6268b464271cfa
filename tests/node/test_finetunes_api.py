"""Finetunes over a real socket: made, filled, listed, used and removed, each by its own account."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from doubles import ListMeter, ScriptedPool, answer, manifest
from local_server import serving
from safetensors.torch import save_file
from starlette.applications import Starlette

from edge.ai import finetunes as finetunes_module
from edge.ai.batch_calls import problem_of, problem_text
from edge.ai.batch_rows import NATIVE
from edge.ai.catalogue import Catalogue
from edge.ai.finetunes import Finetunes
from edge.ai.gate import Gate, Principal
from edge.billing.prices import load_prices
from edge.config import Config, EngineConfig
from edge.errors import Conflict, UnknownFinetune
from edge.node.api import routes
from edge.node.app import Node
from edge.weights.store import ModelStore

HANG_S = 300
STAND_IN = "@cf/meta/llama-2-7b-chat-hf-lora"
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """A store with the model `tiny`."""
    root = tmp_path_factory.mktemp("finetunes")
    store = ModelStore(root / "models")
    store.add(str(tiny_models.save_folder(root / "tiny")))
    return store


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_adapter(tmp_path_factory.mktemp("adapter") / "a", rank=8, seed=1)


class Server:
    """The API over a pool that plays a script, and clients of two accounts."""

    def __init__(self, folder: Path, store: ModelStore) -> None:
        encoder = manifest("encoder", task="text-embeddings")
        installed = [*store.list(), manifest("other"), encoder]
        catalogue = Catalogue(installed, {STAND_IN: "tiny"}, load_prices())
        self.pool = ScriptedPool(*answer("1"))
        self.gate = Gate(self.pool, catalogue, ListMeter())
        self.finetunes = self.gate.finetunes = Finetunes(folder, catalogue, store)
        self.app = Starlette(routes=routes(self.gate, tokens={"a": "alice", "b": "bob"}))
        self.folder = folder

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
        async with serving(self.app) as url:
            alice, bob = (
                httpx.AsyncClient(
                    base_url=f"{url}/client/v4/accounts/{account}/ai",
                    headers={"authorization": f"Bearer {account[0]}"},
                    timeout=HANG_S,
                )
                for account in ("alice", "bob")
            )
            async with alice, bob:
                yield alice, bob


@pytest.fixture
async def server(tmp_path: Path, store: ModelStore) -> AsyncIterator[Server]:
    server = Server(tmp_path / "finetunes", store)
    yield server
    server.finetunes.close()


@pytest.fixture
async def clients(server: Server) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    async with server.running() as clients:
        yield clients


async def create(client: httpx.AsyncClient, name: str, **changes: Any) -> str:
    response = await client.post("/finetunes", json={"model": "tiny", "name": name, "description": "", **changes})
    assert response.status_code == 200, response.text
    return str(response.json()["result"]["id"])


async def upload(client: httpx.AsyncClient, label: str, path: Path, name: str = "") -> httpx.Response:
    form = {"file_name": name or path.name}
    return await client.post(f"/finetunes/{label}/finetune-assets", data=form, files={"file": path.read_bytes()})


async def upload_both(client: httpx.AsyncClient, label: str, adapter: Path) -> None:
    for name in FILES:
        response = await upload(client, label, adapter / name)
        assert (response.status_code, response.json()["success"]) == (200, True), response.text


def failure(response: httpx.Response) -> tuple[int, int, str]:
    body = response.json()
    assert body["success"] is False
    return response.status_code, body["errors"][0]["code"], body["errors"][0]["message"]


async def run(client: httpx.AsyncClient, lora: str, model: str = "tiny") -> httpx.Response:
    return await client.post(f"/run/{model}", json={"prompt": "hi", "lora": lora})


@pytest.mark.slow
async def test_a_finetune_from_its_making_to_its_end(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path
) -> None:
    alice, _ = clients
    # As wrangler sends it: JSON without saying so.
    body = {"model": STAND_IN, "name": "my-tune", "description": "of mine", "public": False}
    made = (await alice.post("/finetunes", content=json.dumps(body), headers={"content-type": "text/plain"})).json()
    finetune = made["result"]
    assert made["success"] is True
    assert {key: finetune[key] for key in body} == body
    assert finetune["created_at"] == finetune["modified_at"]
    assert finetune["created_at"].endswith("Z")
    assert (await alice.get("/finetunes")).json()["result"] == [finetune]

    assert failure(await run(alice, "my-tune", STAND_IN))[:2] == (400, 3039)
    await upload_both(alice, finetune["id"], adapter)
    assert (await alice.get("/finetunes/my-tune")).json()["result"]["files"] == list(FILES)
    for label in ("my-tune", finetune["id"]):
        assert (await run(alice, label, STAND_IN)).status_code == 200
    chat = {"model": STAND_IN, "messages": [{"role": "user", "content": "hi"}], "lora": "my-tune"}
    assert (await alice.post("/v1/chat/completions", json=chat)).status_code == 200
    folder = server.folder / finetune["id"]
    assert [request.adapter_folder for request in server.pool.requests] == [str(folder)] * 3
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (folder / name).read_bytes() == (adapter / name).read_bytes()

    assert (await run(alice, "my-tune", "tiny")).status_code == 200  # which is what serves the other id
    status, code, message = failure(await run(alice, "my-tune", "other"))
    assert (status, code) == (400, 5006)
    assert f"is for the model '{STAND_IN}'" in message
    response = await alice.post("/run/encoder", json={"text": "hi", "lora": "my-tune"})
    assert failure(response)[:2] == (405, 5005)

    assert (await alice.delete("/finetunes/my-tune")).status_code == 200
    assert not folder.exists()
    assert (await alice.get("/finetunes")).json()["result"] == []
    assert failure(await alice.get("/finetunes/my-tune"))[:2] == (404, 1005)


@pytest.mark.slow
async def test_a_batch_is_refused_that_names_an_adapter_that_there_is_not(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path
) -> None:
    await upload_both(clients[0], await create(clients[0], "mine"), adapter)

    async def problem(account: str, lora: str) -> str:
        who = Principal(account=account, trigger="rest", request_id="r")
        error = await problem_of(server.gate, who, NATIVE, "tiny", {"prompt": "hi", "lora": lora})
        return "" if error is None else problem_text(error, "$.requests[3]")

    assert await problem("alice", "mine") == ""
    for account, lora in (("alice", "your"), ("bob", "mine"), ("alice", "../x")):
        assert "$.requests[3].lora is" in await problem(account, lora)
        assert "no finetune of the account and no adapter of the model 'tiny'" in await problem(account, lora)


@pytest.mark.slow
async def test_what_is_on_disk_is_found_again(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path, store: ModelStore
) -> None:
    alice, bob = clients
    kept, gone = await create(alice, "kept"), await create(bob, "gone")
    await upload_both(alice, kept, adapter)
    before = (await alice.get("/finetunes")).json()["result"]
    await bob.delete(f"/finetunes/{gone}")
    (server.folder / ".incoming-1").mkdir()  # of an upload that a crash has ended
    (server.folder / gone).mkdir()
    for old in (server.folder / ".incoming-1", server.folder / gone, server.folder / kept):
        os.utime(old, (0, 0))
    (server.folder / ".incoming-2").mkdir()  # of an upload to another process
    (server.folder / ".incoming-2" / "part-1").touch()
    os.utime(server.folder / ".incoming-2", (0, 0))
    (server.folder / "made-by-another").mkdir()
    again = Server(server.folder, store)
    try:
        folders = sorted(path.name for path in server.folder.iterdir() if path.is_dir())
        assert folders == sorted([".incoming-2", kept, "made-by-another"])
        async with again.running() as (alice, _):
            assert (await alice.get("/finetunes")).json()["result"] == before
            assert (await run(alice, "kept")).status_code == 200
    finally:
        again.finetunes.close()


@pytest.mark.slow
async def test_accounts_do_not_see_each_other(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path
) -> None:
    alice, bob = clients
    mine = await create(alice, "same-name")
    await upload_both(alice, mine, adapter)
    assert (await bob.get("/finetunes")).json()["result"] == []
    for label in (mine, "same-name"):
        assert failure(await bob.get(f"/finetunes/{label}"))[1] == 1005
        assert failure(await bob.delete(f"/finetunes/{label}"))[1] == 1005
        assert failure(await upload(bob, label, adapter / FILES[0]))[1] == 1005
        # Nor is it theirs to use: what the engine gets is the name of one of the model's own adapters.
        await run(bob, label)
        assert (server.pool.requests[-1].adapter, server.pool.requests[-1].adapter_folder) == (label, None)
    theirs = await create(bob, "same-name")
    assert theirs != mine
    assert failure(await run(bob, "same-name"))[1] == 3039
    assert (await run(alice, "same-name")).status_code == 200


@pytest.mark.slow
async def test_public_ones_are_for_all_by_their_id(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path
) -> None:
    alice, bob = clients
    shared = await create(alice, "b", public=True)
    assert (await bob.get("/finetunes/public")).json()["result"] == []  # it has no files yet
    await upload_both(alice, shared, adapter)
    other = await create(bob, "a", public=True)
    await upload_both(bob, other, adapter)

    async def listed(**query: Any) -> list[str]:
        result = (await bob.get("/finetunes/public", params=query)).json()["result"]
        return [each["id"] for each in result]

    assert await listed() == [shared, other]
    assert await listed(orderBy="name") == [other, shared]
    assert await listed(limit=1, offset=1) == [other]
    assert await listed(offset=2) == []
    assert failure(await bob.get("/finetunes/public", params={"orderBy": "x"}))[:2] == (400, 5006)
    assert failure(await bob.get("/finetunes/public", params={"limit": "0"}))[:2] == (400, 5006)
    await run(bob, shared)
    assert server.pool.requests[-1].adapter_folder == str(server.folder / shared)
    await run(bob, "b")
    assert server.pool.requests[-1].adapter_folder is None
    assert failure(await bob.delete(f"/finetunes/{shared}"))[1] == 1005


@pytest.mark.parametrize(
    ("body", "status", "code", "reason"),
    [
        ([], 400, 3003, "JSON object"),
        ({}, 400, 5006, "$.model is missing; $.name is missing"),
        ({"model": "tiny", "name": 5, "public": "yes"}, 400, 5006, "$.public"),
        ({"model": "tiny", "name": "a\n"}, 400, 5006, "printable"),
        ({"model": "tiny", "name": "x" * 101}, 400, 5006, "$.name"),
        ({"model": "tiny", "name": "x", "description": "x" * 2001}, 400, 5006, "$.description"),
        ({"model": "none", "name": "x"}, 400, 5007, "no model 'none'"),
        ({"model": "encoder", "name": "x"}, 405, 5005, "takes no LoRA"),
    ],
)
async def test_bad_finetunes(
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient], body: Any, status: int, code: int, reason: str
) -> None:
    response = await clients[0].post("/finetunes", json=body)
    assert failure(response)[:2] == (status, code)
    assert reason in failure(response)[2]
    assert (await clients[0].get("/finetunes")).json()["result"] == []


async def test_names_and_numbers_are_limited(
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = clients
    monkeypatch.setattr(finetunes_module, "MAX_PER_ACCOUNT", 2)
    await create(alice, "one")
    response = await alice.post("/finetunes", json={"model": "tiny", "name": "one"})
    assert failure(response)[:2] == (409, 1006)
    await create(alice, "two")
    response = await alice.post("/finetunes", json={"model": "tiny", "name": "three"})
    assert failure(response)[:2] == (409, 1006)
    await create(bob, "one")


async def test_bad_uploads(
    server: Server,
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient],
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice, _ = clients
    id = await create(alice, "x")
    path = f"/finetunes/{id}/finetune-assets"
    assert failure(await upload(alice, "y", adapter / FILES[0]))[:2] == (404, 1005)
    for name in ("README.md", "../adapter_config.json", "adapter_model.bin"):
        assert failure(await upload(alice, id, adapter / FILES[0], name))[:2] == (400, 5006)
    for form in ({"data": {"file_name": FILES[0]}}, {"files": {"file": b"{}"}}):
        assert failure(await alice.post(path, **form))[:2] in ((400, 5006), (415, 1004))
    two = [("file", b"{}"), ("file", b"{}")]
    assert failure(await alice.post(path, data={"file_name": FILES[0]}, files=two))[:2] == (400, 5006)
    assert failure(await alice.post(path, json={}))[:2] == (415, 1004)
    monkeypatch.setattr(finetunes_module, "MAX_FILE_BYTES", 1000)
    assert failure(await upload(alice, id, adapter / FILES[1]))[:2] == (413, 3006)
    assert (await upload(alice, id, adapter / FILES[0])).status_code == 200
    assert failure(await upload(alice, id, adapter / FILES[0]))[:2] == (409, 1006)
    # Nothing of all this is left.
    assert [path.name for path in (server.folder / id).iterdir()] == [FILES[0]]
    assert sorted(path.name for path in server.folder.iterdir() if path.is_dir()) == [id]


@pytest.mark.slow
async def test_an_adapter_that_engines_would_refuse_is_refused(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path, tmp_path: Path
) -> None:
    alice, _ = clients
    id = await create(alice, "x")
    large = tiny_models.save_adapter(tmp_path / "large", rank=65)
    assert (await upload(alice, id, large / FILES[0])).status_code == 200
    status, code, message = failure(await upload(alice, id, large / FILES[1]))
    assert (status, code) == (400, 5006)
    assert "rank 65, which is not from 1 to 64" in message
    assert str(server.folder) not in message
    assert (await alice.get(f"/finetunes/{id}")).json()["result"]["files"] == []
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shutil.copy(adapter / FILES[0], foreign)
    save_file({"x": tiny_models.adapter_tensors(rank=1).popitem()[1]}, foreign / FILES[1])
    assert (await upload(alice, id, foreign / FILES[1])).status_code == 200
    assert "adapts something else" in failure(await upload(alice, id, foreign / FILES[0]))[2]
    await upload_both(alice, id, adapter)
    assert (await run(alice, "x")).status_code == 200


@pytest.mark.slow
async def test_uploads_at_the_same_time(clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path) -> None:
    alice, _ = clients
    id = await create(alice, "x")
    responses = await asyncio.gather(*(upload(alice, id, adapter / name) for name in (*FILES, *FILES)))
    assert sorted(response.status_code for response in responses) == [200, 200, 409, 409]
    assert (await run(alice, id)).status_code == 200


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - a file that comes or goes sets no event
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_client_that_hangs_up_leaves_nothing(
    server: Server, clients: tuple[httpx.AsyncClient, httpx.AsyncClient], adapter: Path
) -> None:
    alice, _ = clients
    id = await create(alice, "x")
    url = alice.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    part = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    head = (
        f"POST {url.path}finetunes/{id}/finetune-assets HTTP/1.1\r\nHost: node\r\nAuthorization: Bearer a\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 100000000\r\n\r\n{part}"
    )
    writer.write(head.encode() + bytes(3 << 20))
    await until(lambda: any(server.folder.glob(".incoming-*/part-1")))
    writer.close()
    await until(lambda: not any(server.folder.glob(".incoming-*")))
    assert (await upload(alice, id, adapter / FILES[0])).status_code == 200  # which waits for nobody


@pytest.mark.slow
async def test_a_change_whose_caller_goes_is_made_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()
    transaction = finetunes_module.sqlite.transaction

    def held(database: sqlite3.Connection) -> AbstractContextManager[None]:
        entered.set()
        assert go.wait(HANG_S)
        return transaction(database)

    body = {"model": "tiny", "name": "x"}
    with monkeypatch.context() as holding:
        holding.setattr(finetunes_module.sqlite, "transaction", held)
        for change in (lambda: server.finetunes.create("alice", body), lambda: server.finetunes.delete("alice", "x")):
            entered.clear()
            go.clear()
            task = asyncio.create_task(change())
            assert await asyncio.to_thread(entered.wait, HANG_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            go.set()
            with pytest.raises(Conflict if "create" in change.__code__.co_names else UnknownFinetune):
                await change()
    await server.finetunes.create("alice", body)


async def test_a_name_that_another_process_has_taken_is_a_conflict(server: Server, store: ModelStore) -> None:
    other = Server(server.folder, store)
    await other.finetunes.create("alice", {"model": "tiny", "name": "x"})
    other.finetunes.close()
    with pytest.raises(Conflict, match="made by another process"):
        await server.finetunes.create("alice", {"model": "tiny", "name": "x"})


async def test_a_full_disk_is_said(
    server: Server,
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient],
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice, _ = clients
    id = await create(alice, "x")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("edge.node.api.forms.os.fsync", full)
    status, code, message = failure(await upload(alice, id, adapter / FILES[0]))
    assert (status, code) == (507, 1007)
    assert "the node's disk is full" in message
    monkeypatch.undo()
    assert (await upload(alice, id, adapter / FILES[0])).status_code == 200


@pytest.mark.slow
async def test_a_finetune_changes_what_a_model_says(tmp_path: Path, adapter: Path) -> None:
    """All parts together: a node with an engine, and a model's own adapter beside those of accounts."""
    state = tmp_path / "state"
    models = ModelStore.in_state_dir(state)
    models.add(str(tiny_models.save_folder(tmp_path / "tiny")))
    models.add_adapter("tiny", adapter, "own")
    engine = EngineConfig(num_threads=1)
    config = Config("demo", tmp_path / "worker.py", account_id="alice", engine=engine, state_dir=state)
    tokens = {"a": "alice", "b": "bob"}
    node = Node(config, tokens=tokens, show_tracebacks=True, say=lambda _: None, access_log=lambda *_: None)
    async with node, serving(node.app) as url, httpx.AsyncClient(timeout=HANG_S) as client:

        async def said(account: str, **inputs: Any) -> str:
            response = await client.post(
                f"{url}/client/v4/accounts/{account}/ai/run/tiny",
                json={"prompt": "hello", "raw": True, "temperature": 0, "max_tokens": 8, **inputs},
                headers={"authorization": f"Bearer {account[0]}"},
            )
            body = response.json()
            return str(body["result"]["response"] if body["success"] else body["errors"][0]["code"])

        plain, own = await said("alice"), await said("alice", lora="own")
        assert plain != own
        client.base_url = httpx.URL(f"{url}/client/v4/accounts/alice/ai")
        client.headers["authorization"] = "Bearer a"
        id = await create(client, "mine")
        await upload_both(client, "mine", adapter)
        assert await said("alice", lora="mine") == await said("alice", lora=id) == own
        assert await said("bob", lora="mine") == await said("bob", lora=id) == "5006"
        assert await said("bob", lora="own") == own
        await client.delete("/finetunes/mine")
        assert await said("alice", lora="mine") == "5006"
        assert await said("alice") == plain
