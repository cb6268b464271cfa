"""Text to tokens and back: prompts, chat templates, and text that arrives token by token.

Special tokens written out in a prompt or message are read as special tokens, as the model's own tools do; who
must keep a user's text from ending a chat turn has to strip them first.

Chat templates come from model files: they run in Jinja's immutable sandbox, with limits on time and size. That
stops loops and access to Python; it does not protect the process from a template that builds one huge string.

This module knows nothing about models, scheduling or frames.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from edge.errors import InvalidInput, PromptTooLong, WeightsError
from edge.weights.checkpoint import TokenizerFiles, Vocabulary

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 32 << 20
RENDER_TIMEOUT_S = 2.0
SAMPLE_CHARS = 1 << 14
"""Length of the piece of an oversized prompt that is tokenized to estimate the rest."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
_HEX_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A model's tokenizer and chat template. Its methods may be called from several threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Build it.

        Raises:
            WeightsError: the files describe no tokenizer that is supported.
        """
        if files.tokenizer_json is not None:
            self._tokenizer = _from_json(files.tokenizer_json)
        elif files.vocabulary is not None:
            self._tokenizer = _from_vocabulary(files.vocabulary)
        else:
            raise WeightsError("the model has no tokenizer")
        self.eos_ids = files.eos_ids | {
            number
            for number in [self._tokenizer.token_to_id(files.eos_token)]
            if files.eos_token and number is not None
        }
        self._files = files
        self._template = _compile(files.chat_template) if files.chat_template is not None else None
        self._added = set(self._tokenizer.get_added_tokens_decoder())
        self._byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        self._longest_token = max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, special tokens included."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self._template is not None

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of `text`, with a BOS token where the model expects one and the text has none.

        Raises:
            PromptTooLong: there are more than `max_tokens`; the message has both numbers.
        """
        bos = self._files.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        add_bos = self._files.add_bos
        # `add_special_tokens` runs the post-processor of tokenizer.json, which is what adds BOS where it does.
        ids = self._encode(text, max_tokens, special=not has_bos and add_bos is not False)
        number = self._tokenizer.token_to_id(bos) if bos else None
        if add_bos and not has_bos and number is not None and ids[:1] != [number]:
            ids = [number, *ids]
        return _within(ids, max_tokens)

    def checked(self, ids: list[int], max_tokens: int) -> list[int]:
        """Token ids that a caller has made, as they are.

        Raises:
            InvalidInput: one of them stands for nothing.
            PromptTooLong: there are more than `max_tokens`; the message has both numbers.
        """
        if (token := next((each for each in ids if not 0 <= each < self.num_tokens), None)) is not None:
            raise InvalidInput(
                f"the prompt has the token id {token}, but the model's vocabulary has those from 0 to "
                f"{self.num_tokens - 1}: use the tokenizer of this model, or send text",
                param="prompt",
            )
        return _within(ids, max_tokens)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        max_tokens: int,
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of `messages` through the chat template, up to where the assistant's answer starts.

        Raises:
            InvalidInput: there is no template, or it refuses the messages.
            PromptTooLong: there are more than `max_tokens`; the message has both numbers.
        """
        # The template writes BOS itself, where the model wants one.
        text = self.render_chat(messages, tools, options)
        return _within(self._encode(text, max_tokens, special=False), max_tokens)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """`messages`, and `tools` where the template knows them, as the text that the model was trained on.

        `options` are more of the template's variables; those that it gets anyway go before them.

        Raises:
            InvalidInput: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidInput(
                "this model has no chat template; send `prompt` with `raw: true` instead of messages", param="messages"
            )
        ours = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
            "bos_token": self._files.bos_token,
            "eos_token": self._files.eos_token,
        }
        return _render(self._template, {**options, **ours})

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for, perhaps a part of a character; of a special token, its name."""
        text = self._tokenizer.id_to_token(token)
        if text is None:  # models have more logits than there are tokens
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            return b"".join(_BYTES.get(character, character.encode()) for character in text)
        if _HEX_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.replace(_SPACE, " ").encode()

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._tokenizer.to_str()

    def _encode(self, text: str, max_tokens: int, *, special: bool) -> list[int]:
        if len(text) > max_tokens * self._longest_token:
            # It cannot fit, whatever it says. Tokenizing megabytes to know by how much would take seconds.
            sample = self._tokenizer.encode(text[:SAMPLE_CHARS], add_special_tokens=False)
            num_tokens = max(max_tokens + 1, len(sample) * len(text) // SAMPLE_CHARS)
            raise PromptTooLong(_too_long(f"about {num_tokens}", max_tokens))
        # Unlike `encode` it lets other threads run, so that nobody's stream stops while a long prompt is read.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids


class Detokenizer:
    """The text of one answer as it grows; never a part of a character.

    Tokens are decoded together with those since the last point at which all text was out: some decoders treat
    the first token of a text specially, and a character can be spread over several tokens.
    """

    _MAX_HELD_TOKENS = 16
    """After so many, what is no character will not become one, apart from the end."""
    _MAX_PARTS = 3
    """Signs for broken characters that one incomplete character can look like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._num_known = 0  # tokens at the start of `_ids` whose text is out
        self._num_shown = 0  # characters at the start of their text that are out

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        num_held = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._ids) - self._num_known > self._MAX_HELD_TOKENS:
            num_held = min(num_held, self._MAX_PARTS)
        new = text[self._num_shown : len(text) - num_held]
        self._num_shown += len(new)
        if num_held == 0:
            self._keep(self._ids[self._num_known :], num_held)
            self._num_known = len(self._ids)
        elif len(self._ids) > 4 * self._MAX_HELD_TOKENS:
            self._keep(self._ids[-self._MAX_HELD_TOKENS :], num_held)
            self._num_known = 0
        return new

    def rest(self) -> str:
        """What is still held when no token follows, without the incomplete character at its end."""
        return self._decode(self._ids)[self._num_shown :].rstrip(_REPLACEMENT)

    def _keep(self, ids: list[int], num_held: int) -> None:
        self._ids = ids
        self._num_shown = len(self._decode(ids)) - num_held


