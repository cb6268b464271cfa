"""`python -m edge.engine.quantize JOB`: a model's matrices as 8- or 4-bit codes, and how good they are.

What a weight's rounding error does to the output depends on its input. So inputs are recorded while a calibration
text goes through the model, and errors count as much as the mean square of their channel. The scale and minimum of
each group are searched for with that (activation-aware, as https://arxiv.org/abs/2306.00978), and columns are rounded
one after the other, the later ones making up for the errors of the earlier (https://arxiv.org/abs/2210.17323).

What those papers do besides was measured here and left out, since it did not make the result better: factors for
whole channels, which would also have to be divided out of whatever the channels come from.

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
from edge.engine.fidelity import Subject, compare, make_cache, read
from edge.engine.layers import Projection, RmsNorm, prologue
from edge.engine.models import load_model
from edge.engine.models.decoder import Decoder
from edge.engine.parent import die_with
from edge.engine.tokenizer import Tokenizer
from edge.errors import EdgeError, WeightsError
from edge.weights.checkpoint import Checkpoint, open_checkpoint
from edge.weights.conversion import REPORT_FILE, Job, Recipe, Result
from edge.weights.folder import Quantization, read_text
from edge.weights.quantized import GROUPS, Quantized, from_codes, quantize
from edge.weights.quantized_checkpoint import save_quantized

PIECE_TOKENS = 1024
"""Texts are cut into pieces of so many tokens, each read from its own start."""
MIN_TEXT_TOKENS = 256
MAX_TEXT_BYTES = 1 << 20
MAX_SAMPLES = 2048
"""Tokens whose activations are kept, evenly spread over the text."""
DIAGONAL_SHARE = 0.3
"""How much of the correlation between channels is not believed, because a short text shows some by chance."""
BLOCK = 64
"""Columns after which errors are handed on to all later ones at once."""
INVERSE_BLOCK = 256
"""Columns of a triangular matrix that are inverted at once."""

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
        self._num_tokens = 0

    def add(self, x: Tensor) -> None:
        """Add x (T, K)."""
        offset = -self._num_tokens % self._keep_every
        self._num_tokens += len(x)
        self._samples.append(x[offset :: self._keep_every].bfloat16())

    def moments(self) -> Tensor:
        """(K, K) float32, mean products of the channels with each other."""
        samples = torch.cat(self._samples).float()  # (S, K)
        return samples.T @ samples / len(samples)


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


def record_inputs(subject: Subject, texts: list[list[int]]) -> list[dict[str, Inputs]]:
    """What the linears of each layer of a model are given along `texts`, by the linear's name in the layer."""
    model = subject.model
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
            for _ in read(subject, text):
                pass
    finally:
        for layer, linears in zip(model.layers, originals, strict=True):
            for name, linear in linears.items():
                setattr(layer, name, linear)
    return recorded


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
    num_layers = checkpoint.config().num_layers
    matrices = {
        f"layers.{i}.{name}.weight" for i in range(num_layers) for names in _MATRICES.values() for name in names
    }
    for name in checkpoint.names():
        if name in EMBEDDINGS:
            yield name, _embedding(checkpoint, name, recipe)
        elif name not in matrices:
            yield name, checkpoint.tensor(name)
    for i in range(num_layers):
        for linear, names in _MATRICES.items():
            errors = Errors(inputs[i].pop(linear).moments()) if recipe.search else None
            for name in (f"layers.{i}.{name}.weight" for name in names):
                yield name, _rounded(checkpoint.tensor(name).float(), recipe, _bits(checkpoint, name, recipe), errors)
        progress(i + 1, num_layers)


EMBEDDINGS = ("embed.weight", "head.weight")


def _bits(checkpoint: Checkpoint, name: str, recipe: Recipe) -> Literal[4, 8]:
    """Bits of the matrix `name`: 8 for those that matter more than their size."""
    if name in EMBEDDINGS:
        stored = checkpoint.quantized(name)
        return 4 if stored is not None and stored.bits == 4 else 8
    return 8 if name.endswith(".attention.v.weight") else recipe.bits


def _embedding(checkpoint: Checkpoint, name: str, recipe: Recipe) -> Quantized:
    """Embedding and head stay as they are stored, if that is as codes."""
    stored = checkpoint.quantized(name)
    return stored if stored is not None else _rounded(checkpoint.tensor(name), recipe, 8, None)


def _rounded(weight: Tensor, recipe: Recipe, bits: int, errors: Errors | None) -> Quantized:
    group = _group(weight.shape[1], recipe)
    importance = None if errors is None else errors.importance
    nearest = quantize(weight, bits=bits, group=group, symmetric=recipe.symmetric, importance=importance)
    return nearest if errors is None else errors.hand_on(weight, nearest)


