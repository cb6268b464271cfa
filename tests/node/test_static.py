from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from edge.bindings.assets import Site
from edge.config import AssetsConfig
from edge.errors import ConfigError
from edge.node.static import AssetsFirst


def client_of(folder: Path) -> httpx.AsyncClient:
    site = Site(AssetsConfig(directory=folder, run_worker_first=["/worker/*"]))
    app = AssetsFirst(PlainTextResponse("worker"), lambda _: site)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop.example.com:8787")


async def test_rules_hold_before_the_worker(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("page")
    (tmp_path / "_redirects").write_text("/old/:id /new/:id 308\n/worker/x /page\n/p/* /page 200\n")
    (tmp_path / "_headers").write_text("https://shop.example.com/p*\n  X-Shop: é\n  ! ETag\n")
    async with client_of(tmp_path) as client:
        old = await client.post("/old/a%0d%0ab?q=%20", content=b"data")
        assert (old.status_code, old.headers["location"]) == (308, "/new/a%0D%0Ab?q=%20")
        assert (await client.get("/worker/x")).text == "worker", "which run_worker_first says"
        page = await client.get("/p/anything", headers={"range": "bytes=1-2"})
        assert (page.status_code, page.text) == (206, "ag")
        assert (page.headers["x-shop"].encode("latin-1"), "etag" in page.headers) == (b"\xe9", False)
        other = await client.get("/page", headers={"host": "other.example.com"})
        assert ("x-shop" in other.headers, "etag" in other.headers) == (False, True)
        assert (await client.get("/_headers")).text == "worker"


def test_a_wrong_line_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "_redirects").write_text("/a /b\n/c /d 999\n")
    with pytest.raises(ConfigError, match=f"^{tmp_path}/_redirects:2: the status '999'"):
        client_of(tmp_path)
