"""Times the attention kernels alone, in the shape of SmolLM2-135M: `python -m bench.attention`.

A step of decode and of prefill through all layers' caches, which together are larger than the processor's caches, per
layer; each KV format, natively and by torch, and how fast the machine reads memory. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from edge.engine.attention import Attention, AttentionShape, paged_attention
from edge.engine.kernels import load
from edge.engine.kernels.attention import NativeAttention
from edge.engine.kv_cache import FORMATS, KvCache
from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import Step, build_step

SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, scale=64**-0.5)
NUM_LAYERS = 30
PAGE_SIZE = 16
CPU = torch.device("cpu")
DECODES = [(B, S) for S in (320, 2000) for B in (1, 8, 32)]
PREFILLS = [512, 4096]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cache-dir", type=Path, default=Path(".edge/cache/kernels"))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--no-torch", action="store_true", help="leave the torch path out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load(options.cache_dir)
    kernels.num_threads = options.threads
    native, peer = NativeAttention(kernels), None if options.no_torch else paged_attention
    rows = []
    for format in options.formats:
        for B, S in DECODES:
            rows.append(_row(f"decode {B} x {S}", format, [S] * B, 1, native, peer))
        for N in PREFILLS:
            rows.append(_row(f"prefill {N}", format, [N], N, native, peer))
    print(json.dumps({"threads": options.threads, "read_gb_per_s": round(_read_rate() / 1e9, 1), "rows": rows}))


def _row(
    what: str, format: str, lengths: list[int], num_new: int, native: Attention, peer: Attention | None
) -> dict[str, object]:
    num_pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    cache = KvCache(
        format,
        num_layers=NUM_LAYERS,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        device=CPU,
        num_side_pages=3 * len(lengths) + 256,
    )
    next_page, chunks = 0, []
    for i, length in enumerate(lengths):
        count = -(-length // PAGE_SIZE)
        pages = list(range(next_page, next_page + count))
        next_page += count
        sequence = Sequence(i, [0] * length, length, 1, num_computed_tokens=length - num_new, pages=pages)
        chunks.append(Chunk(sequence, num_new))
    _fill(cache)
    step = build_step(chunks, PAGE_SIZE, CPU)
    ours = _ms_per_layer(native, cache, step)
    theirs = _ms_per_layer(peer, cache, step) if peer else None
    num_keys = sum(lengths) if num_new == 1 else 0
    gb_per_s = num_keys * cache.bytes_per_token() / NUM_LAYERS / ours / 1e6
    flops = 4 * SHAPE.num_heads * SHAPE.head_dim * sum(n * (n + 1) / 2 for n in lengths) if num_new > 1 else 0
    print(
        f"{what:16} {format:9} native {ours:8.3f} ms"
        + (f"  torch {theirs:9.3f} ms  {theirs / ours:5.1f}x" if theirs else "")
        + (f"  {gb_per_s:6.1f} GB/s" if num_keys else f"  {flops / ours / 1e6:6.0f} GFLOP/s"),
        flush=True,
    )
    bytes_per_token = cache.size_bytes(2000) / 2000
    return {
        "what": what,
        "format": format,
        "native_ms": round(ours, 4),
        "torch_ms": theirs and round(theirs, 4),
        "bytes_per_token_at_2000": round(bytes_per_token),
    }


def _fill(cache: KvCache) -> None:
    """Touch all memory: pages that were never written are one page of zeros for the processor."""
    for plane in (cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.value_minimums):
        for tensor in plane:
            tensor.view(torch.uint8).fill_(1)


def _ms_per_layer(attention: Attention, cache: KvCache, step: Step) -> float:
    T = step.num_tokens
    qkv = torch.randn(T, (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim)
    angles = torch.randn(T, SHAPE.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()

    def run() -> None:
        for layer in range(NUM_LAYERS):
            attention(qkv, SHAPE, cos, sin, cache, layer, step)

    with torch.inference_mode():
        return _seconds(run) * 1000 / NUM_LAYERS


def _seconds(run: Callable[[], object]) -> float:
    """Lower quartile of several runs, about half a second of them."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.5 and len(times) < 30):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=4)[0]


def _read_rate() -> float:
    """Bytes per second that all threads read together, one after another in memory."""
    x = torch.ones(1 << 27)
    return x.nbytes / _seconds(lambda: x.sum())


if __name__ == "__main__":
    main()
