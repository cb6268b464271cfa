"""The structs between node and engine, on the framing of `workers._wire`.

A node sends `Generate` and gets `Started`, any number of `Delta`s and then exactly one of `Done` or `Failed`
for that id. Counts in `Usage` are the engine's own and cumulative, so that the node can bill what was done
even if the engine dies before its last frame.
"""

from __future__ import annotations

from typing import Any

from workers._wire import Cancel, Frame

MAX_STOPS = 16
MAX_STOP_CHARS = 1000

# -- node to engine ----------------------------------------------------------------------------------------


class LoadModel(Frame):
    """Make the model in `path` (a GGUF file, or a folder with safetensors) usable as `model`."""

    model: str
    path: str
    dtype: str


class UnloadModel(Frame):
    """Forget `model`; its requests fail. A `LoadModel` of that name loads the files anew."""

    model: str


class Sampling(Frame):
    """How the next token is chosen. `temperature` 0 is greedy; `None` means that the filter is off."""

    temperature: float = 0.6
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class Generate(Frame):
    """Generate text after `messages` (through the chat template) or after `prompt`.

    With `prompt`, the chat template is applied to it as one user message unless `raw`.
    `max_tokens` None means: up to the model's context length. `credit` is the number of `Delta`s that the
    node has room for; `MoreDeltas` adds to it, and a sequence without credit is not scheduled. There are at most
    `MAX_STOPS` strings in `stop`, of 1 to `MAX_STOP_CHARS` characters.
    """

    id: int
    model: str
    messages: list[dict[str, Any]] | None
    prompt: str | None
    raw: bool
    sampling: Sampling
    max_tokens: int | None
    stop: list[str]
    credit: int


class MoreDeltas(Frame):
    """The node has room for `num_deltas` more `Delta`s of `id`."""

    id: int
    num_deltas: int


class Ping(Frame):
    """Heartbeat; answered by `Pong` with the same number."""

    number: int


# -- engine to node ----------------------------------------------------------------------------------------


class Usage(Frame):
    """What a call has used so far. Cached prompt tokens are not counted in `input_tokens`."""

    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    compute_us: int = 0
    """This call's share of the time of the steps it took part in; the shares of a step sum to its time."""


class EngineReady(Frame):
    """First frame of an engine: torch is imported and the device works."""

    device: str
    num_threads: int
    torch: str


class ModelLoaded(Frame):
    """`model` is usable."""

    model: str
    architecture: str
    context_length: int
    num_parameters: int
    size_bytes: int
    load_ms: int


class ModelFailed(Frame):
    """`model` cannot be loaded, and why."""

    model: str
    message: str


class Started(Frame):
    """The prompt of `id` is tokenized and accepted."""

    id: int
    num_prompt_tokens: int


class Delta(Frame):
    """More text of `id` (never a broken character), and the usage up to here.

    Without text, it comes from a step that computed a part of the prompt or whose text is held back: a call that is
    cancelled or lost then is billed for what was done.
    """

    id: int
    text: str
    usage: Usage


class Done(Frame):
    """`id` is complete. `finish_reason` is `stop` (EOS or a stop string), `length` or `cancelled`."""

    id: int
    finish_reason: str
    usage: Usage


class Failed(Frame):
    """`id` was refused or failed; `code` is a key of `edge.errors.BY_CODE`, `param` the input that is at fault."""

    id: int
    code: int
    message: str
    usage: Usage
    param: str | None = None


class Pong(Frame):
    """Heartbeat reply: the state of the step loop."""

    number: int
    num_waiting: int
    num_running: int


ToEngine = LoadModel | UnloadModel | Generate | MoreDeltas | Cancel | Ping
ToNode = EngineReady | ModelLoaded | ModelFailed | Started | Delta | Done | Failed | Pong
