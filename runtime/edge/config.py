"""The configuration file as one frozen struct, read once; nothing deeper reads files or the environment.

`load` finds the file, reads TOML or JSONC, checks every value against the structs below and reports all problems
at once. The annotations are the schema: a constraint's `description` is what an error says was expected.
`wrangler-like.toml` at the top of the repository is the annotated reference of every key.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import fields, replace

from edge.errors import ConfigError

FILE_NAMES = ("edge.toml", "wrangler-like.toml", "wrangler.toml", "wrangler.jsonc", "wrangler.json")
"""The names looked for, in this order, in the working directory and then in its parents."""

MAX_FILE_BYTES = 1 << 20

_Count = Annotated[int, Meta(ge=1, le=1 << 31, description="a whole number of at least 1")]
_Identifier = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="a name of letters, digits and _, not led by a digit")
]


class AiConfig(msgspec.Struct, frozen=True):
    """`[ai]`: the AI binding."""

    binding: _Identifier = "AI"
    models: dict[str, str] = {}
    """Stand-ins: catalogue id to the name of an installed model."""
    priority: Annotated[int, Meta(ge=-100, le=100, description="a whole number from -100 to 100")] = 0
    """Of the handler's calls: higher ones are served first, and nobody starves."""
    share_prefixes: bool = False
    """Whether the account's prompts may share cached beginnings with those of other accounts that say so too. How fast
    an answer begins then tells one such account what another has sent."""


class LimitsConfig(msgspec.Struct, frozen=True):
    """`[limits]`: what one invocation may use, and what a process of the worker may hold."""

    cpu_ms: Annotated[int, Meta(ge=1, le=86_400_000, description="a whole number of milliseconds of at least 1")] = (
        30_000
    )
    """Milliseconds of CPU time of one invocation, over all threads."""
    memory_mb: Annotated[int, Meta(ge=16, le=1 << 20, description="a whole number of MB of at least 16")] = 256
    """MB that one process may hold beyond what it is born with."""
    subrequests: Annotated[int, Meta(ge=0, le=1 << 20, description="a whole number of at least 0")] = 1000
    """Calls of one invocation to `fetch` and to bindings."""
    concurrency: Annotated[int, Meta(ge=1, le=10_000, description="a whole number of at least 1")] = 32
    """Invocations that one process serves at a time."""
    request_body_mb: Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number of MB of at least 1")] = 100
    """MB of a request's body; a longer one is answered with 413."""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most 86400")] = 120.0
    """Seconds from the request to the response's head, before the isolate is stopped."""


class DevConfig(msgspec.Struct, frozen=True):
    """`[dev]`: where `edge dev` listens."""

    ip: Annotated[str, Meta(min_length=1, description='an address such as "localhost" or "0.0.0.0"')] = "localhost"
    port: Annotated[int, Meta(ge=0, le=65535, description="a port from 0 (any free one) to 65535")] = 8787


class ModelOptions(msgspec.Struct, frozen=True):
    """`[engine.models.NAME]`: how one model is run."""

    weights: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    """How weights are held. `auto`: as the file has them, where there are kernels for that, else as floats.
    `float32` is the reference: exact, and slower than all others."""
    group: Literal[0, 32, 64, 128] = 0
    """Columns that share a scale where floats are made into `int8` or `int4` at load; 0: 32."""
    kv: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    """How keys and values are held. `auto`: bfloat16, or float32 where the weights are."""
    deterministic: bool = False
    """Whether a request's tokens must not depend on what else runs."""
    speculation: Annotated[int, Meta(ge=0, le=16, description="a whole number from 0 to 16")] = 0
    """Tokens that are guessed from earlier text and checked together, where that cannot change an answer; 0: none."""


class EngineConfig(msgspec.Struct, frozen=True):
    """`[engine]`: how models are run."""

    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description='"cpu", "cuda" or "cuda:N"')] = "cpu"
    kernels: bool = True
    """Whether native kernels are compiled and used on the CPU, where there is a C++ compiler."""
    weights: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    """`weights` of the models that `models` does not name; so are `kv`, `deterministic` and `speculation`."""
    kv: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    deterministic: bool = False
    speculation: Annotated[int, Meta(ge=0, le=16, description="a whole number from 0 to 16")] = 0
    models: dict[str, ModelOptions] = {}
    """Options of single models by name."""
    num_threads: Annotated[int, Meta(ge=0, le=4096, description="a whole number of threads, 0 for all cores")] = 0
    """Threads of the engine process; 0: as many as it has cores."""
    max_batch_size: _Count = 32
    """Sequences that run at once."""
    max_waiting: _Count = 256
    """Requests that may wait for a place; the next one is refused with 429."""
    step_tokens: _Count = 512
    """Token budget of one step (prompt chunks and decode tokens together)."""
    kv_tokens: _Count = 65536
    """Tokens that the KV cache has room for, all sequences together."""

    def options(self, model: str) -> ModelOptions:
        """How `model` is run."""
        return self.models.get(model) or ModelOptions(
            weights=self.weights, kv=self.kv, deterministic=self.deterministic, speculation=self.speculation
        )


