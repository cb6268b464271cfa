import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from edge.ai import schemas
from edge.ai.completions import COMPLETION, read_completion
from edge.ai.fields import Ignored, Table, object_schema
from edge.ai.response_bodies import RESPONSE, read_response
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
        "service_tier": "auto",
        "parallel_tool_calls": False,
        "logit_bias": None,
        "top_logprobs": None,
        "guided_json": None,
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
    assert schemas.native({"prompt": "x", "temperature": 1e-08}).sampling.temperature == 0
    assert schemas.native({"prompt": "x", "repetition_penalty": 0}).sampling.repetition_penalty is None


def test_everything_that_is_wrong_is_said_at_once() -> None:
    inputs = {
        "prompt": "",
        "temperature": 9,
        "top_k": True,
        "max_tokens": "many",
        "messages": [{"role": "robot", "content": 5}],
        "stop": [1],
        "stream": "yes",
    }
    with pytest.raises(InvalidInput) as caught:
        schemas.native(inputs)
    assert caught.value.message.split("; ") == [
        'bad input: $.prompt is "", must be a string of at least one character',
        '$.messages[0].role is "robot", must be system or user or assistant or tool',
        "$.messages[0].content is 5, must be a string or a list of text parts",
        "$ needs either prompt or messages: both are given",
        "$.temperature is 9, must be a number from 0 to 5",
        "$.top_k is true, must be an integer from 1 to 50",
        '$.max_tokens is "many", must be an integer from 1 to 2147483647',
        "$.stop is a list of 1, must be a string of at most 1000 characters, or a list of up to 16",
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
        ("min_p", 1.5),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("lora", ""),
        ("lora", "x" * 201),
        ("tools", {"name": "f"}),
        ("tools", [{"name": "f"}] * 129),
        ("tool_choice", "any"),
        ("response_format", "json"),
        ("guided_json", 5),
        ("guided_json", "{"),
    ],
)
def test_wrong_native_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"\$\.{key} is "):
        schemas.native({"prompt": "hi", key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("guided_regex", "a*"),
        ("image", [1, 2]),
    ],
)
def test_what_is_not_there_is_refused_and_not_ignored(key: str, value: Any) -> None:
    for parse in (schemas.native, schemas.chat):
        with pytest.raises(InvalidInput, match=rf"\$\.{key} is .*not supported yet"):
            parse({"model": "m", "messages": HI, key: value})


def test_what_only_one_dialect_has_and_what_both_have() -> None:
    for key, value in (
        ("logprobs", True),
        ("n", 2),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
    ):
        with pytest.raises(InvalidInput, match=rf"\$\.{key} is .*not supported yet"):
            schemas.native({"prompt": "hi", key: value})
    assert schemas.chat({"model": "m", "messages": HI, "lora": "mine"}).request.adapter == "mine"
    assert schemas.native({"prompt": "hi", "lora": "mine"}).adapter == "mine"


def test_sampling_of_both_dialects() -> None:
    extra = {"min_p": 0.1, "logit_bias": {"7": -100, "49151": 2.5}}
    chat = {"model": "m", "messages": HI, "logprobs": True, "top_logprobs": 20, "n": 8}
    for sampling in (
        schemas.native({"prompt": "hi", **extra}).sampling,
        schemas.chat({**chat, **extra}).request.sampling,
    ):
        assert (sampling.min_p, sampling.logit_bias) == (0.1, {7: -100.0, 49151: 2.5})
    request = schemas.chat(chat).request
    assert (request.sampling.logprobs, request.num_choices) == (20, 8)
    assert schemas.chat({"model": "m", "messages": HI, "logprobs": True}).request.sampling.logprobs == 0
    assert schemas.chat({"model": "m", "messages": HI}).request.sampling.logprobs is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"top_logprobs": 21, "logprobs": True}, r"\$\.top_logprobs is 21, must be an integer from 0 to 20"),
        ({"top_logprobs": 1}, r"\$\.top_logprobs is given, but logprobs is not true"),
        ({"n": 10**9}, r"\$\.n is 1000000000, must be an integer from 1 to 128"),
        ({"n": 0}, r"\$\.n is 0"),
        ({"logit_bias": {"x": 1}}, r'\$\.logit_bias\["x"\] is no token id'),
        ({"logit_bias": {"-1": 1}}, "is no token id"),
        ({"logit_bias": {"1": 101}}, r'\$\.logit_bias\["1"\] is 101, must be a number from -100 to 100'),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "is an object of 1025, must be an object of up to 1024"),
    ],
)
def test_wrong_openai_values(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        schemas.chat({"model": "m", "messages": HI, **extra})


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("key", "value", "schema"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, {"type": "object"}),
        ("response_format", {"type": "json_object", "json_schema": CITY}, CITY),
        ("response_format", {"type": "json_schema", "json_schema": CITY}, CITY),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}},
            CITY,
        ),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "c", "strict": False}}, {"type": "object"}),
        ("guided_json", CITY, CITY),
        ("guided_json", json.dumps(CITY), CITY),
    ],
)
def test_json_mode(key: str, value: Any, schema: Any) -> None:
    for request in (
        schemas.native({"prompt": "hi", key: value}),
        schemas.chat({"model": "m", "messages": HI, key: value}).request,
    ):
        assert request.form == ("text" if schema is None else "json")
        assert json.loads(request.json_schema or "null") == schema


def test_a_schema_is_closed() -> None:
    given = {key: value for key, value in CITY.items() if key != "additionalProperties"}
    assert json.loads(schemas.native({"prompt": "hi", "guided_json": given}).json_schema or "") == CITY


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "xml"}, r'\$\.response_format\.type is "xml", must be "text", "json_object" or "json_schema"'),
        ({"type": "json_schema"}, r"\$\.response_format\.json_schema is null, must be a JSON schema, an object"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}, r"json_schema\.schema is 5"),
        ({"type": "json_schema", "json_schema": nested(65)}, "is nested too deeply: at most 64 levels"),
        ({"type": "json_schema", "json_schema": {"const": "x" * (1 << 18)}}, "more than 262144"),
        ({"type": "json_schema", "json_schema": {"const": "\ud800"}}, "cannot be written as JSON"),
    ],
)
def test_wrong_schemas(value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        schemas.native({"prompt": "hi", "response_format": value})


def test_a_schema_of_the_allowed_depth_is_taken_and_only_one_at_a_time() -> None:
    assert schemas.native({"prompt": "hi", "guided_json": nested(64)}).json_schema is not None
    with pytest.raises(InvalidInput, match="guided_json is given, and so is response_format"):
        schemas.native({"prompt": "hi", "guided_json": CITY, "response_format": {"type": "json_object"}})


def test_tools_and_json_mode_together() -> None:
    tools = {"tools": [{"name": "f", "parameters": CITY}], "guided_json": CITY}
    assert schemas.native({"prompt": "hi", **tools}).form == "json"
    forced = schemas.native({"prompt": "hi", **tools, "tool_choice": "required"})
    assert forced.form == "call"
    assert json.loads(forced.json_schema or "")["properties"]["name"] == {"const": "f"}
    assert schemas.native({"prompt": "hi", "tools": tools["tools"]}).form == "tools"
    silent = schemas.native({"prompt": "hi", "tools": tools["tools"], "tool_choice": "none"})
    assert (silent.form, silent.tools) == ("text", None)
    with pytest.raises(InvalidInput, match="need the chat template, which raw leaves out"):
        schemas.native({"prompt": "hi", "raw": True, "tools": tools["tools"]})


def test_unsupported_parts_of_messages() -> None:
    messages = [
        {"role": "critic", "content": "sunny"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "["}},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}, 5]},
        "hi",
    ]
    with pytest.raises(InvalidInput) as caught:
        schemas.chat({"model": "m", "messages": messages})
    assert [problem.split(" ")[0] for problem in caught.value.message.removeprefix("bad input: ").split("; ")] == [
        "$.messages[0].role",
        "$.messages[1].function_call.arguments",
        "$.messages[2].content[0].type",
        "$.messages[2].content[1]",
        "$.messages[3]",
    ]


FUNCTIONS = [{"name": "f", "parameters": CITY}, {"name": "g"}]


def test_functions_are_tools_under_their_older_name() -> None:
    def request(**more: Any) -> schemas.TextGeneration:
        return schemas.chat({"model": "m", "messages": HI, **more}).request

    old, new = request(functions=FUNCTIONS), request(tools=FUNCTIONS, parallel_tool_calls=False)
    assert (old.tools, old.form, old.stop) == (new.tools, "tools", new.stop)
    assert len(old.stop) == 1
    assert (old.answers_function_call, new.answers_function_call) == (True, False)
    forced = request(functions=FUNCTIONS, function_call={"name": "f"})
    assert (forced.form, json.loads(forced.json_schema or "")["properties"]["name"]) == ("call", {"const": "f"})
    assert request(functions=FUNCTIONS, function_call="none").tools is None
    assert request(functions=FUNCTIONS, function_call="auto").form == "tools"
    assert not request(functions=[], function_call="none", tools=FUNCTIONS).answers_function_call


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"functions": FUNCTIONS, "tools": FUNCTIONS}, r"\$\.functions are given, and so are tools"),
        ({"tools": FUNCTIONS, "function_call": {"name": "f"}}, r"\$\.functions are given, and so are tools"),
        ({"function_call": {"name": "f"}}, r"\$\.function_call asks for a call, but there are no functions"),
        ({"functions": FUNCTIONS, "function_call": {"name": "h"}}, r'name is "h", must be one of functions: f or g'),
        ({"functions": FUNCTIONS, "function_call": "f"}, r'\$\.function_call is "f", must be "none", "auto" or'),
        ({"functions": [FUNCTIONS[1], FUNCTIONS[1]]}, r'\$\.functions\[1\] has the name "g", as another one has'),
        ({"functions": {"name": "f"}}, r"\$\.functions is an object, must be a list of up to 128 functions"),
        ({"functions": [{"name": "f g"}]}, r"\$\.functions\[0\]\.name is"),
    ],
)
def test_wrong_functions(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        schemas.chat({"model": "m", "messages": HI, **body})


def test_messages_of_the_older_form() -> None:
    messages = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"city": "Rome"}'}},
        {"role": "function", "name": "f", "content": "sunny"},
        {"role": "assistant", "content": "hm", "function_call": None},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    assert schemas.chat({"model": "m", "messages": messages}).request.messages == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "name": "f"},
        {"role": "assistant", "content": "hm"},
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
known_keys = st.sampled_from(
    [
        *("prompt", "messages", "max_tokens", "temperature", "top_k", "stop", "stream", "tools", "tool_choice"),
        *("response_format", "guided_json", "logit_bias", "logprobs", "top_logprobs", "n", "lora", "min_p"),
    ]
)


@given(st.dictionaries(known_keys, json_values) | json_values)
def test_any_value_is_valid_or_refused_as_an_input(value: Any) -> None:
    for parse in (schemas.native, schemas.chat):
        refusal = None
        try:
            parse(value)
        except EdgeError as error:
            refusal = error
        assert refusal is None or (refusal.status == 400 and len(refusal.message) < 10_000)


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name", "function"]), json_values)))
def test_any_message_is_valid_or_refused_as_an_input(messages: Any) -> None:
    refusal = None
    try:
        schemas.chat({"model": "m", "messages": messages})
    except EdgeError as error:
        refusal = error
    assert refusal is None or refusal.status == 400


@pytest.mark.parametrize(("stop", "stops"), [("", []), ([""], []), (["", "x", ""], ["x"]), ([], [])])
def test_empty_stops_mean_nothing(stop: Any, stops: list[str]) -> None:
    assert schemas.chat({"model": "m", "messages": HI, "stop": stop}).request.stop == stops
    assert schemas.native({"prompt": "hi", "stop": stop}).stop == stops


# -- the tables and their JSON Schemas ---------------------------------------------------------------------

