"""Static assets: the files of a folder, served before a worker is asked and through `env.ASSETS.fetch`.

Which file a path stands for follows Cloudflare's `html_handling` and `not_found_handling`. Files are looked up when
they are asked for; `_redirects` and `_headers` (see `asset_rules`) are read once. Nothing outside of the folder is
served, neither by `..` nor by links, and nothing whose name begins with a dot, except `.well-known`; it does not
protect against somebody who can write to the folder.

Calls of the binding: `fetch` with method, URL and header pairs; the answer is the response.
"""

from __future__ import annotations

import mimetypes
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes, urlsplit

from edge.bindings.asset_rules import Rules
from edge.bindings.base import OneBody, parse
from edge.bindings.storage import FileBody
from edge.config import AssetsConfig
from edge.errors import ConfigError, InvalidInput
from edge.isolates.base import Binding, Bundle, StreamAnswer, WorkerKey
from edge.text_files import read_text

_OF_A_BODY = frozenset({"accept-ranges", "content-type", "x-content-type-options"})
_HIDDEN = frozenset({"_headers", "_redirects", "_worker.js"})
_OWN_TYPES = {
    ".avif": "image/avif",
    ".js": "text/javascript",
    ".json": "application/json",
    ".map": "application/json",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
}
_TYPES = mimetypes.MimeTypes()  # of Python's own table: what the machine's files say differs from machine to machine
_MAX_RULES_BYTES = 8 << 20
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})\Z")


class Asset(NamedTuple):
    """What a path stands for: a file, or where it is to be found."""

    file: str = ""
    """Path below the folder, led by a slash."""
    redirect: str = ""
    status: int = 200
    location: str = ""
    """Where a rule of `_redirects` leads, encoded."""


