"""What is known of the model calls of one request while they run, for the head of its answer.

The gate writes it, whoever answers the request reads it. This module knows nothing about HTTP.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from edge.frames import Delta, Done, Encoded, Started


class RateStatus(NamedTuple):
    """Where an account stands with a rate limit."""

    limit: int
    """Calls a minute."""
    remaining: int
    """Calls that may be made now."""
    reset_s: float
    """Seconds until one more may be made than now; after a refusal, until those that were refused may be."""


class CallReport(msgspec.Struct):
    """Of one request. Where there are several choices, the times are those of the first."""

    rate: RateStatus | None = None
    """Where the account stood when the call was let through or refused; None: no limit concerns it."""
    queue_us: int | None = None
    """Until the engine has accepted the prompt: waiting for the engine, for its model, and the tokenizer."""
    prefill_us: int | None = None
    """From there to the first piece of text: waiting for a place among the running ones, and the prompt."""
    decode_us: int | None = None
    """From there to the end."""
    micro_neurons: int | None = None
    """The price of what is complete; None: nothing is, or the model has no price."""
    pico_dollars: int | None = None
    last_ns: int = 0
    """When the last of these times ended, on the monotonic clock."""

    def begin(self) -> None:
        """A call begins."""
        if self.last_ns == 0:
            self.last_ns = time.monotonic_ns()

    def see(self, event: Started | Delta | Done | Encoded) -> None:
        """Take the time of the first event of each kind."""
        if type(event) is Started:
            if self.queue_us is None:
                self.queue_us = self._lap_us()
        elif self.prefill_us is None:
            self.prefill_us = self._lap_us()
        if type(event) is Done and self.decode_us is None:
            self.decode_us = self._lap_us()

    def charge(self, micro_neurons: int, pico_dollars_per_micro_neuron: int) -> None:
        """A call is complete, and costs that."""
        self.micro_neurons = (self.micro_neurons or 0) + micro_neurons
        self.pico_dollars = (self.pico_dollars or 0) + micro_neurons * pico_dollars_per_micro_neuron

    def _lap_us(self) -> int:
        began_ns, self.last_ns = self.last_ns, time.monotonic_ns()
        return (self.last_ns - began_ns) // 1000
