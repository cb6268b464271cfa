"""The rules of `_redirects` and `_headers`, as Cloudflare's static assets read them. It knows nothing about files.

A source is a path in which `*` stands for anything, once, and `:name` for what is between two slashes; a target, or the
value of a header, can repeat them as `:splat` and `:name`. Cloudflare skips a line that it does not understand; here it
is an error, at the time of deploying. Sources come from whoever deploys and are matched on the event loop, so that
each part of a path has at most one placeholder: then no path takes long.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from edge.errors import ConfigError
from workers._headers import is_token

MAX_LINE_CHARS = 2000
MAX_STATIC_REDIRECTS = 2000
MAX_DYNAMIC_REDIRECTS = 100
MAX_HEADER_RULES = 100

_STATUSES = (200, 301, 302, 303, 307, 308)
_PLACEHOLDER = re.compile(r":([A-Za-z]\w*)", re.ASCII)
_VARIABLE = re.compile(rf"\*|{_PLACEHOLDER.pattern}", re.ASCII)
_TARGET = re.compile(r"/|https://[^/\s]")
_COOKIE = "set-cookie"
_OF_THE_MESSAGE = frozenset(
    {"connection", "content-length", "content-range", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
_URL_CHARS = "/:?#[]@!$&'()*+,;=%~"

Values = Mapping[str, str]


class Redirect(NamedTuple):
    """Where a path leads: to the path or URL `target`, percent-encoded. 200: what is there is served instead."""

    target: str
    status: int


class _RedirectRule(NamedTuple):
    source: re.Pattern[str]
    target: str
    status: int


class _HeaderRule(NamedTuple):
    source: re.Pattern[str]
    is_absolute: bool
    changes: list[tuple[str, str | None]]
    """Names in lower case; None: the header is removed."""


class Rules:
    """What the two files of a site say.

    Args:
        redirects: the text of `_redirects`.
        headers: the text of `_headers`.
        html_handling: of the site, which takes `index` and `.html` from the ends of paths unless it is `none`.

    Raises:
        ConfigError: a line is wrong; the message names file and line.
    """

    def __init__(self, redirects: str = "", headers: str = "", html_handling: str = "auto-trailing-slash") -> None:
        self._static: dict[str, Redirect] = {}
        self._dynamic: list[_RedirectRule] = []
        self._headers: list[_HeaderRule] = []
        for number, line in _lines("_redirects", redirects):
            with _in_line("_redirects", number):
                self._add_redirect(line, html_handling)
        for number, line in _lines("_headers", headers):
            with _in_line("_headers", number):
                self._add_header_line(line)

    def redirect(self, path: str) -> Redirect | None:
        """Where the decoded `path` leads by the first rule that it matches."""
        if path in self._static:
            return self._static[path]
        for rule in self._dynamic:
            if match := rule.source.match(path):
                target = _filled(rule.target, {name: quote(value) for name, value in match.groupdict().items()})
                return Redirect(_one_slash(target), rule.status)
        return None

    def apply_headers(self, host: str, path: str, headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """`headers` of the response for the decoded `path` at `host`, changed by all rules that match.

        A rule replaces what was there, and adds to what a rule before it has set.
        """
        found = dict(headers)
        ours: set[str] = set()
        for rule in self._headers:
            match = rule.source.match(f"https://{_hostname(host)}{path}" if rule.is_absolute else path)
            if match is None:
                continue
            values = {name: quote(value) for name, value in match.groupdict().items()}
            for name, value in rule.changes:
                if value is None:
                    found.pop(name, None)
                    ours.discard(name)
                    continue
                filled = _filled(value, values)
                is_added = name in ours and name != _COOKIE
                found[name] = f"{found[name]}, {filled}" if is_added else filled
                ours.add(name)
        return list(found.items())

    # -- reading -------------------------------------------------------------------------------------------

    def _add_redirect(self, line: str, html_handling: str) -> None:
        words = re.split(r"\s+#", line, maxsplit=1)[0].split()
        if len(words) not in (2, 3):
            raise ValueError(f"a redirect is `SOURCE TARGET [STATUS]`, not {len(words)} words")
        source, target, status = words[0], words[1], words[2] if len(words) == 3 else "302"
        if status not in map(str, _STATUSES):
            raise ValueError(f"the status {status!r} is none of {', '.join(map(str, _STATUSES))}")
        if "://" in source:
            raise ValueError(f"the source {source!r} must be a path: redirects are for all hosts")
        if not _TARGET.match(target):
            raise ValueError(f"the target {target!r} must begin with / or https://")
        if status == "200" and not target.startswith("/"):
            raise ValueError(f"with the status 200, the target must be a path of this site, not {target!r}")
        source = unquote(urlsplit("/" + source.lstrip("/")).path)
        _check_no_loop(source, target, html_handling)
        target = quote(_one_slash(target), safe=_URL_CHARS)
        if not self._dynamic and not _VARIABLE.search(source):
            if len(self._static) >= MAX_STATIC_REDIRECTS:
                raise ValueError(f"more than {MAX_STATIC_REDIRECTS} redirects without * and placeholders")
            self._static.setdefault(source, Redirect(target, int(status)))
            return
        if len(self._dynamic) >= MAX_DYNAMIC_REDIRECTS:
            raise ValueError(
                f"more than {MAX_DYNAMIC_REDIRECTS} redirects with * or placeholders, which all that follow the first "
                "of these count as: move those without to the top"
            )
        self._dynamic.append(_RedirectRule(_pattern(source), target, int(status)))

    def _add_header_line(self, line: str) -> None:
        if re.match(r"/|\S+://", line):
            if self._headers and not self._headers[-1].changes:
                raise ValueError("the rule before this one has no headers")
            if len(self._headers) >= MAX_HEADER_RULES:
                raise ValueError(f"more than {MAX_HEADER_RULES} rules")
            self._headers.append(_HeaderRule(_pattern(_source_of_headers(line)), not line.startswith("/"), []))
            return
        if not self._headers:
            raise ValueError("a path, such as /*, must come before the headers that are set there")
        name, colon, value = line.removeprefix("! ").partition(":")
        name, value, is_removed = name.strip().lower(), value.strip(), line.startswith("! ")
        if not is_token(name) or (is_removed and colon) or not (is_removed or value):
            raise ValueError("a header is `Name: value`, or `! Name` where it is removed")
        if name in _OF_THE_MESSAGE:
            raise ValueError(f"the header {name} is the server's own")
        if not re.fullmatch(r"[\x20-\x7e\x80-\xff\t]*", value):
            raise ValueError(f"the value of {name} has characters that no header can have")
        changes = self._headers[-1].changes
        before = [at for at, (each, text) in enumerate(changes) if each == name and text is not None]
        if before and not is_removed:
            if name == _COOKIE:
                raise ValueError("a rule can set one cookie: several do not fit into one header")
            changes[before[0]] = (name, f"{changes[before[0]][1]}, {value}")
        else:
            changes.append((name, None if is_removed else value))


@contextlib.contextmanager
def _in_line(file: str, number: int) -> Iterator[None]:
    """Turn a ValueError of the block into a ConfigError that names file and line."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{file}:{number}: {error}") from error


