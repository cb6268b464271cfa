"""Holds answers to a JSON schema: which tokens a model may choose next, so that what it finishes is JSON that fits.

`llguidance` does the work. What it cannot honour exactly is refused before anything runs, with its reason; nothing is
approximated. Schemas come from callers: their size, nesting and number of properties are limited, and the library
counts its steps, so that neither a schema nor a pattern in it holds up the engine for long.

The end of the answer is allowed only where the JSON is complete. An answer that ends for another reason, at
`max_tokens` or a stop string, is a piece of JSON. Numbers are compared as decimals, exactly: a validator that computes
in binary floating point can find 0.07 to be no multiple of 0.01. Patterns mean what JSON Schema (ECMA-262) says, where
\\d and \\w know ASCII alone; not every validator follows it.

This module knows nothing about models, logits or steps.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from edge.engine.tokenizer import Tokenizer
from edge.errors import InvalidInput
from edge.frames import MAX_SCHEMA_CHARS

if TYPE_CHECKING:  # the library describes this type, but does not have it at run time
    from llguidance._lib import JsonCompileOptions

MAX_DEPTH = 100
"""Levels of JSON in a schema; the library reads 127."""
MAX_PROPERTIES = 2000
"""In a whole schema. The time to compile grows with the square: these take a quarter of a second."""
MAX_STRING_CHARS = 10_000
"""In one pattern, constant or name. Each token that follows one takes time in proportion to it: so much, 3 ms."""
MAX_CACHED = 16

_MAX_GRAMMAR_SIZE = 200_000  # symbols
_MAX_LEXER_STATES = 50_000  # about half a kilobyte each
_INITIAL_FUEL = 300_000
"""Steps of the library on the patterns of a schema. With its default of a million, one such as a{100000} takes a
quarter of a second to compile and 20 ms for each token after that, of a step in which others take part."""
_MAX_REASON_CHARS = 300
_STACK_BYTES = 512 << 20  # of addresses; a schema that is no attack touches a thousandth
_PARAM = "response_format"
_OPTIONS: JsonCompileOptions = {
    # One space, or a new line and its indentation: a model that is lost would write white space without end.
    "whitespace_pattern": r" |\r?\n[ \t]{0,40}",
    "lenient": False,
    "coerce_one_of": False,
}

Masks = npt.NDArray[np.int32]


class GrammarCompiler:
    """Makes grammars for one model. `compile` may be called from several threads, `masks` from one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, num_threads: int = 2) -> None:
        """`vocab_size` is the number of the model's logits; `num_threads` fill the masks of a step."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.num_tokens)
        self._executor = LLExecutor(num_threads)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, schema: str) -> Grammar:
        """A grammar for one answer that fits `schema`, a JSON schema as JSON text.

        Takes up to some hundred milliseconds for large schemas, and the first time as long again to read the
        vocabulary; does not hold Python's lock meanwhile.

        Raises:
            InvalidInput: the schema is no schema, is too large, has something that cannot be honoured, or nothing
                fits it.
        """
        with self._lock:
            if (cached := self._cache.get(schema)) is not None:
                self._cache.move_to_end(schema)
                return Grammar(schema, cached.deep_copy())
        check_schema(schema)
        matcher = _on_large_stack(lambda: self._matcher(schema))
        with self._lock:
            self._cache[schema] = matcher
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
            return Grammar(schema, matcher.deep_copy())

    def masks(self, grammars: list[Grammar], drafts: list[list[int]] | None = None) -> Masks:
        """The tokens that may come next, as bits: token t is bit t % 32 of word t // 32.

        Returns:
            (N, ceil(V / 32)): for each grammar one row, and one more after each token of its draft; rows after a
            token of the draft that is not allowed have no meaning. Grammars can be `broken` afterwards.
        """
        drafts = drafts or [[] for _ in grammars]
        starts = np.cumsum([0] + [1 + len(draft) for draft in drafts]).tolist()
        masks = np.full((starts[-1], -(-self._vocab_size // 32)), -1, np.int32)
        address, size_bytes = masks.ctypes.data, masks.shape[1] * masks.itemsize
        work = list(zip([grammar.matcher for grammar in grammars], starts, drafts, strict=False))
        if len(masks) == 1:  # not worth waking other threads
            grammars[0].matcher.unsafe_compute_mask_ptr(address, size_bytes)
        elif plain := [(matcher, start) for matcher, start, draft in work if not draft]:
            self._executor.unsafe_compute_mask_ptr(plain, address, size_bytes, len(masks))
        if guessed := [member for member in work if member[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, address, size_bytes, len(masks))
        for grammar in grammars:
            if grammar.broken:  # what broke it is shared with the cached one
                with self._lock:
                    self._cache.pop(grammar.schema, None)
        return masks

    def _matcher(self, schema: str) -> LLMatcher:
        limits = LLParserLimits(
            max_grammar_size=_MAX_GRAMMAR_SIZE,
            max_lexer_states=_MAX_LEXER_STATES,
            initial_lexer_fuel=_INITIAL_FUEL,
            verbose_errors=False,
        )
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise _refused(str(error)) from error
        matcher = LLMatcher(self._read_vocabulary(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        matcher.compute_bitmask()  # the first one finds out whether anything fits, and is the slowest
        if matcher.is_error():
            raise _refused("nothing fits it")
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=sorted(self._tokenizer.eos_ids)
                    )
                except ValueError as error:
                    raise InvalidInput(
                        f"this model cannot write structured output: its tokenizer is of no kind that is supported "
                        f"({_reason(str(error))})",
                        param=_PARAM,
                    ) from error
            return self._vocabulary


def _on_large_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """Run `work` in a thread of its own, whose stack a schema cannot overflow: that would be the engine's end.

    A chain of references makes the library recurse once per link and level, some 20,000 times within the limits.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="schema") as pool:
        with _stack_lock:  # the size is a setting of the process
            before = threading.stack_size(_STACK_BYTES)
            try:
                future = pool.submit(work)
            finally:
                threading.stack_size(before)
        return future.result()