def _within(ids: list[int], max_tokens: int) -> list[int]:
    if len(ids) > max_tokens:
        raise PromptTooLong(_too_long(str(len(ids)), max_tokens))
    return ids


def _too_long(num_tokens: str, max_tokens: int) -> str:
    return (
        f"the prompt has {num_tokens} tokens, but only {max_tokens} fit into the model's context; "
        "shorten the prompt or use a model with a longer context"
    )


def _byte_table() -> dict[str, bytes]:
    """The characters by which byte-level tokenizers write bytes (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + place): bytes([byte]) for place, byte in enumerate(others)
    }


_BYTES = _byte_table()


# -- building ----------------------------------------------------------------------------------------------


def _from_json(text: str) -> HfTokenizer:
    try:
        tokenizer = HfTokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise WeightsError(f"tokenizer.json cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_vocabulary(vocabulary: Vocabulary) -> HfTokenizer:
    if vocabulary.model not in ("gpt2", "llama"):
        raise WeightsError(f"GGUF tokenizers of type {vocabulary.model!r} are not supported (supported: gpt2, llama)")
    try:
        tokenizer = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)
    except WeightsError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise WeightsError(f"the GGUF tokenizer cannot be used: {error}") from error
    for kinds, add in (
        ((_CONTROL, _UNKNOWN), tokenizer.add_special_tokens),
        ((_USER_DEFINED,), tokenizer.add_tokens),
    ):
        tokens = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in kinds]
        add([AddedToken(token, normalized=False) for token in tokens])
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> HfTokenizer:
    kind = _BYTE_LEVEL.get(vocabulary.pre)
    if kind is None:
        raise WeightsError(
            f"the GGUF pre-tokenizer {vocabulary.pre!r} is not supported (supported: {', '.join(_BYTE_LEVEL)})"
        )
    merges = []
    for merge in vocabulary.merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise WeightsError(f"the GGUF tokenizer has the merge {merge!r}, which is no pair")
        merges.append((left, right))
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    tokenizer = HfTokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=kind.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.patterns]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if kind.single_digits else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.patterns)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, *splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    if kind.composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


_MAX_TOKEN_CHARS = 1000
"""Of a token that is merged of others: each of its cuts is looked up."""


def _sentencepiece(vocabulary: Vocabulary) -> HfTokenizer:
    """Pairs are merged in the order of the scores of what they give, which is what SentencePiece's BPE does."""
    tokens, types, scores = vocabulary.tokens, vocabulary.types, vocabulary.scores
    if len(scores) != len(tokens):
        raise WeightsError(f"the GGUF tokenizer has {len(tokens)} tokens, but scores of {len(scores)}")
    ids = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != _NORMAL:
            continue
        if len(token) > _MAX_TOKEN_CHARS:
            raise WeightsError(f"the GGUF tokenizer has a token of {len(token)} characters; at most {_MAX_TOKEN_CHARS}")
        for at in range(1, len(token)):
            left = token[:at]
            if left in ids and token[at:] in ids:
                merges.append((-score, -at, left, token[at:]))
    # Of pairs that give the same, those with a longer left side go first, as in the tokenizer.json of such models.
    merges.sort(key=itemgetter(0, 1))
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = HfTokenizer(models.BPE(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    marks = normalizers.Replace(" ", _SPACE)
    spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marks])
        spaces.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(spaces)
    return tokenizer


