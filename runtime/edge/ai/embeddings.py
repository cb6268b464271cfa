"""Text embeddings, and ranking texts by a query, in both dialects.

Formats: Workers AI's bge models (`text`, `pooling`; `query` and `contexts`), and OpenAI's `/embeddings`. Ranking is
done by a bi-encoder: query and contexts become vectors one by one, and a score is the cosine of the angle between two
of them, from -1 to 1. That is less exact than a cross-encoder, which reads both together.
"""

from __future__ import annotations

import asyncio
import base64
import math
import operator
import sys
from array import array
from typing import Any

import msgspec

from edge.ai.answers import tariff_of
from edge.ai.catalogue import TEXT_EMBEDDINGS, Model
from edge.ai.fields import (
    Boolean,
    Choice,
    Custom,
    Fields,
    Ignored,
    Integer,
    ListOf,
    ObjectOf,
    String,
    Strings,
    Table,
    is_unicode,
)
from edge.ai.gate import Gate, Principal
from edge.ai.inputs import with_options
from edge.errors import InvalidInput
from edge.frames import Usage

MAX_TEXTS = 100
"""Of a native call, as at Workers AI."""
MAX_CONTEXTS = 1000
MAX_OPENAI_TEXTS = 2048
MAX_TEXT_CHARS = 10 << 20
_MAX_DIMENSIONS = 1 << 16
_NO_TOKEN_IDS = "is of token ids, which mean other words in the model's own vocabulary: send texts"


class Limits(msgspec.Struct, frozen=True):
    """What differs between models of Workers AI."""

    truncates: bool = True
    """What becomes of a text that is too long, where `truncate_inputs` is not given."""
    max_total_tokens: int | None = None


_LIMITS = {"@cf/baai/bge-m3": Limits(truncates=False, max_total_tokens=60_000)}

NATIVE: Table = {
    "text": Strings("The text, or up to 100 of them.", max_items=MAX_TEXTS, max_chars=MAX_TEXT_CHARS),
    "pooling": Choice(
        "How a vector is made of those of the tokens: the mean, or that of the first one. The two do not compare. By "
        "default as the model was trained.",
        values=("mean", "cls"),
    ),
    "truncate_inputs": Boolean(
        "Whether a text longer than the model reads is cut; else it is refused. True by default, but for bge-m3.",
        default=None,
    ),
    "query": String("What the contexts are ranked by.", max_chars=MAX_TEXT_CHARS),
    "contexts": ListOf(
        "The texts to rank; without a query they become vectors.",
        item=ObjectOf("", table={"text": String("", max_chars=MAX_TEXT_CHARS, required=True)}, required=True),
        max_items=MAX_CONTEXTS,
    ),
    "top_k": Integer("How many of the contexts to give, the best ones.", low=1, high=MAX_CONTEXTS),
}
"""Inputs of `ai/run`: `text`, or `contexts` with or without a `query`."""


def _read_input(fields: Fields, path: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_OPENAI_TEXTS:
        fields.wrong(path, value, f"a string or a list of 1 to {MAX_OPENAI_TEXTS} strings")
    elif any(isinstance(text, int | list) for text in texts):
        fields.problem(path, _NO_TOKEN_IDS)
    else:
        for place, text in enumerate(texts):
            if not (isinstance(text, str) and text and is_unicode(text)):
                at = path if isinstance(value, str) else f"{path}[{place}]"
                fields.wrong(at, text, "a string of at least one character")
        return texts
    return []


OPENAI: Table = {
    "model": String("The model's id.", required=True),
    "input": Custom(
        "The text, or up to 2048 of them.",
        required=True,
        reader=_read_input,
        json={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": MAX_OPENAI_TEXTS,
                },
            ]
        },
    ),
    "encoding_format": Choice(
        "Numbers, or the base64 of little-endian float32.", default="float", values=("float", "base64")
    ),
    "dimensions": Integer(
        "How many numbers of each vector to give; what is left is scaled to length 1 again.",
        low=1,
        high=_MAX_DIMENSIONS,
    ),
    "user": Ignored("Has no effect."),
}
"""OpenAI's body of `/embeddings`."""


