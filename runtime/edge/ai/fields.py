"""The fields of a body, declared in one table from which both their validation and their JSON Schema come.

A table maps keys to fields, in the order in which they are told of:

    CONTEXT = ObjectOf("", table={"text": String("The text.", required=True)}, required=True)
    RERANK: Table = {
        "query": String("What to look for.", required=True),
        "contexts": ListOf("The texts to rank.", item=CONTEXT, max_items=100),
        "top_k": Integer("How many of them to return.", low=1, high=100),
    }
    fields = Fields(inputs, "inputs", RERANK)
    query, top_k = fields["query"], fields["top_k"]  # valid, or the default if absent, null or wrong
    if top_k is not None and ...:  # rules between fields are code
        fields.problem("$.top_k", "is more than there are contexts")
    fields.raise_problems()  # everything that is wrong, at once; fields that nobody read are checked here

`object_schema(RERANK)` is its JSON Schema. Unknown keys are let through: say `Unsupported` for what must not be, and
`Ignored` for what is known to have no effect. What no kind of field can say is `Custom`: a function and its schema.
This module knows nothing about what the fields mean.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgspec

from edge.errors import InvalidInput, InvalidJson

MAX_DEPTH = 64
"""Levels of objects and lists in a value that is handed on as it came."""
_MAX_PROBLEMS = 20
_MAX_SHOWN_CHARS = 60
_MAX_COMPARED = 100
"""Keys that are looked at for one that is misspelt."""

Harmless = Callable[[Any], bool]
"""Whether a value asks for nothing, so that the key may be there."""
EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that ask for nothing."""


# -- reading -----------------------------------------------------------------------------------------------


class Fields:
    """Reads the fields of one object and gathers what is wrong with them. A null is as good as an absent key."""

    def __init__(self, value: Any, what: str, table: Table | None = None) -> None:
        if not isinstance(value, dict):
            raise InvalidJson(f"{what} must be a JSON object, not {shown(value)}")
        self._values = value
        self._table = table or {}
        self._read: dict[str, Any] = {}
        self._problems: list[tuple[str, str]] = []

    def __getitem__(self, key: str) -> Any:
        """The value of `key` as its field in the table reads it."""
        if key not in self._read:
            self._read[key] = self.read(self._table[key], f"$.{key}", self._values.get(key))
        return self._read[key]

    def __contains__(self, key: str) -> bool:
        """Whether `key` is there, if only with null."""
        return key in self._values

    def get(self, key: str) -> Any:
        """The value of `key`, as it came."""
        return self._values.get(key)

    def read(self, field: Field, path: str, value: Any) -> Any:
        """The `value` at `path` as `field` reads it; what is wrong with it becomes problems."""
        if value is not None:
            return field.read(self, path, value)
        if field.required:
            self.problem(path, "is missing")
        return field.default

    def nearest(self, key: str) -> str:
        """A hint if one of the keys that are there may be a misspelt `key`; else empty."""
        names = [str(name) for name in islice(self._values, _MAX_COMPARED)]
        close = difflib.get_close_matches(key, [name for name in names if len(name) < 2 * len(key)], n=1)
        return f" ({close[0]} is not {key})" if close else ""

    def problem(self, path: str, text: str) -> None:
        """Note that what is at `path` is wrong."""
        self._problems.append((path, text))
        if len(self._problems) == _MAX_PROBLEMS:  # a body of megabytes can hold millions
            self._refuse()

    def raise_problems(self) -> None:
        """Raise `InvalidInput` with all problems, if there are any, also with fields that were not read."""
        for key, field in self._table.items():
            if key in self._values or field.required:
                self[key]
        if self._problems:
            self._refuse()

    def _refuse(self) -> None:
        texts = [f"{path} {text}" for path, text in self._problems]
        if len(texts) == _MAX_PROBLEMS:
            texts.append("and perhaps more")
        raise InvalidInput(f"bad input: {'; '.join(texts)}", param=self._problems[0][0].removeprefix("$."))

    def wrong(self, path: str, value: Any, allowed: str) -> None:
        """Note that `value` at `path` is none of `allowed`."""
        self.problem(path, f"is {shown(value)}, must be {allowed}")

    def unsupported(self, path: str, value: Any) -> None:
        """Note that `value` at `path` asks for what is not there."""
        self.problem(path, f"is {shown(value)}, which is not supported yet: leave it out")

    def refuse_in(self, values: dict[str, Any], path: str, features: Mapping[str, Harmless]) -> None:
        """Refuse each of `features` that is asked for in `values` at `path`."""
        for key, is_harmless in features.items():
            if key in values and not is_harmless(values[key]):
                self.unsupported(f"{path}.{key}", values[key])

    def json_text(self, path: str, value: Any, max_chars: int) -> str | None:
        """`value` as JSON; None, and a problem, if it is longer than `max_chars` or nested deeper than `MAX_DEPTH`."""
        if is_deep(value):
            self.problem(path, f"is nested too deeply: at most {MAX_DEPTH} levels")
            return None
        try:
            text = msgspec.json.encode(value).decode()
        except (TypeError, ValueError) as error:  # of a handler, which is not held to JSON: lone surrogates, odd keys
            self.problem(path, f"cannot be written as JSON: {error}")
            return None
        if len(text) > max_chars:
            self.problem(path, f"has {len(text)} characters as JSON, more than {max_chars}")
            return None
        return text


