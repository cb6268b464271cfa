"""How many prompt tokens a step may have while others wait for their next token.

A long prompt is read in pieces between the tokens of others. Small pieces keep those steady; large ones are read
sooner. The size follows what steps have cost lately on this machine, and how many wait for either.

This module knows nothing about sequences and pages.
"""

from __future__ import annotations

SHARE = 0.25
"""Time for each prompt in a step, as a share of the time for the others' tokens. For one alone, nobody is bothered."""
MANY = 4
"""How many may be held up by each of several prompts that wait, before these are read in small pieces."""
MIN_TOKENS = 16
_WEIGHT = 0.2  # of the newest step in the averages


class Pace:
    """Learns what a step costs: a part for the tokens that are decoded, and a part for each prompt token."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._decode_us: dict[int, float] = {}
        """Of steps without prompts, by the number of digits of how many were decoding."""
        self._prompt_token_us: float | None = None

    def observe(self, num_decoding: int, num_prompt_tokens: int, step_us: int) -> None:
        """A step with so many of both took `step_us`."""
        if num_prompt_tokens == 0:
            size = num_decoding.bit_length()
            self._decode_us[size] = _average(self._decode_us.get(size), step_us)
        elif num_prompt_tokens >= MIN_TOKENS and (decode_us := self._decoding_us(num_decoding)) is not None:
            extra_us = max(0.0, step_us - decode_us)
            self._prompt_token_us = _average(self._prompt_token_us, extra_us / num_prompt_tokens)

    def prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """The budget for prompts in a step of `num_decoding` sequences while `num_prompts` prompts are to be read."""
        # Many prompts behind few decoders: those few would keep all others from starting.
        if num_prompts > 1 and num_prompts * MANY >= num_decoding:
            return self._step_tokens
        decode_us = self._decoding_us(num_decoding)
        if not decode_us or not self._prompt_token_us:
            return self._step_tokens // 4
        wanted = num_prompts * SHARE * decode_us / self._prompt_token_us
        return max(MIN_TOKENS, min(self._step_tokens, int(wanted)))

    def _decoding_us(self, num_decoding: int) -> float | None:
        """What a step costs in which so many decode; of the nearest number that is known."""
        if num_decoding == 0:
            return 0.0
        size = num_decoding.bit_length()
        nearest = min(self._decode_us, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._decode_us[nearest]


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
