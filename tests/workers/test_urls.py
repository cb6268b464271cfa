from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers._urls import normalise


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.COM:443/A?b#c", "https://example.com/A?b#c"),
        ("http://example.com:8080/", "http://example.com:8080/"),
        ("  http://example.com/a b\t", "http://example.com/a%20b"),
        ("http://example.com/ä?ö=ü#ß", "http://example.com/%C3%A4?%C3%B6=%C3%BC#%C3%9F"),
        ("http://example.com/a/./b/../c/..", "http://example.com/a/"),
        ("http://example.com/../../a", "http://example.com/a"),
        ("http://example.com/a/%2e%2E/b", "http://example.com/b"),
        ("http:\\\\example.com\\a?b\\c", "http://example.com/a?b\\c"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://[::1]:8787/", "http://[::1]:8787/"),
        ("http://user:pw@example.com", "http://user:pw@example.com/"),
        ("http://example.com/%20%zz", "http://example.com/%20%zz"),
        ("http://example.com?q='\"", "http://example.com/?q=%27%22"),
        ("mailto:someone@example.com", "mailto:someone@example.com"),
    ],
)
def test_one_spelling(url, expected):
    assert normalise(url) == expected


@pytest.mark.parametrize("url", ["", "/path", "example.com", "http://", "http://a:b/", "http://a b/", "http://[::1", 5])
def test_what_is_not_absolute_is_refused(url):
    with pytest.raises(TypeError, match="Invalid URL"):
        normalise(url)


@given(st.text(), st.text())
def test_normalising_again_changes_nothing(path, query):
    once = normalise(f"http://example.com/{path}?{query}")
    assert once.isascii()
    assert normalise(once) == once


@given(st.text())
def test_nothing_but_type_error_is_raised(url):
    with contextlib.suppress(TypeError):
        assert normalise(url)
