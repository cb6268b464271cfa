"""One generation as it grows: its sequence, how its tokens are chosen, and the text that can be shown.

This module knows nothing about models, steps or sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Numbers

from edge.engine.sampler import Sampler
from edge.engine.scheduler import Sequence
from edge.engine.stops import StopStrings
from edge.engine.tokenizer import Detokenizer, Tokenizer
from edge.errors import InvalidInput, PromptTooLong
from edge.frames import Generate, Usage


class Generation:
    """A request that was accepted: prompt tokenized, parameters checked, length within the context."""

    def __init__(self, request: Generate, tokenizer: Tokenizer, max_length: int) -> None:
        """Prepare `request` for a model whose sequences have at most `max_length` tokens.

        Raises:
            InvalidInput: a parameter is out of range, or the prompt is empty or refused by the chat template.
            PromptTooLong: prompt, or prompt and `max_tokens`, do not fit.
        """
        self.id = request.id
        self.sampler = Sampler(request.sampling)
        self._stops = StopStrings(request.stop)
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidInput(f"max_tokens is {request.max_tokens}, but must be at least 1", param="max_tokens")
        # Room for one token of the answer at least.
        prompt = _prompt(request, tokenizer, max_length - 1)
        if not prompt:
            raise InvalidInput("the prompt is empty", param="prompt")
        if request.max_tokens is not None and len(prompt) + request.max_tokens > max_length:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and max_tokens is {request.max_tokens}, together "
                f"{len(prompt) + request.max_tokens}, but the model's context has {max_length} tokens; "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        self._max_output_tokens = request.max_tokens or max_length - len(prompt)
        self._eos_ids = tokenizer.eos_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._num_computed_prompt_tokens = 0
        self._compute_us = 0
        self.sequence = Sequence(self.id, prompt, len(prompt), request.credit)

    @property
    def usage(self) -> Usage:
        """What it has used so far. Work that was done again after a preemption counts as time, not as tokens."""
        return Usage(
            input_tokens=self._num_computed_prompt_tokens,
            output_tokens=self.sequence.num_output_tokens,
            compute_us=self._compute_us,
        )

    def charge(self, compute_us: int) -> None:
        """Note that a step has computed a part of it, for `compute_us` of its time."""
        self._compute_us += compute_us
        computed = min(self.sequence.num_computed_tokens, self.sequence.num_prompt_tokens)
        self._num_computed_prompt_tokens = max(self._num_computed_prompt_tokens, computed)

    def accept(self, token: int) -> tuple[str, str | None]:
        """Append the chosen `token`.

        Returns:
            The text that can be shown now, and the finish reason if this was the last token.
        """
        self.sequence.tokens.append(token)
        if token in self._eos_ids:
            return self._last_text(), "stop"
        text = self._stops.add(self._detokenizer.add(token))
        if self._stops.found:
            return text, "stop"
        if self.sequence.num_output_tokens >= self._max_output_tokens:
            text += self._last_text()
            return text, "stop" if self._stops.found else "length"
        return text, None

    def _last_text(self) -> str:
        return self._stops.add(self._detokenizer.rest()) + self._stops.rest()


def shares(total: int, weights: Numbers[int]) -> list[int]:
    """`total` divided in proportion to `weights`, in whole numbers whose sum is exactly `total`."""
    whole, at = sum(weights), 0
    borders = [0]
    for weight in weights:
        at += weight
        borders.append(total * at // whole)
    return [end - start for start, end in itertools.pairwise(borders)]


def _prompt(request: Generate, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    if request.messages is not None:
        return tokenizer.encode_chat(request.messages, max_tokens)
    if request.prompt is None:
        raise InvalidInput("there is neither `messages` nor `prompt`", param="prompt")
    # A model without a chat template was not trained on chats: it continues plain text.
    if request.raw or not tokenizer.has_chat_template:
        return tokenizer.encode(request.prompt, max_tokens)
    return tokenizer.encode_chat([{"role": "user", "content": request.prompt}], max_tokens)
