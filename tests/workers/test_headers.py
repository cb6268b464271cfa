from __future__ import annotations

import pytest

from workers._headers import header_pairs, merge_headers, parse_headers


def test_a_dict_is_stringified():
    headers = parse_headers({"X-Num": 123, "X-Flag": True, "X-Off": False, "x-pad": "  v\t"})
    assert headers["x-num"] == "123"
    assert headers["X-FLAG"] == "true"
    assert headers["x-off"] == "false"
    assert headers["x-pad"] == "v"


def test_pairs_keep_duplicates():
    headers = parse_headers([("Set-Cookie", "a=1"), ("set-cookie", "b=2")])
    assert headers.get_all("set-cookie") == ["a=1", "b=2"]
    assert header_pairs(headers) == [("Set-Cookie", "a=1"), ("set-cookie", "b=2")]


def test_no_headers():
    assert header_pairs(parse_headers(None)) == []


@pytest.mark.parametrize("headers", ["a: b", 5, [("a", "b", "c")], ["ab"], [1]])
def test_other_types_are_refused(headers):
    if headers == ["ab"]:
        headers = [{"a"}]
    with pytest.raises(TypeError, match="Received unexpected type for headers argument"):
        parse_headers(headers)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "ä", "a\r\nb", 5])
def test_illegal_names_are_refused(name):
    with pytest.raises(ValueError, match="no valid header name"):
        parse_headers({name: "v"})


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\0", "€"])
def test_illegal_values_are_refused(value):
    with pytest.raises(ValueError, match="header 'x'"):
        parse_headers({"x": value})


def test_a_header_without_value_is_refused():
    with pytest.raises(TypeError, match="value of header 'x' is None"):
        parse_headers({"x": None})


def test_headers_changed_in_place_are_checked_when_sent():
    headers = parse_headers({"a": "1"})
    headers["b"] = "2\r\nevil: 1"
    with pytest.raises(ValueError, match="line break"):
        header_pairs(headers)


def test_received_headers_are_merged_but_for_set_cookie():
    headers = merge_headers(
        [
            ("Accept", "a"),
            ("accept", " b,c "),
            ("Cookie", "x=1"),
            ("cookie", "y=2"),
            ("Set-Cookie", "1"),
            ("set-cookie", "2"),
        ]
    )
    assert headers.get_all("accept") == ["a, b,c"]
    assert headers["cookie"] == "x=1; y=2"
    assert headers.get_all("set-cookie") == ["1", "2"]
