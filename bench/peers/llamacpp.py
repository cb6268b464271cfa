"""Peer llama.cpp: batches by hand over its C interface (the Python server of llama-cpp-python does not batch).

All prompts go first, in as few calls as fit, then all sequences one token at a time: no scheduler could do better
for prompts that are all there at the start. Runs in the peer's interpreter.
"""

from __future__ import annotations

import time
from typing import Any

from wire import Generate, serve

BATCH_TOKENS = 2048
CONTEXT_STEP = 256
"""ggml works on keys and values in blocks of this many."""


def start(setup: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """Load the GGUF file `setup["model"]`."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(setup["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {setup['model']}")
    sessions: dict[tuple[int, int], _Session] = {}

    def generate(prompts: list[list[int]], num_outputs: int) -> list[list[float]]:
        length = max(map(len, prompts)) + num_outputs
        key = (len(prompts), -(-length // CONTEXT_STEP) * CONTEXT_STEP)
        if key not in sessions:
            sessions[key] = _Session(llama_cpp, model, *key, num_threads=setup["num_threads"])
        return sessions[key].generate(prompts, num_outputs)

    system = llama_cpp.llama_print_system_info().decode()
    return generate, {"llama-cpp-python": llama_cpp.__version__, "llama.cpp": system, "weights": "as in the file"}


class _Session:
    """Room for `num_sequences` sequences of `length` tokens."""

    def __init__(self, api: Any, model: Any, num_sequences: int, length: int, *, num_threads: int) -> None:
        self._api = api
        params = api.llama_context_default_params()
        params.n_ctx = num_sequences * length
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {num_sequences} sequences of {length} tokens")
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._sampler = api.llama_sampler_init_greedy()
        self._memory = api.llama_get_memory(self._context)

    def generate(self, prompts: list[list[int]], num_outputs: int) -> list[list[float]]:
        self._api.llama_memory_clear(self._memory, False)
        times: list[list[float]] = [[] for _ in prompts]
        last = [0] * len(prompts)
        started = time.perf_counter()
        rows = [
            (token, position, number, position == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for at in range(0, len(rows), BATCH_TOKENS):
            self._decode(rows[at : at + BATCH_TOKENS], last, times, started)
        for step in range(num_outputs - 1):
            rows = [(last[number], len(prompt) + step, number, True) for number, prompt in enumerate(prompts)]
            self._decode(rows, last, times, started)
        return times

    def _decode(self, rows: list[tuple[int, int, int, bool]], last: list[int], times: Any, started: float) -> None:
        """Compute `rows` (token, position, sequence, whether the next token is wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, number, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
        if self._api.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama_decode failed")
        chosen = [
            (number, self._api.llama_sampler_sample(self._sampler, self._context, i))
            for i, (_, _, number, wanted) in enumerate(rows)
            if wanted
        ]
        now = time.perf_counter() - started
        for number, token in chosen:
            last[number] = token
            times[number].append(now)


if __name__ == "__main__":
    serve(start)
