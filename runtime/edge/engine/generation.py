"""One generation as it grows: its sequence, how its tokens are chosen, and the text that can be shown.

This module knows nothing about steps or sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from pathlib import Path

from edge.engine.loaded import LoadedModel
from edge.engine.sampler import Choice, Mask, Row, Sampler
from edge.engine.scheduler import Sequence
from edge.engine.speculation import NgramIndex
from edge.engine.stops import StopStrings
from edge.engine.tokenizer import Detokenizer, Tokenizer
from edge.errors import InvalidInput, PromptTooLong
from edge.frames import Generate, TokenLogprob, Usage


@dataclass(slots=True)
class Growth:
    """What tokens added: text that can be shown, perhaps none, and the finish reason if they were the last."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Generation:
    """A request that was accepted: prompt tokenized, parameters checked, length within the context."""

    def __init__(self, request: Generate, model: LoadedModel) -> None:
        """Prepare `request` for `model`.

        Raises:
            InvalidInput: a parameter is out of range, the schema or adapter cannot be used, or the prompt is empty or
                refused by the chat template.
            PromptTooLong: prompt, or prompt and `max_tokens`, do not fit.
        """
        self.id = request.id
        self.rejects_if_busy = request.reject_if_busy
        folder = Path(request.adapter_folder) if request.adapter_folder is not None else None
        self.adapter = model.adapters.get(request.adapter, folder) if request.adapter is not None else None
        self._stops = StopStrings(request.stop)
        if request.json_schema is not None and request.stop:
            raise InvalidInput(
                "stop strings could cut structured output off, so that it is no JSON any more; leave out `stop`, "
                "or ask for plain text",
                param="stop",
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidInput(f"max_tokens is {request.max_tokens}, but must be at least 1", param="max_tokens")
        # Room for one token of the answer at least.
        prompt = prompt_tokens(request, model.tokenizer, model.max_length - 1)
        if not prompt:
            raise InvalidInput("the prompt is empty", param="prompt")
        if request.max_tokens is not None and len(prompt) + request.max_tokens > model.max_length:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and max_tokens is {request.max_tokens}, together "
                f"{len(prompt) + request.max_tokens}, but the model's context has {model.max_length} tokens; "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        self._max_output_tokens = request.max_tokens or model.max_length - len(prompt)
        self.sampler = Sampler(request.sampling, model.vocab_size, prompt)
        self.grammar = model.grammars.compile(request.json_schema) if request.json_schema is not None else None
        self._tokenizer = model.tokenizer
        self._detokenizer = Detokenizer(model.tokenizer)
        self._num_computed_prompt_tokens = 0
        self._compute_us = 0
        self.sequence = Sequence(
            self.id,
            prompt,
            len(prompt),
            request.credit,
            priority=request.priority,
            # What sequences must have in common, beside tokens, to share pages.
            salt=f"{request.account}\n{self.adapter.key if self.adapter is not None else ''}",
            shareable=model.shares_prefixes,
        )
        self._num_guesses = model.num_guesses
        self._ngrams = NgramIndex(prompt) if self._num_guesses else None

    @property
    def usage(self) -> Usage:
        """What it has used so far. Work that was done again after a preemption counts as time, not as tokens."""
        cached = self.sequence.num_cached_tokens
        return Usage(
            input_tokens=max(0, self._num_computed_prompt_tokens - cached),
            cached_input_tokens=cached,
            output_tokens=self.sequence.num_output_tokens,
            compute_us=self._compute_us,
        )

    def charge(self, compute_us: int) -> None:
        """Note that a step has computed a part of it, for `compute_us` of its time."""
        self._compute_us += compute_us
        computed = min(self.sequence.num_computed_tokens, self.sequence.num_prompt_tokens)
        self._num_computed_prompt_tokens = max(self._num_computed_prompt_tokens, computed)

    def guess(self) -> None:
        """Set the sequence's draft for the next step."""
        if self._ngrams is None:
            return
        num_left = self._max_output_tokens - self.sequence.num_output_tokens - 1
        draft = self._ngrams.propose(min(self._num_guesses, num_left)) if num_left > 0 else []
        self.sequence.draft = draft[: self.grammar.num_allowed(draft)] if self.grammar is not None else draft

    def rows(self, num_draft: int, masks: Iterator[Mask]) -> list[Row]:
        """What choosing the next token needs, and the token after each of the first `num_draft` guesses.

        `masks` gives the grammar's mask for each of them in turn, if there is a grammar.
        """
        return [
            Row(self.sampler, self.sequence.draft[:i], next(masks) if self.grammar is not None else None)
            for i in range(num_draft + 1)
        ]

    def accept(self, choices: list[Choice]) -> Growth:
        """Append the chosen tokens, up to the one that is the last of the answer."""
        growth = Growth()
        for choice in choices:
            self._accept(choice, growth)
            if growth.finish_reason is not None:
                break
        return growth

    def _accept(self, choice: Choice, growth: Growth) -> None:
        token = choice.token
        self.sequence.tokens.append(token)
        self.sampler.accept(token)
        if self._ngrams is not None:
            self._ngrams.add(token)
        if token in self._tokenizer.eos_ids:
            growth.text += self._last_text()
            growth.finish_reason = "stop"
            return
        if choice.logprob is not None:
            growth.logprobs.append(_token_logprob(self._tokenizer, choice))
        growth.text += self._stops.add(self._detokenizer.add(token))
        if self.grammar is not None:
            self.grammar.accept(token)
        if self._stops.found:
            growth.finish_reason = "stop"
        elif self.grammar is not None and self.grammar.is_finished:
            growth.text += self._last_text()
            growth.finish_reason = "stop"
        elif self.sequence.num_output_tokens >= self._max_output_tokens:
            growth.text += self._last_text()
            growth.finish_reason = "stop" if self._stops.found else "length"

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


def prompt_tokens(request: Generate, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """The tokens of the prompt of `request`.

    Raises:
        InvalidInput: there is none, the chat template refuses it, or a token is none of the vocabulary.
        PromptTooLong: there are more than `max_tokens`.
    """
    options = request.template_options
    if request.messages is not None:
        return tokenizer.encode_chat(request.messages, max_tokens, request.tools, options)
    if request.prompt is None:
        raise InvalidInput("there is neither `messages` nor `prompt`", param="prompt")
    if isinstance(request.prompt, list):
        return tokenizer.checked(request.prompt, max_tokens)
    # A model without a chat template was not trained on chats: it continues plain text.
    if request.raw or not tokenizer.has_chat_template:
        return tokenizer.encode(request.prompt, max_tokens)
    message = {"role": "user", "content": request.prompt}
    return tokenizer.encode_chat([message], max_tokens, request.tools, options)


def _token_logprob(tokenizer: Tokenizer, choice: Choice) -> TokenLogprob:
    def of(token: int, logprob: float, top: list[TokenLogprob]) -> TokenLogprob:
        raw = tokenizer.token_bytes(token)
        return TokenLogprob(raw.decode(errors="replace"), logprob, list(raw), top)

    assert choice.logprob is not None
    return of(choice.token, choice.logprob, [of(token, logprob, []) for token, logprob in choice.top])