def _lines(file: str, text: str) -> Iterator[tuple[int, str]]:
    for number, whole in enumerate(text.split("\n"), 1):
        line = whole.strip()
        if len(line) > MAX_LINE_CHARS:
            raise ConfigError(f"{file}:{number}: the line has {len(line)} characters and may have {MAX_LINE_CHARS}")
        if line and not line.startswith("#"):
            yield number, line


def _check_no_loop(source: str, target: str, html_handling: str) -> None:
    """Raises ValueError where a redirect leads to what html_handling leads back from."""
    if not re.fullmatch(r"/(?:.*/)?index(?:\.html)?", target):
        return
    if source.endswith("/*"):
        raise ValueError(
            f"{source} to {target} is a loop: for pages that are not found, "
            'set `not_found_handling = "single-page-application"` in [assets]'
        )
    if source.endswith("/") and html_handling != "none":
        raise ValueError(f"{source} to {target} is a loop: `html_handling` serves it at {source} already")


def _source_of_headers(line: str) -> str:
    if line.startswith("/"):
        return unquote(urlsplit("/" + line.lstrip("/")).path)
    parts = urlsplit(line)
    if parts.scheme != "https" or not parts.netloc or re.search(r":[0-9]*\Z", parts.netloc):
        raise ValueError("a rule for a host begins with https://HOST/, without a port")
    return f"https://{parts.netloc}{unquote(parts.path) or '/'}"


def _pattern(source: str) -> re.Pattern[str]:
    """What matches a source, with a named group for each placeholder. Raises ValueError."""
    expression = ""
    seen: set[str] = set()
    for part in re.split(r"(/)", source):
        variables = list(_VARIABLE.finditer(part))
        if len(variables) > 1:
            raise ValueError(f"{part!r} has more than one placeholder between two slashes")
        for variable in variables:
            name = variable[1] or "splat"
            if name in seen:
                raise ValueError(f"{variable[0]!r} is in {source!r} twice")
            seen.add(name)
            anything = ".*" if variable[0] == "*" else "[^/]+"
            before, after = re.escape(part[: variable.start()]), re.escape(part[variable.end() :])
            expression += f"{before}(?P<{name}>{anything}){after}"
        if not variables:
            expression += re.escape(part)
    return re.compile(expression + r"\Z", re.DOTALL)


def _filled(text: str, values: Values) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def _one_slash(target: str) -> str:
    """A path without doubled slashes: a browser takes what begins with two for a host."""
    if not target.startswith("/"):
        return target
    path, mark, rest = target.partition("?")
    return re.sub(r"/+", "/", path) + mark + rest


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
