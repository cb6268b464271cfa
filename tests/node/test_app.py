"""All parts of a node together, with a tiny model: what the configuration says reaches the part that it is for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from msgspec.structs import replace

from edge.billing.bill import make_bill
from edge.billing.ledger import FILE_NAME, latest_records
from edge.billing.times import now_us
from edge.config import (
    AiConfig,
    ApiConfig,
    AssetsConfig,
    BillingConfig,
    Config,
    EngineConfig,
    QueueConsumerConfig,
    QueuesConfig,
    TriggersConfig,
)
from edge.errors import ConfigError, WorkerStartFailed
from edge.node.access import Access
from edge.node.app import Node
from edge.weights.store import ModelStore

HANG_S = 60
BASE = "/client/v4/accounts/acme/ai"
PROMPT = {"prompt": "hello", "raw": True, "temperature": 0, "max_tokens": 8}
PRICES = """
version = "house-1"
usd_per_1000_neurons = "1"
[neurons_per_million_tokens]
"house/model" = { input = 1_000_000, output = 2_000_000 }
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "prices.toml").write_text(PRICES)
    return Config(
        "demo",
        tmp_path / "worker.py",
        account_id="acme",
        ai=AiConfig(models={"house/model": "tiny"}),
        engine=EngineConfig(num_threads=1),
        billing=BillingConfig(prices=tmp_path / "prices.toml"),
        state_dir=tmp_path / "state",
    )


