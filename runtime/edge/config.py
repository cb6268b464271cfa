"""The configuration file as one frozen struct, read once; nothing deeper reads files or the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class AiConfig(msgspec.Struct, frozen=True):
    """`[ai]`: the AI binding."""

    binding: str = "AI"
    models: dict[str, str] = {}
    """Stand-ins: catalogue id to the name of an installed model."""


class LimitsConfig(msgspec.Struct, frozen=True):
    """`[limits]`: what one invocation may use."""

    timeout_s: float = 30.0
    """Seconds from the request to the response's head, before the isolate is stopped."""


class DevConfig(msgspec.Struct, frozen=True):
    """`[dev]`: where `edge dev` listens."""

    ip: str = "localhost"
    port: int = 8787


class EngineConfig(msgspec.Struct, frozen=True):
    """`[engine]`: how models are run."""

    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 0
    """Threads of the engine process; 0: as many as it has cores."""
    max_batch_size: int = 32
    """Sequences that run at once."""
    max_waiting: int = 256
    """Requests that may wait for a place; the next one is refused with 429."""
    step_tokens: int = 512
    """Token budget of one step (prompt chunks and decode tokens together)."""
    kv_tokens: int = 65536
    """Tokens that the KV cache has room for, all sequences together."""


class Config(msgspec.Struct, frozen=True):
    """A worker's configuration. Paths are absolute once loaded."""

    name: str
    main: Path
    path: Path | None = None
    """The file this was read from."""
    compatibility_date: str | None = None
    compatibility_flags: list[str] = []
    account_id: str = "dev"
    vars: dict[str, Any] = {}
    ai: AiConfig | None = None
    limits: LimitsConfig = LimitsConfig()
    dev: DevConfig = DevConfig()
    engine: EngineConfig = EngineConfig()
    state_dir: Path = Path(".edge")
    """Where models, the ledger and logs live."""
