"""`edge serve` as an operator runs it: a real process, tokens of the command line, real requests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import EDGE, wait_for

WORKER = """
import asyncio
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.partition("//")[2].partition("/")[2]
        if path == "broken":
            raise ValueError("of the handler")
        if path == "slow":
            return Response(self.slowly())
        return Response(f"worker at {path}, {request.headers.get('authorization')}")

    async def slowly(self):
        yield b"begin "
        while (await self.env.KV.get("end")) is None:
            await asyncio.sleep(0.02)
        yield b"end"
"""
EdgeServe = Callable[..., tuple[str, Any]]
SERVE = ["--insecure-no-sandbox"]
"""A machine that tests run on need not have every layer."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "edge.toml").write_text(
        'name = "demo"\nmain = "worker.py"\naccount_id = "acme"\n[[kv_namespaces]]\nbinding = "KV"\n'
    )
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def edge(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EDGE, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def new_token(folder: Path, *arguments: str) -> str:
    done = edge(folder, "tokens", "create", "test", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_does_not_start_without_a_token(project: Path) -> None:
    done = edge(project, "serve", "--port", "0", *SERVE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Create one: edge tokens create NAME --account acme;" in done.stderr
    assert "edge serve --without-tokens" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_does_not_start_with_a_worker_that_cannot_be_imported(project: Path) -> None:
    (project / "worker.py").write_text("import nothing_of_this_name\n")
    done = edge(project, "serve", "--port", "0", "--without-tokens", *SERVE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing_of_this_name" in done.stderr


@pytest.mark.slow
def test_a_served_node_from_its_first_token_to_its_revocation(project: Path, edge_serve: EdgeServe) -> None:
    token = new_token(project)
    url, server = edge_serve(project, *SERVE)
    account = f"{url}/client/v4/accounts/acme"
    with httpx.Client(headers={"authorization": f"Bearer {token}"}) as client:
        searched = client.get(f"{account}/ai/models/search")
        assert searched.json()["success"] is True
        # The log says whose request it was, and under which id to ask.
        line = f"Z acme {searched.headers['x-request-id']} GET /client/v4/accounts/acme/ai/models/search 200 ("
        wait_for(lambda: line in server.output)
        # Nobody gets in without one, also from this machine, and not with that of `edge dev`.
        for headers in ({}, {"authorization": "Bearer dev"}):
            assert httpx.get(f"{account}/ai/models/search", headers=headers).status_code == 401
        # What strangers see of it and of its errors.
        assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
        broken = httpx.get(f"{url}/broken")
        assert broken.status_code == 500
        assert "ValueError" not in broken.text
        assert "Traceback" not in broken.text
        assert client.post(f"{url}/cdn-cgi/local/scheduled").text.startswith("worker at cdn-cgi")
        # A token that is created while it runs is known, and one that is revoked is not.
        other = new_token(project, "--account", "other", "--scope", "ai:read")
        assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {other}"}).status_code == 200
        token_id = token.split("_")[1]
        assert edge(project, "tokens", "revoke", token_id).returncode == 0
        wait_for(lambda: client.get(f"{account}/ai/models/search").status_code == 401, limit_s=10)

    def logged() -> list[tuple[str, str]]:
        entries = json.loads(edge(project, "tokens", "log", "--json").stdout)
        return [(entry["event"], entry["detail"]) for entry in entries]

    wait_for(lambda: ("refused", "revoked") in logged() and ("refused", "unknown token") in logged())
    assert "Tokens 1 of acme (edge tokens list)" in server.output
    assert "reloads on save" not in server.output


@pytest.mark.slow
def test_v1_is_the_api_s_with_a_token_of_the_node_and_else_the_worker_s(project: Path, edge_serve: EdgeServe) -> None:
    token = new_token(project, "--account", "other")
    url, _ = edge_serve(project, *SERVE)

    def get(authorization: str | None) -> httpx.Response:
        headers = {} if authorization is None else {"authorization": authorization}
        return httpx.get(f"{url}/v1/models", headers=headers)

    assert get(f"Bearer {token}").json()["object"] == "list"
    assert get(None).text == "worker at v1/models, None"
    assert get("Bearer sk-of-the-worker").text == "worker at v1/models, Bearer sk-of-the-worker"
    # One that has the form of the node's is never shown to a worker.
    wrong = get(f"Bearer {token[:-4]}0000")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    assert httpx.get(f"{url}/v1x").text == "worker at v1x, None"


@pytest.mark.slow
def test_what_is_in_flight_at_sigterm_is_finished(project: Path, edge_serve: EdgeServe) -> None:
    url, server = edge_serve(project, "--without-tokens", *SERVE)
    parts: list[str] = []

    def read() -> None:
        with httpx.stream("GET", f"{url}/slow", timeout=120) as response:
            parts.extend(response.iter_text())

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: parts)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Stopping; requests still running: 1. They have 30 s" in server.output)
    wait_for(lambda: refuses(url))
    assert edge(project, "kv", "key", "put", "end", "now").returncode == 0
    reader.join(120)
    assert "".join(parts) == "begin end"
    assert server.process.wait(60) == 0


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz")
    except httpx.ConnectError:
        return True
    return False


def test_the_first_token_is_printed_once(project: Path) -> None:
    assert re.fullmatch(r"edge_[0-9a-f]{16}_[0-9a-f]{64}", new_token(project))
