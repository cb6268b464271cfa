"""Who used the CPU time of a process: splits what the node's clock says among its invocations. Plain arithmetic."""

from __future__ import annotations

TYPICAL_OVERHEAD_US = 100.0
_WINDOW = 1000


class CpuSplit:
    """Splits the CPU time of one process so that the parts always sum up to the whole.

    All times are integer microseconds; `total_us` is the process's clock, which the node reads from outside. What an
    invocation `claims` is measured inside, by code that is not trusted: it only decides who of those that ran at the
    same time pays, and an invocation that runs alone pays what the clock says.

    What a process does for an invocation outside of its handler (frames, dispatch) is in nobody's claim. The size of
    that is learned from stretches at whose end nothing is in flight, and added to each claim.
    """

    def __init__(self, total_us: int = 0) -> None:
        self.num_active = 0
        self._background_us = 0
        self._pool_us = 0
        self._total_us = total_us
        self._overhead_us = TYPICAL_OVERHEAD_US
        self._window_used_us = 0
        self._window_claimed_us = 0
        self._window_num = 0

    def begin(self, total_us: int) -> None:
        """An invocation starts."""
        self._advance(total_us)
        self.num_active += 1

    def end(self, total_us: int, claim_us: int) -> int:
        """An invocation that claims `claim_us` is over: the part that it has to pay."""
        self._advance(total_us)
        self.num_active -= 1
        claim_us = min(max(claim_us, 0), self._pool_us)
        part_us = self._pool_us if self.num_active == 0 else min(self._pool_us, claim_us + round(self._overhead_us))
        self._pool_us -= part_us
        self._window_claimed_us += claim_us
        self._window_num += 1
        if self.num_active == 0 or self._window_num == _WINDOW:
            self._learn()
        return part_us

    def pending_us(self, total_us: int) -> int:
        """What the active invocations have used together and nobody has paid yet."""
        self._advance(total_us)
        return self._pool_us

    def pending_background_us(self, total_us: int) -> int:
        """What was used while no invocation was active, since it was last taken."""
        self._advance(total_us)
        return self._background_us

    def take_background(self, total_us: int) -> int:
        """The same; it counts anew from here on."""
        taken_us, self._background_us = self.pending_background_us(total_us), 0
        return taken_us

    def _advance(self, total_us: int) -> None:
        used_us = max(total_us - self._total_us, 0)
        self._total_us += used_us
        if self.num_active:
            self._pool_us += used_us
            self._window_used_us += used_us
        else:
            self._background_us += used_us

    def _learn(self) -> None:
        sample_us = max(self._window_used_us - self._window_claimed_us, 0) / self._window_num
        self._overhead_us += (sample_us - self._overhead_us) * self._window_num / (self._window_num + 32)
        self._window_used_us = self._window_claimed_us = self._window_num = 0
