"""What a run of a bench is told on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What is to be measured."""

    state_dir: Path
    """Where the models are; the peers go into its folder `bench`."""
    peers: bool
    quick: bool
    sections: tuple[str, ...]
    """Names of the bench's `SECTIONS`."""

    @property
    def num_repetitions(self) -> int:
        """Measured runs of each kind; there is one more before, which does not count."""
        return 1 if self.quick else 5
