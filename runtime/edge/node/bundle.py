"""From a configuration to what an isolate needs to start."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from edge.config import Config
from edge.isolates.base import Bundle

SKIPPED_FOLDERS = frozenset(
    {
        *("__pycache__", ".venv", "venv", "node_modules", ".edge", ".git"),
        *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
    }
)
"""Folders below a worker's root that hold no code of the worker."""


def bundle_of(config: Config) -> Bundle:
    """The worker of `config` as it is on disk now.

    Its version is a hash of the Python files below the module root, so that usage records of the same code
    carry the same version.
    """
    root = config.main.parent
    return Bundle(
        worker=config.name,
        version=f"dev-{_source_hash(root)}",
        root=str(root),
        main=config.main.name,
        vars=config.vars,
        ai_binding=config.ai.binding if config.ai is not None else None,
    )


def _source_hash(root: Path) -> str:
    digest = hashlib.sha256()
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