@pytest.fixture
def _tiny(config: Config, tmp_path: Path) -> None:
    """A model is installed."""
    ModelStore.in_state_dir(config.state_dir).add(str(tiny_models.save_folder(tmp_path / "tiny")))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node looks at its models more often, so that nobody has to wait for that."""
    monkeypatch.setattr("edge.node.app._MODELS_INTERVAL_S", 0.05)


@asynccontextmanager
async def running(config: Config, said: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    node = Node(config, tokens={"t": "acme"}, show_tracebacks=True, say=said.append, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        client.headers["authorization"] = "Bearer t"
        yield client


async def run(client: httpx.AsyncClient, model: str) -> Any:
    async with asyncio.timeout(HANG_S):
        return (await client.post(f"{BASE}/run/{model}", json=PROMPT)).json()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - the node looks at the store when it likes
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("_tiny")
async def test_a_call_has_the_price_of_the_operator_s_own_book(config: Config) -> None:
    async with running(config, []) as client:
        usage = (await run(client, "house/model"))["result"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["neurons"]) == (5, 8, 5 + 2 * 8)
    ledger = config.state_dir / FILE_NAME
    (record,) = latest_records(ledger, limit=9)
    assert (record.account, record.model, record.served_by, record.status) == ("acme", "house/model", "tiny", "ok")
    assert record.price_version.startswith("house-1+")
    bill = make_bill(ledger, since_us=0, until_us=now_us() + 1, by="model")
    assert bill.to_json()["total"]["usd_exact"] == "0.021"


async def test_a_price_book_that_is_not_exact_is_refused_at_start(config: Config) -> None:
    assert config.billing.prices is not None
    config.billing.prices.write_text(PRICES.replace("1_000_000", "0.5"))
    with pytest.raises(ConfigError, match=r"0\.5 is a float, which is not exact"):
        Node(config, tokens={}, show_tracebacks=True, say=print, access_log=lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_tiny")
async def test_stand_ins_are_taken_over_while_it_runs(config: Config) -> None:
    accesses: list[Access] = []
    node = Node(config, tokens={"t": "acme"}, show_tracebacks=True, say=print, access_log=accesses.append)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        client.headers["authorization"] = "Bearer t"
        missing = (await run(client, "@cf/new/one"))["errors"][0]
        assert missing["code"] == 5007
        assert '"@cf/new/one" = "NAME" under [ai.models]' in missing["message"]
        node.use_ai(replace(config, ai=AiConfig(models={"@cf/new/one": "tiny"})))
        assert (await run(client, "@cf/new/one"))["result"]["response"]
        assert (await run(client, "house/model"))["errors"][0]["code"] == 5007
    assert [access.status for access in accesses] == [400, 200, 400]
    assert accesses[0].path == f"{BASE}/run/@cf/new/one"
    assert accesses[0].problem.startswith("no model '@cf/new/one'")


@pytest.mark.slow
@pytest.mark.usefixtures("_tiny")
async def test_models_that_are_removed_added_and_replaced_while_it_runs(config: Config, tmp_path: Path) -> None:
    store, said = ModelStore.in_state_dir(config.state_dir), []
    async with running(config, said) as client:
        first = (await run(client, "tiny"))["result"]["response"]
        store.remove("tiny")
        store.add(str(tiny_models.save_folder(tmp_path / "other", seed=1)), "tiny")
        await until(lambda: "Models    house/model, tiny" in said)
        assert (await run(client, "tiny"))["result"]["response"] != first
        store.remove("tiny")
        await until(lambda: "Models    none" in said)
        assert (await run(client, "tiny"))["errors"][0]["code"] == 5007


@pytest.mark.slow
@pytest.mark.usefixtures("_tiny")
async def test_a_store_that_cannot_be_read_for_a_while_is_looked_at_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with running(config, said) as client:
        assert (await run(client, "tiny"))["success"]
        looks = 0

        def unreadable(store: ModelStore) -> list[Any]:
            nonlocal looks
            looks += 1
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(ModelStore, "list", unreadable)
            ModelStore.in_state_dir(config.state_dir).remove("tiny")
            await until(lambda: looks >= 2)
            assert (await run(client, "tiny"))["success"]  # it is in memory
        await until(lambda: "Models    none" in said)


async def test_what_the_router_refuses_is_told_as_the_api_tells_errors(config: Config) -> None:
    async with running(config, []) as client:
        response = await client.get(f"{BASE}/run/tiny")
    assert (response.status_code, response.json()["errors"][0]["code"]) == (405, 7001)


async def test_every_path_that_is_not_the_node_s_own_is_the_worker_s(config: Config) -> None:
    config.main.write_text(
        "from workers import Response, WorkerEntrypoint\n"
        "class Default(WorkerEntrypoint):\n"
        "    async def fetch(self, request):\n"
        "        return Response(request.url)\n"
    )
    node = Node(config, tokens={}, show_tracebacks=True, say=print, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        await node.deploy(config)
        for path in ("/a%0Ab", "/healthz/", "/client/v4x", "/%1b[2J"):
            response = await client.get(path)
            assert (response.status_code, response.text) == (200, str(response.request.url))


async def test_a_worker_gets_no_request_that_is_meant_for_the_api(config: Config) -> None:
    """A base URL with a slash too many, for example: the header holds a token of the node."""
    config.main.write_text(
        "from workers import Response, WorkerEntrypoint\n"
        "class Default(WorkerEntrypoint):\n"
        "    async def fetch(self, request):\n"
        "        return Response('the worker')\n"
    )
    node = Node(config, tokens={"secret": "acme"}, show_tracebacks=True, say=print, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        await node.deploy(config)
        headers = {"authorization": "Bearer secret"}
        for path in ("//client/v4/accounts/acme/ai/models/search", "/client//v4/user", "//v1/models", "/v1//models"):
            response = await client.get(f"http://node{path}", headers=headers)
            assert (response.status_code, response.headers["content-type"]) == (200, "application/json"), path
        for path in ("/client/v4/a%0Ab", "//client/v4/none"):
            assert (await client.get(f"http://node{path}", headers=headers)).json()["errors"][0]["code"] == 7000


PREFLIGHT = {
    "origin": "https://app.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_a_browser_may_ask_for_v1_beside_a_worker(config: Config) -> None:
    config.main.write_text(
        "from workers import Response, WorkerEntrypoint\n"
        "class Default(WorkerEntrypoint):\n"
        "    async def fetch(self, request):\n"
        "        return Response('worker', status=299)\n"
    )
    config = replace(config, api=ApiConfig(cors_origins=[PREFLIGHT["origin"]]))
    node = Node(config, tokens={"t": "acme"}, show_tracebacks=True, say=print, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        await node.deploy(config)
        for path in ("/v1/chat/completions", "/v1/models", f"{BASE}/v1/models"):
            response = await client.options(path, headers=PREFLIGHT)
            allowed = response.headers.get("access-control-allow-origin")
            assert (response.status_code, allowed) == (200, PREFLIGHT["origin"]), path
        listed = {"authorization": "Bearer t", "origin": PREFLIGHT["origin"]}
        response = await client.get("/v1/models", headers=listed)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PREFLIGHT["origin"])
        for change in (
            {"origin": "https://other.example.com"},
            {"access-control-request-headers": "content-type"},
            {"access-control-request-method": None},
        ):
            headers = {key: value for key, value in {**PREFLIGHT, **change}.items() if value is not None}
            response = await client.options("/v1/chat/completions", headers=headers)
            assert (response.status_code, response.text) == (299, "worker"), change


WORKER = """
from workers import Response, WorkerEntrypoint
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("TEXT")
    async def queue(self, batch, env, ctx):
        print("got", [message.body for message in batch.messages])
