from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bindings.assets import Asset, Assets, Site, decoded_path
from edge.bindings.storage import PIECE_BYTES
from edge.config import AssetsConfig
from edge.errors import InvalidInput
from edge.isolates.base import Binding, Bundle, StreamAnswer

FILES = ["/index.html", "/about.html", "/docs/index.html", "/docs/api.html", "/logo.svg", "/data", "/data.html"]


def write(root: Path, *files: str) -> None:
    for file in files:
        (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / file[1:]).write_text(file)


def site_of(root: Path, **options: Any) -> Site:
    return Site(AssetsConfig(directory=root, **options))


def shown(asset: Asset | None) -> str:
    """`/file`, `-> /elsewhere`, or `none`."""
    if asset is None:
        return "none"
    return f"-> {asset.redirect}" if asset.redirect else asset.file


@pytest.mark.parametrize(
    ("handling", "expected"),
    [
        (
            "auto-trailing-slash",
            {
                "/": "/index.html",
                "/index": "-> /",
                "/index.html": "-> /",
                "/about": "/about.html",
                "/about/": "-> /about",
                "/about.html": "-> /about",
                "/about/index.html": "-> /about",
                "/docs": "-> /docs/",
                "/docs/": "/docs/index.html",
                "/docs.html": "-> /docs/",
                "/docs/index": "-> /docs/",
                "/docs/index.html": "-> /docs/",
                "/docs/api": "/docs/api.html",
                "/logo.svg": "/logo.svg",
                "/logo.svg/": "none",
                "/data": "/data",
                "/data.html": "/data.html",  # `/data` is another file
                "/nothing": "none",
            },
        ),
        (
            "force-trailing-slash",
            {
                "/": "/index.html",
                "/index": "-> /",
                "/about": "-> /about/",
                "/about/": "/about.html",
                "/about.html": "-> /about/",
                "/docs": "-> /docs/",
                "/docs/": "/docs/index.html",
                "/docs/index.html": "-> /docs/",
                "/logo.svg": "/logo.svg",
                "/data": "/data",
                "/nothing/": "none",
            },
        ),
        (
            "drop-trailing-slash",
            {
                "/": "/index.html",
                "/index.html": "-> /",
                "/about": "/about.html",
                "/about/": "-> /about",
                "/about.html": "-> /about",
                "/docs": "/docs/index.html",
                "/docs/": "-> /docs",
                "/docs/index": "-> /docs",
                "/logo.svg": "/logo.svg",
                "/nothing": "none",
            },
        ),
        (
            "none",
            {
                "/": "none",
                "/about": "none",
                "/about.html": "/about.html",
                "/docs/": "none",
                "/index.html": "/index.html",
            },
        ),
    ],
)
def test_html_handling(tmp_path: Path, handling: Any, expected: dict[str, str]) -> None:
    write(tmp_path, *FILES)
    site = site_of(tmp_path, html_handling=handling)
    assert {path: shown(site.asset(path)) for path in expected} == expected


NAMES = st.sampled_from(["a", "a.html", "index.html", "index", "b", "html", "a.html.html"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))


