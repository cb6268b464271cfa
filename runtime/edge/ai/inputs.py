"""What comes with the inputs of a call, whichever way it came in: its options, and inputs that are raw bytes.

This module knows nothing about HTTP, tasks or dialects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from edge.ai.catalogue import TEXT_GENERATION, Model
from edge.ai.fields import shown
from edge.ai.gate import Principal
from edge.errors import InvalidInput, LoraUnsupported, UnsupportedContent

MAX_TAGS = 5
MAX_TAG_CHARS = 50
_TAG = re.compile(r"[A-Za-z0-9:./@-]+")
_BOOLEANS: Mapping[Any, bool] = {"true": True, "1": True, "false": False, "0": False, "": False}
"""How options are spelt in a query string."""


class Binary(msgspec.Struct, frozen=True):
    """A body that is no JSON: the one binary input of a task, such as an audio file; `inputs` came beside it."""

    content_type: str
    data: bytes
    inputs: Mapping[str, Any] = {}


class FormInputs(dict[str, Any]):
    """Inputs of a call as a form has them: files are `Binary`s, and all else is text, whatever it means."""


def check_inputs(model: Model, inputs: Any) -> None:
    """Refuse what no schema of a task knows of.

    Raises:
        UnsupportedContent: `inputs` are bytes, which no task here takes.
        LoraUnsupported: they name an adapter, and the model takes none.
    """
    is_text = model.manifest.task == TEXT_GENERATION
    if not is_text and isinstance(inputs, dict) and inputs.get("lora"):
        raise LoraUnsupported(f"model {model.id!r} takes no LoRA adapters: leave lora out", param="lora")
    if isinstance(inputs, Binary):
        raise UnsupportedContent(
            f"the body is {inputs.content_type[:100]!r}, which {model.id!r} cannot read: its task is "
            f"{model.manifest.task!r}; send a JSON object with Content-Type: application/json"
        )


def with_options(principal: Principal, options: Any) -> Principal:
    """`principal` as `options` of its call change it. Unknown options have no effect, nor has `gateway`.

    Raises:
        InvalidInput: an option is wrong.
    """
    if not isinstance(options, Mapping):
        return principal
    tags(options.get("tags"))
    if not is_asked(options, "rejectIfBusy"):
        return principal
    return msgspec.structs.replace(principal, reject_if_busy=True)


def is_asked(options: Mapping[str, Any], name: str) -> bool:
    """Whether the option `name` is true; in a query string, `true` and `1` are.

    Raises:
        InvalidInput: it is neither true nor false.
    """
    value = options.get(name)
    if value is None or isinstance(value, bool):
        return value is True
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise InvalidInput(f"the option {name} is {shown(value)}, must be true or false", param=f"options.{name}")


def tags(value: Any) -> tuple[str, ...]:
    """The tags of a call, each once; in a query string they are separated by commas.

    Raises:
        InvalidInput: there are too many, or one is no tag.
    """
    given = value.split(",") if isinstance(value, str) and value else value or []
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise InvalidInput(f"the option tags is {shown(value)}, must be a list of strings", param="options.tags")
    for tag in given:
        if not (isinstance(tag, str) and len(tag) <= MAX_TAG_CHARS and _TAG.fullmatch(tag)):
            raise InvalidInput(
                f"the option tags has {shown(tag)}, which is none: 1 to {MAX_TAG_CHARS} letters, digits and : - . / @",
                param="options.tags",
            )
    unique = tuple(dict.fromkeys(given))
    if len(unique) > MAX_TAGS:
        raise InvalidInput(f"the option tags has {len(unique)} tags, more than {MAX_TAGS}", param="options.tags")
    return unique
