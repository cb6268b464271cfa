"""`python -m edge.engine.quantize JOB`: a model's matrices as 8- or 4-bit codes, and how good they are.

The input channels of a linear differ in size by orders of magnitude, and the weights of large ones deserve finer
steps. So each channel of the weights is multiplied by a factor before rounding, and the same factor is divided out
where the channel comes from: in the norm before, in the rows of `v` or in those of `up`, at no cost when the model
runs. Factors are a power of the channel's mean size on a calibration text, and the power that disturbs the outputs
least is searched for, linear by linear (AWQ, https://arxiv.org/abs/2306.00978).

Then the model is loaded as an engine would load it, and compared with the source on a text that took no part.

JOB is a `Job` as JSON; its `Result` goes to stdout, as JSON, and what is going on to stderr. This module knows nothing
about stores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import msgspec
import torch
from torch import Tensor

from edge.config import ModelOptions
from edge.engine import kernels as native
from edge.engine.fidelity import PAGE_SIZE, Subject, compare, make_cache
from edge.engine.layers import Projection, RmsNorm, prologue
from edge.engine.models import load_model
from edge.engine.models.decoder import Decoder
from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import build_step
from edge.engine.tokenizer import Tokenizer
from edge.errors import EdgeError, WeightsError
from edge.weights.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from edge.weights.conversion import REPORT_FILE, Job, Recipe, Result
from edge.weights.folder import INPUTS, OUTPUTS, Quantization, read_text
from edge.weights.quantized import GROUPS, Quantized, quantize
from edge.weights.quantized_checkpoint import save_quantized

PIECE_TOKENS = 1024
"""Texts are cut into pieces of so many tokens, each read from its own start."""
MIN_TEXT_TOKENS = 256
MAX_TEXT_BYTES = 1 << 20
MAX_SAMPLES = 512
"""Tokens whose activations are kept for the search; means are over all of them."""
MAX_SEARCH_ROWS = 256
"""Outputs of a linear that the search looks at, evenly spread."""
POWERS = tuple(i / 10 for i in range(11))
STEP_TOKENS = 256

_MATRICES = {
    "qkv": ("attention.q", "attention.k", "attention.v"),
    "o": ("attention.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""The linears of a layer, by the attribute that they are in the model, and the matrices they consist of."""


# -- calibration -------------------------------------------------------------------------------------------


class Inputs:
    """What one linear was given while the calibration text went through the model."""

    def __init__(self, keep_every: int) -> None:
        self._keep_every = keep_every
        self._samples: list[Tensor] = []
        self._sizes: list[Tensor] = []
        self._num_tokens = 0

    def add(self, x: Tensor) -> None:
        """Add x (T, K)."""
        offset = -self._num_tokens % self._keep_every
        self._num_tokens += len(x)
        self._samples.append(x[offset :: self._keep_every].float().clone())
        self._sizes.append(x.float().abs().sum(0))

    @property
    def samples(self) -> Tensor:
        """(S, K) float32, some tokens' inputs."""
        return torch.cat(self._samples)

    @property
    def mean_sizes(self) -> Tensor:
        """(K,), mean absolute value of each channel."""
        return torch.stack(self._sizes).sum(0) / self._num_tokens


