"""The real `env.AI` of workerd, which is part of its program, against a node: docs/bindings.md, run.

Without workerd, which `make test` does not install, these are skipped: `npm install workerd` somewhere, and name its
program in $EDGE_TEST_WORKERD, or run `python -m bench isolates --peers` once.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles import STAND_IN, ScriptedPool, answer, make_gate
from local_server import serving
from starlette.applications import Starlette

from edge.errors import OutOfCapacity
from edge.node.api import routes

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60
WORKER = """
const CASES = {
  run: (ai) => {
    const options = { rejectIfBusy: true, extraHeaders: { "x-session-affinity": "s" } };
    return ai.run("%(model)s", { prompt: "hi" }, options);
  },
  prefix: (ai) => ai.run("%(model)s", { prompt: "hi" }, { prefix: "p", gateway: { id: "g" } }),
  stream: async (ai) => new Response(await ai.run("%(model)s", { prompt: "hi", stream: true })).text(),
  raw: async (ai) => {
    const response = await ai.run("%(model)s", { prompt: "hi" }, { returnRawResponse: true });
    return response.headers.get("content-type");
  },
  form: (ai) => {
    const form = new FormData();
    form.append("prompt", "hi");
    const response = new Response(form);
    const stream = { body: response.body, contentType: response.headers.get("content-type") };
    return ai.run("%(model)s", { multipart: stream, max_tokens: 7 });
  },
  bytes: (ai) => ai.run("%(model)s", { audio: { body: new Response("RIFF").body, contentType: "audio/wav" } }),
  unknown: (ai) => ai.run("@cf/no/model", { prompt: "hi" }),
  wrong: (ai) => ai.run("%(model)s", {}),
  models: (ai) => ai.models({ search: "llama" }),
  markdown: (ai) => ai.toMarkdown([{ name: "a.txt", blob: new Blob(["x"]) }]),
  gateway: (ai) => ai.gateway("g").getUrl(),
  autorag: (ai) => ai.autorag("r").search({ query: "x" }),
};
export default {
  async fetch(request, env) {
    let result = null, error = null;
    try {
      result = await CASES[new URL(request.url).pathname.slice(1)](env.AI);
    } catch (e) {
      error = [e.name, e.message];
    }
    const { lastRequestId, lastRequestHttpStatusCode, lastRequestInternalStatusCode } = env.AI;
    return Response.json({ result, error, lastRequestId, lastRequestHttpStatusCode, lastRequestInternalStatusCode });
  },
};
"""


def program() -> Path:
    given = os.environ.get("EDGE_TEST_WORKERD")
    found = Path(given or ROOT / ".edge/bench/peers/workerd/node_modules/workerd/bin/workerd")
    if not found.is_file():
        pytest.skip(f"there is no workerd at {found}")
    return found


def blocks(language: str) -> list[str]:
    """The code of docs/bindings.md in `language`."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / "bindings.md").read_text(), re.MULTILINE | re.DOTALL
    )


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool(*answer("1", "2"))


@pytest.fixture
async def client(pool: ScriptedPool, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a workerd that is configured as the documentation says, at a node."""
    app = Starlette(routes=routes(make_gate(pool), tokens={"dev": "dev"}))
    async with serving(app) as url:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        (config,), (bridge,) = blocks("capnp"), blocks("js")
        config = config.replace("127.0.0.1:8787", url.removeprefix("http://")).replace("*:8080", f"127.0.0.1:{port}")
        (tmp_path / "config.capnp").write_text(config)
        (tmp_path / "bridge.js").write_text(bridge)
        (tmp_path / "worker.js").write_text(WORKER % {"model": STAND_IN})
        process = started(tmp_path)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_LIMIT_S) as client:
                deadline = time.monotonic() + START_LIMIT_S
                while not await is_up(client):
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                yield client
        finally:
            process.kill()
            process.wait()


def started(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([program(), "serve", "config.capnp"], cwd=folder, stdout=log, stderr=log)


async def is_up(client: httpx.AsyncClient) -> bool:
    try:
        await client.get("/none")
    except httpx.TransportError:
        return False
    return True


async def said(client: httpx.AsyncClient, case: str) -> dict[str, Any]:
    response = await client.get(f"/{case}")
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_calls(client: httpx.AsyncClient, pool: ScriptedPool) -> None:
    for case in ("run", "prefix", "form"):
        found = await said(client, case)
        assert found["error"] is None
        assert found["result"]["response"] == "12"
        assert found["lastRequestHttpStatusCode"] == 200
        assert len(found["lastRequestId"]) == 36
    assert [request.reject_if_busy for request in pool.requests] == [True, False, False]
    assert [request.max_tokens for request in pool.requests] == [256, 256, 7]
    assert (await said(client, "stream"))["result"].endswith("data: [DONE]\n\n")
    assert (await said(client, "raw"))["result"] == "application/json"
    assert [model["name"] for model in (await said(client, "models"))["result"]] == [STAND_IN]


async def test_errors(client: httpx.AsyncClient, pool: ScriptedPool) -> None:
    for case, code, name in (
        ("unknown", 5007, "NoSuchModel"),
        ("wrong", 5006, "InvalidInput"),
        ("bytes", 1004, "UnsupportedContent"),
    ):
        found = await said(client, case)
        assert found["error"][0] == name
        assert found["error"][1].startswith(f"{code}: ")
        assert found["lastRequestInternalStatusCode"] == code
    pool.script = [OutOfCapacity("busy")]
    found = await said(client, "run")
    assert found["error"][0] == "OutOfCapacity"
    assert found["error"][1].startswith("3040: ")
    assert found["lastRequestHttpStatusCode"] == 429
    for case, reason in (
        ("markdown", "toMarkdown() is not supported"),
        ("gateway", "no AI Gateway"),
        ("autorag", "no AI Search"),
    ):
        assert reason in (await said(client, case))["error"][1]
