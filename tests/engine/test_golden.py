"""The packaged model in float32 against the golden values: what must never change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from edge.config import ModelOptions
from edge.engine.pages import PageAllocator
from edge.engine.runner import ModelRunner, load_runner
from edge.engine.scheduler import Scheduler, Sequence
from edge.engine.step import build_step
from edge.engine.tokenizer import Tokenizer
from edge.weights.checkpoint import open_checkpoint

FOLDER = Path(__file__).parent.parent / "golden"
GOLDEN = json.loads((FOLDER / "smollm2_135m_instruct_q4_1.json").read_text())
PROMPTS = GOLDEN["raw_prompts"] + GOLDEN["chat_prompts"]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return load_runner(
        open_checkpoint(model_path),
        options=ModelOptions(weights="float32"),
        device=torch.device("cpu"),
        kernels=None,
        kv_tokens=4096,
        max_running=16,
        step_tokens=2048,
    )


def greedy(runner: ModelRunner, prompts: list[list[int]], num_tokens: int, step_tokens: int = 512) -> list[list[int]]:
    """Greedy answers to all prompts at once, up to EOS or `num_tokens`."""
    allocator: PageAllocator = runner.allocator
    scheduler = Scheduler(allocator, step_tokens=step_tokens, max_running=16, max_waiting=16)
    sequences = [Sequence(i, list(prompt), len(prompt), credit=1) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        chunks = scheduler.schedule()
        complete = [chunk.sequence for chunk in chunks if chunk.completes]
        logits = runner.run(chunks)
        for chunk in chunks:
            scheduler.computed(chunk)
        for sequence, row in zip(complete, logits, strict=True):
            sequence.tokens.append(int(row.argmax()))
            if sequence.tokens[-1] == 2 or sequence.num_output_tokens == num_tokens:
                scheduler.remove(sequence)
    return [sequence.tokens[sequence.num_prompt_tokens :] for sequence in sequences]


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[5]], ids=["raw", "chat"])
def test_one_prompt_alone(runner: ModelRunner, prompt: dict) -> None:
    assert greedy(runner, [prompt["input_ids"]], 32) == [prompt["output_ids"]]


@pytest.mark.slow
def test_all_prompts_in_one_batch_with_chunked_prefill(runner: ModelRunner) -> None:
    answers = greedy(runner, [prompt["input_ids"] for prompt in PROMPTS], 32, step_tokens=24)
    assert answers == [prompt["output_ids"] for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_every_prompt_alone(runner: ModelRunner, prompt: dict) -> None:
    assert greedy(runner, [prompt["input_ids"]], 32) == [prompt["output_ids"]]


def test_logits(runner: ModelRunner) -> None:
    for prompt in GOLDEN["raw_prompts"]:
        scheduler = Scheduler(runner.allocator, step_tokens=512, max_running=16, max_waiting=16)
        sequence = Sequence(0, list(prompt["input_ids"]), len(prompt["input_ids"]), credit=1)
        scheduler.add(sequence)
        (row,) = runner.run(scheduler.schedule())
        scheduler.remove(sequence)
        top = row.topk(5)
        assert top.indices.tolist() == prompt["last_logits_top5"]["ids"]
        assert top.values.tolist() == pytest.approx(prompt["last_logits_top5"]["logits"], abs=1e-3)


@pytest.mark.slow
def test_perplexity(runner: ModelRunner, model_path: Path) -> None:
    text = (FOLDER / GOLDEN["perplexity"]["text_file"]).read_text()
    tokens = Tokenizer(open_checkpoint(model_path).tokenizer_files()).encode(text, 8192)
    scheduler = Scheduler(runner.allocator, step_tokens=2048, max_running=16, max_waiting=16)
    sequence = Sequence(0, tokens, len(tokens), credit=1)
    scheduler.add(sequence)
    with torch.inference_mode():
        step = build_step(scheduler.schedule(), runner.allocator.page_size, torch.device("cpu"))
        logits = runner.model.logits(runner.model(step, runner.cache))  # (T, V)
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    scheduler.remove(sequence)
    assert math.exp(loss.item()) == pytest.approx(GOLDEN["perplexity"]["perplexity"], rel=1e-5)
