"""Holds a parsed configuration file against the structs of `edge.config`, and reports all problems at once.

It reads annotations, and knows single keys only where those cannot say it: files that must exist, names that must
differ, and keys of wrangler that have no effect here.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import fields, replace

from edge.config import Config
from edge.errors import ConfigError


def check(table: dict[str, Any], file: Path, lines: Mapping[str, int], warn: Callable[[str], None]) -> Config:
    """The configuration that `table` of `file` is, with absolute paths.

    Args:
        lines: the line of each key, for messages.
        warn: hears of keys that are unknown or have no effect.

    Raises:
        ConfigError: values are wrong; all of them are listed.
    """
    findings = _Findings(file, lines)
    values = _values(Config, table, "", findings)
    _check_values(values, findings)
    for warning in findings.warnings():
        warn(warning)
    if findings.problems:
        raise ConfigError(findings.message())
    return _with_absolute_paths(Config(**values), file)


def _with_absolute_paths(config: Config, file: Path) -> Config:
    prices, assets = config.billing.prices, config.assets
    return replace(
        config,
        path=file,
        main=_absolute(file.parent, config.main),
        state_dir=_absolute(file.parent, config.state_dir),
        billing=replace(config.billing, prices=None if prices is None else _absolute(file.parent, prices)),
        assets=assets and replace(assets, directory=_absolute(file.parent, assets.directory)),
    )


def _absolute(folder: Path, path: Path) -> Path:
    # Not `resolve`: a link to a file stands in the folder of the link, with the modules beside it.
    return Path(os.path.abspath(folder / path))


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def describe(value: Any) -> str:
    """`value` as an error shows what was found."""
    match value:
        case str() | bool() | int() | float() | list() | dict() | None:
            text = json.dumps(value, ensure_ascii=False, default=str)
            return text if len(text) <= 60 else f"{text[:57]}…"
        case _:
            return f"the {type(value).__name__} {value} without quotes"


class _Findings:
    """What is wrong (`problems`) or odd (`unknown`, `idle`) in one file."""

    def __init__(self, file: Path, lines: Mapping[str, int]) -> None:
        self.file = file
        self.lines = lines
        self.problems: list[str] = []
        self.unknown: list[tuple[str, list[str]]] = []
        """Each with the keys that are known there."""
        self.idle: list[str] = []

    def problem(self, key: str, what: str) -> None:
        self.problems.append(f"{self._where(key)}{key}: {what}")

    def message(self) -> str:
        if len(self.problems) == 1:
            return f"{self.file}, {self.problems[0]}"
        listed = "".join(f"\n  {problem}" for problem in self.problems)
        return f"{self.file} has {len(self.problems)} problems:{listed}"

    def warnings(self) -> Iterator[str]:
        for key, known in self.unknown:
            yield f"warning: {self.file}, {self._where(key)}unknown key {key}; {_nearest(key, known)}"
        if self.idle:
            yield f"warning: {self.file}: {', '.join(self.idle)}: accepted, has no effect yet"

    def _where(self, key: str) -> str:
        """The line of `key`, or of the nearest key around it."""
        while key and key not in self.lines:
            key = re.sub(r"(\[\d+\]|\.?[^.\[\]]*)$", "", key)
        return f"line {self.lines[key]}: " if key else ""


class _AlreadyFound(Exception):
    """A value is wrong, and the findings say so."""


def _values(kind: type[Any], table: dict[str, Any], at: str, findings: _Findings) -> dict[str, Any]:
    """The values of `table` that are right for the fields of `kind`; the others become findings."""
    known = {field.name: field for field in fields(kind) if _join(at, field.name) != "path"}
    for key in table:
        if key not in known and key != "$schema":
            if not at and key in REFUSED_KEYS and _says_something(table[key]):
                findings.problem(key, REFUSED_KEYS[key])
            elif key in WRANGLER_KEYS.get(re.sub(r"\[\d+\]", "", at), ()):
                findings.idle.append(_join(at, key))
            else:
                findings.unknown.append((_join(at, key), list(known)))
    values = {}
    for name, field in known.items():
        key = _join(at, name)
        if name in table:
            try:
                values[name] = _convert(table[name], field.type, key, findings)
            except _AlreadyFound:
                continue
            except msgspec.ValidationError:
                findings.problem(key, f"expected {_expected(field.type)}, found {describe(table[name])}")
        elif field.required:
            findings.problem(key, f"missing; expected {_expected(field.type)}")
    return values


def _convert(value: Any, kind: Any, key: str, findings: _Findings) -> Any:
    struct = _struct_in(kind)
    if struct and isinstance(value, dict):
        known = _values(struct, value, key, findings)
        if any(field.required and field.name not in known for field in fields(struct)):
            raise _AlreadyFound
        return struct(**known)
    if (struct := _struct_in_list(kind)) and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [_convert(item, struct, f"{key}[{index}]", findings) for index, item in enumerate(value)]
    if (struct := _struct_by_name(kind)) and isinstance(value, dict):
        return {name: _convert(each, struct, _join(key, name), findings) for name, each in value.items()}
    return msgspec.convert(value, kind, dec_hook=_decode_path)


def _decode_path(kind: type, value: Any) -> Path:
    assert kind is Path, f"no decoder for {kind}"
    if not isinstance(value, str) or not value or "\0" in value:
        raise msgspec.ValidationError("not a path")
    return Path(value)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    return next((m for m in _members(kind) if isinstance(m, type) and issubclass(m, msgspec.Struct)), None)


def _struct_by_name(kind: Any) -> type[msgspec.Struct] | None:
    """The struct of a table of tables."""
    return _struct_in(get_args(kind)[1]) if get_origin(kind) is dict else None


def _struct_in_list(kind: Any) -> type[msgspec.Struct] | None:
    """The struct of a list of tables."""
    return _struct_in(get_args(kind)[0]) if get_origin(kind) is list else None


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, types.UnionType) or get_origin(kind) is Union else (kind,)


_EXPECTED = {
    str: "a string",
    int: "a whole number",
    list[str]: "a list of strings",
    dict[str, str]: "a table of strings",
    dict[str, Any]: "a table",
}


def _expected(kind: Any) -> str:
    kind = _members(kind)[0]
    if _struct_in(kind):
        return "a table"
    if _struct_by_name(kind):
        return "a table of tables"
    if _struct_in_list(kind):
        return "a list of tables"
    for meta in getattr(kind, "__metadata__", ()):
        return str(meta.description)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(kind))
    return _EXPECTED[kind]


def _nearest(key: str, here: list[str]) -> str:
    at, _, leaf = key.rpartition(".")
    if close := difflib.get_close_matches(leaf, here, n=1):
        return f"did you mean {_join(at, close[0])}?"
    if elsewhere := [known for known in _known_keys() if known.rpartition(".")[2] == leaf]:
        return f"did you mean {elsewhere[0]}?"
    return f"known here: {', '.join(here)}"


def _known_keys(kind: type[Any] = Config, at: str = "") -> Iterator[str]:
    for field in fields(kind):
        key = _join(at, field.name)
        if key != "path":
            yield key
        if struct := _struct_in(field.type) or _struct_in_list(field.type):
            yield from _known_keys(struct, key)


def _check_values(values: dict[str, Any], findings: _Findings) -> None:
    """What the annotations cannot say: the file system, and values against each other."""
    if main := values.get("main"):
        file = _absolute(findings.file.parent, main)
        if file.suffix != ".py":
            findings.problem("main", f"expected a Python file (.py), found {main}; only Python workers are run here")
        elif not file.is_file():
            findings.problem("main", f"there is no file {file}")
    for key in _not_json(values.get("vars", {}), "vars"):
        findings.problem(key, "expected a JSON value (text, number, true or false, list, table); put dates in quotes")
    _check_names(values, findings)


def _check_names(values: dict[str, Any], findings: _Findings) -> None:
    """No two bindings, and no binding and variable, may share a name in `env`."""
    taken = {name: f"vars.{name}" for name in values.get("vars", {})}
    for key, name in _bindings(values):
        if name in taken:
            findings.problem(key, f"{name!r} is the name of {taken[name]} already; rename one of them")
        taken.setdefault(name, key)


def _bindings(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where each binding is declared, and its name in `env`."""
    for section in ("ai", "version_metadata", "assets"):
        if (value := values.get(section)) and value.binding:
            yield f"{section}.binding", value.binding
    for section in ("kv_namespaces", "d1_databases", "r2_buckets", "services"):
        for index, value in enumerate(values.get(section, [])):
            yield f"{section}[{index}].binding", value.binding
    for index, value in enumerate(values.get("ratelimits", [])):
        yield f"ratelimits[{index}].name", value.name
    if queues := values.get("queues"):
        for index, value in enumerate(queues.producers):
            yield f"queues.producers[{index}].binding", value.binding


