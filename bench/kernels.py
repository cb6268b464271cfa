"""Times the quantized linears alone, in the shapes of SmolLM2-135M: `python -m bench.kernels`.

A step through all layers and the head, whose weights together are larger than the processor's caches, for several
numbers of rows; beside it torch's own operators over the same shapes. GB/s are of weights, to hold against the memory
of the machine at few rows; GMAC/s against its multipliers at many. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from edge.engine.kernels import Kernels, load
from edge.engine.kernels.linear import NativeLinear
from edge.engine.layers import PackedLinear, RmsNorm
from edge.weights.quantized import Quantized

NUM_LAYERS = 30
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
"""Outputs and inputs."""
ROWS = (1, 8, 32, 128, 512)
GROUP = 32
BUDGET_S = 1.0


@dataclass(frozen=True)
class Row:
    """One linear with one number of rows, in microseconds for one call."""

    name: str
    num_rows: int
    native_us: float
    gmac_per_s: float
    gb_per_s: float
    peers_us: dict[str, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cache-dir", type=Path, default=Path(".edge/cache/kernels"))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--no-torch", action="store_true", help="leave torch's operators out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load(options.cache_dir)
    kernels.num_threads = options.threads
    print(f"{'linear':<8} {'rows':>4} {'us':>9} {'GMAC/s':>7} {'GB/s':>6}  torch, us")
    rows = []
    for name in SHAPES:
        for row in _measure(name, options.rows, kernels, with_torch=not options.no_torch):
            rows.append(row)
            peers = "  ".join(f"{peer} {us:.1f}" for peer, us in row.peers_us.items())
            rates = f"{row.gmac_per_s:>7.0f} {row.gb_per_s:>6.1f}"
            print(f"{name:<8} {row.num_rows:>4} {row.native_us:>9.1f} {rates}  {peers}")
    for num_rows in options.rows:
        layers = NUM_LAYERS * sum(row.native_us for row in rows if row.num_rows == num_rows and row.name != "head")
        head = next(row.native_us for row in rows if row.num_rows == num_rows and row.name == "head")
        print(f"step of {num_rows:>3} rows: {NUM_LAYERS} layers {layers / 1e3:.2f} ms, head {head / 1e3:.2f} ms")
    print(json.dumps({"bench": "kernels", "threads": options.threads, "rows": [vars(row) for row in rows]}))


def _measure(name: str, numbers: list[int], kernels: Kernels, *, with_torch: bool) -> list[Row]:
    N, K = SHAPES[name]
    bits = 8 if name == "head" else 4
    num_copies = 1 if name == "head" else NUM_LAYERS
    copies = [NativeLinear([_weights(N, K, bits)], None, kernels) for _ in range(num_copies)]
    norm = RmsNorm(torch.ones(K), 1e-5) if name in ("qkv", "gate_up") else None
    gate = "silu" if name == "down" else None
    rows = []
    for T in numbers:
        x = torch.randn(T, K if gate is None else 2 * K)
        calls = [partial(linear, x, norm=norm, gate=gate) for linear in copies]
        us = _time_us(calls)
        peers = _torch_us(N, K, T, num_copies) if with_torch else {}
        size_bytes = copies[0].size_bytes
        rows.append(Row(name, T, us, N * K * T / us / 1e3, size_bytes / us / 1e3, peers))
    return rows


def _torch_us(N: int, K: int, T: int, num_copies: int) -> dict[str, float]:
    """Torch's operators for the product alone: norm, gate and rounding are not in them."""
    x = torch.randn(T, K, dtype=torch.bfloat16)
    calls: dict[str, list[Callable[[], Tensor]]] = {"bf16": [], "int8": [], "int4": []}
    for _ in range(num_copies):
        weight = torch.randn(N, K, dtype=torch.bfloat16)
        codes = torch.randint(-128, 128, (N, K), dtype=torch.int8)
        nibbles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (N, K), dtype=torch.int32), 1)
        scales = torch.rand(N, dtype=torch.bfloat16)
        pairs = torch.rand(K // GROUP, N, 2, dtype=torch.bfloat16)
        calls["bf16"].append(partial(PackedLinear(weight), x))
        calls["int8"].append(partial(torch._weight_int8pack_mm, x, codes, scales))
        calls["int4"].append(partial(torch.ops.aten._weight_int4pack_mm_for_cpu, x, nibbles, GROUP, pairs))
    return {name: _time_us(each) for name, each in calls.items()}


def _weights(N: int, K: int, bits: int) -> Quantized:
    """Asymmetric in 4 bits and symmetric in 8, as in files of Q4_1 with a head of Q8_0."""
    codes = torch.randint(0, 256, (N, K * bits // 8), dtype=torch.uint8)
    scales = torch.rand(N, K // GROUP).half() * 0.01
    minimums = scales * -128 if bits == 8 else -torch.rand(N, K // GROUP).half()
    return Quantized(codes, scales, minimums, bits)


def _time_us(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Lower quartile of a call's time, going round all of them so that weights come from memory."""
    times: list[float] = []
    deadline = time.perf_counter() + BUDGET_S
    for call in calls:
        call()
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 50):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) / len(calls))
    return sorted(times)[len(times) // 4] * 1e6


if __name__ == "__main__":
    main()