async def run(gate: Gate, principal: Principal, model: Model, inputs: Any) -> dict[str, Any]:
    """The native result: vectors of `text` or `contexts`, or with a `query` the contexts in order of their scores.

    Raises:
        InvalidJson, InvalidInput: the inputs are wrong.
        EdgeError: the call was refused or failed.
    """
    fields = Fields(inputs, "inputs", NATIVE)
    texts, query, contexts = fields["text"], fields["query"], fields["contexts"]
    if (fields.get("text") is None) == (fields.get("contexts") is None):
        given = "both are given" if fields.get("text") is not None else f"there is neither{fields.nearest('text')}"
        fields.problem("$", f"needs either text or contexts: {given}")
    if query is not None and contexts is None:
        fields.problem("$.query", "is given, which needs contexts")
    fields.raise_problems()
    limits = _LIMITS.get(model.id, Limits())
    truncates = limits.truncates if fields["truncate_inputs"] is None else fields["truncate_inputs"]
    ranked = [context["text"] for context in contexts or []]
    embeddings = await gate.embed(
        principal,
        model,
        texts or ([query, *ranked] if query is not None else ranked),
        fields["pooling"],
        truncate=truncates,
        max_total_tokens=limits.max_total_tokens,
    )
    usage = _usage(gate, principal, model, embeddings.usage)
    if query is not None:
        ranking = await asyncio.to_thread(_ranking, embeddings.vectors, fields["top_k"])  # a thousand take long
        return {"response": ranking, "usage": usage}
    vectors = [vector.tolist() for vector in embeddings.vectors]
    shape = [len(vectors), embeddings.dimensions]
    if texts is None:
        return {"response": vectors, "shape": shape, "pooling": embeddings.pooling, "usage": usage}
    return {"shape": shape, "data": vectors, "pooling": embeddings.pooling, "usage": usage}


async def openai(gate: Gate, principal: Principal, body: Any) -> dict[str, Any]:
    """The answer to OpenAI's `/embeddings`.

    Raises:
        UnknownModel, InvalidJson, InvalidInput: the call is wrong.
        EdgeError: it was refused or failed.
    """
    fields = Fields(body, "the body", OPENAI)
    name, texts, dimensions = fields["model"], fields["input"], fields["dimensions"]
    fields.raise_problems()
    principal = with_options(principal, body.get("options"))
    model = gate.catalogue.resolve(name, TEXT_EMBEDDINGS)
    _check_dimensions(dimensions, model.manifest.dimensions)
    embeddings = await gate.embed(principal, model, texts)
    _check_dimensions(dimensions, embeddings.dimensions)
    vectors = embeddings.vectors
    if dimensions is not None:
        vectors = [_shortened(vector, dimensions) for vector in vectors]
    encode = _base64 if fields["encoding_format"] == "base64" else array.tolist
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ],
        "model": model.id,
        "usage": _usage(gate, principal, model, embeddings.usage),
    }


def _check_dimensions(asked: int | None, available: int | None) -> None:
    if asked is not None and available is not None and asked > available:
        raise InvalidInput(
            f"bad input: $.dimensions is {asked}, but the model's vectors have {available}", param="dimensions"
        )


def _ranking(vectors: list[array[float]], top_k: int | None) -> list[dict[str, Any]]:
    """The contexts by their likeness to the query, whose vector is the first: best first, equals as they came."""
    query, *contexts = vectors
    length = math.hypot(*query)
    scores = [_cosine(query, length, context) for context in contexts]
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[:top_k]
    return [{"id": place, "score": scores[place]} for place in best]


def _cosine(a: array[float], length: float, b: array[float]) -> float:
    """Of the angle between `a`, which has that length, and `b`."""
    lengths = length * math.hypot(*b)
    return sum(map(operator.mul, a, b)) / lengths if lengths else 0.0


def _shortened(vector: array[float], dimensions: int) -> array[float]:
    part = vector[:dimensions]
    length = math.hypot(*part)
    return array("f", (number / length for number in part)) if length else part


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _usage(gate: Gate, principal: Principal, model: Model, usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "total_tokens": usage.input_tokens,
        **tariff_of(gate, principal, model).shown([usage]),
    }
