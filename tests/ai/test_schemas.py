import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.ai import schemas
from edge.errors import EdgeError, InvalidInput, InvalidJson
from edge.frames import Sampling

HI = [{"role": "user", "content": "hi"}]


def test_native_defaults() -> None:
    request = schemas.native({"prompt": "hi"})
    assert request == schemas.TextGeneration(
        messages=None,
        prompt="hi",
        raw=False,
        sampling=Sampling(temperature=0.6),
        max_tokens=256,
        stop=[],
        stream=False,
    )


def test_native_takes_every_field() -> None:
    inputs = {
        "messages": HI,
        "stream": True,
        "max_tokens": 7.0,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 50,
        "seed": 9_999_999_999,
        "repetition_penalty": 1.1,
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "stop": "END",
    }
    request = schemas.native(inputs)
    assert request.messages == HI
    assert (request.max_tokens, request.stop, request.stream) == (7, ["END"], True)
    assert request.sampling == Sampling(0.0, 0.5, 50, 9_999_999_999, 1.1, -2.0, 2.0)


def test_chat_defaults_and_aliases() -> None:
    body = schemas.chat({"model": "m", "messages": [{"role": "developer", "content": "be brief"}, *HI]})
    assert body.model == "m"
    assert body.request.messages == [{"role": "system", "content": "be brief"}, *HI]
    assert (body.request.max_tokens, body.request.sampling.temperature) == (None, 1.0)
    body = schemas.chat({"model": "m", "messages": HI, "max_tokens": 5, "max_completion_tokens": 9})
    assert body.request.max_tokens == 9


def test_what_real_clients_send_is_accepted() -> None:
    careless = {
        "stop": None,
        "seed": None,
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {},
        "store": False,
        "options": {"rejectIfBusy": True},
        "random_seed": 3,
        "strict": True,
        "reasoning_effort": None,
        "logprobs": False,
        "n": 1,
        "lora": None,
    }
    messages = [
        {"role": "assistant", "content": None, "name": None, "tool_calls": [], "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user"},
    ]
    expected = [
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "a\nb"},
        {"role": "user", "content": ""},
    ]
    assert schemas.native({"messages": messages, **careless}).messages == expected
    assert schemas.chat({"model": "m", "messages": messages, **careless}).request.messages == expected
    assert schemas.native({"prompt": "x", "temperature": 1e-08}).sampling.temperature == 1e-08
    assert schemas.native({"prompt": "x", "repetition_penalty": 0}).sampling.repetition_penalty is None


def test_everything_that_is_wrong_is_said_at_once() -> None:
    inputs = {
        "prompt": "",
        "temperature": 9,
        "top_k": True,
        "max_tokens": "many",
        "messages": [{"role": "robot", "content": 5}],
        "stop": [""],
        "stream": "yes",
    }
    with pytest.raises(InvalidInput) as caught:
        schemas.native(inputs)
    assert caught.value.message.split("; ") == [
        'bad input: $.prompt is "", must be a string of at least one character',
        '$.messages[0].role is "robot", must be system or user or assistant',
        "$.messages[0].content is 5, must be a string or a list of text parts",
        "$ needs either prompt or messages: both are given",
        "$.temperature is 9, must be a number from 0 to 5",
        "$.top_k is true, must be an integer from 1 to 50",
        '$.max_tokens is "many", must be an integer from 1 to 2147483647',
        "$.stop is a list of 1, must be a string of 1 to 1000 characters, or a list of up to 16",
        '$.stream is "yes", must be true or false',
    ]
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", 1.5),
        ("seed", 0),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("max_tokens", math.inf),
        ("repetition_penalty", -1),
        ("frequency_penalty", 3),
        ("presence_penalty", "1"),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("raw", 1),
        ("prompt", "\ud800"),
        ("stop", "\ud800"),
    ],
)
def test_wrong_native_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"\$\.{key} is "):
        schemas.native({"prompt": "hi", key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tools", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("lora", "mine"),
        ("logprobs", True),
        ("image", [1, 2]),
        ("n", 2),
    ],
)
def test_what_is_not_there_is_refused_and_not_ignored(key: str, value: Any) -> None:
    for parse in (schemas.native, schemas.chat):
        with pytest.raises(InvalidInput, match=rf"\$\.{key} is .*not supported yet"):
            parse({"model": "m", "messages": HI, key: value})


def test_unsupported_parts_of_messages() -> None:
    messages = [
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}, 5]},
        "hi",
    ]
    with pytest.raises(InvalidInput) as caught:
        schemas.chat({"model": "m", "messages": messages})
    assert [problem.split(" ")[0] for problem in caught.value.message.removeprefix("bad input: ").split("; ")] == [
        "$.messages[0].role",
        "$.messages[1].tool_calls",
        "$.messages[2].content[0].type",
        "$.messages[2].content[1]",
        "$.messages[3]",
    ]


def test_a_chat_body_needs_model_and_messages() -> None:
    with pytest.raises(InvalidInput, match=r"\$\.model is missing; \$\.messages is missing"):
        schemas.chat({})
    with pytest.raises(InvalidInput, match=r"\$\.messages is an empty list"):
        schemas.chat({"model": "m", "messages": []})
    with pytest.raises(InvalidInput, match=r"stream_options is given, but stream is not true"):
        schemas.chat({"model": "m", "messages": HI, "stream_options": {}})
    with pytest.raises(InvalidInput, match="a list of up to 4"):
        schemas.chat({"model": "m", "messages": HI, "stop": ["a"] * 5})


def test_a_prompt_or_messages_is_needed() -> None:
    with pytest.raises(InvalidInput, match="either prompt or messages: there is neither"):
        schemas.native({})
    with pytest.raises(InvalidInput, match=r"there is neither \(promt is not prompt\)"):
        schemas.native({"promt": "hi", "stream": False})
    with pytest.raises(InvalidInput, match="raw is true, which needs prompt"):
        schemas.native({"messages": HI, "raw": True})


@pytest.mark.parametrize("value", [None, 5, "text", [1], True])
def test_other_than_objects_are_refused(value: Any) -> None:
    for parse in (schemas.native, schemas.chat):
        with pytest.raises(InvalidJson, match="must be a JSON object, not"):
            parse(value)


def test_millions_of_mistakes_are_refused_quickly_and_briefly() -> None:
    with pytest.raises(InvalidInput) as caught:
        schemas.native({"messages": [{"role": "user", "content": [1] * 3_000_000}]})
    assert caught.value.message.count("must be a part") == 20
    assert caught.value.message.endswith("and perhaps more")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=8,
)
known_keys = st.sampled_from(["prompt", "messages", "max_tokens", "temperature", "top_k", "stop", "stream", "tools"])


@given(st.dictionaries(known_keys, json_values) | json_values)
def test_any_value_is_valid_or_refused_as_an_input(value: Any) -> None:
    for parse in (schemas.native, schemas.chat):
        refusal = None
        try:
            parse(value)
        except EdgeError as error:
            refusal = error
        assert refusal is None or (refusal.status == 400 and len(refusal.message) < 10_000)
