"""Peer transformers: `generate` over one padded batch. Runs in an interpreter that has torch and transformers."""

from __future__ import annotations

import time
from typing import Any

from wire import Generate, serve


def start(setup: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """Load the folder `setup["model"]` in bfloat16."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.generation.stopping_criteria import StoppingCriteria

    torch.set_num_threads(setup["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.bfloat16, local_files_only=True).eval()

    class Clock(StoppingCriteria):
        """Called once a step, after its tokens are chosen."""

        def __init__(self) -> None:
            self.started = time.perf_counter()
            self.times_s: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times_s.append(time.perf_counter() - self.started)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_outputs: int) -> list[list[float]]:
        length = max(map(len, prompts))
        clock = Clock()
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_outputs,
            min_new_tokens=num_outputs,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        return [list(clock.times_s) for _ in prompts]

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__, "weights": "bfloat16"}


if __name__ == "__main__":
    serve(start)
