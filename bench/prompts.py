"""Prompts of an exact length that share no beginning: the same tokens for the product, as messages, and for peers."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.engine.tokenizer import Tokenizer
from edge.weights.checkpoint import open_checkpoint

MAX_TRIES = 50
NUM_SYSTEM_WORDS = 4
"""They come first in the prompt, so that prompts differ from their first page on."""


@dataclass(frozen=True)
class Prompt:
    """`messages` become the tokens `ids` through the model's chat template."""

    messages: list[dict[str, Any]]
    ids: list[int]


class PromptMaker:
    """Makes prompts of random words for one model; the same ones for the same `seed`."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        self._tokenizer = Tokenizer(open_checkpoint(model).tokenizer_files())
        vocabulary = (self._tokenizer.decode([i]) for i in range(self._tokenizer.num_tokens))
        self._words = sorted({word for word in vocabulary if re.fullmatch(r" [a-z]{3,8}", word)})
        self._random = random.Random(seed)

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return sorted(self._tokenizer.eos_ids)

    def prompts(self, num_prompts: int, num_tokens: int) -> list[Prompt]:
        """New prompts of `num_tokens` tokens each, chat template included.

        Raises:
            ValueError: the template alone is longer.
        """
        return [self._prompt(num_tokens) for _ in range(num_prompts)]

    def _prompt(self, num_tokens: int) -> Prompt:
        system = "".join(self._random.choices(self._words, k=NUM_SYSTEM_WORDS)).strip()
        words: list[str] = []
        missing = num_tokens
        for _ in range(MAX_TRIES):
            if missing >= 0:
                words += self._random.choices(self._words, k=missing)
            else:
                del words[missing:]
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "".join(words).strip()}]
            ids = self._tokenizer.encode_chat(messages, max_tokens=1 << 20)
            missing = num_tokens - len(ids)
            if missing == 0:
                return Prompt(messages, ids)
        raise ValueError(f"no prompt of {num_tokens} tokens could be made: the last one had {num_tokens - missing}")