class IsolatesConfig(msgspec.Struct, frozen=True):
    """`[isolates]`: the processes that run handlers."""

    sandbox: Literal["strict", "standard", "best-effort", "none"] | None = None
    """Which layers must be on; None: `best-effort` in `edge dev`, `standard` elsewhere."""
    preload: list[str] = []
    """Packages that are imported before a process is forked, so that no cold start waits for them."""
    max_per_worker: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 4
    """Processes of one worker version at most."""
    idle_s: Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most 86400")] = 300.0
    """Seconds without a request after which a process is ended; the next request forks one."""
    max_requests: Annotated[int, Meta(ge=1, le=1 << 31, description="a whole number of at least 1")] = 100_000
    """Requests after which a process is replaced."""


class EgressConfig(msgspec.Struct, frozen=True):
    """`[egress]`: where `fetch` of handlers may go. Private and loopback addresses only where listed."""

    allow: list[str] = msgspec.field(default_factory=lambda: ["*"])
    """Host names with `*` as a wildcard, addresses or networks, each with `:PORT` if wanted. Only an address, a network
    or the exact name of a host reaches private addresses."""
    deny: list[str] = []
    """Of the same form; goes before `allow`."""
    max_response_mb: Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number of MB of at least 1")] = 1024
    timeout_s: Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most 86400")] = 100.0
    """Seconds without a byte before a subrequest fails."""


class KvNamespaceConfig(msgspec.Struct, frozen=True):
    """`[[kv_namespaces]]`: `env.BINDING` is a KV namespace."""

    binding: _Identifier
    id: str = ""
    """Which namespace of the account; default: the binding's name."""
    preview_id: str = ""

    @property
    def storage_id(self) -> str:
        """Which namespace of the account this is."""
        return self.id or self.binding


class D1Config(msgspec.Struct, frozen=True):
    """`[[d1_databases]]`: `env.BINDING` is an SQLite database."""

    binding: _Identifier
    database_name: str = ""
    database_id: str = ""
    """Which database of the account; default: `database_name`, else the binding's name."""
    preview_database_id: str = ""
    migrations_dir: str = "migrations"
    migrations_table: str = "d1_migrations"

    @property
    def storage_id(self) -> str:
        """Which database of the account this is."""
        return self.database_id or self.database_name or self.binding


class S3Config(msgspec.Struct, frozen=True):
    """`s3` of `[[r2_buckets]]`: the bucket is in S3, or in a store that speaks its protocol.

    There are no credentials here: AWS's library finds them in the node's environment.
    """

    bucket: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$", description="the name of a bucket in S3")
    ]
    endpoint: Annotated[
        str, Meta(pattern=r"^(https?://[^/\s@?#]+/?)?$", description='an address such as "https://s3.example.com"')
    ] = ""
    """Of the store; default: that of AWS in the region."""
    region: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]*$", description='a region such as "eu-central-1"')] = ""
    """Default: the one in the node's environment, else us-east-1."""
    prefix: (
        Annotated[
            str,
            Meta(
                pattern=r"^(?!/)(?!.*(^|/)\.{1,2}/)([A-Za-z0-9!_.'()/-]{1,255}/)?$",
                description='what keys begin with, which ends in /, such as "photos/", or nothing',
            ),
        ]
        | None
    ) = None
    """Before all keys; default: the account and a slash."""


class R2Config(msgspec.Struct, frozen=True):
    """`[[r2_buckets]]`: `env.BINDING` is a bucket of objects."""

    binding: _Identifier
    bucket_name: str = ""
    """Which bucket of the account; default: the binding's name."""
    preview_bucket_name: str = ""
    jurisdiction: str = ""
    s3: S3Config | None = None
    """Where in S3 the objects are; default: in files of the state directory."""

    @property
    def storage_id(self) -> str:
        """Which bucket of the account this is."""
        return self.bucket_name or self.binding


class QueueProducerConfig(msgspec.Struct, frozen=True):
    """`[[queues.producers]]`: `env.BINDING` sends to a queue."""

    binding: _Identifier
    queue: str
    delivery_delay: Annotated[int, Meta(ge=0, le=43_200, description="a whole number of seconds up to 43200")] = 0


