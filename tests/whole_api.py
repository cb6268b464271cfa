"""The API with all its parts on a real socket, for tests; the engine alone is a double, which answers all it is asked.

There are two accounts, `acme` and `other`, with a token each.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from batches import running
from doubles import BGE_M3, CLASSIFIER, ENCODER, STAND_IN, ListMeter, ScriptedPool, manifest
from local_server import serving
from starlette.applications import Starlette

from edge.ai.catalogue import Catalogue
from edge.ai.finetunes import Finetunes
from edge.ai.gate import Event, Gate
from edge.auth.authenticator import Authenticator
from edge.auth.scopes import ALL
from edge.auth.store import FILE_NAME, TokenStore
from edge.billing.prices import load_prices
from edge.frames import Delta, Done, Encode, Encoded, Generate, Started, TokenLogprob, Usage
from edge.node.api import routes
from edge.node.protocol import LimitedHttp
from edge.pool.base import OnUsage
from edge.weights.store import ModelStore

ACCOUNT, OTHER = "acme", "other"
CHAT, RESPONSES = "@cf/qwen/qwen3-30b-a3b-fp8", "@cf/openai/gpt-oss-20b"
MODELS = {"legacy": STAND_IN, "chat": CHAT, "responses": RESPONSES, "embeddings": BGE_M3, "classification": CLASSIFIER}
"""A model of each kind: what it can be asked, and how it answers."""
HANG_S = 60
_CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Paris"}}\n</tool_call>'


class AnsweringPool(ScriptedPool):
    """Answers in the form that is asked for: with reasoning, a call of a tool, or JSON; and vectors and labels."""

    async def _play(self, request: Generate | Encode, on_usage: OnUsage) -> AsyncGenerator[Any, None]:
        for event in _encoded(request) if isinstance(request, Encode) else _generated(request):
            if not isinstance(event, Started):
                on_usage(event.usage)
            yield event


def _generated(request: Generate) -> Iterator[Event]:
    if request.json_schema is not None:
        text = '{"name": "f", "arguments": {"city": "Paris"}}'
    elif request.tools:
        name = request.tools[0].get("function", request.tools[0]).get("name", "f")
        text = "<think>Rain?</think>Let me see." + _CALL % name
    else:
        text = "<think>A greeting.</think>Good morning, wörld."
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    if (limit := request.max_tokens) is not None:
        pieces = pieces[:limit]
    yield Started(0, 15)
    usage = Usage(input_tokens=10, cached_input_tokens=5)
    for number, piece in enumerate(pieces, start=1):
        usage = Usage(input_tokens=10, cached_input_tokens=5, output_tokens=number, compute_us=100 * number)
        yield Delta(0, piece, usage, _logprobs(piece, request.sampling.logprobs))
    yield Done(0, "length" if "".join(pieces) != text else "stop", usage)


def _logprobs(piece: str, num_top: int | None) -> list[TokenLogprob]:
    if num_top is None:
        return []
    token = TokenLogprob(piece, -0.5, list(piece.encode()))
    return [msgspec.structs.replace(token, top=[token] * num_top)]


def _encoded(request: Encode) -> Iterator[Started | Delta | Encoded]:
    usage = Usage(input_tokens=4 * len(request.texts), compute_us=50)
    labels = ["NEGATIVE", "POSITIVE"] if request.model == CLASSIFIER else []
    rows = b"".join(struct.pack("<2f", 0.6, 0.8) for _ in request.texts)
    yield Started(0, usage.input_tokens)
    yield Encoded(0, rows, 2, usage, None if labels else request.pooling or "mean", labels)


class Served(msgspec.Struct):
    """A running API, and what it holds of `ACCOUNT`."""

    url: str
    tokens: dict[str, str]
    """By account."""
    ids: dict[str, list[str]] = {}
    """By kind: what `{file}`, `{batch}` and so on in a path can be."""

    def client(self, account: str = ACCOUNT) -> httpx.Client:
        """A client with the token of `account`."""
        headers = {"authorization": f"Bearer {self.tokens[account]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG_S)


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """The API, in a thread of its own, with its state in `folder`."""
    started: list[Served] = []
    is_started, loop = threading.Event(), asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        async with _serving(folder) as api:
            started.append(api)
            is_started.set()
            await is_over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            is_started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_started.wait(HANG_S)
        (api,) = started
        with api.client() as client:
            api.ids = _filled(client)
        yield api
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(HANG_S)


@asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[Served]:
    installed = [
        manifest(),
        manifest(ENCODER, task="text-embeddings", architecture="bert", context_length=256, dimensions=2),
        manifest(CLASSIFIER, task="text-classification", architecture="bert", context_length=256),
    ]
    stand_ins = {STAND_IN: installed[0].name, CHAT: installed[0].name, RESPONSES: installed[0].name, BGE_M3: ENCODER}
    gate = Gate(AnsweringPool(), Catalogue(installed, stand_ins, load_prices()), ListMeter())
    with closing(TokenStore(folder / FILE_NAME)) as store:
        tokens = {account: store.create("test", account, ALL)[1] for account in (ACCOUNT, OTHER)}
    authenticator = Authenticator(folder / FILE_NAME)
    async with running(folder, gate=gate):
        gate.finetunes = Finetunes(folder / "finetunes", gate.catalogue, ModelStore(folder / "models"))
        app = Starlette(routes=routes(gate, tokens=authenticator))
        async with serving(app, http=LimitedHttp) as url:
            yield Served(url, tokens)
        gate.finetunes.close()
    await authenticator.close()


def _filled(client: httpx.Client) -> dict[str, list[str]]:
    """What there is after a few calls."""
    ai = f"/client/v4/accounts/{ACCOUNT}/ai"
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": STAND_IN, "messages": [{"role": "user", "content": "hi"}]},
    }

    def made(path: str, **request: Any) -> dict[str, Any]:
        response = client.post(path, **request)
        assert response.status_code == 200, (path, response.text)
        return dict(response.json())

    file = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", json.dumps(line).encode() + b"\n")}}
    ids = [made(f"{ai}/v1/files", **file)["id"] for _ in range(3)]
    batch = {"input_file_id": ids[0], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    requests = {"requests": [{"prompt": "hi", "external_reference": "x"}]}
    token = {"name": "t", "policies": [{"permission_groups": [{"id": "ai:read"}]}]}
    return {
        "file": ids,
        "openai_batch": [made(f"{ai}/v1/batches", json=batch)["id"]],
        "batch": [made(f"{ai}/run/{STAND_IN}", json=requests)["result"]["request_id"] for _ in range(2)],
        "finetune": [made(f"{ai}/finetunes", json={"model": STAND_IN, "name": n})["result"]["id"] for n in "ab"],
        "token": [made("/client/v4/user/tokens", json=token)["result"]["id"] for _ in range(3)],
    }
