"""What `edge dev` and `edge serve` say when they are ready: workers, what their `env` has, and how to reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote_plus

from edge.config import Config
from edge.errors import ConfigError
from edge.isolates.sandbox.layers import SandboxReport, summary
from edge.node.app import Node, key_of
from edge.node.dev_vars import load_dev_vars
from edge.weights.manifest import DEFAULT_SPEC


def welcome(
    node: Node, configs: Sequence[Config], base: str, *, account: str | None, access: str, reload: bool
) -> list[str]:
    """The lines. `base` is the node's URL, `account` whose calls it takes (None: those of several), `access` how."""
    has_ai = any(config.ai is not None for config in configs)
    return [
        *(line for config in configs for line in _worker(config, base, reload, node.serves(config))),
        *(_models(node, base, account) if has_ai else ()),
        f"Account   {configs[0].account_id}    {access}",
        *_sandbox(node, configs),
    ]


def missing_services(node: Node, configs: Sequence[Config]) -> Iterator[str]:
    """A warning for each service binding to a worker that is not here."""
    workers = set(node.isolates.workers())
    for config in configs:
        for service in config.services:
            if (config.account_id, service.service) not in workers:
                yield (
                    f"warning: {config.name}: env.{service.binding} is the worker {service.service!r}, which is not on "
                    "this node: start it as well, with one more -c FILE; calls of it fail until then"
                )


def short(path: Path) -> str:
    """`path` from the working directory, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _models(node: Node, base: str, account: str | None) -> Iterator[str]:
    """What there is to know of models, for those who have asked for some with `[ai]`."""
    models = ", ".join(model.id for model in node.catalogue.models())
    yield f"Models    {models or f'none; the small default model: edge models add {DEFAULT_SPEC}'}"
    yield f"REST      {base}/client/v4/accounts/{account or 'ACCOUNT'}/ai/run/MODEL"
    yield f"OpenAI    {base}/{f'client/v4/accounts/{account}/ai/' if account else ''}v1"


def _worker(config: Config, base: str, reload: bool, serves: bool) -> Iterator[str]:
    state = f"{', reloads on save' if reload else ''}{'' if serves else '; NOT SERVED: what is wrong is said above'}"
    yield f"Worker    {config.name}  ({short(config.main)}{state})"
    yield f"AI        {f'env.{config.ai.binding}' if config.ai else 'none ([ai] is not in the configuration)'}"
    for kv in config.kv_namespaces:
        yield f"KV        env.{kv.binding}  ({kv.storage_id})"
    for d1 in config.d1_databases:
        yield f"D1        env.{d1.binding}  ({d1.database_name or d1.database_id or d1.binding})"
    for r2 in config.r2_buckets:
        yield f"R2        env.{r2.binding}  ({r2.storage_id}{', in S3' if r2.s3 is not None else ''})"
    for producer in config.queues.producers:
        yield f"Queue     env.{producer.binding}  (sends to {producer.queue})"
    for consumer in config.queues.consumers:
        yield f"Queue     consumes {consumer.queue}"
    for service in config.services:
        entrypoint = f", {service.entrypoint}" if service.entrypoint else ""
        yield f"Service   env.{service.binding}  ({service.service}{entrypoint})"
    for limit in config.ratelimits:
        yield f"Limit     env.{limit.name}  ({limit.simple.limit} in {limit.simple.period} s)"
    if config.version_metadata is not None:
        yield f"Version   env.{config.version_metadata.binding}"
    if config.assets is not None:
        name = f"env.{config.assets.binding}  " if config.assets.binding else ""
        yield f"Assets    {name}({short(config.assets.directory)})"
    for cron in config.triggers.crons:
        yield f"Cron      {cron}  (UTC; now: curl '{base}/cdn-cgi/local/scheduled?cron={quote_plus(cron, safe='*/')}')"
    secrets = _secret_names(config)
    for name in sorted(set(config.vars) - secrets):
        yield f"Variable  env.{name}"
    for name in sorted(secrets):
        yield f"Secret    env.{name}"


def _secret_names(config: Config) -> set[str]:
    try:
        return set(load_dev_vars(config.path)) if config.path is not None else set()
    except ConfigError:  # it was said when the worker could not be started for it
        return set()


def _sandbox(node: Node, configs: Sequence[Config]) -> Iterator[str]:
    policy = configs[0].isolates.sandbox or "best-effort"
    if any(node.serves(config) for config in configs):
        first = next(config for config in configs if node.serves(config))
        yield f"Sandbox   {summary(policy, SandboxReport(layers=node.isolates.status(key_of(first)).layers))}"