class QueueConsumerConfig(msgspec.Struct, frozen=True):
    """`[[queues.consumers]]`: this worker's `queue` handler gets the messages of a queue."""

    queue: str
    max_batch_size: Annotated[int, Meta(ge=1, le=100, description="a whole number from 1 to 100")] = 10
    max_batch_timeout: Annotated[int, Meta(ge=0, le=60, description="a whole number of seconds up to 60")] = 5
    max_retries: Annotated[int, Meta(ge=0, le=100, description="a whole number up to 100")] = 3
    dead_letter_queue: str = ""
    max_concurrency: Annotated[int, Meta(ge=1, le=250, description="a whole number from 1 to 250")] = 1
    retry_delay: Annotated[int, Meta(ge=0, le=43_200, description="a whole number of seconds up to 43200")] = 0


class QueuesConfig(msgspec.Struct, frozen=True):
    """`[queues]`."""

    producers: list[QueueProducerConfig] = []
    consumers: list[QueueConsumerConfig] = []


class ServiceConfig(msgspec.Struct, frozen=True):
    """`[[services]]`: `env.BINDING` is another worker of the account on this node."""

    binding: _Identifier
    service: str
    entrypoint: str = ""
    """A named entrypoint class of it; default: `Default`."""
    environment: str = ""
    props: dict[str, Any] = {}


class RateLimitRule(msgspec.Struct, frozen=True):
    """`limit` calls with one key in `period` seconds."""

    limit: _Count
    period: Literal[10, 60]


class RateLimitConfig(msgspec.Struct, frozen=True):
    """`[[ratelimits]]`: `env.NAME.limit({"key": …})`."""

    name: _Identifier
    namespace_id: str
    simple: RateLimitRule


class VersionMetadataConfig(msgspec.Struct, frozen=True):
    """`[version_metadata]`: `env.BINDING` says which version of the worker runs."""

    binding: _Identifier


class TriggersConfig(msgspec.Struct, frozen=True):
    """`[triggers]`: when the worker's `scheduled` handler runs, in UTC."""

    crons: list[str] = []


class AssetsConfig(msgspec.Struct, frozen=True):
    """`[assets]`: files that are served beside the worker."""

    directory: Annotated[Path, Meta(description='the path of a folder, such as "public"')]
    binding: _Identifier | None = None
    html_handling: Literal["auto-trailing-slash", "force-trailing-slash", "drop-trailing-slash", "none"] = (
        "auto-trailing-slash"
    )
    not_found_handling: Literal["none", "404-page", "single-page-application"] = "none"
    run_worker_first: bool | list[str] = False
    """Whether, or for which paths, the worker is asked before the files are."""


class BillingConfig(msgspec.Struct, frozen=True):
    """`[billing]`: what calls cost."""

    prices: Annotated[Path, Meta(description='the path of a price book, such as "prices.toml"')] | None = None
    """The price book; None: the packaged one, with the prices that Workers AI publishes."""


class Config(msgspec.Struct, frozen=True):
    """A worker's configuration. Paths are absolute once loaded."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9_][a-z0-9_-]{0,62}$",
            description="a name of at most 63 lowercase letters, digits, - and _, not led by -",
        ),
    ]
    main: Annotated[Path, Meta(description='the path of the worker\'s Python file, such as "src/worker.py"')]
    path: Path | None = None
    """The file this was read from; not a key of the file."""
    compatibility_date: (
        Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$", description='a date in quotes, such as "2026-11-30"')]
        | None
    ) = None
    compatibility_flags: list[str] = []
    account_id: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="an id of at most 64 letters, digits, - and _")
    ] = "dev"
    vars: dict[str, Any] = {}
    ai: AiConfig | None = None
    kv_namespaces: list[KvNamespaceConfig] = []
    d1_databases: list[D1Config] = []
    r2_buckets: list[R2Config] = []
    queues: QueuesConfig = QueuesConfig()
    services: list[ServiceConfig] = []
    ratelimits: list[RateLimitConfig] = []
    version_metadata: VersionMetadataConfig | None = None
    triggers: TriggersConfig = TriggersConfig()
    assets: AssetsConfig | None = None
    limits: LimitsConfig = LimitsConfig()
    isolates: IsolatesConfig = IsolatesConfig()
    egress: EgressConfig = EgressConfig()
    dev: DevConfig = DevConfig()
    engine: EngineConfig = EngineConfig()
    billing: BillingConfig = BillingConfig()
    state_dir: Annotated[Path, Meta(description='the path of a folder, such as ".edge"')] = Path(".edge")
    """Where models, the ledger and logs live."""

    @property
    def s3_buckets(self) -> dict[str, S3Config]:
        """The R2 buckets that are in S3, by id."""
        return {bucket.storage_id: bucket.s3 for bucket in self.r2_buckets if bucket.s3 is not None}

    @property
    def project(self) -> Path:
        """The folder that the worker's files are in."""
        return self.path.parent if self.path is not None else self.main.parent


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def load(path: Path | None, cwd: Path, warn: Callable[[str], None] = _warn) -> Config:
    """The configuration in `path`, or in the first of `FILE_NAMES` found from `cwd` upwards.

    Unknown keys, and keys of wrangler that have no effect here yet, are handed to `warn`, by default to stderr.

    Raises:
        ConfigError: there is no file, it cannot be read or parsed, or values are wrong (all of them are listed).
    """
    file = find(cwd) if path is None else _absolute(cwd, path)
    if file is None:
        raise ConfigError(
            f"no configuration file in {cwd} or above it; looked for {', '.join(FILE_NAMES)}. "
            "`edge init NAME` makes a new worker; `--config FILE` names a file elsewhere"
        )
    text = _read(file)
    table, lines = _parse_toml(file, text) if file.suffix == ".toml" else _parse_jsonc(file, text)
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