_stack_lock = threading.Lock()


class Grammar:
    """The state of one answer that is held to a schema."""

    def __init__(self, schema: str, matcher: LLMatcher) -> None:
        self.schema = schema
        self.matcher = matcher

    def accept(self, token: int) -> None:
        """Note that `token`, which the mask allowed, was appended to the answer."""
        self.matcher.consume_token(token)

    def num_allowed(self, tokens: list[int]) -> int:
        """How many of `tokens`, from the first, may follow: so much of a draft is worth a try."""
        return 0 if self.matcher.is_error() else self.matcher.validate_tokens(tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the JSON is complete and nothing can follow: the answer needs no EOS token."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def broken(self) -> str | None:
        """Why the answer cannot go on: the schema takes more work for a token than is allowed. None if it can."""
        if not self.matcher.is_error():
            return None
        return (
            f"the JSON schema cannot be followed any further ({_reason(self.matcher.get_error())}); "
            "use simpler patterns or fewer alternatives in it"
        )


# -- what is refused before the library sees it ----------------------------------------------------------------


def check_schema(text: str) -> None:
    """Refuse what is too large, and what the library would take without being able to honour it.

    Raises:
        InvalidInput: with the reason.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise _refused(f"it has {len(text)} characters, more than the {MAX_SCHEMA_CHARS} that are allowed")
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _refused(f"it is not JSON: {error}") from error
    except RecursionError:
        raise _refused(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(schema, dict):
        raise _refused("it is not a JSON object")
    if "x-guidance" in schema:
        raise _refused("the keyword `x-guidance` is not supported")
    num_properties = 0
    for part in _parts(schema):
        num_properties += _size(part.get("properties"))
        if num_properties > MAX_PROPERTIES:
            raise _refused(f"it has more than {MAX_PROPERTIES} properties")
        _check_min_properties(part)
        _check_patterns(part)


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All objects in `schema`: schemas, and whatever else. Refuses what is nested too deeply, and long strings."""
    todo: list[tuple[Any, int]] = [(schema, 1)]
    while todo:
        part, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise _refused(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(part, dict):
            yield part
            todo += [(key, depth) for key in part]
            todo += [(value, depth + 1) for value in part.values()]
        elif isinstance(part, list):
            todo += [(value, depth + 1) for value in part]
        elif isinstance(part, str) and len(part) > MAX_STRING_CHARS:
            raise _refused(f"it has a string of {len(part)} characters, and {MAX_STRING_CHARS} are allowed in one")


def _size(value: object) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _check_min_properties(part: dict[str, Any]) -> None:
    """A name that the schema leaves open can be written twice, and counts once."""
    least = part.get("minProperties")
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if isinstance(least, int) and least > max(1, _size(part.get("required"))) and not is_closed:
        raise _refused("`minProperties` over 1 is supported only with `additionalProperties: false`")


_REGEX_PARTS = re.compile(
    r"\\.|\[\^?(?P<first>\])?(?P<body>(?:\\.|[^\]\\])*)(?:\]|\\?\Z)|(?P<flags>\(\?[A-Za-z])", re.DOTALL
)


def _check_patterns(schema: dict[str, Any]) -> None:
    names = schema.get("patternProperties")
    for pattern in [schema.get("pattern"), *(names if isinstance(names, dict) else ())]:
        if isinstance(pattern, str):
            _check_pattern(pattern)


def _check_pattern(pattern: str) -> None:
    """Refuse what the library's regular expressions read otherwise than JSON Schema's (ECMA-262) do."""
    for part in _REGEX_PARTS.finditer(pattern):
        if part["flags"]:
            raise _refused(f"the pattern {pattern!r} has {part['flags']!r}, which JSON Schema does not know")
        body = re.sub(r"\\.", "", part["body"] or "")
        if part["first"] or "[" in body or any(sign in body for sign in ("&&", "--", "~~")):
            raise _refused(
                f"the pattern {pattern!r} has a class {part[0]!r} that is read in different ways; "
                "put a backslash before each of [ ] & - ~ in it that stands for itself"
            )


def _refused(reason: str) -> InvalidInput:
    return InvalidInput(f"the JSON schema cannot be used: {_reason(reason)}", param=_PARAM)


def _reason(error: str) -> str:
    """An error of the library, without the state of its parser and on one line."""
    text = " ".join(error.split("<state>")[0].split())
    half = _MAX_REASON_CHARS // 2
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:half]} … {text[-half:]}"