# -- kinds of fields ---------------------------------------------------------------------------------------


class Field(msgspec.Struct, frozen=True):
    """What a key may hold. `default` is its value if it is absent, null or wrong."""

    description: str
    default: Any = None
    required: bool = False

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The `value`, which is not None, if it is right; else the default, and problems of `fields`."""
        raise NotImplementedError

    def json_type(self) -> dict[str, Any]:
        """The JSON Schema of what is right, without description, default and null."""
        raise NotImplementedError

    def schema(self, *, can_be_null: bool = True) -> dict[str, Any]:
        """The JSON Schema of the field. What is not required may be null, unless `can_be_null` is false."""
        schema = nullable(self.json_type()) if can_be_null and not self.required else self.json_type()
        if self.description:
            schema = {"description": self.description, **schema}
        return schema if self.default in (None, []) else {**schema, "default": self.default}


Table = Mapping[str, Field]
"""The fields of an object by key."""


class Boolean(Field, frozen=True):
    """True or false; false by default."""

    default: Any = False

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """True or false."""
        if isinstance(value, bool):
            return value
        fields.wrong(path, value, "true or false")
        return bool(self.default)

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return {"type": "boolean"}


class String(Field, frozen=True, kw_only=True):
    """A string that is not empty."""

    max_chars: int | None = None

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The string."""
        limit = math.inf if self.max_chars is None else self.max_chars
        if isinstance(value, str) and 0 < len(value) <= limit and is_unicode(value):
            return value
        span = "at least one character" if self.max_chars is None else f"1 to {self.max_chars} characters"
        fields.wrong(path, value, f"a string of {span}")
        return None

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        longest = {} if self.max_chars is None else {"maxLength": self.max_chars}
        return {"type": "string", "minLength": 1, **longest}


class Strings(Field, frozen=True, kw_only=True):
    """A string that is not empty, or a list of some, which is what it is read as."""

    max_items: int
    max_chars: int

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The strings."""
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not 0 < len(strings) <= self.max_items:
            fields.wrong(path, value, f"a string or a list of 1 to {self.max_items} strings")
            return None
        item = String("", max_chars=self.max_chars)
        for i, string in enumerate(strings):
            item.read(fields, path if isinstance(value, str) else f"{path}[{i}]", string)
        return strings

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        item = String("", max_chars=self.max_chars).json_type()
        return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1, "maxItems": self.max_items}]}


class Choice(Field, frozen=True, kw_only=True):
    """One of some words."""

    values: tuple[str, ...]

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The word."""
        if isinstance(value, str) and value in self.values:
            return value
        fields.wrong(path, value, " or ".join(f'"{each}"' for each in self.values))
        return self.default

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return {"type": "string", "enum": list(self.values)}


