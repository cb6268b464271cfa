"""How many prompt tokens a step may have while others wait for their next token.

A long prompt is read in pieces between the tokens of others. Small pieces keep those steady; large ones are read
sooner. The size follows what steps have cost lately on this machine, and how many wait for either. The texts of
encoders are computed between steps, for a time that is bounded here as well.

This module knows nothing about sequences and pages.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 1 / 3
"""Time for each prompt in a step, as a share of the time for the others' tokens. For one alone, nobody is bothered."""
MIN_TEXTS_US = 2000
"""A batch of an encoder's texts gets so much of a turn at least."""
IDLE_TEXTS_US = 20_000
"""How long such a batch keeps the device at a time, about, when nobody else wants it."""
MANY = 4
"""How many may be held up by each of several prompts that wait, before these are read in small pieces."""
MIN_TOKENS = 4
MIN_TOKENS_BESIDE_FEW = 16
"""Beside at most `MANY` others: smaller pieces would make the prompt wait long for little."""
_WEIGHT = 0.2  # of the newest step in the averages
_KEPT = 0.95  # of what older steps have taught about prompts, with each new one
_UNTAUGHT = 2.0  # by how much a token may cost more in a small piece than in a step of its own


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompt tokens of a step."""

    num_tokens: int
    num_seen: int
    """Tokens that they attend to, all of them together, without those of this step."""


class Pace:
    """Learns what a step costs: a part for the tokens that are decoded, and a part for each prompt token."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._decode_us: dict[int, float] = {}
        """Of steps without prompts, by the number of digits of how many were decoding."""
        self._alone, self._beside = _PromptCost(), _PromptCost()
        """In steps of prompts only, and beside tokens that are decoded."""

    def observe(self, num_decoding: int, prompts: Prompts, step_us: int) -> None:
        """A step with so many of both took `step_us`."""
        if prompts.num_tokens == 0:
            size = num_decoding.bit_length()
            old = self._decode_us.get(size)
            self._decode_us[size] = step_us if old is None else old + _WEIGHT * (step_us - old)
        elif num_decoding == 0:
            self._alone.observe(prompts, step_us)
        elif (decode_us := self._decoding_us(num_decoding)) is not None:
            self._beside.observe(prompts, max(0.0, step_us - decode_us))

    def prompt_tokens(self, num_decoding: int, num_prompts: int, num_seen: int) -> int:
        """The budget for prompts in a step of `num_decoding` sequences while `num_prompts` prompts are to be read.

        `num_seen` tokens come before the next one of the longest of them.
        """
        # Many prompts behind few decoders: those few would keep all others from starting.
        if num_prompts > 1 and num_prompts * MANY >= num_decoding:
            return self._step_tokens
        decode_us = self._decoding_us(num_decoding)
        token_us = self._beside.token_us(num_seen) or _UNTAUGHT * self._alone.token_us(num_seen)
        if not decode_us or not token_us:
            return self._step_tokens // 4
        wanted = int(num_prompts * SHARE * decode_us / token_us)
        least = MIN_TOKENS_BESIDE_FEW if num_decoding <= MANY else MIN_TOKENS
        return max(least, min(self._step_tokens, wanted))

    def _decoding_us(self, num_decoding: int) -> float | None:
        """What a step costs in which so many decode; of the nearest number that is known."""
        if num_decoding == 0:
            return 0.0
        size = num_decoding.bit_length()
        nearest = min(self._decode_us, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._decode_us[nearest]


def texts_us(step_us: float | None, *, beside_decoding: bool, is_outranked: bool) -> float:
    """How long an encoder's texts may be computed after a step that took `step_us` (None: there was none).

    Args:
        beside_decoding: whether somebody waits for their next token.
        is_outranked: whether somebody of a higher priority waits for that, or for texts of another encoder.
    """
    if is_outranked:
        return MIN_TEXTS_US
    if step_us is None:
        return IDLE_TEXTS_US
    return max(SHARE * step_us if beside_decoding else step_us, MIN_TEXTS_US)


class _PromptCost:
    """What a prompt token costs: so much, and more for every token before it. Least squares, older steps fading."""

    def __init__(self) -> None:
        self._tokens_tokens = self._tokens_seen = self._seen_seen = 0.0
        self._tokens_us = self._seen_us = 0.0

    def observe(self, prompts: Prompts, us: float) -> None:
        tokens, seen = prompts.num_tokens, prompts.num_seen
        self._tokens_tokens = _KEPT * self._tokens_tokens + tokens * tokens
        self._tokens_seen = _KEPT * self._tokens_seen + tokens * seen
        self._seen_seen = _KEPT * self._seen_seen + seen * seen
        self._tokens_us = _KEPT * self._tokens_us + tokens * us
        self._seen_us = _KEPT * self._seen_us + seen * us

    def token_us(self, num_seen: int) -> float:
        """Of one with so many before it; 0 if nothing is known."""
        if self._tokens_tokens == 0:
            return 0.0
        mean = self._tokens_us / self._tokens_tokens
        determinant = self._tokens_tokens * self._seen_seen - self._tokens_seen**2
        if determinant < 0.01 * self._tokens_tokens * self._seen_seen or determinant == 0:
            return mean  # all so far had about as many before them
        each = (self._seen_seen * self._tokens_us - self._tokens_seen * self._seen_us) / determinant
        per_seen = (self._tokens_tokens * self._seen_us - self._tokens_seen * self._tokens_us) / determinant
        # Noise can make either negative; no token costs less than half of the mean.
        return max(each + max(per_seen, 0.0) * num_seen, mean / 2)
