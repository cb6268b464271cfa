"""The structs between node and engine, on the framing of `workers._wire`.

A node sends `Generate` and gets `Started`, any number of `Delta`s and then exactly one of `Done` or `Failed`
for that id; `Encode` ends with `Encoded` instead of `Done`, and `CountTokens` is answered by `TokenCount` alone. Counts
in `Usage` are the engine's own and cumulative, so that the node can bill what was done even if the engine dies before
its last frame.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edge.config import ModelOptions
from workers._wire import Cancel, Frame

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SCHEMA_CHARS = 1 << 18

Pooling = Literal["mean", "cls"]
"""How one vector is made of those of a text's tokens: their mean, or that of the first token."""

# -- node to engine ----------------------------------------------------------------------------------------


class LoadModel(Frame):
    """Make the model in `path` (a GGUF file, or a folder with safetensors) usable as `model`."""

    model: str
    path: str
    options: ModelOptions


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
    min_p: float | None = None
    """Tokens less likely than this share of the most likely one are left out."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Token id to what is added to its logit; at most `MAX_LOGIT_BIASES`."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many of the most likely ones, at most `MAX_LOGPROBS`."""


class Generate(Frame):
    """Generate text after `messages` (through the chat template) or after `prompt`.

    With `prompt`, the chat template is applied to it as one user message unless `raw`. One of token ids is taken as it
    is.
    `max_tokens` None means: up to the model's context length. `credit` is the number of `Delta`s that the
    node has room for; `MoreDeltas` adds to it, and a sequence without credit is not scheduled. There are at most
    `MAX_STOPS` strings in `stop`, of 1 to `MAX_STOP_CHARS` characters. The answer is JSON that fits `json_schema`, a
    JSON schema as JSON text, where that is given.
    """

    id: int
    model: str
    messages: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    raw: bool
    sampling: Sampling
    max_tokens: int | None
    stop: list[str]
    credit: int
    account: str = ""
    """Whose call it is: prompts that start alike share their keys and values within one account only."""
    priority: int = 0
    """Higher ones are served first, from -100 to 100."""
    json_schema: str | None = None
    adapter: str | None = None
    """Name of the LoRA adapter to run the model with."""
    adapter_folder: str | None = None
    """Where that adapter is, if it is none of the model's own."""
    reject_if_busy: bool = False
    """Refuse the call rather than have it wait for others to end."""
    tools: list[dict[str, Any]] | None = None
    """Handed to the chat template."""
    template_options: dict[str, Any] = msgspec.field(default_factory=dict)
    """More variables of the chat template."""


class CountTokens(Frame):
    """Say how many tokens the prompt of `request` has, through the chat template and with its tools. Its own id and
    `credit` mean nothing, nothing is computed, and prompts longer than the context are counted too."""

    id: int
    request: Generate


class Encode(Frame):
    """Read each of `texts` whole, and give a row of numbers for it.

    An encoder gives the text's vector, of length 1, with `pooling` or with the model's own; a classifier gives a
    probability for each of its labels. A text that is longer than the model reads is cut, if `truncate`, else refused.
    """

    id: int
    model: str
    texts: list[str]
    pooling: Pooling | None = None
    truncate: bool = True
    max_total_tokens: int | None = None
    """Of all texts together, once they are cut; more are refused. None: any number."""
    reject_if_busy: bool = False
    """As in `Generate`."""
    priority: int = 0
    """Higher ones go first."""


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
    weights: str
    """How its weights are held: `float32`, `bfloat16`, `int8`, `int4`, or several of them."""
    kv: str
    """How its keys and values are held; `none` if it has none."""


class ModelFailed(Frame):
    """`model` cannot be loaded, and why."""

    model: str
    message: str


class TokenCount(Frame):
    """The prompt of the `CountTokens` `id` has `num_tokens` tokens."""

    id: int
    num_tokens: int


class Started(Frame):
    """The prompt of `id` is tokenized and accepted; that of an `Encode` is all of its texts."""

    id: int
    num_prompt_tokens: int


class TokenLogprob(Frame):
    """Natural log-probability of a token in the model's own distribution, at least -9999; `bytes` can be a part of a
    character."""

    token: str
    logprob: float
    bytes: list[int]
    top: list[TokenLogprob] = msgspec.field(default_factory=list)
    """The most likely tokens at its place."""


class Delta(Frame):
    """More text of `id` (never a broken character), and the usage up to here.

    Without text, it comes from a step that computed a part of the prompt or whose text is held back: a call that is
    cancelled or lost then is billed for what was done.
    """

    id: int
    text: str
    usage: Usage
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    """Of the tokens that this step chose, if they were asked for."""


class Done(Frame):
    """`id` is complete. `finish_reason` is `stop` (EOS or a stop string), `length` or `cancelled`."""

    id: int
    finish_reason: str
    usage: Usage


class Encoded(Frame):
    """The rows of the `Encode` `id`, one for each text, in order."""

    id: int
    rows: bytes
    """float32, little-endian: N times `width` of them."""
    width: int
    usage: Usage
    pooling: Pooling | None
    """How the vectors were made; None: these are probabilities."""
    labels: list[str]
    """Of a classifier's columns; else empty."""


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


ToEngine = LoadModel | UnloadModel | Generate | CountTokens | Encode | MoreDeltas | Cancel | Ping
ToNode = EngineReady | ModelLoaded | ModelFailed | TokenCount | Started | Delta | Done | Encoded | Failed | Pong
