"""The step loop with a tiny model, in its thread, spoken to as the engine process does."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from helpers import mostly_slow

from edge.config import ModelOptions
from edge.engine import runner
from edge.engine.generation import Generation
from edge.engine.kernels import Kernels
from edge.engine.loop import Install, Remove, StepLoop, Stop, Submit, Upgrade
from edge.frames import Delta, Done, Failed, MoreDeltas, Ping, Pong, Sampling, Started
from edge.weights.checkpoint import open_checkpoint
from workers._wire import Cancel, Frame

HANG_S = 60


@dataclass
class Answer:
    """All frames of one generation."""

    frames: list[Frame] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.frames if isinstance(frame, Delta))

    @property
    def last(self) -> Any:
        return self.frames[-1]


class Loop:
    """A running step loop with the model `tiny`."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.model = tiny_models.load(folder, **config)
        self.arrived: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.answers: dict[int, Answer] = {}
        self.steps = StepLoop(lambda frames: [self.arrived.put(frame) for frame in frames] and None)
        self.steps.post(Install(self.model))
        self._thread = threading.Thread(target=self.steps.run)

    def submit(self, number: int, prompt: str = "hello", **changes: Any) -> None:
        request = tiny_models.request(prompt, id=number, **changes)
        self.steps.post(Submit(self.model, Generation(request, self.model)))

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def next(self) -> Frame:
        self.start()
        frame = self.arrived.get(timeout=HANG_S)
        if not isinstance(frame, Pong):
            self.answers.setdefault(frame.id, Answer()).frames.append(frame)
        return frame

    def finish(self, *numbers: int) -> list[Answer]:
        """The answers to these, complete."""
        while not all(n in self.answers and isinstance(self.answers[n].last, Done | Failed) for n in numbers):
            self.next()
        return [self.answers.pop(number) for number in numbers]

    def stop(self) -> None:
        self.steps.post(Stop())
        self.start()
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        free = self.model.runner.allocator
        assert free.num_free == free.num_pages or self.model.scheduler.running or self.model.scheduler.waiting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def build(**config: Any) -> Loop:
        loops.append(Loop(folder, **config))
        return loops[-1]

    yield build
    for loop in loops:
        loop.stop()


PROMPTS = ["hello", "x" * 70, "emoji 😀", "a b c " * 20, "?"]


def test_an_answer_is_started_deltas_done_with_its_usage(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.submit(1)
    (answer,) = loop.finish(1)
    assert answer.frames[0] == Started(1, 5)
    assert all(isinstance(frame, Delta) for frame in answer.frames[1:-1])
    assert isinstance(answer.last, Done)
    assert answer.last.finish_reason == "length"
    usage = answer.last.usage
    assert (usage.input_tokens, usage.cached_input_tokens, usage.output_tokens) == (5, 0, 24)
    spent = [frame.usage.compute_us for frame in answer.frames[1:]]
    assert spent == sorted(spent)
    assert spent[-1] > 0


def test_together_everybody_says_what_they_say_alone(make: Callable[..., Loop]) -> None:
    loop = make(step_tokens=40)
    alone = []
    for number, prompt in enumerate(PROMPTS):
        loop.submit(number, prompt)
        alone += [answer.text for answer in loop.finish(number)]
    crowd = make(step_tokens=40)
    for number, prompt in enumerate(PROMPTS):
        crowd.submit(number, prompt)
    assert [answer.text for answer in crowd.finish(*range(5))] == alone
    assert len(set(alone)) == 5


def test_preemption_changes_no_answer(make: Callable[..., Loop]) -> None:
    roomy, tight = make(), make(kv_tokens=128)
    for loop in (roomy, tight):
        for number, prompt in enumerate(PROMPTS[:4]):
            loop.submit(number, prompt, max_tokens=50 if len(prompt) < 80 else 8)
    preempted: list[int] = []
    original = tight.model.scheduler._preempt
    tight.model.scheduler._preempt = lambda s: (preempted.append(s.id), original(s))[1]  # type: ignore[method-assign]
    expected, answers = roomy.finish(*range(4)), tight.finish(*range(4))
    assert preempted
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert [a.last.usage.output_tokens for a in answers] == [a.last.usage.output_tokens for a in expected]
    assert [a.last.usage.input_tokens for a in answers] == [a.last.usage.input_tokens for a in expected]


def test_a_seed_gives_the_same_text_in_any_company(make: Callable[..., Loop]) -> None:
    loop = make()
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
    loop.submit(1, sampling=sampling)
    loop.submit(2, sampling=Sampling(temperature=1.0))
    loop.submit(3, sampling=Sampling(temperature=1.0))
    first, other, third = loop.finish(1, 2, 3)
    loop.submit(4, sampling=sampling)
    (again,) = loop.finish(4)
    assert again.text == first.text
    assert other.text != third.text


def test_the_shares_of_a_step_sum_to_its_time(make: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**12, 1_000_003_000))
    monkeypatch.setattr("edge.engine.loop.time.perf_counter_ns", lambda: next(clock))
    loop = make(step_tokens=40)
    for number, prompt in enumerate(PROMPTS):
        loop.submit(number, prompt, max_tokens=3)
    answers = loop.finish(*range(5))
    total = sum(answer.last.usage.compute_us for answer in answers)
    assert total % 1_000_003 == 0
    assert total > 0


