"""How many prompt tokens a step may have while others wait for their next token.

A long prompt is read in pieces between the tokens of others. Small pieces keep those steady; large ones are read
sooner. The size follows what steps have cost lately on this machine, and how many wait for either.

This module knows nothing about sequences and pages.
"""

from __future__ import annotations

MIN_SHARE = 0.25
"""Time for prompts in a step, as a share of the time for the others' tokens, that nobody is bothered by."""
MIN_TOKENS = 16
_WEIGHT = 0.2  # of the newest step in the averages


class Pace:
    """Learns what a step costs: a part for the tokens that are decoded, and a part for each prompt token."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._decode_us: float | None = None
        self._prompt_token_us: float | None = None

    def observe(self, num_decoding: int, num_prompt_tokens: int, step_us: int) -> None:
        """A step with so many of both took `step_us`."""
        if num_prompt_tokens == 0:
            self._decode_us = _average(self._decode_us, step_us)
        elif num_decoding == 0:
            if num_prompt_tokens >= MIN_TOKENS:
                self._prompt_token_us = _average(self._prompt_token_us, step_us / num_prompt_tokens)
        elif self._decode_us is not None:
            extra_us = max(0.0, step_us - self._decode_us)
            self._prompt_token_us = _average(self._prompt_token_us, extra_us / num_prompt_tokens)

    def prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """The budget for prompts in a step of `num_decoding` sequences while `num_prompts` prompts are to be read."""
        if not self._decode_us or not self._prompt_token_us:
            return self._step_tokens // 4
        # Many prompts behind few decoders: those few would keep all others from starting.
        share = max(MIN_SHARE, num_prompts / max(1, num_decoding))
        return max(MIN_TOKENS, min(self._step_tokens, int(share * self._decode_us / self._prompt_token_us)))


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
