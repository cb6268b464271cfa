"""Chooses the next token of each sequence from its logits.

Order, as in the APIs that callers know: penalties, temperature, top-k, top-p, one draw. Every sequence has its
own random generator, so that a seed gives the same text whatever else is in the batch.

This module knows nothing about sequences, text or frames.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from edge.errors import InvalidInput
from edge.frames import Sampling

GREEDY_TEMPERATURE = 1e-6
"""At or under this, the most likely token is taken: division by it would overflow."""


class Sampler:
    """One sequence's way of choosing tokens: its parameters and its random generator."""

    def __init__(self, sampling: Sampling) -> None:
        """Check the parameters.

        Raises:
            InvalidInput: one is out of range.
        """
        _check(sampling)
        self.sampling = sampling
        self._random = random.Random(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.sampling.temperature <= GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        s = self.sampling
        return s.repetition_penalty not in (None, 1.0) or bool(s.frequency_penalty) or bool(s.presence_penalty)

    def draw(self) -> float:
        """The next random number of this sequence, in [0, 1)."""
        return self._random.random()


@dataclass(frozen=True, slots=True)
class Row:
    """What choosing one token needs to know of a sequence."""

    sampler: Sampler
    tokens: list[int]
    """Prompt and answer so far."""
    num_prompt_tokens: int


def sample(logits: Tensor, rows: list[Row]) -> list[int | None]:
    """The next token of each row, or None where the logits (R, V) float32 are not numbers. Changes `logits`."""
    for i, row in enumerate(rows):
        if row.sampler.penalized:
            _penalize(logits[i], row)
    highest, best = logits.max(dim=-1)
    chosen: list[int | None] = list(best.tolist())
    for i, finite in enumerate(highest.isfinite().tolist()):  # NaN and +inf rise to the maximum; all -inf stays
        if not finite:
            chosen[i] = None
        elif not rows[i].sampler.greedy:
            chosen[i] = _draw(logits[i], rows[i].sampler)
    return chosen


def _draw(logits: Tensor, sampler: Sampler) -> int:
    """One token at random from `logits` (V,), after temperature, top-k and top-p."""
    sampling = sampler.sampling
    V = logits.shape[0]
    ids = None
    scaled = logits.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < V:
        scaled, ids = scaled.topk(sampling.top_k)
    weights = (scaled - scaled.max()).exp()
    if sampling.top_p is not None and sampling.top_p < 1:
        if ids is None:
            weights, ids = weights.sort(descending=True)
        cumulative = weights.cumsum(0)
        # Keep the smallest set that reaches top_p: a token stays while those before it have not reached it.
        num_kept = int((cumulative - weights < sampling.top_p * cumulative[-1]).sum())
        weights = weights[: max(1, num_kept)]
    cumulative = weights.cumsum(0)
    total = cumulative[-1]
    index = int(torch.searchsorted(cumulative, sampler.draw() * total, right=True))
    # The product can round up to the total: then it is the last token that has any probability.
    index = min(index, int((cumulative < total).sum()))
    return index if ids is None else int(ids[index])


def _penalize(logits: Tensor, row: Row) -> None:
    """Lower the `logits` (V,) of tokens that occurred.

    Repetition (arXiv:1909.05858) looks at prompt and answer; frequency and presence, as OpenAI defines them,
    at the answer alone.
    """
    sampling = row.sampler.sampling
    if sampling.repetition_penalty is not None:
        seen = torch.unique(torch.tensor(row.tokens, dtype=torch.int64, device=logits.device))
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    answer = row.tokens[row.num_prompt_tokens :]
    if answer:
        seen, counts = torch.unique(torch.tensor(answer, device=logits.device), return_counts=True)
        logits[seen] -= counts * (sampling.frequency_penalty or 0.0) + (sampling.presence_penalty or 0.0)


def _check(sampling: Sampling) -> None:
    limits = {
        "temperature": (0, 100),
        "top_p": (0, 1),
        "repetition_penalty": (1e-3, 1e3),
        "frequency_penalty": (-100, 100),
        "presence_penalty": (-100, 100),
    }
    for name, (low, high) in limits.items():
        value = getattr(sampling, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise InvalidInput(f"{name} is {value}, but must be from {low:g} to {high:g}", param=name)
    if sampling.top_k is not None and sampling.top_k < 1:
        raise InvalidInput(f"top_k is {sampling.top_k}, but must be at least 1", param="top_k")