def _group(num_columns: int, recipe: Recipe) -> int:
    """The recipe's group, or the next smaller one that fits the width; a row, where none does."""
    sizes = (recipe.group, *reversed(GROUPS)) if recipe.group else ()
    return next((size for size in sizes if size <= recipe.group and num_columns % size == 0), num_columns)


class Errors:
    """What errors in the columns of a matrix do to its outputs, given the moments (K, K) of its inputs."""

    def __init__(self, moments: Tensor) -> None:
        squares = moments.diagonal()
        # A channel that slept during the calibration text may be awake in others.
        sizes = squares.clamp(min=max(float(squares.median()) * 0.1, float(squares.mean()) * 1e-6)).sqrt()
        self.importance = sizes.square()
        """(K,)."""
        correlations = moments / sizes / sizes[:, None] * (1 - DIAGONAL_SHARE)
        correlations.diagonal().fill_(1)
        # The upper triangular V with V^T V = moments^-1, from a Cholesky factor of the moments in reverse order.
        upper = torch.linalg.cholesky(correlations.flip(0, 1)).flip(0, 1)
        self._factor = _inverse(upper) / sizes

    def hand_on(self, weight: Tensor, nearest: Quantized) -> Quantized:
        """`weight` (N, K) on the grid of `nearest`, each column rounded after the errors before it are made up for."""
        K, top = weight.shape[1], (1 << nearest.bits) - 1
        # Columns as rows (K, N), so that each is contiguous.
        scales, minimums = (
            part.float().T.repeat_interleave(nearest.group, dim=0) for part in (nearest.scales, nearest.minimums)
        )
        divisors = torch.where(scales == 0, 1.0, scales)
        columns = weight.T.clone(memory_format=torch.contiguous_format)
        codes = torch.empty(columns.shape, dtype=torch.uint8)
        for start in range(0, K, BLOCK):
            end = min(start + BLOCK, K)
            block, errors = columns[start:end], torch.empty(end - start, len(weight))
            for j, k in enumerate(range(start, end)):
                code = ((block[j] - minimums[k]) / divisors[k]).round_().clamp_(0, top)
                codes[k] = code.to(torch.uint8)
                errors[j] = (block[j] - code * scales[k] - minimums[k]) / self._factor[k, k]
                block[j + 1 :].addr_(self._factor[k, k + 1 : end], errors[j], alpha=-1)
            columns[end:].addmm_(self._factor[start:end, end:].T, errors, alpha=-1)
        return from_codes(codes.T.contiguous(), nearest.scales, nearest.minimums, nearest.bits)


def _inverse(upper: Tensor) -> Tensor:
    """Of an upper triangular matrix (K, K): a solution of the identity that leaves out the half that is zero."""
    K = len(upper)
    inverse = torch.zeros_like(upper)
    for start in range(0, K, INVERSE_BLOCK):
        end = min(start + INVERSE_BLOCK, K)
        identity = torch.zeros(end, end - start)
        identity[start:].fill_diagonal_(1)
        inverse[:end, start:end] = torch.linalg.solve_triangular(upper[:end, :end], identity, upper=True)
    return inverse


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
        inputs = record_inputs(_subject(model), calibration)
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
        kernels = native.load(cache_dir)
    except native.KernelsUnavailable as error:
        _say(f"no native kernels, measuring with torch's operators: {error}")
        return None
    kernels.num_threads = torch.get_num_threads()
    return kernels


def _load(checkpoint: Checkpoint, weights: Literal["auto", "float32"], kernels: native.Kernels | None) -> Decoder:
    return load_model(
        checkpoint,
        options=ModelOptions(weights=weights),
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=kernels,
    )


def _subject(model: Decoder) -> Subject:
    return Subject(model, make_cache(model.config, PIECE_TOKENS, "float32", torch.device("cpu")))


def _pieces(tokenizer: Tokenizer, path: Path, model: Decoder) -> list[list[int]]:
    """The tokens of the text in `path`, in pieces that fit the model."""
    text = read_text(path, MAX_TEXT_BYTES)
    tokens = tokenizer.encode(text, len(text) + 1)
    if len(tokens) < MIN_TEXT_TOKENS:
        raise WeightsError(f"{path}: {len(tokens)} tokens are too few, at least {MIN_TEXT_TOKENS} are needed")
    length = min(PIECE_TOKENS, model.config.context_length)
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


def _quantization(checkpoint: Checkpoint, recipe: Recipe) -> Quantization:
    bits = {name: _bits(checkpoint, name, recipe) for name in checkpoint.names()}
    exceptions = {name: number for name, number in bits.items() if number != recipe.bits}
    return Quantization(bits=recipe.bits, group_size=recipe.group, symmetric=recipe.symmetric, bits_by_name=exceptions)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _say_layers(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rQuantizing layer {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        _say(f"Quantized {total} layers")


def main(arguments: list[str]) -> int:
    """Do the job that `arguments` name; the exit code. Ends with the process that started it."""
    die_with(os.getppid())
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
