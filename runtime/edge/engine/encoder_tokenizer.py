"""Texts to the tokens that an encoder reads, special tokens included, cut to its limit.

It knows nothing about models or requests; generating models have `edge.engine.tokenizer`.
"""

from __future__ import annotations

from tokenizers import Tokenizer as HfTokenizer

from edge.errors import WeightsError

CHARS_PER_TOKEN = 64
"""More than tokens have on average, in nearly all texts: how much of a long text is read at first."""


class EncoderTokenizer:
    """An encoder's tokenizer. Its methods may be called from several threads."""

    def __init__(self, tokenizer_json: str, max_tokens: int) -> None:
        """Of the text of a tokenizer.json, for texts of at most `max_tokens` tokens.

        Raises:
            WeightsError: it cannot be used.
        """
        try:
            self._tokenizer = HfTokenizer.from_str(tokenizer_json)
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(max_tokens)
        except Exception as error:  # the library raises nothing narrower
            raise WeightsError(f"tokenizer.json cannot be used: {error}") from error
        self.max_tokens = max_tokens

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, special tokens included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> tuple[list[int], bool]:
        """The tokens of `text`, cut to the limit, and whether something was cut off."""
        num_chars = self.max_tokens * CHARS_PER_TOKEN
        while (start := _whole_words(text, num_chars)) is not text:
            (encoding,) = self._tokenizer.encode_batch_fast([start])  # unlike `encode` it lets other threads run
            if encoding.overflowing:
                return encoding.ids, True
            num_chars *= 4
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        return encoding.ids, bool(encoding.overflowing)


def _whole_words(text: str, num_chars: int) -> str:
    """The words at the start of `text` that end within `num_chars`; `text` itself where it is short, or no word does.

    Tokenizers look at a text word by word, so that what follows changes nothing about the tokens of these.
    """
    if len(text) <= num_chars:
        return text
    end = text.rfind(" ", 0, num_chars)
    return text if end <= 0 else text[:end]
