"""Runs one model: owns its weights and its KV cache, and turns the scheduler's chunks into one forward pass.

This module knows nothing about why these chunks, about text or about frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from edge.config import ModelOptions
from edge.engine.kernels import Kernels
from edge.engine.kv_cache import KvCache
from edge.engine.lora import Adapter, AdapterTable, StepAdapters
from edge.engine.models import load_model
from edge.engine.models.decoder import Decoder
from edge.engine.pages import PageAllocator
from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import build_step
from edge.errors import WeightsError
from edge.weights.checkpoint import Checkpoint

PAGE_SIZE = 16
MAX_ADAPTER_TABLES = 64


class ModelRunner:
    """A model on a device, with KV cache for `allocator`'s pages."""

    def __init__(
        self,
        model: Decoder,
        allocator: PageAllocator,
        cache: KvCache,
        *,
        device: torch.device,
        kernels: Kernels | None = None,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.allocator = allocator
        self.cache = cache
        self.adapters: dict[int, Adapter] = {}
        """The adapter of each sequence that has one, by the sequence's id."""
        self.device = device
        self._kernels = kernels
        self._deterministic = deterministic
        self._tables: dict[tuple[Adapter, ...], AdapterTable] = {}

    @property
    def has_kernels(self) -> bool:
        """Whether native kernels do the work."""
        return self._kernels is not None

    @property
    def is_row_independent(self) -> bool:
        """Whether what is computed for a token cannot depend on what else is in the step, to the last bit."""
        return self.model.is_row_independent

    def use(self, model: Decoder, kernels: Kernels | None) -> None:
        """Go on with `model`, which is the same one on other kernels; keys and values stay."""
        self.model = model
        self._kernels = kernels
        self._tables.clear()

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], paused: Iterable[Sequence] = ()) -> Tensor:
        """Compute `chunks`; their keys and values are in the cache afterwards.

        Args:
            chunks: what the step computes.
            paused: sequences that hold pages and are not in the step; the cache keeps what they are going to read.

        Returns:
            The logits (R, V), float32: for each chunk that completes its sequence, in the order of `chunks`, those
            after the sequence's last token and after each token of the chunk's draft.
        """
        for sequence in paused:
            self.cache.keep(sequence.pages, sequence.num_computed_tokens)
        if self._deterministic and not self.is_row_independent:
            return self._run_one_by_one(chunks)
        return self._forward(chunks)

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        step = build_step(chunks, self.allocator.page_size, self.device)
        step.adapters = self._step_adapters(chunks)
        # The head is as large as several layers: only rows that need it go through it, and through the last layer.
        rows = torch.from_numpy(_rows(chunks)).to(self.device)
        if len(rows) == step.num_tokens:
            return self.model.logits(self.model(step, self.cache))
        if step.adapters is not None:
            return self.model.logits(self.model(step, self.cache)[rows])
        return self.model.logits(self.model(step, self.cache, rows))

    def _run_one_by_one(self, chunks: list[Chunk]) -> Tensor:
        """Every token as a step of its own: slow, but the same operations on the same shapes whatever else runs.

        Nothing is guessed then (see `LoadedModel.num_guesses`), so that only a sequence's last token has logits.
        """
        return torch.cat([self._forward([single]) for chunk in chunks for single in _singles(chunk)])

    def _step_adapters(self, chunks: list[Chunk]) -> StepAdapters | None:
        if not self.adapters:
            return None
        # In one order, so that few tables serve many batches.
        used = sorted({a for c in chunks if (a := self.adapters.get(c.sequence.id))}, key=lambda adapter: adapter.key)
        numbers = {adapter: number for number, adapter in enumerate(used)}
        rows: list[int] = []
        which: list[int] = []
        row = 0
        for chunk in chunks:
            if adapter := self.adapters.get(chunk.sequence.id):
                rows += range(row, row + chunk.num_tokens)
                which += [numbers[adapter]] * chunk.num_tokens
            row += chunk.num_tokens
        if not rows:
            return None
        rows_and_which = torch.tensor([rows, which], dtype=torch.int32, device=self.device)
        return StepAdapters(self._table(tuple(used)), rows_and_which[0], rows_and_which[1])

    def _table(self, adapters: tuple[Adapter, ...]) -> AdapterTable:
        table = self._tables.get(adapters)
        if table is None:
            if len(self._tables) >= MAX_ADAPTER_TABLES:
                self._tables.clear()
            table = self._tables[adapters] = AdapterTable(adapters, self.model.config, self._kernels)
        return table


def load_runner(
    checkpoint: Checkpoint,
    *,
    options: ModelOptions,
    device: torch.device,
    kernels: Kernels | None,
    kv_tokens: int,
    max_running: int,
    step_tokens: int,
) -> ModelRunner:
    """Load the model of `checkpoint` and give it a KV cache for `kv_tokens` tokens, or as many as can be used.

    Raises:
        WeightsError: the model cannot be loaded, or not with these options.
    """
    model = load(checkpoint, options=options, device=device, kernels=kernels)
    config = model.config
    allocator = PageAllocator(-(-min(kv_tokens, max_running * config.context_length) // PAGE_SIZE), PAGE_SIZE)
    try:
        cache = KvCache(
            kv_format(options),
            num_layers=config.num_layers,
            num_pages=allocator.num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
            # The first page and the last two of every sequence, and one for every page that a step can begin.
            num_side_pages=5 * max_running + step_tokens // PAGE_SIZE,
        )
    except ValueError as error:
        raise WeightsError(f"{error} (option kv of [engine])") from error
    used = None if options.weights == "float32" else kernels
    return ModelRunner(model, allocator, cache, device=device, kernels=used, deterministic=options.deterministic)


def load(checkpoint: Checkpoint, *, options: ModelOptions, device: torch.device, kernels: Kernels | None) -> Decoder:
    """The model of `checkpoint` as `options` want it; `float32` asks for torch's operators, and gets no `kernels`.

    Raises:
        WeightsError: the model cannot be loaded.
    """
    if options.weights == "float32":
        dtype, kernels = torch.float32, None
    elif kernels is None and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32  # on such a processor bfloat16 is emulated
    else:
        dtype = torch.bfloat16
    return load_model(checkpoint, options=options, dtype=dtype, device=device, kernels=kernels)


def kv_format(options: ModelOptions) -> str:
    """How keys and values are held under `options`."""
    if options.kv != "auto":
        return options.kv
    return "float32" if options.weights == "float32" else "bfloat16"


def _rows(chunks: list[Chunk]) -> np.ndarray:
    """Of the step's rows, those whose logits are needed."""
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.completes:
            rows += range(end - 1 - chunk.num_draft, end)
    return np.array(rows, np.int64)


def _singles(chunk: Chunk) -> Iterator[Chunk]:
    """`chunk` token by token."""
    start = chunk.sequence.num_computed_tokens
    for i in range(chunk.num_tokens):
        yield Chunk(dataclasses.replace(chunk.sequence, num_computed_tokens=start + i), 1)