TABLES = [
    (schemas.native, schemas.NATIVE, {"prompt": "hi"}, Draft202012Validator(schemas.native_schema())),
    (schemas.chat, schemas.CHAT, {"model": "m", "messages": HI}, Draft202012Validator(schemas.chat_schema())),
    (read_completion, COMPLETION, {"model": "m", "prompt": "hi"}, Draft202012Validator(object_schema(COMPLETION))),
    (read_response, RESPONSE, {"model": "m", "input": "hi"}, Draft202012Validator(object_schema(RESPONSE))),
]
WRONG = [True, 0.5, -1e300, "", "x" * 2000, [], [[{}]], {}, {"type": "x"}, {"x": "y"}]


@pytest.mark.parametrize(("parse", "table", "valid", "validator"), TABLES)
def test_every_field_of_a_table_refuses_what_its_schema_does(
    parse: Any, table: Table, valid: dict[str, Any], validator: Draft202012Validator
) -> None:
    validator.check_schema(validator.schema)
    assert validator.is_valid(valid)
    for key, field in table.items():
        assert field.description, key
        if not field.required and key not in valid:
            assert validator.is_valid({**valid, key: None}), key
            parse({**valid, key: None})
        if isinstance(field, Ignored):
            continue
        wrong = [value for value in WRONG if not Draft202012Validator(field.schema()).is_valid(value)]
        assert wrong, key
        for value in wrong:
            body = {key: value} if key in ("prompt", "messages") else {**valid, key: value}
            assert not validator.is_valid(body)
            with pytest.raises(InvalidInput, match=rf"\$\.{key}\b"):
                parse(body)


@given(st.sampled_from(TABLES), st.dictionaries(known_keys, json_values), st.booleans())
def test_what_is_accepted_fits_the_schema(case: Any, body: dict[str, Any], is_valid_otherwise: bool) -> None:
    parse, _table, valid, validator = case
    body = {**valid, **body} if is_valid_otherwise else body
    try:
        parse(body)
    except EdgeError:
        return
    validator.validate(body)


# -- tools and reasoning in chat bodies --------------------------------------------------------------------

F, G = ({"type": "function", "function": {"name": name}} for name in "fg")


@pytest.mark.parametrize(
    ("choice", "offered", "form"),
    [
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [G]}}, ["g"], "tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [G]}}, ["g"], "call"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, ["f"], "tools"),
        ({"type": "function", "name": "f"}, ["f", "g"], "call"),
    ],
)
def test_allowed_tools_and_flat_choices(choice: Any, offered: list[str], form: str) -> None:
    request = schemas.chat({"model": "m", "messages": HI, "tools": [F, G], "tool_choice": choice}).request
    assert ([tool["function"]["name"] for tool in request.tools or []], request.form) == (offered, form)


def test_a_tool_that_is_allowed_must_be_there() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]}
    with pytest.raises(InvalidInput, match=r'\$\.tool_choice\.tools is "h", must be one of tools: f or g'):
        schemas.chat({"model": "m", "messages": HI, "tools": [F, G], "tool_choice": choice})


def test_without_parallel_tool_calls_the_answer_ends_after_the_first_one() -> None:
    body = {"model": "m", "messages": HI, "stop": "x"}
    assert schemas.chat({**body, "tools": [F], "parallel_tool_calls": False}).request.stop == ["x", "</tool_call>"]
    assert schemas.chat({**body, "tools": [F], "parallel_tool_calls": None}).request.stop == ["x"]
    assert schemas.chat({**body, "parallel_tool_calls": False}).request.stop == ["x"]


def test_reasoning_is_for_the_chat_template() -> None:
    def options(**body: Any) -> dict[str, Any]:
        return schemas.chat({"model": "m", "messages": HI, **body}).request.template_options

    assert options() == {}
    assert options(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert options(reasoning_effort=None) == options(reasoning_effort="none") == {"enable_thinking": False}
    both = options(reasoning_effort=None, chat_template_kwargs={"enable_thinking": True, "x": [1]})
    assert both == {"enable_thinking": True, "x": [1]}
    for key in ("messages", "tools", "bos_token", "not an identifier", "1"):
        with pytest.raises(InvalidInput, match=r"is no variable that can be set"):
            options(chat_template_kwargs={key: 1})