class Site:
    """The assets of one worker.

    Raises:
        ConfigError: `_redirects` or `_headers` cannot be read, or has a line that is wrong.
    """

    def __init__(self, config: AssetsConfig) -> None:
        self._config = config
        self._root = os.path.realpath(config.directory)
        patterns = config.run_worker_first if isinstance(config.run_worker_first, list) else []
        self._worker_first = [_pattern(each) for each in patterns if not each.startswith("!")]
        self._assets_first = [_pattern(each[1:]) for each in patterns if each.startswith("!")]
        redirects, headers = self._text("_redirects"), self._text("_headers")
        try:
            self._rules = Rules(redirects, headers, config.html_handling)
        except ConfigError as error:
            raise ConfigError(f"{config.directory}/{error.message}") from error

    def asset_before_worker(self, path: str, is_navigation: bool) -> Asset | None:
        """What is served for the decoded `path` without asking the worker; None: the worker is asked.

        Args:
            is_navigation: whether a browser goes to a page: pages that are not found are then the assets' affair.
        """
        if self._config.run_worker_first is True:
            return None
        if any(pattern.match(path) for pattern in self._assets_first):
            return self.asset(path)
        if any(pattern.match(path) for pattern in self._worker_first):
            return None
        return self.asset(path) if is_navigation else self._redirected(path) or self._found(path)

    def asset(self, path: str) -> Asset | None:
        """What the decoded `path` stands for, `not_found_handling` included."""
        return self._redirected(path) or self._found(path) or self._not_found(path)

    def respond(
        self, asset: Asset | None, method: str, path: str, headers: Sequence[tuple[str, str]], query: str = ""
    ) -> StreamAnswer:
        """The response with `asset`, or one that says that there is none.

        Args:
            path: what was asked for, decoded.
            headers: of the request, names in lower case.
        """
        if asset is None or not (asset.file or asset.redirect or asset.location):
            return _text(404, "Not Found")
        if asset.location:
            return _text(asset.status, "", [("location", _with_query(asset.location, query))])
        if method not in ("GET", "HEAD"):
            return _text(405, "Method Not Allowed", [("allow", "GET, HEAD")])
        if asset.redirect:
            location = quote(asset.redirect, safe="/") + (f"?{query}" if query else "")
            return _text(307, "", [("location", location)])
        return self._open(asset, method, path, dict(headers))

    # -- rules ---------------------------------------------------------------------------------------------

    def _redirected(self, path: str) -> Asset | None:
        """Where a rule leads, whatever else there is; an empty asset where it leads to nothing in this site."""
        redirect = self._rules.redirect(path)
        if redirect is None:
            return None
        if redirect.status != 200:
            return Asset(location=redirect.target, status=redirect.status)
        rewritten = decoded_path(urlsplit(redirect.target).path)
        return self._exact(rewritten) or self._found(rewritten) or self._not_found(rewritten) or Asset(status=404)

    def _text(self, name: str) -> str:
        """The content of a file of rules; empty: there is none."""
        path = os.path.join(self._root, name)
        if not os.path.lexists(path):
            return ""
        if os.path.realpath(path) != path or not os.path.isfile(path):
            raise ConfigError(f"assets.directory: {name} is no file, or a link; put the rules there")
        return read_text(Path(path), "a file of rules", _MAX_RULES_BYTES)

    # -- which file ----------------------------------------------------------------------------------------

    def _found(self, path: str) -> Asset | None:
        match self._config.html_handling:
            case "auto-trailing-slash":
                return self._auto(path)
            case "force-trailing-slash":
                return self._one_form(path, with_slash=True)
            case "drop-trailing-slash":
                return self._one_form(path, with_slash=False)
            case _:
                return self._exact(path)

    def _auto(self, path: str) -> Asset | None:
        """A page of a folder has a slash at its end, any other page has none."""
        if path.endswith("/"):
            found = self._exact(f"{path}index.html")
        elif path.endswith(".html"):
            found = None
        elif path.endswith("/index"):
            found = self._exact(path)
        else:
            found = self._exact(path) or self._exact(f"{path}.html")
        return found or self._auto_redirect(path) or self._exact(path) or self._exact(f"{path}.html")

    def _auto_redirect(self, path: str) -> Asset | None:
        for stem in _stems(path):
            if self._exact(f"{stem}/index.html") and path != f"{stem}/":
                return Asset(redirect=f"{stem}/")
            if self._exact(f"{stem}.html") and path != stem and not self._exact(stem):
                return Asset(redirect=stem)
        return None

    def _one_form(self, path: str, *, with_slash: bool) -> Asset | None:
        """All pages have a slash at their ends, or none has."""
        exact = self._exact(path)
        if exact is not None and not path.endswith(".html"):
            return exact
        for stem in _stems(path):
            files = (f"{stem}/index.html", f"{stem}.html") if with_slash else (f"{stem}.html", f"{stem}/index.html")
            page = self._exact(files[0]) or self._exact(files[1])
            if page is not None and exact in (None, page):
                better = f"{stem}/" if with_slash or not stem else stem
                return page if path == better else Asset(redirect=better)
        return exact

    def _exact(self, path: str) -> Asset | None:
        return Asset(path) if self._real_path(path) else None

    def _not_found(self, path: str) -> Asset | None:
        match self._config.not_found_handling:
            case "single-page-application":
                return self._exact("/index.html")
            case "404-page":
                folder = path
                while folder:
                    folder = folder.rpartition("/")[0]
                    if found := self._exact(f"{folder}/404.html"):
                        return found._replace(status=404)
        return None

    def _real_path(self, path: str) -> str:
        """The file of `path`; empty if there is none that may be served."""
        parts = path.split("/")
        if parts[0] or len(parts) < 2 or not all(_is_public(part) for part in parts[1:]) or parts[-1] in _HIDDEN:
            return ""
        real = os.path.realpath(os.path.join(self._root, *parts[1:]))
        is_inside = real.startswith(self._root.rstrip("/") + "/")
        return real if is_inside and os.path.isfile(real) else ""

    # -- its content ---------------------------------------------------------------------------------------

    def _open(self, asset: Asset, method: str, path: str, request: dict[str, str]) -> StreamAnswer:
        try:
            # Neither a link nor a pipe that was put there a moment ago.
            fd = os.open(self._real_path(asset.file), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it has just been removed, or may not be read
            return _text(404, "Not Found")
        file = os.fdopen(fd, "rb")
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            file.close()
            return _text(404, "Not Found")
        etag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
        headers = [
            ("etag", etag),
            ("content-type", _content_type(asset.file)),
            ("accept-ranges", "bytes"),
            ("x-content-type-options", "nosniff"),
        ]
        if not {"authorization", "range"} & set(request):
            headers.append(("cache-control", "public, max-age=0, must-revalidate"))
        headers = self._rules.apply_headers(request.get("host", ""), path, headers)
        if asset.status == 200 and _lists(request.get("if-none-match", ""), etag):
            file.close()
            return StreamAnswer(304, [pair for pair in headers if pair[0] not in _OF_A_BODY], OneBody())
        status, start, end = asset.status, 0, found.st_size
        if status == 200 and (bounds := _bounds(request, etag, end)):
            status, (start, end) = 206, bounds
            headers.append(("content-range", f"bytes {start}-{end - 1}/{found.st_size}"))
        headers.append(("content-length", str(end - start)))
        if method == "HEAD":
            file.close()
            return StreamAnswer(status, headers, OneBody())
        return StreamAnswer(status, headers, FileBody(file, start, end - start))


class Assets:
    """The ASSETS bindings of all workers of a node; `sites` is by worker."""

    def __init__(self) -> None:
        self.sites: dict[WorkerKey, Site] = {}

    @contextmanager
    def new_site(self, key: WorkerKey, site: Site | None) -> Iterator[None]:
        """Give the worker `key` other assets, or none, while a version that has them takes over; if the block raises,
        it keeps those that it had."""
        before = self.sites.get(key)
        if site is not None:  # before the first request reaches the new version
            self.sites[key] = site
        try:
            yield
        except BaseException:
            site = before
            raise
        finally:
            if site is None:
                self.sites.pop(key, None)
            else:
                self.sites[key] = site

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> StreamAnswer:
        """`fetch` of the binding; see above."""
        if method != "fetch":
            raise InvalidInput(f"an assets binding has no method {method[:40]!r}; it has fetch(method, url, headers)")
        where = "fetch(method, url, headers)"
        http_method, url, headers = parse(where, args, tuple[str, str, list[tuple[str, str]]])
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidInput(f"{where}: {error}") from error
        path = decoded_path(parts.path)
        site = self.sites.get(caller.key)
        if site is None:
            raise InvalidInput("the worker has no assets any more; a new version without them has taken over")
        headers = [("host", parts.netloc), *((name.lower(), value) for name, value in headers)]
        return site.respond(site.asset(path), http_method.upper(), path, headers, parts.query)

    async def close(self) -> None:
        """Files are closed by those who read them."""


def decoded_path(path: str) -> str:
    """The path of a URL with `%xx` resolved; what is no UTF-8 becomes something that is no file."""
    return unquote_to_bytes(path or "/").decode(errors="replace")


def _with_query(location: str, query: str) -> str:
    """A target with the query of the request, if it has none of its own."""
    target, mark, fragment = location.partition("#")
    return f"{target}?{query}{mark}{fragment}" if query and "?" not in target else location


def _stems(path: str) -> list[str]:
    """`path`, and what is left of it without an ending that names of pages can have: `/a` for `/a/index.html`."""
    endings = ("/index.html", "/index", ".html", "/", "")
    return [path.removesuffix(ending) for ending in endings if path.endswith(ending)]


def _is_public(name: str) -> bool:
    return bool(name) and (not name.startswith(".") or name == ".well-known") and not set(name) & {"\0", "\\", "�"}


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))) + r"\Z", re.DOTALL)


def _content_type(file: str) -> str:
    suffix = Path(file).suffix.lower()
    kind = _OWN_TYPES.get(suffix) or _TYPES.guess_type(f"x{suffix}")[0] or "application/octet-stream"
    is_text = kind.startswith("text/") or kind in ("application/json", "application/xml", "image/svg+xml")
    return f"{kind}; charset=utf-8" if is_text else kind


def _lists(header: str, etag: str) -> bool:
    return header.strip() == "*" or etag in (each.strip().removeprefix("W/") for each in header.split(","))


def _bounds(request: dict[str, str], etag: str, size: int) -> tuple[int, int] | None:
    """Start and end of the one range that is asked for; None: send everything, which is always allowed."""
    match = _RANGE.match(request.get("range", "").strip())
    if match is None or request.get("if-range", etag) != etag:
        return None
    first, last = match[1], match[2]
    if first:
        start, end = int(first), min(size, int(last) + 1) if last else size
    elif last:
        start, end = max(0, size - int(last)), size
    else:
        return None
    return (start, end) if start < end else None


def _text(status: int, text: str, headers: Sequence[tuple[str, str]] = ()) -> StreamAnswer:
    body = text.encode()
    own = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
    return StreamAnswer(status, [*own, *headers], OneBody(body))
