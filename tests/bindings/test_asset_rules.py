from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bindings.asset_rules import MAX_DYNAMIC_REDIRECTS, MAX_HEADER_RULES, MAX_STATIC_REDIRECTS, Redirect, Rules
from edge.bindings.assets import Assets, Site
from edge.config import AssetsConfig
from edge.errors import ConfigError
from edge.isolates.base import Binding, Bundle, StreamAnswer

REDIRECTS = """
# moved
/home301 / 301
/home /new          # 302 by default
/query /new?a=1#part 308
/home /second-rule-of-the-same-path
/tücke /ü 303
https-is-no-path /x
/blog/* https://blog.example.com/:splat
/products/:code/:name /p/:name?code=:code
/late /after-a-dynamic-one
/app/* /shell.html 200
/lost/* /no/such/page 200
/same/* /:splat
/:a/middle/* /:splat/:a
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home301", ("/", 301)),
        ("/home", ("/new", 302)),
        ("/query", ("/new?a=1#part", 308)),
        ("/tücke", ("/%C3%BC", 303)),
        ("/https-is-no-path", ("/x", 302)),
        ("/blog/", ("https://blog.example.com/", 302)),
        ("/blog/2024/a b", ("https://blog.example.com/2024/a%20b", 302)),
        ("/blog", None),
        ("/products/12/shoe", ("/p/shoe?code=12", 302)),
        ("/products/12/shoe/x", None),
        ("/products//shoe", None),
        ("/late", ("/after-a-dynamic-one", 302)),
        ("/app/x/y", ("/shell.html", 200)),
        ("/x/middle/y/z", ("/y/z/x", 302)),
        ("/HOME", None),
        # What a visitor writes leads to no other host and into no other header.
        ("/same//evil.example.com", ("/evil.example.com", 302)),
        ("/same/\\evil.example.com", ("/%5Cevil.example.com", 302)),
        ("/same/a\r\nset-cookie: x", ("/a%0D%0Aset-cookie%3A%20x", 302)),
        ("/blog/?x#y", ("https://blog.example.com/%3Fx%23y", 302)),
        ("/products/:name/b", ("/p/b?code=%3Aname", 302)),
    ],
)
def test_redirects(path: str, expected: tuple[str, int] | None) -> None:
    assert Rules(REDIRECTS).redirect(path) == (Redirect(*expected) if expected else None)


HEADERS = """
/*
  X-Frame-Options: DENY
  Cache-Control: max-age=60
/docs/*
  x-robots-tag: noindex
  x-robots-tag: nofollow
  cache-control: public
  ! ETag
/movies/:title
  x-movie: :title at :nothing
https://:project.example.dev/*
  x-project: :project
https://shop.example.com/*
  ! x-frame-options
"""


def test_headers() -> None:
    rules = Rules(headers=HEADERS)
    sent = [("etag", '"1"'), ("cache-control", "none")]

    def changed(host: str, path: str) -> dict[str, str]:
        return dict(rules.apply_headers(host, path, sent))

    assert changed("localhost:8787", "/a") == {"etag": '"1"', "cache-control": "max-age=60", "x-frame-options": "DENY"}
    assert changed("localhost", "/docs/a") == {
        "cache-control": "max-age=60, public",
        "x-frame-options": "DENY",
        "x-robots-tag": "noindex, nofollow",
    }
    assert changed("x", "/movies/Jaws ü\r\n")["x-movie"] == "Jaws%20%C3%BC%0D%0A at :nothing"
    assert changed("staging.example.dev:443", "/")["x-project"] == "staging"
    assert "x-frame-options" not in changed("shop.example.com", "/")
    assert changed("[", "/")["x-frame-options"] == "DENY"
    assert Rules().apply_headers("x", "/", sent) == sent


@pytest.mark.parametrize(
    ("redirects", "headers", "message"),
    [
        ("/a", "", r"_redirects:1: a redirect is `SOURCE TARGET \[STATUS\]`, not 1 words"),
        ("\n# x\n/a /b 301 x", "", "_redirects:3: .* not 4 words"),
        ("/a /b 404", "", "_redirects:1: the status '404' is none of 200, 301"),
        ("/a /b 0x12d", "", "the status '0x12d'"),
        ("https://example.com/a /b", "", "must be a path"),
        ("/a b", "", "the target 'b' must begin with / or https://"),
        ("/a http://example.com", "", "must begin with / or https://"),
        ("/a javascript:alert(1)", "", "must begin with / or https://"),
        ("/a https://example.com/ 200", "", "must be a path of this site"),
        ("/* /index.html 200", "", "is a loop: .*single-page-application"),
        ("/x/ /x/index", "", "is a loop"),
        ("/*/x/* /a", "", r"'\*' is in .* twice"),
        ("/:a/:a /a", "", "':a' is in .* twice"),
        ("/:a-:b /a", "", "more than one placeholder between two slashes"),
        ("/" + "a" * 2000 + " /b", "", "_redirects:1: the line has 2004 characters and may have 2000"),
        ("\n".join(f"/{n} /x" for n in range(MAX_STATIC_REDIRECTS + 1)), "", "_redirects:2001: more than 2000"),
        ("\n".join(f"/{n}/* /x" for n in range(MAX_DYNAMIC_REDIRECTS + 1)), "", "_redirects:101: more than 100"),
        ("", "x-a: b", "_headers:1: a path, such as"),
        ("", "/a\n  x-a b", "_headers:2: a header is `Name: value`"),
        ("", "/a\n  x-a:", "_headers:2: a header is `Name: value`"),
        ("", "/a\n  x a: b", "_headers:2: a header is"),
        ("", "/a\n  ! x-a: b", "_headers:2: a header is"),
        ("", "/a\n  x-a: b\0c", "characters that no header can have"),
        ("", "/a\n  x-a: 日", "characters that no header can have"),
        ("", "/a\n  Content-Length: 5", "content-length is the server's own"),
        ("", "/a\n  set-cookie: a=1\n  set-cookie: b=2", "_headers:3: a rule can set one cookie"),
        ("", "/a\n/b\n  x: y", "_headers:2: the rule before this one has no headers"),
        ("", "https://example.com:8080/\n  x: y", "without a port"),
        ("", "http://example.com/\n  x: y", "begins with https://HOST/"),
        ("", "\n".join(f"/{n}\n  x: y" for n in range(MAX_HEADER_RULES + 1)), "_headers:201: more than 100 rules"),
    ],
)
def test_wrong_lines_are_named(redirects: str, headers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rules(redirects, headers)


def test_what_the_limits_still_allow() -> None:
    Rules("\n".join(f"/{n} /x" for n in range(MAX_STATIC_REDIRECTS)) + "\n/a/* /x" * MAX_DYNAMIC_REDIRECTS)
    assert Rules("/ /index.html", html_handling="none").redirect("/") == Redirect("/index.html", 302)


@settings(max_examples=200)
@given(text=st.text(alphabet="/*:ab -#?!\n.0", max_size=60), path=st.text(alphabet="/ab*:\\\n", max_size=20))
def test_any_text_gives_rules_or_an_error_that_names_its_line(text: str, path: str) -> None:
    for redirects, headers in ((text, ""), ("", text)):
        try:
            rules = Rules(redirects, headers)
        except ConfigError as error:
            refused = error.message
        else:
            refused = "_none:"
            rules.apply_headers("x", f"/{path}", [])
            if found := rules.redirect(f"/{path}"):
                assert re.match(r"/(?!/)|https://", found.target)
        assert re.match(r"_(redirects|headers|none):", refused)


def test_hostile_paths_do_not_take_long() -> None:
    """With a placeholder more in a part of the path, matching this would take hours."""
    rules = Rules("\n".join(f"/x{n}/*/:a-b/:c.html/:d/e{n} /x" for n in range(100)))
    assert rules.redirect("/x0/" + "-b/.html/" * 1500 + "e") is None
    assert rules.redirect("/x0/" + "-b" * 8000) is None


