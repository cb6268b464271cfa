"""Guesses the next tokens of a sequence from what it already says: n-gram look-up, no second model.

A guess costs nothing but the model's time to verify it, and pays where answers repeat the prompt: edits, quotes, code.
Guesses decide only what is verified together, never what is chosen.

This module knows nothing about models, steps or pages.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST, SHORTEST = 4, 2
"""Numbers of last tokens that are looked up, the longest first."""


class NgramIndex:
    """The tokens of one sequence, and where each short run of them occurred last. Memory grows with the sequence."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """From a run of tokens to the place after its last occurrence, but for the one that ends the sequence."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Note that `token` was appended to the sequence."""
        end = len(self._tokens)
        for size in range(SHORTEST, min(LONGEST, end) + 1):
            self._after[tuple(self._tokens[end - size :])] = end
        self._tokens.append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """What may follow, `num_tokens` long: what followed the last tokens when they occurred last. Empty: no guess.

        A continuation that runs into the end of the sequence goes on with itself, as repetitions do.
        """
        end = len(self._tokens)
        for size in range(min(LONGEST, end), SHORTEST - 1, -1):
            start = self._after.get(tuple(self._tokens[end - size :]))
            if start is not None:
                period = end - start
                return [self._tokens[start + place % period] for place in range(num_tokens)]
        return []