def _not_json(value: Any, key: str) -> Iterator[str]:
    match value:
        case dict():
            for name, item in value.items():
                yield from _not_json(item, _join(key, name))
        case list():
            for index, item in enumerate(value):
                yield from _not_json(item, f"{key}[{index}]")
        case float():
            if value - value != 0:  # inf or nan
                yield key
        case str() | bool() | int() | None:
            pass
        case _:
            yield key


# -- wrangler's keys that a worker cannot do without ------------------------------------------------------

REFUSED_KEYS = {
    "durable_objects": "Durable Objects are not supported yet; keep state in D1 or KV, or leave this section out",
    "workflows": "workflows are not supported yet; use queues and crons, or leave this section out",
}


def _says_something(value: Any) -> bool:
    """Whether a section of wrangler's declares anything: an empty list of bindings does not."""
    return any(map(_says_something, value.values())) if isinstance(value, dict) else bool(value)


# -- wrangler's keys that are accepted and have no effect yet ----------------------------------------------

_TOP_LEVEL = """
    access agent_memory ai_search ai_search_namespaces alias analytics_engine_datasets artifacts base_dir browser
    build cache cloudchamber compliance_region connect containers data_blobs define dependencies_instrumentation
    dispatch_namespaces durable_objects env exports find_additional_modules first_party_worker flagship hyperdrive
    images jsx_factory jsx_fragment keep_names keep_vars logfwdr logpush media migrations minify mtls_certificates
    no_bundle observability pages_build_output_dir pipelines placement preserve_file_names preview_urls previews
    python_modules route routes rules secrets secrets_store_secrets send_email send_metrics site stream
    streaming_tail_consumers tail_consumers text_blobs tsconfig unsafe unsafe_hello_world upload_source_maps
    vectorize vpc_networks vpc_services wasm_modules websearch worker_loaders workers_dev workflows
"""
_DEV = """
    container_engine enable_containers generate_types host inspector_ip inspector_port local_protocol
    upstream_protocol
"""
WRANGLER_KEYS = {
    "": frozenset(_TOP_LEVEL.split()),
    "ai": frozenset({"remote", "staging"}),
    "dev": frozenset(_DEV.split()),
    "kv_namespaces": frozenset({"remote"}),
    "d1_databases": frozenset({"remote", "migrations_pattern"}),
    "r2_buckets": frozenset({"remote"}),
    "services": frozenset({"remote"}),
    "queues.consumers": frozenset({"type", "visibility_timeout_ms"}),
}
"""By section."""