"""


async def test_a_worker_that_is_renamed_and_one_that_is_wrong(config: Config, tmp_path: Path) -> None:
    said: list[str] = []
    node = Node(config, tokens={}, show_tracebacks=True, say=said.append, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        assert (await client.get("/")).status_code == 404
        config.main.write_text(WORKER.replace("TEXT", "first"))
        consumers = QueuesConfig(consumers=[QueueConsumerConfig("jobs")])
        first = replace(config, queues=consumers, triggers=TriggersConfig(["0 3 * * *"]))
        await node.deploy(first)
        assert (await client.get("/")).text == "first"

        config.main.write_text(WORKER.replace("TEXT", "renamed"))
        renamed = replace(first, name="renamed")
        with pytest.raises(ConfigError, match="'jobs' is consumed by another worker, demo already"):
            await node.deploy(renamed)
        await node.deploy(renamed, was=first)
        assert (await client.get("/")).text == "renamed"
        assert node.isolates.workers() == [("acme", "renamed")]
        assert node.triggers.first() == (("acme", "renamed"), "0 3 * * *")

        config.main.write_text(WORKER.replace("TEXT", "without").partition("    async def queue")[0])
        await node.deploy(renamed)
        assert "warning: renamed has no `queue` handler: messages of the queues that it consumes wait" in said
        assert "warning: renamed has no `scheduled` handler: its crons will fail" in said

        (tmp_path / "out").symlink_to("/usr")
        for wrong, problem in [
            ({"triggers": TriggersConfig(["61 * * * *"])}, "'61' is no value of the minute"),
            ({"assets": AssetsConfig(tmp_path / "nothing")}, "there is no folder"),
            ({"assets": AssetsConfig(tmp_path)}, "keep code and assets in different folders"),
            ({"assets": AssetsConfig(tmp_path / "out")}, "assets.directory: .* leads out of .*, to /usr, by a link"),
        ]:
            with pytest.raises(ConfigError, match=problem):
                await node.deploy(replace(renamed, **wrong))
        assert (await client.get("/")).text == "without"


async def test_no_worker_takes_the_name_of_another_one(config: Config) -> None:
    config.main.write_text(WORKER.replace("TEXT", "first"))
    node = Node(config, tokens={}, show_tracebacks=True, say=print, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        await node.deploy(config)
        other = replace(config, name="other")
        await node.deploy(other)
        with pytest.raises(ConfigError, match="name: 'other' is the name of another worker on this node"):
            await node.deploy(other, was=config)
        assert (await client.get("/")).text == "first"
        assert node.isolates.workers() == [("acme", "demo"), ("acme", "other")]
        # A name is taken also by a worker that could never be started.
        node.use_ai(replace(config, name="broken"))
        with pytest.raises(ConfigError, match="'broken' is the name of another worker"):
            await node.deploy(replace(config, name="broken"), was=config)


@pytest.mark.usefixtures("_tiny")
async def test_stand_ins_go_with_the_worker_and_those_of_the_first_one_go_first(config: Config) -> None:
    config.main.write_text(WORKER.replace("TEXT", "first"))
    first = replace(config, ai=AiConfig(models={"@cf/new/one": "tiny"}))
    node = Node(first, tokens={}, show_tracebacks=True, say=print, access_log=lambda *_: None)
    async with node:
        await node.deploy(first)
        await node.deploy(replace(first, name="second", ai=AiConfig(models={"@cf/new/one": "other"})))
        renamed = replace(first, name="renamed")
        await node.deploy(renamed, was=first)
        assert node.catalogue.resolve("@cf/new/one").manifest.name == "tiny"
        # Of a version that does not come up, nothing is taken over.
        config.main.write_text("1 / 0")
        for name in ("renamed", "again"):
            with pytest.raises(WorkerStartFailed):
                await node.deploy(replace(first, name=name, ai=AiConfig(models={"@cf/new/two": "tiny"})), was=renamed)
            assert "@cf/new/two" not in {model.id for model in node.catalogue.models()}


@pytest.mark.usefixtures("_tiny")
async def test_handlers_list_the_models_of_the_node(config: Config) -> None:
    config.main.write_text(
        "from workers import Response, WorkerEntrypoint\n"
        "class Default(WorkerEntrypoint):\n"
        "    async def fetch(self, request):\n"
        "        return Response.json([each.name for each in await self.env.AI.models(search='@cf')])\n"
    )
    config = replace(config, ai=AiConfig(models={"@cf/new/one": "tiny"}))
    node = Node(config, tokens={}, show_tracebacks=True, say=print, access_log=lambda *_: None)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        await node.deploy(config)
        assert (await client.get("/")).json() == ["@cf/new/one"]


async def test_files_go_before_the_worker(config: Config, tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "page.html").write_text("page")
    config.main.write_text(WORKER.replace("TEXT", "worker"))
    accesses: list[Access] = []
    node = Node(config, tokens={}, show_tracebacks=True, say=print, access_log=accesses.append)
    async with node, httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://node") as client:
        await node.deploy(replace(config, assets=AssetsConfig(tmp_path / "public")))
        texts = [(await client.get(path)).text for path in ("/page", "/", "/%2e%2e/worker.py", "/page%00")]
        assert texts == ["page", "worker", "worker", "worker"]
        head = await client.head("/page")
        assert (head.status_code, head.headers["content-length"], head.text) == (200, "4", "")
        assert (await client.post("/page")).status_code == 405
        assert (await client.get("/cdn-cgi/local/scheduled")).text == "worker"  # not in a node of others
    assert [access.status for access in accesses] == [200] * 5 + [405, 200]
    assert all(access.is_complete for access in accesses)
