from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import RequestTooLarge
from edge.node.api import json_size
from edge.node.api.json_size import MAX_CONTAINERS, MAX_STRINGS, check_json_size

BIG = 10 << 20


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", "lists and objects"),
        (b"[" + b"{}," * MAX_CONTAINERS + b"1]", "lists and objects"),
        (b'{"a":' * (MAX_CONTAINERS + 1), "lists and objects"),
        (b"[" + b'"ab",' * (MAX_STRINGS + 1) + b"1]", "strings"),
    ],
)
def test_what_would_take_much_memory_is_refused(text: bytes, what: str) -> None:
    with pytest.raises(RequestTooLarge, match=f"holds .*{what}"):
        check_json_size(text)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"prompt": '[{"' * (BIG // 4)}).encode(),
        b"[" + b"0," * (BIG // 2 - 2) + b"0]",
        b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"1]",
        b"[" + b'"ab",' * (MAX_STRINGS - 1) + b"1]",
    ],
)
def test_what_takes_little_passes(text: bytes) -> None:
    check_json_size(text)


@pytest.mark.parametrize("unit", [b'"', b'\\"', b'"a', b'a"b\\', b'["', b'\\"['])
def test_no_text_takes_long(unit: bytes) -> None:
    text = b'["' + unit * (BIG // len(unit))
    began = time.process_time()
    with suppress(RequestTooLarge):
        check_json_size(text)
    assert time.process_time() - began < 20  # 0.3 s on a slow machine, hours if it looked at bytes again


values = st.recursive(
    st.text(alphabet='a"\\[{,é', max_size=5) | st.integers(),
    lambda children: st.lists(children) | st.dictionaries(st.text(alphabet='b"\\[{', max_size=5), children),
    max_leaves=40,
)


def count(value: Any) -> tuple[int, int]:
    """Containers and strings in `value`."""
    match value:
        case str():
            return 0, 1
        case list() | dict():
            children = value if isinstance(value, list) else [*value, *value.values()]
            counts = [count(child) for child in children]
            return 1 + sum(each[0] for each in counts), sum(each[1] for each in counts)
        case _:
            return 0, 0


@settings(max_examples=50)
@given(values, st.booleans(), st.booleans())
def test_it_counts_what_is_there(value: Any, has_escapes: bool, is_short: bool) -> None:
    num_containers, num_strings = count(value)
    text = json.dumps(value, ensure_ascii=has_escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "MAX_CONTAINERS", max(0, num_containers - is_short))
        patch.setattr(json_size, "MAX_STRINGS", num_strings)
        if is_short and num_containers:
            with pytest.raises(RequestTooLarge, match=f"holds {num_containers} lists"):
                check_json_size(text)
        else:
            check_json_size(text)