class _Recorder:
    """A linear that remembers what it was given."""

    def __init__(self, linear: Projection, inputs: Inputs) -> None:
        self._linear = linear
        self._inputs = inputs

    def __call__(
        self, x: Tensor, *, norm: RmsNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        self._inputs.add(prologue(x, norm, gate))
        return self._linear(x, norm=norm, gate=gate, residual=residual)


def record_inputs(model: Decoder, texts: list[list[int]]) -> list[dict[str, Inputs]]:
    """What the linears of each layer of `model` are given along `texts`, by the linear's name in the layer."""
    keep_every = -(-sum(map(len, texts)) // MAX_SAMPLES)
    recorded: list[dict[str, Inputs]] = []
    originals = []
    for layer in model.layers:
        recorded.append({name: Inputs(keep_every) for name in _MATRICES})
        originals.append({name: getattr(layer, name) for name in _MATRICES})
        for name, inputs in recorded[-1].items():
            setattr(layer, name, _Recorder(originals[-1][name], inputs))
    try:
        for text in texts:
            _read(model, text)
    finally:
        for layer, linears in zip(model.layers, originals, strict=True):
            for name, linear in linears.items():
                setattr(layer, name, linear)
    return recorded


def _read(model: Decoder, text: list[int]) -> None:
    cache = make_cache(model, len(text), "float32", torch.device("cpu"))
    sequence = Sequence(
        id=0, tokens=text, num_prompt_tokens=len(text), credit=1, pages=list(range(-(-len(text) // PAGE_SIZE)))
    )
    while sequence.num_missing_tokens:
        chunk = Chunk(sequence, min(STEP_TOKENS, sequence.num_missing_tokens))
        with torch.inference_mode():
            model(build_step([chunk], PAGE_SIZE, cache.device), cache)
        sequence.num_computed_tokens += chunk.num_tokens


# -- quantizing --------------------------------------------------------------------------------------------


def quantize_tensors(
    checkpoint: Checkpoint, recipe: Recipe, inputs: list[dict[str, Inputs]], progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """All tensors of `checkpoint` by our name, its matrices as codes.

    Args:
        checkpoint: the source.
        recipe: how.
        inputs: from `record_inputs` on the source's model; not looked at without `recipe.search`.
        progress: called with the number of layers done, and of all.
    """
    config = checkpoint.config()
    outside = [name for name in checkpoint.names() if not name.startswith("layers.")]
    for name in outside:
        yield name, _embedding(checkpoint, name, recipe) if name in _EMBEDDINGS else checkpoint.tensor(name)
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        names = [name for name in checkpoint.names() if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): checkpoint.tensor(name).float() for name in names}
        importances = _scale(tensors, config, recipe, inputs[i]) if recipe.search else {}
        for name, tensor in tensors.items():
            stem = name.removesuffix(".weight")
            if tensor.dim() == 2:
                yield prefix + name, _rounded(tensor, recipe, recipe.bits, importances.get(stem))
            else:
                yield prefix + name, tensor
        progress(i + 1, config.num_layers)


_EMBEDDINGS = ("embed.weight", "head.weight")


def _embedding(checkpoint: Checkpoint, name: str, recipe: Recipe) -> Quantized:
    """Embedding and head matter more than other matrices: they stay as they are stored, or get 8 bits."""
    stored = checkpoint.quantized(name)
    return stored if stored is not None else _rounded(checkpoint.tensor(name), recipe, 8, None)


def _rounded(weight: Tensor, recipe: Recipe, bits: int, importance: Tensor | None) -> Quantized:
    group = _group(weight.shape[1], recipe)
    return quantize(weight, bits=bits, group=group, symmetric=recipe.symmetric, importance=importance)


def _group(num_columns: int, recipe: Recipe) -> int:
    """The recipe's group, or the next smaller one that fits the width; a row, where none does."""
    sizes = (recipe.group, *reversed(GROUPS)) if recipe.group else ()
    return next((size for size in sizes if size <= recipe.group and num_columns % size == 0), num_columns)


def _scale(
    tensors: dict[str, Tensor], config: ModelConfig, recipe: Recipe, inputs: dict[str, Inputs]
) -> dict[str, Tensor]:
    """Multiply the channels of a layer's matrices by factors, and divide them out where the channels come from.

    Changes `tensors` and adds the factors to them; returns what errors in each column of each matrix count.
    """
    importances = {}
    for linear, names in _MATRICES.items():
        samples, sizes = inputs[linear].samples, inputs[linear].mean_sizes
        if linear == "o":
            sizes = _over_groups(sizes, config)
        factors = _search([tensors[f"{name}.weight"] for name in names], samples, sizes, recipe)
        for name in names:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * factors
            tensors[name + INPUTS] = factors.clone()  # files hold no two names of one tensor
            importances[name] = (samples / factors).square().mean(0)
        source, divisors = _source(linear, factors, config)
        if not source.endswith("norm"):
            tensors[source + OUTPUTS] = divisors.clone()
        for name in (f"{source}.weight", f"{source}.bias"):
            if name in tensors:
                tensors[name] = tensors[name] / divisors.view(-1, *[1] * (tensors[name].dim() - 1))
    return importances


def _source(linear: str, factors: Tensor, config: ModelConfig) -> tuple[str, Tensor]:
    """Where the input channels of `linear` come from, and what its rows are divided by for `factors` (K,)."""
    match linear:
        case "qkv":
            return "attention_norm", factors
        case "gate_up":
            return "mlp_norm", factors
        case "o":
            K, D = config.num_kv_heads, config.head_dim
            return "attention.v", factors.view(K, -1, D)[:, 0].flatten()
        case _:
            return "mlp.up", factors


def _over_groups(sizes: Tensor, config: ModelConfig) -> Tensor:
    """`sizes` (H D,) of what attention gives, the same for all heads that share their values."""
    K, D = config.num_kv_heads, config.head_dim
    grouped = sizes.view(K, -1, D)  # (K, H / K, D)
    return grouped.mean(1, keepdim=True).expand_as(grouped).reshape(-1)


def _search(weights: list[Tensor], samples: Tensor, sizes: Tensor, recipe: Recipe) -> Tensor:
    """The factors (K,) of the input channels with which the rounded `weights` disturb the outputs least."""
    rows = torch.cat(weights)
    rows = rows[:: -(-len(rows) // MAX_SEARCH_ROWS)]
    best, least = torch.ones_like(sizes), float("inf")
    for power in POWERS:
        factors = sizes.clamp(min=float(sizes.mean()) * 1e-3).pow(power)
        factors = factors / (factors.max() * factors.min()).sqrt()
        importance = (samples / factors).square().mean(0)
        rounded = _rounded(rows * factors, recipe, recipe.bits, importance).dequantize() / factors
        error = float((samples @ (rows - rounded).T).square().sum())
        if error < least:
            best, least = factors, error
    return best


# -- the whole of it ---------------------------------------------------------------------------------------


def run(job: Job) -> Result:
    """Write the model in `job.source` with quantized weights into `job.folder`, and compare the two.

    Raises:
        WeightsError: the source or a text cannot be used.
    """
    checkpoint, folder = open_checkpoint(Path(job.source)), Path(job.folder)
    tokenizer = Tokenizer(checkpoint.tokenizer_files())
    _say("Loading the source")
    model = _load(checkpoint, "float32", None)
    calibration, heldout = (_pieces(tokenizer, Path(path), model) for path in (job.calibration, job.heldout))
    started = time.monotonic()
    inputs = []
    if job.recipe.search:
        _say("Reading the calibration text")
        inputs = record_inputs(model, calibration)
    tensors = quantize_tensors(checkpoint, job.recipe, inputs, _say_layers)
    save_quantized(folder, checkpoint, _quantization(checkpoint, job.recipe), tensors)
    quantize_s = time.monotonic() - started
    _say("Comparing with the source")
    quantized = open_checkpoint(folder)
    candidate = _load(quantized, "auto", _kernels(Path(job.cache_dir)))
    result = Result(
        recipe=job.recipe,
        report=compare(_subject(model), _subject(candidate), heldout),
        size_bytes_source=checkpoint.size_bytes,
        size_bytes=quantized.size_bytes,
        quantize_s=round(quantize_s, 1),
    )
    (folder / REPORT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


def _kernels(cache_dir: Path) -> native.Kernels | None:
    """What engines compute with here, so that it is part of what is measured."""
    try:
        return native.load(cache_dir)
    except native.KernelsUnavailable as error:
        _say(f"no native kernels, measuring with torch's operators: {error}")
        return None


def _load(checkpoint: Checkpoint, weights: Literal["auto", "float32"], kernels: native.Kernels | None) -> Decoder:
    return load_model(
        checkpoint,
        options=ModelOptions(weights=weights),
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=kernels,
    )


def _subject(model: Decoder) -> Subject:
    return Subject(model, make_cache(model, PIECE_TOKENS, "float32", torch.device("cpu")))


def _pieces(tokenizer: Tokenizer, path: Path, model: Decoder) -> list[list[int]]:
    """The tokens of the text in `path`, in pieces that fit the model."""
    text = read_text(path, MAX_TEXT_BYTES)
    tokens = tokenizer.encode(text, len(text) + 1)
    if len(tokens) < MIN_TEXT_TOKENS:
        raise WeightsError(f"{path}: {len(tokens)} tokens are too few, at least {MIN_TEXT_TOKENS} are needed")
    length = min(PIECE_TOKENS, model.config.context_length)
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


def _quantization(checkpoint: Checkpoint, recipe: Recipe) -> Quantization:
    exceptions: dict[str, Literal[4, 8]] = {}
    for name in _EMBEDDINGS:
        if name in checkpoint.names():
            stored = checkpoint.quantized(name)
            exceptions[name] = 4 if stored is not None and stored.bits == 4 else 8
    return Quantization(bits=recipe.bits, group_size=recipe.group, symmetric=recipe.symmetric, bits_by_name=exceptions)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _say_layers(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rQuantizing layer {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        _say(f"Quantized {total} layers")


def main(arguments: list[str]) -> int:
    """Do the job that `arguments` name; the exit code."""
    try:
        result = run(msgspec.json.decode(arguments[0], type=Job))
    except EdgeError as error:
        _say(f"error: {error.message}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
