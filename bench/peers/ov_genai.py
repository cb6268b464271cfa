"""Peer OpenVINO GenAI: its continuous batching pipeline over the GGUF file. Runs in the peer's interpreter."""

from __future__ import annotations

import time
from typing import Any

from wire import Generate, serve


def start(setup: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    """Load the GGUF file `setup["model"]`."""
    import numpy
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(
        setup["model"], "CPU", INFERENCE_NUM_THREADS=setup["num_threads"], PERFORMANCE_HINT="LATENCY"
    )

    def generate(prompts: list[list[int]], num_outputs: int) -> list[list[float]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_outputs
        config.ignore_eos = True
        config.do_sample = False
        length = max(map(len, prompts))
        ids = numpy.array([[0] * (length - len(prompt)) + prompt for prompt in prompts], dtype=numpy.int64)
        mask = numpy.array([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        times: list[float] = []
        started = time.perf_counter()
        metrics = pipeline.generate(inputs, config).perf_metrics
        ended = time.perf_counter() - started
        first = metrics.get_ttft().mean / 1000
        step = (ended - first) / max(1, num_outputs - 1)
        times = [first + i * step for i in range(num_outputs)]
        return [list(times) for _ in prompts]

    version = openvino_genai.__version__
    return generate, {"openvino-genai": version, "weights": "as in the file"}


if __name__ == "__main__":
    serve(start)