def test_a_slow_reader_holds_up_only_itself(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.submit(1, credit=2)
    loop.submit(2)
    loop.finish(2)
    frames = loop.answers[1].frames
    assert [type(frame) for frame in frames] == [Started, Delta, Delta]
    loop.steps.post(MoreDeltas(1, 1000))
    (slow,) = loop.finish(1)
    loop.submit(3)
    (quick,) = loop.finish(3)
    assert slow.text == quick.text


def test_a_sequence_that_waits_for_its_reader_keeps_the_pages_it_reads_in_full(make: Callable[..., Loop]) -> None:
    loop = make(max_batch_size=2, step_tokens=64, options=ModelOptions(weights="float32", kv="int4"), kv_tokens=4096)
    side = loop.model.runner.cache.side
    assert side is not None
    loop.submit(1, "the slow one, " * 8, credit=2, max_tokens=60)
    loop.submit(2, "begin")
    loop.finish(2)
    (slow,) = loop.model.scheduler.running
    last = slow.num_computed_tokens // 16
    read_in_full = [slow.pages[0], slow.pages[last - 1], slow.pages[last]]
    for number in range(3, 9):  # several times as many pages as there are copies
        loop.submit(number, f"{number} other " * 40, max_tokens=3)
        loop.finish(number)
    assert loop.model.scheduler.running == [slow]
    assert (side.side_of_page[read_in_full] >= 0).all()
    loop.steps.post(MoreDeltas(1, 1000))
    loop.finish(1)


def test_the_usage_of_a_long_prompt_is_told_while_it_is_computed(make: Callable[..., Loop]) -> None:
    loop = make(step_tokens=8, max_batch_size=4)
    loop.submit(1, "x" * 50)
    (answer,) = loop.finish(1)
    (num_prompt_tokens,) = [frame.num_prompt_tokens for frame in answer.frames if isinstance(frame, Started)]
    usages = [frame.usage for frame in answer.frames if isinstance(frame, Delta)]
    progress = [usage for usage in usages if usage.output_tokens == 0]
    assert [usage.input_tokens for usage in progress] == list(range(8, num_prompt_tokens, 8))
    assert all(usage.compute_us > 0 for usage in progress)


def test_cancel_ends_a_generation_within_one_step(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.submit(1, max_tokens=400)
    while not isinstance(loop.next(), Delta):
        pass
    loop.steps.post(Cancel(1))
    (answer,) = loop.finish(1)
    assert answer.last.finish_reason == "cancelled"
    assert 0 < answer.last.usage.output_tokens < 400
    loop.steps.post(Cancel(1))
    loop.steps.post(Cancel(99))
    loop.steps.post(Ping(5))
    assert loop.next() == Pong(5, 0, 0)
    assert loop.model.runner.allocator.num_free == loop.model.runner.allocator.num_pages


def test_cancel_of_one_that_waits(make: Callable[..., Loop]) -> None:
    loop = make(max_batch_size=1)
    loop.submit(1, max_tokens=300)
    loop.submit(2)
    loop.steps.post(Cancel(2))
    loop.steps.post(Cancel(1))
    assert [answer.last.finish_reason for answer in loop.finish(2, 1)] == ["cancelled", "cancelled"]


def test_a_full_queue_refuses(make: Callable[..., Loop]) -> None:
    loop = make(max_waiting=1)
    loop.submit(1)
    loop.submit(2)
    refused, served = loop.finish(2, 1)
    assert (refused.last.code, served.last.finish_reason) == (3040, "length")
    assert len(refused.frames) == 1


def test_a_failing_step_fails_its_sequences_and_not_the_engine(
    make: Callable[..., Loop], capfd: pytest.CaptureFixture[str]
) -> None:
    loop = make()
    original = loop.model.runner.run
    failures = iter([MemoryError("no room")])

    def run(chunks: list[Any], paused: list[Any]) -> torch.Tensor:
        for failure in failures:
            raise failure
        return original(chunks, paused)

    loop.model.runner.run = run  # type: ignore[method-assign]
    loop.submit(1)
    loop.submit(2)
    for answer in loop.finish(1, 2):
        assert isinstance(answer.last, Failed)
        assert answer.last.code == 1000
        assert "MemoryError: no room" in answer.last.message
    assert "MemoryError" in capfd.readouterr().err
    loop.submit(3)
    assert loop.finish(3)[0].last.finish_reason == "length"


def test_nan_fails_its_own_sequence_and_leaves_nothing_behind(make: Callable[..., Loop]) -> None:
    loop = make(kv_tokens=64)
    loop.submit(9)
    (expected,) = loop.finish(9)
    embed, bad = loop.model.runner.model._embed.weight, 7
    good_row = embed[bad].clone()
    embed[bad] = torch.nan
    loop.submit(1, prompt="(" if loop.model.tokenizer.encode("(", 9) == [bad] else loop.model.tokenizer.decode([bad]))
    loop.submit(2)
    broken, fine = loop.finish(1, 2)
    assert isinstance(broken.last, Failed)
    assert "no numbers" in broken.last.message
    assert broken.last.usage.input_tokens == 1
    assert fine.text == expected.text
    embed[bad] = good_row
    for number in (3, 4, 5, 6):  # whoever gets the pages next
        loop.submit(number)
    assert [answer.text for answer in loop.finish(3, 4, 5, 6)] == [expected.text] * 4


def test_nan_of_an_adapter_is_blamed_on_it_and_harms_nobody_else(make: Callable[..., Loop], folder: Path) -> None:
    tiny_models.save_adapter(folder.parent / "adapters" / "huge", rank=4, lora_alpha=1e6)
    loop = make()
    matrices = loop.model.adapters.get("huge")._parts
    for part in matrices.values():
        part.up.mul_(1e30)
    loop.submit(1)
    loop.submit(2, adapter="huge")
    fine, broken = loop.finish(1, 2)
    assert isinstance(fine.last, Done)
    assert isinstance(broken.last, Failed)
    assert "edge models rm tiny --adapter huge" in broken.last.message


def test_stop_strings_and_max_tokens(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.submit(1)
    (whole,) = loop.finish(1)
    stop = whole.text[5:8]
    loop.submit(2, stop=[stop])
    (cut,) = loop.finish(2)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.last.finish_reason == "stop"
    loop.submit(3, max_tokens=None, prompt="x" * 500)
    (filled,) = loop.finish(3)
    assert filled.last.finish_reason == "length"
    assert filled.last.usage.output_tokens == 12


def test_ping_is_answered_between_steps(make: Callable[..., Loop]) -> None:
    loop = make(max_batch_size=1)
    loop.submit(1, max_tokens=400)
    loop.submit(2)
    loop.submit(3)
    loop.steps.post(Ping(1))
    while not isinstance(frame := loop.next(), Pong):
        pass
    assert frame == Pong(1, 3, 0)
    loop.steps.post(Cancel(1))
    loop.finish(2, 3)


def test_a_model_that_is_removed_fails_its_requests_and_can_come_back(make: Callable[..., Loop]) -> None:
    loop = make(max_batch_size=1)
    loop.submit(1, max_tokens=400)
    loop.submit(2)
    while not isinstance(loop.next(), Delta):
        pass
    loop.steps.post(Remove("tiny"))
    loop.submit(3)  # its prompt was tokenized before
    running, waiting, late = (answer.last for answer in loop.finish(1, 2, 3))
    assert [frame.code for frame in (running, waiting, late)] == [5007] * 3
    assert "'tiny' was removed" in running.message
    assert running.usage.output_tokens > 0
    assert loop.model.runner.allocator.num_free == loop.model.runner.allocator.num_pages
    loop.steps.post(Install(loop.model))
    loop.submit(4)
    assert loop.finish(4)[0].last.finish_reason == "length"


def test_a_prompt_that_was_seen_before_is_cached_within_its_account_only(make: Callable[..., Loop]) -> None:
    loop = make()
    prompt = "x" * 70
    loop.submit(1, prompt, account="a")
    (first,) = loop.finish(1)
    loop.submit(2, prompt, account="a")
    loop.submit(3, prompt, account="b")
    again, stranger = loop.finish(2, 3)
    assert [answer.text for answer in (again, stranger)] == [first.text] * 2
    used = [answer.last.usage for answer in (first, again, stranger)]
    assert [(usage.input_tokens, usage.cached_input_tokens) for usage in used] == [(70, 0), (6, 64), (70, 0)]


def test_a_prompt_of_full_pages_is_cached_but_for_its_last_token(tmp_path: Path, kernels: Kernels) -> None:
    folder = tiny_models.save_folder(tmp_path / "even", hidden_size=64, head_dim=16, num_attention_heads=4)
    for kv, num_new in (("bfloat16", 1), ("int8", 1), ("int4", 16)):
        loop = Loop(folder, options=ModelOptions(weights="int8", kv=kv), kernels=kernels)  # type: ignore[arg-type]
        try:
            loop.submit(1, "x" * 64, max_tokens=40)
            loop.submit(2, "x" * 64, max_tokens=40)
            first, second = loop.finish(1, 2)
            assert first.last.usage.input_tokens == 64
            assert (second.last.usage.input_tokens, second.last.usage.cached_input_tokens) == (num_new, 64 - num_new)
            if kv != "int4":
                assert second.text == first.text
        finally:
            loop.stop()


def test_guessing_changes_no_answer(tmp_path: Path, kernels: Kernels) -> None:
    folder = tiny_models.save_folder(tmp_path / "even", hidden_size=64, head_dim=16, num_attention_heads=4)
    prompts = ["ab" * 30, "the cat sat on the mat. the cat sat on", "hello"]
    samplings = [
        Sampling(temperature=0),
        Sampling(temperature=1, seed=1),
        Sampling(temperature=0, repetition_penalty=2),
    ]
    answers, num_steps = [], []
    for speculation in (0, 4):
        loop = Loop(folder, options=ModelOptions(weights="int8", speculation=speculation), kernels=kernels)
        try:
            assert loop.model.num_guesses == speculation
            for number, (prompt, sampling) in enumerate((p, s) for p in prompts for s in samplings):
                loop.submit(number, prompt, sampling=sampling, max_tokens=200)
            done = loop.finish(*range(9))
            answers.append(
                [(answer.text, answer.last.finish_reason, answer.last.usage.output_tokens) for answer in done]
            )
            num_steps.append(sum(isinstance(frame, Delta) for answer in done for frame in answer.frames))
        finally:
            loop.stop()
    assert answers[0] == answers[1]
    assert num_steps[1] < num_steps[0], "some guess must have been right"


@pytest.mark.parametrize("kv", mostly_slow(["bfloat16", "int8", "int4"]))
def test_a_crowd_without_room_changes_no_answer(tmp_path: Path, kernels: Kernels, kv: Any) -> None:
    folder = tiny_models.save_folder(
        tmp_path / "even", hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1
    )
    options = ModelOptions(weights="int8", kv=kv, deterministic=True, speculation=8)
    schema = json.dumps({"type": "array", "items": {"enum": [1, 2, "ab"]}, "maxItems": 9})
    ways: list[dict[str, Any]] = [
        {"sampling": Sampling(temperature=0)},
        {"sampling": Sampling(temperature=1.2, seed=3, top_p=0.9), "stop": ["ab", "zz"]},
        {"sampling": Sampling(temperature=0, frequency_penalty=1, logprobs=2)},
        {"sampling": Sampling(temperature=1, seed=4), "json_schema": schema},
    ]
    prompts = ["the same beginning, " * 6 + "ab" * 20, "the same beginning, " * 6 + "c", "hello", "x y " * 10]
    requests = [(prompt, way) for prompt in prompts for way in ways]
    alone = Loop(folder, options=options, kernels=kernels)
    crowd = Loop(folder, options=options, kernels=kernels, kv_tokens=320, step_tokens=40, max_batch_size=8)
    try:
        expected = []
        for number, (prompt, way) in enumerate(requests):
            alone.submit(number, prompt, max_tokens=60, **way)
            expected += alone.finish(number)
        for number, (prompt, way) in enumerate(requests):
            crowd.submit(number, prompt, max_tokens=60, **way)
        for number in (100, 101):
            crowd.submit(number, "somebody who gives up", max_tokens=60)
            crowd.steps.post(Cancel(number))
        answers = crowd.finish(*range(len(requests)))
    finally:
        alone.stop()
        crowd.stop()
    assert [(a.text, a.last.finish_reason) for a in answers] == [(a.text, a.last.finish_reason) for a in expected]
    assert crowd.model.runner.allocator.num_free == crowd.model.runner.allocator.num_pages


def test_nothing_is_guessed_where_checking_a_guess_could_change_the_answer(make: Callable[..., Loop]) -> None:
    assert make(options=ModelOptions(weights="float32", speculation=4)).model.num_guesses == 0


def test_an_answer_is_held_to_its_schema(make: Callable[..., Loop]) -> None:
    loop = make()
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    for number in range(6):
        sampling = Sampling(temperature=1.5, seed=number) if number else Sampling(temperature=0)
        loop.submit(number, json_schema=json.dumps(schema), sampling=sampling, max_tokens=200)
    loop.submit(6)
    *held, free = loop.finish(*range(7))
    assert all(answer.last.finish_reason == "stop" for answer in held)
    assert {json.loads(answer.text)["n"] for answer in held} <= {1, 2}
    assert free.last.finish_reason == "length"


def test_log_probabilities_are_told_of_every_token(make: Callable[..., Loop]) -> None:
    loop = make()
    loop.submit(1, sampling=Sampling(temperature=0, logprobs=2))
    (answer,) = loop.finish(1)
    told = [entry for frame in answer.frames if isinstance(frame, Delta) for entry in frame.logprobs]
    assert len(told) == answer.last.usage.output_tokens
    assert all(entry.top[0].logprob == entry.logprob > entry.top[1].logprob for entry in told)


def test_higher_priority_goes_first(make: Callable[..., Loop]) -> None:
    loop = make(max_batch_size=1)
    loop.submit(1)
    for number, priority in ((2, 0), (3, 5), (4, -5)):
        loop.submit(number, priority=priority)
    order = []
    while len(order) < 4:
        if isinstance(frame := loop.next(), Done):
            order.append(frame.id)
    assert order in ([1, 3, 2, 4], [3, 1, 2, 4])


def test_requests_run_with_their_own_adapters(make: Callable[..., Loop], folder: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        tiny_models.save_adapter(folder.parent / "adapters" / name, rank=4, seed=seed)
    loop = make()
    alone = []
    for number, adapter in enumerate((None, "one", "two")):
        loop.submit(number, adapter=adapter)
        alone += [answer.text for answer in loop.finish(number)]
    assert len(set(alone)) == 3
    for number, adapter in enumerate((None, "one", "two", "one")):
        loop.submit(10 + number, adapter=adapter)
    together = [answer.text for answer in loop.finish(10, 11, 12, 13)]
    assert together == [*alone, alone[1]]
    assert loop.model.runner.adapters == {}


def test_a_model_goes_on_with_native_kernels_where_it_was(
    make: Callable[..., Loop], folder: Path, kernels: Kernels
) -> None:
    loop = make(options=ModelOptions(weights="bfloat16"))
    loop.submit(1, max_tokens=300, sampling=Sampling(temperature=0, logit_bias={tiny_models.END: -100}))
    while not isinstance(loop.next(), Delta):
        pass
    options = loop.model.options
    decoder = runner.load(open_checkpoint(folder), options=options, device=torch.device("cpu"), kernels=kernels)
    loop.steps.post(Upgrade(loop.model, decoder, kernels))
    (answer,) = loop.finish(1)
    assert (answer.last.finish_reason, answer.last.usage.output_tokens) == ("length", 300)
    assert loop.model.runner.has_kernels
