"""Every way in which handlers are known to read a result (and to hand values in)."""

from __future__ import annotations

import copy
import enum
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.values import MAX_DEPTH, JsBytes, JsDict, JsList, plain, to_py, wrap

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture
def result():
    return wrap({"response": "hi", "choices": [{"message": {"content": "yes"}}], "data": [[1.0, 2.0]], "items": 3})


def test_keys_are_attributes_at_every_depth(result):
    assert result.response == "hi"
    assert result.choices[0].message.content == "yes"


def test_results_are_real_dicts_and_lists(result):
    assert isinstance(result, dict)
    assert isinstance(result.choices, list)
    assert result["response"] == result.get("response") == "hi"
    assert "response" in result
    assert result["items"] == 3


def test_to_py_gives_plain_values_at_every_depth(result):
    assert hasattr(result, "to_py")
    assert hasattr(result.choices, "to_py")
    assert type(result.to_py()["choices"][0]["message"]) is dict
    assert type(result.choices.to_py()[0]) is dict
    assert type(result.data.to_py()[0]) is list
    assert result.to_py(depth=1).get("response") == "hi"


def test_a_missing_attribute_is_an_attribute_error_that_names_the_keys(result):
    assert getattr(result, "output", None) is None
    assert not hasattr(result, "__missing_dunder__")
    with pytest.raises(AttributeError, match=r"no 'output' here; the keys are: response, choices, data, items"):
        _ = result.output


def test_attributes_can_be_set_and_deleted(result):
    result.response = "new"
    assert result["response"] == "new"
    del result.response
    assert "response" not in result
    with pytest.raises(AttributeError):
        del result.response


def test_results_copy_print_and_serialise_like_dicts(result):
    plain_result = {"response": "hi", "choices": [{"message": {"content": "yes"}}], "data": [[1.0, 2.0]], "items": 3}
    assert copy.deepcopy(result) == plain_result
    assert str(result) == str(plain_result)
    assert json.dumps(result) == json.dumps(plain_result)


def test_bytes_have_the_conversions_of_a_buffer():
    chunk = wrap({"image": b"\x01\x02"}).image
    assert isinstance(chunk, JsBytes)
    assert chunk.to_bytes() == b"\x01\x02"
    assert type(chunk.to_bytes()) is bytes
    assert chunk.to_py().tolist() == [1, 2]


@given(JSON)
def test_wrapping_changes_nothing_but_the_types(value):
    assert wrap(value) == value
    assert to_py(wrap(value)) == value
    assert plain(wrap(value), "inputs") == value


def test_plain_unwraps_proxies_buffers_tuples_and_enums():
    class Proxy:
        def to_py(self):
            return {"prompt": (1, 2)}

    class Role(enum.StrEnum):
        USER = "user"

    value = plain({"a": Proxy(), "b": bytearray(b"x"), "c": memoryview(b"y"), "d": Role.USER, "e": True}, "inputs")
    assert value == {"a": {"prompt": [1, 2]}, "b": b"x", "c": b"y", "d": "user", "e": True}
    assert type(value["d"]) is str


def test_plain_names_the_place_of_what_cannot_be_sent():
    with pytest.raises(TypeError, match=r"inputs\.messages\[1\]\.content is a set"):
        plain({"messages": [{}, {"content": {1}}]}, "inputs")
    with pytest.raises(TypeError, match=r"inputs has the key 1; keys must be str"):
        plain({1: 2}, "inputs")


def test_plain_refuses_values_that_contain_themselves():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match=f"inputs is nested deeper than {MAX_DEPTH} levels"):
        plain({"a": loop}, "inputs")


def test_subclasses_are_left_alone():
    class Mine(dict):
        pass

    assert type(wrap(Mine())) is Mine
    assert isinstance(wrap([()])[0], JsList)
    assert isinstance(wrap([{}])[0], JsDict)
