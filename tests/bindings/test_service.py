"""Workers that call each other, in real processes; what a binding does with odd calls, without."""

from __future__ import annotations

import json
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edge.bindings.service import MAX_DEPTH, Services
from edge.errors import EdgeError, HandlerFailed, InvalidInput, UnknownWorker
from edge.isolates.base import Binding, Bundle, InboundEvent, InboundRequest, JsonAnswer, OutboundResponse
from edge.isolates.dispatch import Isolates
from edge.node.hub import Hub


class NoAi:
    async def run(self, caller: Bundle, model: str, inputs: Any, options: dict[str, Any]) -> JsonAnswer:
        raise InvalidInput("no models here")


class Town:
    """Workers by name; `services` of each are those of the account."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.logs: list[str] = []
        self.isolates = Isolates(Hub(NoAi(), {"service": Services(self)}), lambda *log: self.logs.append(log[3]))

    async def fetch(self, key: Any, request: InboundRequest, **options: Any) -> OutboundResponse:
        return await self.isolates.fetch(key, request, **options)

    async def event(self, key: Any, event: InboundEvent) -> Any:
        return await self.isolates.event(key, event)

    async def deploy(self, name: str, source: str, account: str = "acme", **services: dict[str, Any]) -> None:
        folder = self._root / account / name
        folder.mkdir(parents=True, exist_ok=True)
        imports = "from workers import Response, WorkerEntrypoint, fetch\n"
        (folder / "entry.py").write_text(imports + textwrap.dedent(source))
        bindings = {binding: Binding("service", props) for binding, props in services.items()}
        await self.isolates.deploy(Bundle(name, "v1", str(folder), "entry.py", account=account, bindings=bindings))

    async def get(self, name: str, path: str = "/", body: bytes | None = None, account: str = "acme") -> str:
        method, content = ("GET", None) if body is None else ("POST", pieces(body))
        request = InboundRequest(method, f"http://{name}{path}", [("x-test", "1")], content)
        response = await self.isolates.fetch((account, name), request)
        if response.body is None:
            return ""
        return b"".join([chunk async for chunk in response.body]).decode()


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    town = Town(tmp_path)
    await town.isolates.start()
    try:
        yield town
    finally:
        await town.isolates.close()


FRONT = """
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.split("/", 3)[3]
        if path == "rpc":
            result = await self.env.BACK.add(2, 3, names=["a", "b"])
            return Response.json(result)
        if path == "error":
            return Response(await self.env.BACK.fail())
        if path == "private":
            return Response(await self.env.BACK.fetch_nothing())
        return await self.env.BACK.fetch(request)
"""
BACK = """
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        size = len(await request.bytes()) if request.method == "POST" else 0
        return Response(f"{request.method} {request.url} {size}", status=201, headers={"x-back": "yes"})

    async def add(self, a, b, options):
        return {"sum": a + b, "names": options["names"], "props": self.ctx.props}

    async def fail(self):
        raise ValueError("not today")

class Admin(WorkerEntrypoint):
    def add(self, a, b, options):
        return {"sum": a - b, "names": [], "props": self.ctx.props}
"""


async def test_methods_and_requests_of_another_worker(town: Town) -> None:
    await town.deploy("back", BACK)
    await town.deploy("front", FRONT, BACK={"service": "back", "props": {"tier": "gold"}})
    assert await town.get("front", "/rpc") == '{"sum": 5, "names": ["a", "b"], "props": {"tier": "gold"}}'
    assert await town.get("front", "/page?q=1") == "GET http://front/page?q=1 0"
    assert await town.get("front", "/upload", bytes(300_000)) == "POST http://front/upload 300000"
    with pytest.raises(HandlerFailed, match="not today"):
        await town.get("front", "/error")


async def test_a_named_entrypoint(town: Town) -> None:
    await town.deploy("back", BACK)
    await town.deploy("front", FRONT, BACK={"service": "back", "entrypoint": "Admin"})
    assert '"sum": -1' in await town.get("front", "/rpc")
    await town.deploy("front", FRONT, BACK={"service": "back", "entrypoint": "Nobody"})
    with pytest.raises(HandlerFailed, match="Nobody"):
        await town.get("front", "/rpc")


async def test_accounts_do_not_reach_each_other_s_workers(town: Town) -> None:
    await town.deploy("back", BACK, account="other")
    await town.deploy("front", FRONT, BACK={"service": "back"})
    with pytest.raises(HandlerFailed, match="no worker 'back' of the account 'acme' on this node"):
        await town.get("front", "/rpc")


LOOP = """
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        print("here")
        return await self.env.NEXT.fetch(request)

    async def count(self, n):
        print("here")
        return await self.env.NEXT.count(n + 1)

