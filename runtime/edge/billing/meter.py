"""The usage record: what one model call used, and by whom it was made.

Counts are the engine's own. This module knows nothing about prices, databases or the calls themselves.
"""

from __future__ import annotations

import os
import time
from typing import Literal, Protocol

import msgspec

Trigger = Literal["rest", "openai", "binding", "batch"]
Status = Literal["ok", "cancelled", "error"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. Times are integer microseconds since the epoch, in UTC.

    Cached prompt tokens are not counted in `input_tokens`: the three token counts are disjoint.
    """

    id: str
    """Minted once for the call: writing the same id again is harmless."""
    request_id: str
    """The id that the caller was told: `cf-ai-req-id` of the API, `env.AI.lastRequestId` of a handler."""
    started_at: int
    ended_at: int
    account: str
    worker: str | None
    version: str | None
    model: str
    """The catalogue id that the caller asked for: it is the one that has a price."""
    served_by: str
    """The installed model that ran: `model` itself, or what stands in for it."""
    task: str
    trigger: Trigger
    status: Status
    error_code: int | None
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    compute_us: int
    wall_us: int
    price_version: str
    """The `PriceBook.id` of the prices that were in force."""
    sandbox: int = 0
    """The sandbox layers of the process that made the call, a bit for each; 0 for calls that no handler made."""


class Meter(Protocol):
    """Where usage records go."""

    async def record(self, record: UsageRecord) -> None:
        """Return once `record` is durable.

        Raises:
            MeteringUnavailable: it could not be made durable, or this is not known.
        """
        ...


def new_id() -> str:
    """A new id, a UUID of version 7 (RFC 9562): ids sort by the millisecond in which they were minted."""
    global _entropy
    if len(_entropy) < 10:
        _entropy = os.urandom(1000)
    taken, _entropy = _entropy[:10], _entropy[10:]
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(taken)
    number = milliseconds << 80 | 0x7 << 76 | (random >> 68) << 64 | 0b10 << 62 | random & (1 << 62) - 1
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_entropy = b""
"""Random bytes that are left: to ask the kernel for them each time takes as long as all the rest."""


def _forget_entropy() -> None:
    global _entropy
    _entropy = b""


os.register_at_fork(after_in_child=_forget_entropy)  # or parent and child would mint the same ids
