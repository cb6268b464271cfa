"""JSON schemas, changed without a change of what they are for: closed against invented properties, or moved elsewhere.

Schemas are trees here: references are not followed. Whether one can be honoured is for the engine to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_DATA = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords whose value is data."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names, which are no keywords, to schemas."""
_COMBINING = frozenset({"allOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies"})
"""Keywords under which a closed schema could admit what the open one refuses, or nothing at all."""
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"})
"""Keywords that say which other properties there may be, or have to be."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, where objects that name properties, and do not say that they take others, take no others.

    What fits it fits `schema` as well. Small models would otherwise go on inventing properties until they are cut off.
    A schema that combines others in ways in which this is not safe stays as it is.
    """
    if any(_is_combined(each) for each in _schemas_in(schema)):
        return schema
    return _changed(schema, _close)  # type: ignore[no-any-return]


def moved(schema: dict[str, Any], root: str) -> dict[str, Any]:
    """`schema` with its references to itself made for a place at `root`, such as `#/$defs/a`, in another one."""

    def move(each: dict[str, Any]) -> dict[str, Any]:
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            return {**each, "$ref": root + reference[1:]}
        return each

    return _changed(schema, move)  # type: ignore[no-any-return]


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or schema.keys() & _OPEN:
        return schema
    return {**schema, "additionalProperties": False} if set(map(str, required)) <= properties.keys() else schema


def _is_combined(schema: dict[str, Any]) -> bool:
    keys = schema.keys()
    return bool(keys & _COMBINING or (keys & {"anyOf", "$ref"} and keys & {"properties", "required"}))


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """`schema` and all schemas in it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _schemas_in(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                yield from _schemas_in(list(value.values()))
            elif key not in _DATA:
                yield from _schemas_in(value)


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`schema` after a `change` of it and of all schemas in it."""
    if isinstance(schema, list):
        return [_changed(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            inner[key] = {name: _changed(each, change) for name, each in value.items()}
        else:
            inner[key] = value if key in _DATA else _changed(value, change)
    return change(inner)