@settings(max_examples=150)
@given(
    files=st.lists(PATHS, max_size=6),
    paths=st.lists(PATHS | PATHS.map(lambda path: path + "/"), max_size=8),
    handling=st.sampled_from(["auto-trailing-slash", "force-trailing-slash", "drop-trailing-slash", "none"]),
)
def test_redirects_end_at_a_file(files: list[str], paths: list[str], handling: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            try:
                write(Path(folder), file)
            except OSError:  # a folder of that name is there, or a file of a folder's name
                continue
        site = site_of(Path(folder), html_handling=handling)
        for path in ["/", *paths]:
            seen = [path]
            while (found := site.asset(seen[-1])) is not None and found.redirect:
                assert found.redirect not in seen
                seen.append(found.redirect)
            assert len(seen) == 1 or found is not None


def test_pages_that_are_not_found(tmp_path: Path) -> None:
    write(tmp_path, "/index.html", "/404.html", "/docs/404.html")
    pages = site_of(tmp_path, not_found_handling="404-page")
    assert pages.asset("/no/such") == Asset("/404.html", status=404)
    assert pages.asset("/docs/a/b") == Asset("/docs/404.html", status=404)
    assert site_of(tmp_path, not_found_handling="single-page-application").asset("/no/such") == Asset("/index.html")
    assert site_of(tmp_path / "docs", not_found_handling="single-page-application").asset("/no/such") is None


def test_who_is_asked_first(tmp_path: Path) -> None:
    write(tmp_path, *FILES, "/api/docs/index.html")
    spa = site_of(tmp_path, not_found_handling="single-page-application")
    assert spa.asset_before_worker("/about", False) == Asset("/about.html")
    assert spa.asset_before_worker("/nothing", False) is None
    assert spa.asset_before_worker("/nothing", True) == Asset("/index.html")
    assert site_of(tmp_path, run_worker_first=True).asset_before_worker("/about", True) is None
    patterns = site_of(tmp_path, run_worker_first=["/api/*", "!/api/docs/*", "/about"])
    assert patterns.asset_before_worker("/about", False) is None
    assert patterns.asset_before_worker("/about.html", False) == Asset(redirect="/about")
    assert patterns.asset_before_worker("/api/x", True) is None
    assert patterns.asset_before_worker("/api/docs/", False) == Asset("/api/docs/index.html")


ESCAPES = [
    "/../secret",
    "/%2e%2e/secret",
    "/..%2fsecret",
    "/a/../../secret",
    "/link",
    "/linked/secret",
    "//secret",
    "/secret%00.html",
    "/..\\secret",
    "/.env",
    "/.git/config",
    "/a/.hidden/x",
    "/_headers",
    "/_redirects",
    "/%ff",
    "/pipe",
    "/a",
    "secret",
    "",
]


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("handling", ["auto-trailing-slash", "none"])
def test_nothing_outside_is_served(tmp_path: Path, path: str, handling: Any) -> None:
    root = tmp_path / "public"
    write(tmp_path, "/secret", "/secret.html", "/index.html")
    write(root, "/.env", "/.git/config", "/a/.hidden/x", "/a/b")
    (root / "_headers").write_text("/x\n  x-a: b\n")
    (root / "_redirects").write_text("/x /y\n")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "linked").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    assert site_of(root, html_handling=handling).asset(decoded_path(path)) is None


