"""`edge dev` with packages from `pyproject.toml`, secrets from `.dev.vars`, and requests that leave the node."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_wheels import make_wheel

pytestmark = pytest.mark.slow

WORKER = """
import greeting
import requests
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/outside"):
            return Response(requests.get(self.env.API).text)
        return Response(f"{greeting.VERSION} {self.env.SECRET} {self.env.PLAIN}")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_wheel(tmp_path / "wheels", "greeting", "1.5")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "entry.py").write_text(WORKER)
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["greeting>=1"]\n')
    (folder / ".dev.vars").write_text('SECRET="from .dev.vars"\n')
    return folder


@pytest.fixture
def api() -> Iterator[str]:
    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello from outside")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def write_config(folder: Path, api: str, allow: str) -> None:
    text = (
        'name = "x"\nmain = "src/entry.py"\ncompatibility_date = "2026-11-30"\n'
        f'[vars]\nPLAIN = "plain"\nSECRET = "hidden"\nAPI = "http://{api}/"\n[egress]\nallow = {allow}\n'
    )
    (folder / "wrangler.toml").write_text(text)


def test_packages_secrets_and_requests(edge_dev: Callable[..., Any], project: Path, api: str) -> None:
    write_config(project, api, '["*"]')
    url, server = edge_dev(project)
    assert httpx.get(url).text == "1.5 from .dev.vars plain"
    refused = httpx.get(f"{url}/outside")
    assert refused.status_code == 500
    assert f'[egress] allow = ["*", "{api}"]' in refused.text
    server.stop()
    write_config(project, api, f'["*", "{api}"]')
    url, _ = edge_dev(project)
    assert httpx.get(f"{url}/outside").text == "hello from outside"