class Rpc(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(str(await self.env.NEXT.count(1)))
"""


@pytest.mark.parametrize(("entrypoint", "num_events"), [("", MAX_DEPTH + 1), ("Rpc", MAX_DEPTH)])
async def test_loops_end_with_an_error(town: Town, entrypoint: str, num_events: int) -> None:
    await town.deploy("a", LOOP, NEXT={"service": "b"})
    await town.deploy("b", LOOP, NEXT={"service": "a"})
    request = InboundRequest("GET", "http://a/", [])
    with pytest.raises(HandlerFailed, match="led through 16 workers, and 'b' would be one more"):
        await town.isolates.fetch(("acme", "a"), request, entrypoint=entrypoint)
    assert sum(text.count("here") for text in town.logs) == num_events


async def test_a_chain_that_is_no_loop_may_be_called_many_times(town: Town) -> None:
    many = """
    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            results = [await self.env.BACK.add(n, n, names=[]) for n in range(40)]
            return Response(str(sum(result["sum"] for result in results)))
    """
    await town.deploy("back", BACK)
    await town.deploy("front", many, BACK={"service": "back"})
    assert await town.get("front") == str(2 * sum(range(40)))


class Empty:
    async def fetch(self, key: Any, request: InboundRequest, **options: Any) -> OutboundResponse:
        raise UnknownWorker("none")

    async def event(self, key: Any, event: InboundEvent) -> Any:
        return {"not": "bytes"}


@pytest.mark.parametrize(
    ("method", "args", "error"),
    [
        ("drop", [], InvalidInput),
        ("fetch", [], InvalidInput),
        ("fetch", ["GET", "http://x", "no headers"], InvalidInput),
        ("fetch", ["GET", "http://x", [["a", 1]]], InvalidInput),
        ("fetch", ["GET", "http://x", []], UnknownWorker),
        ("rpc", ["add"], InvalidInput),
        ("rpc", ["add", "text"], InvalidInput),
        ("rpc", ["add", b"packed"], EdgeError),
    ],
)
async def test_calls_that_are_wrong(method: str, args: list[Any], error: type[EdgeError]) -> None:
    caller = Bundle("front", "v1", "/", "entry.py")
    with pytest.raises(error):
        await Services(Empty()).call(caller, Binding("service", {"service": "back"}), method, args, None)


async def test_the_hub_knows_only_what_the_bundle_has() -> None:
    hub = Hub(NoAi(), {"service": Services(Empty())})
    caller = Bundle("front", "v1", "/", "entry.py", bindings={"KV": Binding("kv"), "AI": Binding("ai")})
    for binding in ("KV", "AI", "OTHER", "x" * 10_000):
        with pytest.raises(InvalidInput, match=r"^env\.\w{1,100} of this worker is no binding"):
            await hub.call(caller, binding, "get", [], None)
    with pytest.raises(InvalidInput, match="no models here"):
        await hub.ai_run(caller, "m", {}, {})
    with pytest.raises(InvalidInput, match=r"has no AI binding: add \[ai\]"):
        await hub.ai_run(Bundle("front", "v1", "/", "entry.py"), "m", {}, {})


async def test_own_entrypoints_are_reached_through_ctx_exports(town: Town) -> None:
    await town.deploy(
        "front",
        """
        from workers import env, import_from_javascript
        seen = []

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                if request.url.endswith("/again"):
                    return Response("again")
                assert await self.ctx.exports.Counter.add(2, 3) == 5
                assert await import_from_javascript("cloudflare:workers").exports.Counter.add(1, 1) == 2
                assert dir(self.ctx.exports) == ["Counter", "Default"]
                try:
                    self.ctx.exports.Missing
                except AttributeError as error:
                    assert "it has: Counter, Default" in str(error)
                again = await self.ctx.exports.Default.fetch("http://front/again")
                return Response(await again.text())

        class Counter(WorkerEntrypoint):
            def add(self, a, b):
                return a + b
        """,
    )
    assert await town.get("front") == "again"


async def test_exports_are_the_workers_own(town: Town) -> None:
    """A handler can ask the node for any name, but not for another worker."""
    await town.deploy(
        "front",
        """
        from workers.bindings import BindingCalls, BindingError

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                texts = []
                for name in ("ctx.exports.", "ctx.exports.Other", "ctx.exports.a.b", "ctx.other.Default", "exports"):
                    try:
                        await BindingCalls(name).call("rpc", "m", b"\\x90")
                    except BindingError as error:
                        texts.append(str(error))
                return Response.json(texts)
        """,
    )
    texts = json.loads(await town.get("front"))
    assert len(texts) == 5
    assert "Method m does not exist" in texts[0]
    assert "no 'Other' class defined" in texts[1]
    assert all("is no binding" in text for text in texts[2:])


async def test_functions_are_refused_by_the_argument_that_they_are(town: Town) -> None:
    await town.deploy("back", "class Default(WorkerEntrypoint):\n    def call(self, *args): return lambda: 1\n")
    await town.deploy(
        "front",
        """
        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                texts = []
                for args in ((1, lambda: 1), (1, {"each": [print]}), (1, 2)):
                    try:
                        await self.env.BACK.call(*args)
                    except Exception as error:
                        texts.append(f"{type(error).__name__}: {error}")
                return Response.json(texts)
        """,
        BACK={"service": "back"},
    )
    texts = json.loads(await town.get("front"))
    refusal = "cannot be sent over RPC: functions (RPC stubs) are not supported by this runtime."
    assert texts[0].startswith(f"TypeError: argument 2 of env.BACK.call(): function {refusal}")
    assert texts[1].startswith(f"TypeError: argument 2 of env.BACK.call(): builtin_function_or_method {refusal}")
    assert refusal in texts[2]