def test_links_that_stay_inside_and_well_known_files_are_served(tmp_path: Path) -> None:
    write(tmp_path, "/a.txt", "/.well-known/security.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    site = site_of(tmp_path)
    assert (shown(site.asset("/b.txt")), shown(site.asset("/.well-known/security.txt"))) == (
        "/b.txt",
        "/.well-known/security.txt",
    )


async def body_of(answer: StreamAnswer) -> bytes:
    return b"".join([piece async for piece in answer.body])


async def get(site: Site, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    answer = site.respond(site.asset(path), method, path, pairs, "q=1")
    return answer.status, dict(answer.headers), await body_of(answer)


async def test_responses(tmp_path: Path) -> None:
    write(tmp_path, "/page.html", "/ü/index.html", "/404.html")
    (tmp_path / "big.bin").write_bytes(bytes(range(256)) * (PIECE_BYTES // 128))
    site = site_of(tmp_path, not_found_handling="404-page")
    status, headers, body = await get(site, "/page")
    assert (status, body, headers["content-type"], headers["content-length"]) == (
        200,
        b"/page.html",
        "text/html; charset=utf-8",
        "10",
    )
    assert (await get(site, "/page", if_none_match=f'"x", W/{headers["etag"]}'))[::2] == (304, b"")
    assert (await get(site, "/page", if_none_match='"x"'))[0] == 200
    status, head, body = await get(site, "/page", "HEAD")
    assert (status, head, body) == (200, headers, b"")
    assert (await get(site, "/page", "POST"))[0] == 405
    status, headers, _ = await get(site, "/ü")
    assert (status, headers["location"]) == (307, "/%C3%BC/?q=1")
    assert (await get(site, "/none"))[::2] == (404, b"/404.html")
    assert (await get(site_of(tmp_path), "/none"))[::2] == (404, b"Not Found")
    whole = (tmp_path / "big.bin").read_bytes()
    assert (await get(site, "/big.bin"))[2] == whole
    (tmp_path / "page.html").write_text("changed")
    assert (await get(site, "/page"))[2] == b"changed"


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=-99", 206, b"0123456789"),
        ("bytes=5-99", 206, b"56789"),
        ("bytes=10-", 200, b"0123456789"),
        ("bytes=4-2", 200, b"0123456789"),
        ("bytes=-", 200, b"0123456789"),
        ("bytes=0-1,4-5", 200, b"0123456789"),
        ("lines=0-1", 200, b"0123456789"),
    ],
)
async def test_ranges(tmp_path: Path, asked: str, status: int, content: bytes) -> None:
    (tmp_path / "digits").write_bytes(b"0123456789")
    found = await get(site_of(tmp_path), "/digits", range=asked)
    assert (found[0], found[2]) == (status, content)
    assert found[1]["content-length"] == str(len(content))
    assert (await get(site_of(tmp_path), "/digits", range=asked, if_range='"other"'))[0] == 200


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("a.css", "text/css; charset=utf-8"),
        ("a.js", "text/javascript; charset=utf-8"),
        ("a.JSON", "application/json; charset=utf-8"),
        ("a.png", "image/png"),
        ("a.woff2", "font/woff2"),
        ("a.unheard", "application/octet-stream"),
        ("noending", "application/octet-stream"),
    ],
)
async def test_content_types(tmp_path: Path, file: str, kind: str) -> None:
    write(tmp_path, f"/{file}")
    assert (await get(site_of(tmp_path), f"/{file}"))[1]["content-type"] == kind


async def test_the_binding_serves_its_own_worker_s_files(tmp_path: Path) -> None:
    write(tmp_path, "/a.txt")
    assets = Assets()
    caller = Bundle("site", "v1", "/", "worker.py")
    assets.sites[caller.key] = site_of(tmp_path)
    answer = await assets.call(
        caller, Binding("assets"), "fetch", ["GET", "http://x/a.txt?q", [["If-None-Match", "*"]]], None
    )
    assert answer.status == 304
    answer = await assets.call(caller, Binding("assets"), "fetch", ["get", "http://x/a%2Etxt", []], None)
    assert await body_of(answer) == b"/a.txt"
    for method, args in (("list", []), ("fetch", ["GET"]), ("fetch", ["GET", "http://[", []]), ("fetch", [1, 2, 3])):
        with pytest.raises(InvalidInput):
            await assets.call(caller, Binding("assets"), method, args, None)


async def test_a_new_site_is_taken_back_if_the_version_that_has_it_fails(tmp_path: Path) -> None:
    caller, binding, args = Bundle("w", "v", "/w", "w.py"), Binding("assets"), ["GET", "http://x/page", []]
    old, new = site_of(tmp_path / "old"), site_of(tmp_path / "new")
    assets = Assets()
    with assets.new_site(caller.key, old):
        assert assets.sites[caller.key] is old
    for failing in (new, None):
        with contextlib.suppress(RuntimeError), assets.new_site(caller.key, failing):
            assert assets.sites[caller.key] is (failing or old)
            raise RuntimeError
        assert assets.sites[caller.key] is old
    with assets.new_site(caller.key, None):
        assert assets.sites[caller.key] is old  # of the version that still serves
    with pytest.raises(InvalidInput, match="no assets any more"):
        await assets.call(caller, binding, "fetch", args, None)
