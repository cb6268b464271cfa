"""Reasoning on the way out: what models write first, in `<think>` tags, kept apart from the answer itself.

A reader like those of `edge.ai.tool_calls`, and around one. It knows nothing about models: an answer that does not
begin with the tag has no reasoning.
"""

from __future__ import annotations

from edge.ai.tool_calls import Piece, Reader, Thought, num_unclear


class Thinking:
    """Takes the reasoning off the front of an answer; what follows goes through `inner`, or is shown as it is."""

    _OPEN, _CLOSE = "<think>", "</think>"

    def __init__(self, inner: Reader | None = None) -> None:
        self._inner = inner
        self._held = ""
        self._is_thinking = False
        self._has_thought = False
        self._is_over = False
        self._skips_space = False

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._inner is None else self._inner.num_calls

    def feed(self, text: str) -> list[Piece]:
        """What `text`, which comes next, adds."""
        if self._is_over:
            return self._after(text)
        self._held += text
        if not self._is_thinking:
            start = self._held.lstrip()
            if self._OPEN.startswith(start):
                return []  # it may become the tag
            if not start.startswith(self._OPEN):
                self._is_over = True
                return self._answer(self._take(len(self._held)))
            self._is_thinking, self._held = True, start[len(self._OPEN) :]
        return self._think()

    def end(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        held = self._take(len(self._held))
        pieces: list[Piece] = []
        if self._is_thinking and held.strip():
            pieces = [Thought(held.rstrip())]
        elif not self._is_thinking and held:
            pieces = self._answer(held)
        return pieces if self._inner is None else [*pieces, *self._inner.end()]

    def _think(self) -> list[Piece]:
        if not self._has_thought:
            self._held = self._held.lstrip()
        at = self._held.find(self._CLOSE)
        thought = self._take(at if at >= 0 else len(self._held) - num_unclear(self._held, self._CLOSE))
        pieces: list[Piece] = [Thought(thought.rstrip() if at >= 0 else thought)] if thought.strip() else []
        self._has_thought = self._has_thought or bool(pieces)
        if at < 0:
            return pieces
        self._take(len(self._CLOSE))
        self._is_thinking, self._is_over, self._skips_space = False, True, True
        return [*pieces, *self._after(self._take(len(self._held)))]

    def _after(self, text: str) -> list[Piece]:
        """`text` of the answer; white space between it and the reasoning is dropped."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return self._answer(text) if text else []

    def _answer(self, text: str) -> list[Piece]:
        return [text] if self._inner is None else self._inner.feed(text)

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken
