from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import tiny_models
import torch
from helpers import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine import grammar as grammars
from edge.engine.grammar import Grammar, GrammarCompiler
from edge.engine.sampler import Row, Sampler, sample
from edge.engine.tokenizer import Detokenizer, Tokenizer
from edge.errors import InvalidInput
from edge.frames import MAX_SCHEMA_CHARS, Sampling
from edge.weights.checkpoint import TokenizerFiles, open_checkpoint

MAX_TOKENS = 400
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}, "maxItems": 2},
        "role": {"enum": ["admin", "user", 3, None]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": ["string", "null"], "maxLength": 9}, "zip": {"pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "emails", "role", "address"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "json object": {"type": "object"},
    "anything": {},
    "person": PERSON,
    "optional properties": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}},
    "anyOf": {
        "anyOf": [
            {"type": "object", "properties": {"is": {"const": "cat"}, "lives": {"enum": [7, 9]}}, "required": ["is"]},
            {"type": "object", "properties": {"is": {"const": "dog"}}, "required": ["is"], "maxProperties": 1},
        ]
    },
    "oneOf": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]},
            {"properties": {"a": {"maxLength": 3}, "b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "strings": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 3}, "minItems": 3},
    "patterns": {
        "type": "array",
        "prefixItems": [
            {"type": "string", "pattern": pattern, "maxLength": 12}
            for pattern in (r"^\d{2,4}$", r"^\w{1,5}$", "b+c$", "^[^a-z]{1,6}$", "^.{3}$", r"^[\w.+-]+@x\.(de|com)$")
        ],
        "items": False,
        "minItems": 6,
    },
    "formats": {
        "type": "array",
        "prefixItems": [{"type": "string", "format": kind} for kind in ("uuid", "ipv4", "date-time", "date", "time")],
        "items": False,
        "minItems": 5,
    },
    "numbers": {
        "type": "array",
        "prefixItems": [
            {"type": "number", "exclusiveMinimum": 0.125, "maximum": 0.35},
            {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
            {"type": "number"},
            {"type": "number", "multipleOf": 0.5, "maximum": 9},
            {"type": "integer", "exclusiveMaximum": 1000},
        ],
        "items": False,
        "minItems": 5,
    },
    "named by pattern": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
    },
    "values": {"enum": ["é😀", '"q"', "\\", "\n", {"a": [1, 2]}, [], 1.5, True, "\ufffd", "日本語"]},
}


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return open_checkpoint(tiny_models.save_folder(tmp_path_factory.mktemp("tiny"))).tokenizer_files()


@pytest.fixture(scope="module")
def tiny(tiny_files: TokenizerFiles) -> Tokenizer:
    return Tokenizer(tiny_files)


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    # Models have more logits than there are tokens.
    return GrammarCompiler(tiny, tiny.num_tokens + 30)


def allowed(compiler: GrammarCompiler, grammar: Grammar) -> set[int]:
    (mask,) = compiler.masks([grammar])
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def write(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, seed: int, hurry: float = 6.0) -> str | None:
    """A text of random tokens that `schema` allows, or None if it does not end; `hurry` makes it end."""
    rng = np.random.default_rng(seed)
    noise = 3 * rng.standard_normal((16, tokenizer.num_tokens), dtype=np.float32)
    closing = [token for sign in ('"', "}", "]") for token in tokenizer.encode(sign, 9)]
    grammar, detokenizer = compiler.compile(json.dumps(schema)), Detokenizer(tokenizer)
    sampler = Sampler(Sampling(temperature=1.0, seed=seed), tokenizer.num_tokens)
    text = ""
    for _ in range(MAX_TOKENS):
        first, second = rng.integers(len(noise), size=2)
        logits = torch.from_numpy(noise[first] + noise[second])[None]
        logits[0, closing] += hurry
        (mask,) = compiler.masks([grammar])
        (choice,) = sample(logits, [Row(sampler, mask=mask)])
        assert choice is not None
        assert grammar.broken is None
        sampler.accept(choice.token)
        if choice.token in tokenizer.eos_ids:
            return text + detokenizer.rest()
        text += detokenizer.add(choice.token)
        grammar.accept(choice.token)
        if grammar.is_finished:
            return text + detokenizer.rest()
    return None


# -- what is written fits ----------------------------------------------------------------------------------


@settings(max_examples=num_examples(120), deadline=None)
@given(name=st.sampled_from(sorted(SCHEMAS)), seed=st.integers(0, 1 << 30), hurry=st.sampled_from([0.0, 6.0]))
def test_what_is_finished_fits_the_schema(
    compiler: GrammarCompiler, tiny: Tokenizer, name: str, seed: int, hurry: float
) -> None:
    text = write(compiler, tiny, SCHEMAS[name], seed, hurry)
    if text is not None:
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker(["uuid", "ipv4"]))


