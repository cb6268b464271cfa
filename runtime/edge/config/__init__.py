"""The configuration as one frozen struct; nothing deeper reads files or the environment.

The annotations are the schema: a constraint's `description` is what an error says was expected. `file` reads it from
a file, `checks` holds a file against it. `wrangler-like.toml` at the top of the repository is the annotated reference
of every key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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


class ApiConfig(msgspec.Struct, frozen=True):
    """`[api]`: Workers AI's REST API and OpenAI's."""

    rate_limits: Literal["on", "off"] | None = None
    """Whether the calls of an account are limited, also those of its workers; None: `off` in `edge dev`, else `on`."""
    requests_per_minute: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=1 << 31)]],
        Meta(description="a table of whole numbers of at least 0, by task or model"),
    ] = {}
    """Calls that one account may make within a minute, by task or model, over those that Workers AI publishes; 0: any
    number."""
    call_timeout_s: Annotated[
        float, Meta(ge=0, le=86_400, description="a number of seconds from 0 (any time) to 86400")
    ] = 600.0
    """Seconds that one model call may take, waiting included; then it ends with 408. 0: any time."""
    keep_alive_s: Annotated[float, Meta(ge=0, le=3600, description="a number of seconds from 0 (never) to 3600")] = 15.0
    """Seconds without an event after which an event stream gets a comment, for proxies that end silent connections; 0:
    never."""
    read_timeout_s: Annotated[
        float, Meta(ge=0, le=86_400, description="a number of seconds from 0 (any time) to 86400")
    ] = 300.0
    """Seconds for which the reader of an event stream may take nothing before it is disconnected; 0: any time."""
    cors_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|https?://[^/\s]+)$")]],
        Meta(description='a list of origins such as "https://app.example.com", or "*" for any'),
    ] = []
    """Origins whose web pages may call the API from a browser."""


class BillingConfig(msgspec.Struct, frozen=True):
    """`[billing]`: what calls cost."""

    prices: Annotated[Path, Meta(description='the path of a price book, such as "prices.toml"')] | None = None
    """The price book; None: the packaged one, with the prices that Workers AI publishes."""


class BatchesConfig(msgspec.Struct, frozen=True):
    """`[batches]`: asynchronous batches, and the files that they read and write."""

    concurrency: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 8
    """Requests of batches that are under way at a time while nobody else makes calls; else it is one."""
    retention_days: Annotated[int, Meta(ge=1, le=3650, description="a whole number of days from 1 to 3650")] = 7
    """After which batches that ended, and files, are removed."""
    max_mb_per_account: Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number of MB of at least 1")] = 1024
    """MB that the requests, answers and files of an account may hold when more is taken in."""


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
    api: ApiConfig = ApiConfig()
    billing: BillingConfig = BillingConfig()
    batches: BatchesConfig = BatchesConfig()
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
