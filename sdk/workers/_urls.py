"""URLs in the one spelling that handlers see, after the WHATWG URL standard as far as HTTP URLs need it."""

from __future__ import annotations

import functools
from urllib.parse import SplitResult, quote, urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_STRIPPED = "".join(map(chr, range(0x21)))  # C0 controls and space
_SAFE_PATH = "/!$%&'()*+,-.:;=@[]^_|~"
_SAFE_QUERY = "/!$%&()*+,-.:;=?@[]\\^_`{|}~"
_SAFE_FRAGMENT = "/!#$%&'()*+,-.:;=?@[]\\^_{|}~"


def normalise(url: str) -> str:
    """`url` normalised: `HTTP://Example.com:80` becomes `http://example.com/`. Other schemes are left as they are.

    Raises:
        TypeError: `url` is no str, or no absolute URL.
    """
    if not isinstance(url, str):
        raise TypeError(f"Invalid URL: a str is needed, not {type(url).__name__}")
    return _normalised(url)


@functools.lru_cache(maxsize=128)  # a worker sees the same few URLs over and over
def _normalised(url: str) -> str:
    text = url.strip(_STRIPPED).translate({ord(char): None for char in "\t\n\r"})
    try:
        parts = urlsplit(text)
        if parts.scheme not in _DEFAULT_PORTS:
            if not parts.scheme:
                raise ValueError
            return text
        text = text.replace("\\", "/", _num_backslashes(text))
        parts = urlsplit(text)
        return _spell(parts)
    except ValueError:  # UnicodeError is one
        raise TypeError(
            f"Invalid URL: {url!r} is not absolute and well-formed, like https://example.com/path"
        ) from None


def _spell(parts: SplitResult) -> str:
    if not parts.hostname:
        raise ValueError
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    if any(char in " <>^|%" for char in host):
        raise ValueError
    spelled = f"[{host}]" if ":" in host else host
    if parts.port is not None and parts.port != _DEFAULT_PORTS[parts.scheme]:
        spelled += f":{parts.port}"
    if "@" in parts.netloc:
        spelled = parts.netloc.rpartition("@")[0] + "@" + spelled
    text = f"{parts.scheme}://{spelled}{_without_dots(quote(parts.path, _SAFE_PATH))}"
    if parts.query:
        text += "?" + quote(parts.query, _SAFE_QUERY)
    if parts.fragment:
        text += "#" + quote(parts.fragment, _SAFE_FRAGMENT)
    return text


def _without_dots(path: str) -> str:
    """`path` with `.` and `..` resolved; it always starts with a slash."""
    kept: list[str] = []
    segments = path.split("/")[1:] or [""]
    for index, segment in enumerate(segments):
        dots = segment.lower().replace("%2e", ".")
        if dots == "..":
            del kept[-1:]
        elif dots != ".":
            kept.append(segment)
            continue
        if index == len(segments) - 1:
            kept.append("")
    return "/" + "/".join(kept)


def _num_backslashes(text: str) -> int:
    """How many backslashes come before the query: browsers read those as slashes."""
    end = min((at for at in (text.find("?"), text.find("#")) if at >= 0), default=len(text))
    return text.count("\\", 0, end)