@dataclass(frozen=True)
class _ByteLevel:
    """How a byte-level tokenizer cuts a text into pieces before it merges, as the tokenizer.json of its models says."""

    patterns: tuple[str, ...] = ()
    """Each cuts what those before it left whole; none: GPT-2's own."""
    single_digits: bool = False
    whole_words: bool = False
    """A piece that is a token is that token, whatever merges would make of it."""
    composes: bool = False
    """Texts are brought into Unicode's form NFC."""


_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_START = r"[^\r\n\p{L}\p{N}]?"
_NOT_HAN = r"&&[^\p{Han}]"

_LLAMA3 = _ByteLevel(patterns=(_WORDS % "{1,3}",), whole_words=True)
_GLM4 = _ByteLevel(patterns=(_WORDS % "{1,3}",))

# By `tokenizer.ggml.pre`.
_BYTE_LEVEL = {
    "smollm": _ByteLevel(single_digits=True),
    "qwen2": _ByteLevel(patterns=(_WORDS % "",), composes=True),
    "gpt-2": _ByteLevel(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "chatglm-bpe": _GLM4,
    "glm4": _GLM4,
    "deepseek-v3": _ByteLevel(
        patterns=(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
        )
    ),
    "tekken": _ByteLevel(
        patterns=(
            rf"{_START}[{_UPPER}]*[{_LOWER}]+|{_START}[{_UPPER}]+[{_LOWER}]*"
            rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
        ),
        whole_words=True,
    ),
    "kimi-k2": _ByteLevel(
        patterns=(
            rf"[\p{{Han}}]+|{_START}[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_SUFFIX}?"
            rf"|{_START}[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_SUFFIX}?"
            rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
        ),
        whole_words=True,
    ),
}


# -- chat templates ----------------------------------------------------------------------------------------


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise WeightsError(f"the chat template of {len(source)} characters is over the limit of {MAX_TEMPLATE_CHARS}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise WeightsError(f"the chat template cannot be compiled: {error}") from error


def _render(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    pieces, num_chars = [], 0
    try:
        with _time_limit(RENDER_TIMEOUT_S):
            for piece in template.generate(values):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise _Refused(f"the rendered text is over the limit of {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
    except Exception as error:  # a template can fail in every way that Python can
        raise InvalidInput(
            f"the model's chat template refuses these messages: {error or type(error).__name__}", param="messages"
        ) from error
    return "".join(pieces)


@contextmanager
def _time_limit(timeout_s: float) -> Iterator[None]:
    """Raises in the code of templates that run in this thread once `timeout_s` has passed."""
    deadline = time.monotonic() + timeout_s

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != "<template>":
            return None
        if time.monotonic() > deadline:
            raise _Refused(f"it takes longer than {timeout_s:g} s")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
