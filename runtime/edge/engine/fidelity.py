"""How close a model stays to another one: next-token distributions of both along the same text.

Used for what changes numbers on purpose: quantized weights, KV formats, other kernels. Texts are gone through piece by
piece on both sides at once, so that memory does not grow with their length.

This module knows nothing about how models differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.engine.kv_cache import KvCache, KvOptions
from edge.engine.models.decoder import Decoder
from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import build_step
from edge.weights.checkpoint import ModelConfig
from edge.weights.conversion import Report

PAGE_SIZE = 16
CHUNK_TOKENS = 128
"""Positions that are compared at a time: for each of them there are two rows as long as the vocabulary."""


@dataclass(frozen=True)
class Subject:
    """A model, and the cache that it runs on, which must have room for the longest text."""

    model: Decoder
    cache: KvCache


def compare(reference: Subject, candidate: Subject, texts: list[list[int]]) -> Report:
    """How `candidate` predicts the tokens of `texts`, each from its own start, compared with `reference`.

    Raises:
        ValueError: no text has two tokens, or one is longer than a cache.
    """
    divergences, same, losses, reference_losses = [], 0, 0.0, 0.0
    for text in (text for text in texts if len(text) > 1):
        next_tokens = torch.split(torch.tensor(text[1:]), CHUNK_TOKENS)
        for targets, p, q in zip(next_tokens, log_probs(reference, text), log_probs(candidate, text), strict=True):
            divergences.append((p.exp() * (p - q)).sum(-1).clamp_(min=0).double())  # (R,)
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            reference_losses -= _sum_at(p, targets)
            losses -= _sum_at(q, targets)
    if not divergences:
        raise ValueError("no text has two tokens to compare models on")
    kl = torch.cat(divergences)
    return Report(
        num_tokens=len(kl),
        perplexity_reference=math.exp(reference_losses / len(kl)),
        perplexity=math.exp(losses / len(kl)),
        mean_kl=float(kl.mean()),
        kl_999=float(kl.quantile(0.999)),
        top1=same / len(kl),
    )


def log_probs(subject: Subject, text: list[int]) -> Iterator[Tensor]:
    """Log-probabilities (R, V) float32 of what follows each token of `text` but the last, `CHUNK_TOKENS` at a time.

    Raises:
        ValueError: the text is longer than the cache.
    """
    for hidden in read(subject, text[:-1]):
        with torch.inference_mode():  # not around the yield: the caller would be in it too
            found = F.log_softmax(subject.model.logits(hidden), dim=-1)
        yield found


def read(subject: Subject, tokens: list[int]) -> Iterator[Tensor]:
    """Hidden states (R, C) of a sequence of `tokens`, `CHUNK_TOKENS` at a time.

    Raises:
        ValueError: it is longer than the cache.
    """
    model, cache = subject.model, subject.cache
    num_pages = -(-len(tokens) // cache.page_size)
    if num_pages > cache.num_pages:
        raise ValueError(f"{len(tokens)} tokens do not fit a cache of {cache.num_pages * cache.page_size}")
    sequence = Sequence(id=0, tokens=tokens, num_prompt_tokens=len(tokens), credit=1, pages=list(range(num_pages)))
    while sequence.num_missing_tokens:
        chunk = Chunk(sequence, min(CHUNK_TOKENS, sequence.num_missing_tokens))
        with torch.inference_mode():
            hidden = model(build_step([chunk], cache.page_size, cache.device), cache)
        yield hidden
        sequence.num_computed_tokens += chunk.num_tokens


def make_cache(
    config: ModelConfig, num_tokens: int, kv: str, device: torch.device, options: KvOptions | None = None
) -> KvCache:
    """A cache in the format `kv` with room for a text of `num_tokens`; `options` are for formats of codes."""
    return KvCache(
        kv,
        num_layers=config.num_layers,
        num_pages=-(-num_tokens // PAGE_SIZE),
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        device=device,
        options=options,
    )


def _sum_at(log_probs: Tensor, targets: Tensor) -> float:
    """Sum of what `log_probs` (R, V) say of `targets` (R,)."""
    return float(log_probs.gather(1, targets.to(log_probs.device).unsqueeze(1)).double().sum())
