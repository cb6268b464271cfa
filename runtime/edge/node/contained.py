"""Folders of a project that handlers or the web may read: they must not be links that lead out of the project."""

from __future__ import annotations

from pathlib import Path

from edge.errors import ConfigError


def contained(project: Path, folder: Path, key: str) -> Path:
    """`folder` without links in its path.

    A configuration may name a folder outside of `project`, its own folder, in so many words. Whoever wrote a link in
    the project may be somebody else.

    Args:
        key: of the configuration, for messages.

    Raises:
        ConfigError: `folder` is in `project` by its name, and somewhere else by where it leads.
    """
    real = folder.resolve()
    if folder.is_relative_to(project) and not real.is_relative_to(project.resolve()):
        raise ConfigError(
            f"{key}: {folder} leads out of {project}, to {real}, by a link; "
            "name that path itself in the configuration if it is meant, or copy it"
        )
    return real