# -- in a site ---------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Site:
    for name in ("page.html", "shell.html", "404.html"):
        (tmp_path / name).write_text(name)
    (tmp_path / "_redirects").write_text(
        "/page /elsewhere 301\n/app/* /shell 200\n/raw/* /shell.html 200\n/lost /nowhere 200\n/go /to?x=1#y\n"
    )
    (tmp_path / "_headers").write_text("/*\n  X-Site: yes\n  cache-control: no-store\n/app/*\n  x-app: :splat\n")
    return Site(AssetsConfig(directory=tmp_path))


async def get(site: Site, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    answer = site.respond(site.asset(path), method, path, pairs, "q=1")
    return answer.status, dict(answer.headers), b"".join([piece async for piece in answer.body])


async def test_a_redirect_goes_before_files_and_the_worker(site: Site) -> None:
    assert (await get(site, "/page"))[:2] == (
        301,
        {"content-type": "text/plain; charset=utf-8", "content-length": "0", "location": "/elsewhere?q=1"},
    )
    assert (await get(site, "/page", "POST"))[0] == 301
    assert (await get(site, "/go"))[1]["location"] == "/to?x=1#y"
    asset = site.asset_before_worker("/page", False)
    assert asset is not None
    assert (asset.location, asset.status) == ("/elsewhere", 301)
    assert site.asset_before_worker("/other", False) is None


async def test_a_rewrite_serves_another_file(site: Site) -> None:
    status, headers, body = await get(site, "/app/a/b")
    assert (status, body, headers["x-app"]) == (200, b"shell.html", "a/b")
    status, _, body = await get(site, "/raw/a")
    assert (status, body) == (200, b"shell.html")
    asset = site.asset_before_worker("/lost", False)
    assert asset is not None, "the worker is not asked"
    assert site.respond(asset, "GET", "/lost", []).status == 404


async def test_headers_are_on_files_and_on_304(site: Site) -> None:
    status, headers, _ = await get(site, "/shell")
    assert (status, headers["x-site"], headers["cache-control"]) == (200, "yes", "no-store")
    status, again, body = await get(site, "/shell", if_none_match=headers["etag"])
    assert (status, body) == (304, b"")
    assert again == {"etag": headers["etag"], "cache-control": "no-store", "x-site": "yes"}


async def test_caches_are_told_nothing_about_parts_and_what_needs_authorization(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    site = Site(AssetsConfig(directory=tmp_path))
    assert (await get(site, "/a.txt"))[1]["cache-control"] == "public, max-age=0, must-revalidate"
    assert "cache-control" not in (await get(site, "/a.txt", range="bytes=0-1"))[1]
    assert "cache-control" not in (await get(site, "/a.txt", authorization="Basic eDp5"))[1]


async def test_rules_hold_for_the_binding_too(site: Site) -> None:
    assets = Assets()
    caller = Bundle("site", "v1", "/", "worker.py")
    assets.sites[caller.key] = site

    async def fetch(url: str) -> StreamAnswer:
        return await assets.call(caller, Binding("assets"), "fetch", ["GET", url, []], None)

    assert dict((await fetch("http://x/page")).headers)["location"] == "/elsewhere"
    assert dict((await fetch("http://x/shell")).headers)["x-site"] == "yes"
    assert (await fetch("http://x/_redirects")).status == 404


@pytest.mark.parametrize("how", ["link", "folder", "bytes"])
def test_rules_that_cannot_be_read(tmp_path: Path, how: str) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "secret").write_text("x: hidden words")
    file = tmp_path / "public" / "_headers"
    makers: dict[str, Any] = {
        "link": lambda: file.symlink_to(tmp_path / "secret"),
        "folder": file.mkdir,
        "bytes": lambda: file.write_bytes(b"\xff\xfe"),
    }
    makers[how]()
    with pytest.raises(ConfigError, match="_headers") as refused:
        Site(AssetsConfig(directory=tmp_path / "public"))
    assert "hidden words" not in refused.value.message
