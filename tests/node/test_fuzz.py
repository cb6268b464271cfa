"""Whatever is sent to whichever route: an answer, and never one that says that the node is at fault."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batches import running
from doubles import MODEL, STAND_IN, ScriptedPool, answer
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from edge.ai.finetunes import Finetunes
from edge.auth.authenticator import Authenticator
from edge.node.api import routes
from edge.node.api.openapi import document
from edge.weights.store import ModelStore

HANG_S = 60
AUTH = {"authorization": "Bearer dev"}
HI = [{"role": "user", "content": "hi"}]
TEXT = {
    "prompt": "hi",
    "max_tokens": 5,
    "temperature": 0.5,
    "stop": ["a"],
    "seed": 1,
    "tools": [{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}],
    "response_format": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}},
    "logit_bias": {"1": 2},
    "stream": False,
    "lora": None,
}
CHAT = {
    **{key: value for key, value in TEXT.items() if key != "prompt"},
    "model": STAND_IN,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        *HI,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
}
VALID = [TEXT, {key: value for key, value in CHAT.items() if key != "model"}, CHAT]
"""Bodies that are right for some route, or nearly."""

# What is below `/v1` is the same as below an account.
posts = sorted(
    path.format(account="dev", model=MODEL, finetune="x", batch="x", path="run")
    for path, methods in document()["paths"].items()
    if "post" in methods and not path.startswith("/v1/")
)


Check = Callable[..., int]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API with all its parts; the engine alone is a double."""
    async with running(folder, ScriptedPool(*answer("1", "2"))) as batches:
        gate = batches.gate
        gate.finetunes = Finetunes(folder / "finetunes", gate.catalogue, ModelStore(folder / "models"))
        authenticator = Authenticator(folder / "tokens.sqlite", fixed={"dev": "dev"})
        transport = httpx.ASGITransport(Starlette(routes=routes(gate, tokens=authenticator)))
        async with httpx.AsyncClient(transport=transport, base_url="http://node", headers=AUTH) as client:
            yield client
        gate.finetunes.close()
        await authenticator.close()


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """Sends a body to a path; the answer's status, which is not the node's fault."""

    async def send(client: httpx.AsyncClient, path: str, content: bytes, content_type: str) -> httpx.Response:
        async with asyncio.timeout(HANG_S):
            return await client.post(path, content=content, headers={"content-type": content_type})

    def check(path: str, content: bytes, content_type: str = "application/json") -> int:
        response = runner.run(send(client, path, content, content_type))
        assert response.status_code < 500, (path, content[:300], response.text[:300])
        if response.status_code >= 400:
            (error,) = response.json()["errors"]
            assert len(error["message"]) < 10_000
        return response.status_code

    with asyncio.Runner() as runner:
        parts = AsyncExitStack()
        client = runner.run(parts.enter_async_context(serving(tmp_path_factory.mktemp("node"))))
        yield check
        runner.run(parts.aclose())


@pytest.mark.parametrize("part", ["%0A", "a%0D%0Ab", "%00", "%2F", "%", "%FF", "\u2028", "a" * 30_000, "a" * 40_000])
def test_any_path_below_the_prefixes_has_our_own_error(check: Check, part: str) -> None:
    for path in ("/client/v4/accounts/dev/ai/batches/{}/cancel", "/client/v4/{}", "/v1/{}", "/v1/batches/{}/cancel"):
        assert 400 <= check(path.format(part), b"{}") < 500


numbers = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 5e-324])
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\udfff", "\x00", "\u2028", "𝟙", "null"])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(posts), json_values)
def test_any_json(check: Check, path: str, value: Any) -> None:
    check(path, json.dumps(value).encode())


@given(
    st.sampled_from(posts), st.binary(max_size=200), st.sampled_from(["application/json", "audio/wav", "text/plain"])
)
def test_any_bytes(check: Check, path: str, content: bytes, content_type: str) -> None:
    check(path, content, content_type)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A valid body in which a few values have been replaced, taken out, doubled or put elsewhere."""
    body = json.loads(json.dumps(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(1, 3))):
        parent, key = body, draw(st.sampled_from(sorted(body))) if body else None
        while key is not None:
            child = parent[key]
            inner = sorted(child) if isinstance(child, dict) else range(len(child)) if isinstance(child, list) else ()
            if not inner or draw(st.booleans()):
                break
            parent, key = child, draw(st.sampled_from(inner))
        if key is None:
            break
        match draw(st.integers(0, 4)):
            case 0 if isinstance(parent, dict):
                del parent[key]
            case 1:
                parent[key] = [parent[key]] * 2
            case 2:
                parent[key] = draw(st.sampled_from([None, True, 0, -1, "", [], {}, "x" * 3000, 1e400]))
            case _:
                parent[key] = draw(json_values)
    return body


@given(st.sampled_from(posts), mutated())
def test_any_change_of_a_valid_body(check: Check, path: str, body: Any) -> None:
    check(path, json.dumps(body).encode())


@pytest.mark.parametrize("levels", [64, 65, 500, 20_000])
@pytest.mark.parametrize("opening", ['{"a":', "[", '{"messages":[', '{"input":[{"content":'])
def test_any_depth(check: Check, levels: int, opening: str) -> None:
    for path in posts:
        closing = "".join({"{": "}", "[": "]"}[bracket] for bracket in reversed(opening) if bracket in "{[")
        assert 400 <= check(path, (opening * levels + "1" + closing * levels).encode()) < 500


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "-0", "1" * 5000, '"\\ud800"', '"\\u0000"', "'", '"\x01"', "[1,]"],
)
@pytest.mark.parametrize("key", ["prompt", "temperature", "max_tokens", "messages", "input"])
def test_odd_values_in_otherwise_valid_bodies(check: Check, key: str, value: str) -> None:
    for path in posts:
        valid = {name: each for name, each in CHAT.items() if name != key}
        check(path, (json.dumps(valid)[:-1] + f', "{key}": {value}}}').encode())


@pytest.mark.parametrize(
    "body",
    [
        {f"k{i}": i for i in range(50_000)},
        {"prompt": "hi", "stop": ["a"] * 100_000},
        {"model": MODEL, "messages": HI * 10_000},
        {"model": MODEL, "input": ["a"] * 100_000},
    ],
    ids=["keys", "stop", "messages", "input"],
)
def test_many_keys_and_many_items(check: Check, body: Any) -> None:
    content = json.dumps(body).encode()
    for path in posts:
        check(path, content)