class Number(Field, frozen=True, kw_only=True):
    """A number from `low` to `high`, read as a float."""

    low: float
    high: float

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The number."""
        if isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high:
            return float(value)
        fields.wrong(path, value, f"a number from {self.low:g} to {self.high:g}")
        return self.default

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}


class Integer(Field, frozen=True, kw_only=True):
    """An integer from `low` to `high`; 3.0 is one too, as in JSON Schema."""

    low: int
    high: int

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The integer."""
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if is_whole and not isinstance(value, bool) and self.low <= value <= self.high:
            return int(value)
        fields.wrong(path, value, f"an integer from {self.low} to {self.high}")
        return self.default

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class ListOf(Field, frozen=True, kw_only=True):
    """A list of `min_items` to `max_items` items."""

    item: Field
    max_items: int
    min_items: int = 1

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The items."""
        if not isinstance(value, list) or not self.min_items <= len(value) <= self.max_items:
            fields.wrong(path, value, f"a list of {self.min_items} to {self.max_items}")
            return self.default
        return [fields.read(self.item, f"{path}[{i}]", each) for i, each in enumerate(value)]

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        items = self.item.schema()
        return {"type": "array", "items": items, "minItems": self.min_items, "maxItems": self.max_items}


class ObjectOf(Field, frozen=True, kw_only=True):
    """An object with the fields of `table`."""

    table: Table

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """The values by key."""
        if isinstance(value, dict):
            return {key: fields.read(field, f"{path}.{key}", value.get(key)) for key, field in self.table.items()}
        fields.wrong(path, value, "an object")
        return self.default

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return object_schema(self.table)


class Custom(Field, frozen=True, kw_only=True):
    """What `reader(fields, path, value)` makes of it, or the value as it came; `json` is what the reader accepts."""

    json: dict[str, Any]
    reader: Callable[[Fields, str, Any], Any] | None = None

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """What the reader makes of it."""
        return value if self.reader is None else self.reader(fields, path, value)

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return self.json


class Ignored(Field, frozen=True):
    """Anything: it has no effect."""

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """Nothing."""
        return None

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return {}


class Unsupported(Field, frozen=True, kw_only=True):
    """What is not there, so that only values that do not ask for it may be sent."""

    harmless: tuple[Any, ...] = EMPTY

    def read(self, fields: Fields, path: str, value: Any) -> Any:
        """Nothing."""
        if not any(each == value and isinstance(each, bool) == isinstance(value, bool) for each in self.harmless):
            fields.unsupported(path, value)

    def json_type(self) -> dict[str, Any]:
        """Its JSON Schema."""
        return {"enum": list(self.harmless)}


# -- forms -------------------------------------------------------------------------------------------------


def from_texts(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a form, where numbers, booleans and objects are text too, as the fields of `table` read them.

    What a field cannot take as text is read as JSON; where it is none it stays text, which the field then refuses.
    """
    return {key: _from_text(table.get(key), value) for key, value in values.items()}


def _from_text(field: Field | None, value: Any) -> Any:
    if field is None or not isinstance(value, str) or _takes_text(field.json_type()):
        return value
    try:
        return msgspec.json.decode(value.lower() if isinstance(field, Boolean) else value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return value


def _takes_text(schema: dict[str, Any]) -> bool:
    if "type" in schema:
        return "string" in schema["type"]  # one type, or a list of them
    if "anyOf" in schema:
        return any(map(_takes_text, schema["anyOf"]))
    return any(isinstance(value, str) for value in schema.get("enum", [""]))


# -- JSON Schema -------------------------------------------------------------------------------------------


def object_schema(table: Table) -> dict[str, Any]:
    """The JSON Schema of an object with the fields of `table`."""
    required = [key for key, field in table.items() if field.required]
    return {
        "type": "object",
        "properties": {key: field.schema() for key, field in table.items()},
        **({"required": required} if required else {}),
    }


def variants_schema(table: Table, titles: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of an object with the fields of `table`, exactly one of the keys of `titles` among them."""
    variants = []
    for key, title in titles.items():
        fields = {name: field.schema() for name, field in table.items() if name == key or name not in titles}
        variants.append(
            {"title": title, "properties": {**fields, key: table[key].schema(can_be_null=False)}, "required": [key]}
        )
    return {**object_schema(table), "oneOf": variants}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, of which null is an instance, too."""
    if not schema:
        return {}
    if not schema.keys() & {"type", "enum", "anyOf"} or schema.keys() & {"const", "oneOf", "allOf", "not", "$ref"}:
        return {"anyOf": [schema, {"type": "null"}]}
    nulled = dict(schema)  # each keyword that null must get past; all others speak of other types only
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        nulled["type"] = types if "null" in types else [*types, "null"]
    if "enum" in schema and None not in schema["enum"]:
        nulled["enum"] = [*schema["enum"], None]
    if "anyOf" in schema:
        nulled["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return nulled


# -- values ------------------------------------------------------------------------------------------------


def is_deep(value: Any) -> bool:
    """Whether `value` has more than `MAX_DEPTH` levels of objects and lists."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def is_unicode(text: str) -> bool:
    """Whether `text` can be sent on: a lone surrogate, which Python allows, is in no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """`value` in a few words, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return "not a finite number"
        case int() | float():
            return str(value) if abs(value) < 10**20 else "a huge number"
        case str():
            return f'"{_short(value)}"'
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _short(text: str) -> str:
    printable = "".join(character if character.isprintable() else "�" for character in text[:_MAX_SHOWN_CHARS])
    return printable if len(text) <= _MAX_SHOWN_CHARS else printable + "…"
