"""`edge dev` with packages from `pyproject.toml`, secrets from `.dev.vars`, and requests that leave the node."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import wait_for
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


def test_packages_that_cannot_be_had_now(edge_dev: Callable[..., Any], project: Path, tmp_path: Path) -> None:
    """The old version goes on serving; the first save after the package can be had brings up the new one."""
    worker = project / "src" / "entry.py"
    (project / "wrangler.toml").write_text('name = "x"\nmain = "src/entry.py"\n[vars]\nPLAIN = ""\n')
    (project / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["greeting>=2"]\n')
    worker.write_text(WORKER.replace("import requests\n", ""))
    url, server = edge_dev(project)
    lines = server.output.splitlines()
    failed = next(index for index, line in enumerate(lines) if line.startswith("src/entry.py could not be started"))
    assert lines[failed].endswith("could not be started; it is not served. The next save tries again.")
    assert f"the packages in {project / 'pyproject.toml'} could not be installed: PIP_NO_INDEX" in lines[failed + 1]
    banner = "Worker    x  (src/entry.py, reloads on save; NOT SERVED: what is wrong is said above)"
    assert lines.index(banner) > failed
    assert not [line for line in lines if line.startswith(("Models", "REST", "OpenAI"))]

    make_wheel(tmp_path / "wheels", "greeting", "2.0")
    worker.write_text(worker.read_text() + "\n")
    wait_for(lambda: "Reloaded in" in server.output)
    assert httpx.get(url).text.startswith("2.0 ")

    (project / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["greeting>=3"]\n')
    wait_for(lambda: "; the version before it goes on serving. The next save tries again." in server.output)
    assert httpx.get(url).text.startswith("2.0 ")
    make_wheel(tmp_path / "wheels", "greeting", "3.0")
    worker.write_text(worker.read_text() + "\n")
    wait_for(lambda: httpx.get(url).text.startswith("3.0 "))


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
