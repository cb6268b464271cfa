"""From a configuration to what an isolate needs to start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from edge.config import Config
from edge.errors import ConfigError
from edge.isolates.base import Binding, Bundle
from edge.node.contained import contained

SKIPPED_FOLDERS = frozenset(
    {
        *("__pycache__", ".venv", "venv", "node_modules", ".edge", ".git"),
        *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
    }
)
"""Folders below a worker's root that hold no code of the worker."""


def bundle_of(
    config: Config, *, secrets: Mapping[str, str] | None = None, search_paths: tuple[str, ...] = ()
) -> Bundle:
    """The worker of `config` as it is on disk now.

    Its version is a hash of the Python files below the module root and of what the configuration, `secrets` and
    `search_paths` say of it, so that usage records of the same code carry the same version.

    Args:
        secrets: variables that go before those of the configuration.
        search_paths: folders with the packages that it depends on.

    Raises:
        ConfigError: the module root is a link out of the project, or what the node keeps its state in.
    """
    root = contained(config.project, config.main.parent, "main")
    if root == config.state_dir.resolve():
        raise ConfigError(f"state_dir is {root}, whose files the worker may read; name another folder, such as .edge")
    bundle = Bundle(
        worker=config.name,
        version="",
        root=str(root),
        main=config.main.name,
        account=config.account_id,
        vars=config.vars | dict(secrets or {}),
        bindings=bindings_of(config),
        search_paths=search_paths,
        compatibility_date=config.compatibility_date or "",
        compatibility_flags=tuple(config.compatibility_flags),
        limits=config.limits,
        egress=config.egress,
    )
    version = f"dev-{_hash_of(bundle)}"
    return replace(bundle, version=version, bindings=_with_metadata(bundle.bindings, version))


def bindings_of(config: Config) -> dict[str, Binding]:
    """The names that `env` gets besides variables, and what they are."""
    bindings: dict[str, Binding] = {}
    if config.ai is not None:
        bindings[config.ai.binding] = Binding("ai")
    for kv in config.kv_namespaces:
        bindings[kv.binding] = Binding("kv", {"id": kv.storage_id})
    for d1 in config.d1_databases:
        bindings[d1.binding] = Binding("d1", {"id": d1.storage_id})
    for r2 in config.r2_buckets:
        bindings[r2.binding] = Binding("r2", {"id": r2.storage_id})
    for producer in config.queues.producers:
        props = {"queue": producer.queue, "delay_s": producer.delivery_delay}
        bindings[producer.binding] = Binding("queue", props)
    for service in config.services:
        props = {"service": service.service, "entrypoint": service.entrypoint, "props": service.props}
        bindings[service.binding] = Binding("service", props)
    for limit in config.ratelimits:
        props = {"id": limit.namespace_id, "limit": limit.simple.limit, "period": limit.simple.period}
        bindings[limit.name] = Binding("ratelimit", props)
    if config.version_metadata is not None:
        bindings[config.version_metadata.binding] = Binding("version_metadata")  # which version: see `bundle_of`
    if config.assets is not None and config.assets.binding is not None:
        bindings[config.assets.binding] = Binding("assets")
    return bindings


def _with_metadata(bindings: Mapping[str, Binding], version: str) -> dict[str, Binding]:
    """`bindings`, of which those of version metadata say what they are about."""
    metadata = {"id": version, "tag": "", "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds")}
    return {
        name: Binding(binding.kind, metadata) if binding.kind == "version_metadata" else binding
        for name, binding in bindings.items()
    }


def _hash_of(bundle: Bundle) -> str:
    root = Path(bundle.root)
    digest = hashlib.sha256(msgspec.json.encode(bundle))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            # An editor may be replacing it right now. What is no file, such as a pipe, would be read for ever, and what
            # cannot be read is for the import to complain about.
            with suppress(OSError):
                if path.is_file():
                    source = path.read_bytes()
                    digest.update(os.fsencode(path.relative_to(root)) + f"\0{len(source)}\0".encode() + source)
    return digest.hexdigest()[:8]
