"""A model that can run: its runner, tokenizer and adapters, and the queues of its sequences."""

from __future__ import annotations

from edge.config import EngineConfig, ModelOptions
from edge.engine.grammar import GrammarCompiler
from edge.engine.kernels import Kernels
from edge.engine.lora import AdapterStore
from edge.engine.models.decoder import Decoder
from edge.engine.pace import Pace
from edge.engine.runner import ModelRunner
from edge.engine.scheduler import Scheduler
from edge.engine.tokenizer import Tokenizer


class LoadedModel:
    """What the step loop and the threads that read prompts share of a model; they touch different parts of it."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        adapters: AdapterStore,
        options: ModelOptions,
        config: EngineConfig,
    ) -> None:
        self.name = name
        self.runner = runner
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.options = options
        self.vocab_size = runner.model.config.vocab_size
        self.grammars = GrammarCompiler(tokenizer, self.vocab_size)
        self.scheduler = Scheduler(
            runner.allocator,
            step_tokens=config.step_tokens,
            max_running=config.max_batch_size,
            max_waiting=config.max_waiting,
        )
        self.scheduler.recomputes_in_place = self._recomputes_in_place
        self.pace = Pace(config.step_tokens)
        self.max_length = min(runner.model.config.context_length, self.scheduler.max_sequence_tokens)
        """Tokens that a sequence can have, prompt and answer."""

    def use(self, decoder: Decoder, kernels: Kernels) -> None:
        """Go on with `decoder`, which is the same model on `kernels`."""
        self.runner.use(decoder, kernels)
        self.scheduler.recomputes_in_place = self._recomputes_in_place

    @property
    def _recomputes_in_place(self) -> bool:
        # An int4 page that has lost its full-precision copy is read with less precision than when it was written.
        return self.runner.is_row_independent and self.runner.cache.format != "int4"

    @property
    def shares_prefixes(self) -> bool:
        """Whether pages can be found: by prompts that start alike, and by a sequence that was preempted.

        What int4 pages hold is read with more precision by the sequence that wrote them than by one that finds them.
        """
        return not (self.options.deterministic and self.runner.cache.format == "int4")

    @property
    def num_guesses(self) -> int:
        """Tokens that are guessed for each step. Where checking them could change the answer, none are."""
        return self.options.speculation if self.runner.is_row_independent else 0