def find(cwd: Path) -> Path | None:
    """The configuration file for the folder `cwd`: the first of `FILE_NAMES` in it, else in its parents."""
    cwd = Path(os.path.abspath(cwd))
    candidates = (folder / name for folder in (cwd, *cwd.parents) for name in FILE_NAMES)
    return next((file for file in candidates if file.is_file()), None)


def strip_jsonc(text: str) -> str:
    """`text` with comments and trailing commas turned into spaces: plain JSON in which all positions are the same."""
    no_comments = re.sub(rf"{_STRING}|//[^\n]*|/\*.*?\*/", _blank_comment, text, flags=re.DOTALL)
    return re.sub(rf"{_STRING}|,(?=\s*[}}\]])", lambda match: " " if match[0] == "," else match[0], no_comments)


_STRING = r'"(?:[^"\\\n]|\\.)*"'


def _blank_comment(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)


# -- reading and parsing -----------------------------------------------------------------------------------


def _read(file: Path) -> str:
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give the configuration file in it")
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is longer than {MAX_FILE_BYTES} bytes; is it a configuration file?")
    try:
        # Newlines as `open` in text mode would give them: tomllib knows no lone \r.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error


def _parse_toml(file: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        return tomllib.loads(text), _toml_lines(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _parse_jsonc(file: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    plain = strip_jsonc(text)
    try:
        table = json.loads(plain, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{file} is not valid JSON: {error.msg} (at {where})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {_found(table)}")
    return table, _json_lines(plain)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _toml_lines(text: str) -> dict[str, int]:
    """Line numbers by key path, for messages only: keys in inline tables are not found."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = _bare(header[1])
            lines.setdefault(section, number)
        elif key := re.match(r"""\s*((?:"[^"]*"|'[^']*'|[\w.-]|\s)+?)\s*=""", line):
            lines.setdefault(_join(section, _bare(key[1])), number)
    return lines


def _json_lines(plain: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    path: list[str] = []
    key = ""
    for token in re.finditer(rf"{_STRING}|[{{}}\[\]:]", plain):
        match token[0]:
            case ":":
                lines.setdefault(".".join([*path[1:], key]), plain.count("\n", 0, token.start()) + 1)
            case "{" | "[":
                path.append(key)
            case "}" | "]":
                path.pop()
            case string:
                key = json.loads(string, strict=False)
    return lines


def _absolute(folder: Path, path: Path) -> Path:
    # Not `resolve`: a link to a file stands in the folder of the link, with the modules beside it.
    return Path(os.path.abspath(folder / path))


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


# -- checking ----------------------------------------------------------------------------------------------


class _Findings:
    """What is wrong (`problems`) or odd (`unknown`, `idle`) in one file."""

    def __init__(self, file: Path, lines: dict[str, int]) -> None:
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
                findings.problem(key, f"expected {_expected(field.type)}, found {_found(table[name])}")
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


def _found(value: Any) -> str:
    match value:
        case str() | bool() | int() | float() | list() | dict() | None:
            text = json.dumps(value, ensure_ascii=False, default=str)
            return text if len(text) <= 60 else f"{text[:57]}…"
        case _:
            return f"the {type(value).__name__} {value} without quotes"


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
