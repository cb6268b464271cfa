"""Finds stop strings in text that arrives in pieces.

This module knows nothing about tokens.
"""

from __future__ import annotations

from edge.errors import InvalidInput
from edge.frames import MAX_STOP_CHARS, MAX_STOPS


class StopStrings:
    """Passes text on, up to the first stop string; holds back what could be the start of one."""

    def __init__(self, stops: list[str]) -> None:
        """Look for any of `stops`.

        Raises:
            InvalidInput: one is empty or too long, or there are too many.
        """
        if len(stops) > MAX_STOPS:
            raise InvalidInput(
                f"{len(stops)} stop strings are more than the {MAX_STOPS} that are allowed", param="stop"
            )
        if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidInput(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        self._stops = stops
        self._held = ""
        self.found = False
        """Whether a stop string was met; nothing more is passed on."""

    def add(self, text: str) -> str:
        """What of the text so far can be shown now."""
        if self.found:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            # The one that is complete first, so that the answer does not depend on how the text was cut.
            self.found, self._held = True, ""
            return text[: min(matches)[1]]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def rest(self) -> str:
        """What is still held when no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the start of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