@pytest.mark.slow
@pytest.mark.model
def test_the_same_with_the_tokens_of_a_real_model(model_path: Path) -> None:
    tokenizer = Tokenizer(open_checkpoint(model_path).tokenizer_files())
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens)
    for name, schema in SCHEMAS.items():
        texts = [text for seed in range(4) if (text := write(compiler, tokenizer, schema, seed, 12.0)) is not None]
        assert texts, name
        for text in texts:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker(["uuid", "ipv4"]))


def advanced(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> Grammar:
    """The grammar after `text`."""
    grammar, tokens = compiler.compile(json.dumps(schema)), tokenizer.encode(text, 1000)
    assert grammar.num_allowed(tokens) == len(tokens)
    for token in tokens:
        grammar.accept(token)
    return grammar


def test_the_end_is_allowed_only_where_the_json_is_complete(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    for text in ("", "{", '{"a"', '{"a":1', '{"a":{}'):
        grammar = advanced(compiler, tiny, {"type": "object"}, text)
        assert not tiny.eos_ids & allowed(compiler, grammar)
        assert not grammar.is_finished
    grammar = advanced(compiler, tiny, {"type": "object"}, '{"a":{}}')
    assert grammar.is_finished
    assert allowed(compiler, grammar) == tiny.eos_ids
    number = advanced(compiler, tiny, {"type": "integer"}, "12")
    assert not number.is_finished
    assert allowed(compiler, number) == {*tiny.eos_ids, *tiny.encode("0123456789", 10)}


def test_special_tokens_are_never_part_of_it(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    inside = allowed(compiler, advanced(compiler, tiny, {"type": "string"}, '"a'))
    assert max(inside) < len(tiny_models.ALPHABET)
    assert len(inside) > 90


def test_white_space_ends(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    def fits(text: str) -> bool:
        tokens = tiny.encode(text, 1000)
        return compiler.compile('{"type":"object"}').num_allowed(tokens) == len(tokens)

    assert fits('{\n    "a": [\n        1,\r\n\t\t2\n    ]\n}')
    assert fits('{"a": {"b":1}, "c" : 2 }')
    assert not fits(" {")
    assert not fits('{"a":  1')
    assert not fits('{"a":\n\n')
    assert not fits("{\n" + 41 * " ")


# -- masks -------------------------------------------------------------------------------------------------


def test_masks_of_many_and_after_drafts(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    texts = ["{", '{"a":', '{"a":1']
    own = [advanced(compiler, tiny, {"type": "object"}, text) for text in texts]
    alone = [compiler.masks([grammar])[0].tolist() for grammar in own]
    assert compiler.masks(own).tolist() == alone
    draft = tiny.encode('"a":1', 9)
    rows = compiler.masks([own[0], own[1]], [draft, []]).tolist()
    assert len(rows) == 7
    assert [rows[0], rows[4], rows[5], rows[6]] == [alone[0], alone[1], alone[2], alone[1]]
    assert own[0].num_allowed(tiny.encode('"x"', 9)) == 3  # the draft was not accepted
    assert own[0].num_allowed(tiny.encode('"x"}}', 9)) == 3
    compiler.masks([own[0]], [tiny.encode("}}}", 9)])
    assert own[0].broken is None
    assert compiler.masks([]).shape[0] == 0


def test_grammars_of_one_schema_are_independent(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    first, second = (compiler.compile('{"type":"object"}') for _ in range(2))
    first.accept(*tiny.encode("{", 1))
    assert allowed(compiler, second) == set(tiny.encode("{", 1))


def test_compiling_in_several_threads(tiny: Tokenizer) -> None:
    compiler = GrammarCompiler(tiny, tiny.num_tokens)
    done: list[set[int]] = []

    def work(number: int) -> None:
        done.append(allowed(compiler, compiler.compile(json.dumps({"const": number % 3}))))

    threads = [threading.Thread(target=work, args=[number]) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(sorted, done)) == sorted([tiny.encode(str(number % 3), 1) for number in range(12)])


def test_a_schema_that_takes_too_much_work_breaks_its_own_answer_alone(
    compiler: GrammarCompiler, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_LEXER_STATES", 400)
    schema = json.dumps({"type": "string", "pattern": "(.*a){20}.{1000}"})
    hard, easy = compiler.compile(schema), compiler.compile('{"type":"object"}')
    text = iter(tiny.encode('"' + "xa" * 400, 1000))
    compiler.masks([hard, easy])
    while hard.broken is None:
        hard.accept(next(text))
        compiler.masks([hard, easy])
    assert "cannot be followed any further" in hard.broken
    assert not hard.is_finished
    assert easy.broken is None
    assert hard.num_allowed([1]) == 0
    again = compiler.compile(schema)  # starts afresh
    for token in tiny.encode('"xaxa', 9):
        compiler.masks([again])
        again.accept(token)
    assert again.broken is None


def test_the_cache_is_bounded(tiny: Tokenizer) -> None:
    compiler = GrammarCompiler(tiny, tiny.num_tokens)
    for number in range(grammars.MAX_CACHED + 5):
        compiler.compile(json.dumps({"const": number}))
    assert len(compiler._cache) == grammars.MAX_CACHED


# -- what is refused ---------------------------------------------------------------------------------------


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{'a'", "not JSON"),
        ("[1]", "not a JSON object"),
        ("true", "not a JSON object"),
        ('"\ud800"', "not JSON"),
        ("{" + " " * MAX_SCHEMA_CHARS + "}", "more than the 262144 that are allowed"),
        (nested(200), "deeper than 100 levels"),
        (nested(20_000), "deeper than 100 levels"),
        ({"properties": {f"p{i}": {} for i in range(2001)}}, "more than 2000 properties"),
        ({"properties": {"default": {"properties": {f"p{i}": {} for i in range(2001)}}}}, "more than 2000 properties"),
        ({"type": "string", "pattern": "a" * 10_001}, "string of 10001 characters"),
        ({"const": [[{"description": "a" * 20_000}]]}, "string of 20000 characters"),
        ({"properties": {"a" * 20_000: {}}}, "string of 20000 characters"),
        ({"properties": 5}, "properties|object"),
        ({"type": "strin"}, "strin"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "string", "format": "shoe-size"}, "shoe-size"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"$ref": "#"}, "nothing fits"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "nothing fits"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "http://localhost/schema.json"}, "retrieve|retriev"),
        ({"$ref": "file:///etc/passwd"}, "retriev"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "enum": [1]}, "[Uu]nsatisfiable"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"type": "string", "pattern": "(" * 5000 + ")" * 5000}, "nested parentheses"),
        ({"type": "string", "pattern": "(?i)a"}, r"\(\?i"),
        ({"type": "string", "pattern": "^[a-z&&[^b]]$"}, "read in different ways"),
        ({"type": "string", "pattern": "^[]a]$"}, "read in different ways"),
        ({"type": "string", "pattern": "[" * 10_000}, "read in different ways"),
        ({"type": "object", "patternProperties": {"[[a]]": {}}}, "read in different ways"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    compiler: GrammarCompiler, schema: Any, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=f"the JSON schema cannot be used: .*{reason}") as caught:
        compiler.compile(schema if isinstance(schema, str) else json.dumps(schema))
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "pattern",
    [
        "(a{1,1000}){1,1000}",
        "^((a|b)*c){500}$",
        "^(.*a.*){50}$",
        "^(a|aa)+$",
        r"^\w{1,500000}$",
        ".*a(a|b){200}$",
        "|".join(f"w{number}" for number in range(1500)),
        r"^[\p{L}\[\]\-&~]{1,100}[^\]a-z]{3,1000}$",
    ],
)
def test_hard_patterns_are_followed_or_given_up(compiler: GrammarCompiler, tiny: Tokenizer, pattern: str) -> None:
    grammar = compiler.compile(json.dumps({"type": "string", "pattern": pattern}))
    for _ in range(40):
        choices = allowed(compiler, grammar) - tiny.eos_ids
        if grammar.broken or not choices:
            break
        grammar.accept(max(choices))
    assert grammar.broken is None or "cannot be followed" in grammar.broken


@pytest.mark.parametrize("opening", ['{"allOf":[', '{"anyOf":[{"type":"null"},', '{"items":'])
def test_long_chains_of_references_do_not_end_the_process(compiler: GrammarCompiler, opening: str) -> None:
    closing = {"[": "]}", ",": "]}"}.get(opening[-1], "}")
    definitions = ['"0":{"type":"string"}']
    while sum(map(len, definitions)) < MAX_SCHEMA_CHARS - 40_000:
        reference = f'{{"$ref":"#/$defs/{len(definitions) - 1}"}}'
        definitions.append(f'"{len(definitions)}":' + opening * 40 + reference + closing * 40)
    schema = f'{{"$ref":"#/$defs/{len(definitions) - 1}","$defs":{{{",".join(definitions)}}}}}'
    if opening == '{"items":':
        with pytest.raises(InvalidInput, match="schema too large"):
            compiler.compile(schema)
    else:
        assert allowed(compiler, compiler.compile(schema))


KEYWORDS = (
    "type properties required items anyOf allOf oneOf $ref $defs enum const pattern patternProperties minimum maximum "
    "minLength maxLength minItems maxItems minProperties additionalProperties format multipleOf"
)


@settings(max_examples=num_examples(150), deadline=None)
@given(
    schema=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(KEYWORDS.split()),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_nonsense_is_refused_or_followed(compiler: GrammarCompiler, schema: Any) -> None:
    try:
        grammar = compiler.compile(json.dumps(schema))
    except InvalidInput:
        return
    assert allowed(compiler, grammar)


def test_a_tokenizer_that_is_not_supported_is_the_callers_error(tiny_files: TokenizerFiles) -> None:
    assert tiny_files.tokenizer_json is not None
    definition = json.loads(tiny_files.tokenizer_json)
    definition["decoder"] = {"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": True}
    tokenizer = Tokenizer(msgspec.structs.replace(tiny_files, tokenizer_json=json.dumps(definition)))
    with pytest.raises(InvalidInput, match="this model cannot write structured output"):
        GrammarCompiler(tokenizer, tokenizer.num_tokens).compile("{}")
