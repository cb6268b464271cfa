"""Where the engine's steps thread spends its time, seen from outside of Python.

The engine of a real node is sampled under a real load by `profiler/sampler.c`: every half millisecond the
instruction pointer of the steps thread, whatever it is doing, waiting included. A sample belongs to the file that
this address is in; in libc, to the first other file on the top of the stack. Python's share is what belongs to the
interpreter or to extension modules (msgspec, numpy, torch's Python layer); kernels, OpenMP and torch's operators,
with their waiting for each other's threads, are the rest.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import os
import re
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Row, Target, measured, missing

if TYPE_CHECKING:
    from bench.engine import Bench

NUM_SEQUENCES = 32
NUM_OUTPUTS = 400
BEGIN_S, SECONDS = 4.0, 2.0
STOP_TIMEOUT_S = 30.0
_SAMPLE = struct.Struct("<65Q")
_PYTHON = re.compile(r"python[\d.]*$|libpython|\.cpython-|\.abi3\.so|libtorch_python|/numpy")
_PASSED_OVER = re.compile(r"/libc[.-]|/ld-|libpthread|\[vdso\]|libstdc\+\+|libm\.")
_HERE = Path(__file__).parent / "profiler"


def python_share(bench: Bench, folder: Path) -> Row:
    """The share of Python in the decode steps of 32 sequences; `folder` is a new one for the profiler's files."""
    metric = f"Python's share of the steps thread while {NUM_SEQUENCES} sequences decode after 300 tokens"
    target = Target("<=", 15, "%")
    if why := _build(folder):
        return missing(metric, "%", why, target=target)
    on = bench.start_node(python_path=folder)
    prompts = bench.prompts.prompts(NUM_SEQUENCES, 300)
    on.complete(prompts, 2)  # so that the prompts are in the prefix cache, and the load is all decode
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        load = pool.submit(on.complete, prompts, NUM_OUTPUTS)
        time.sleep(BEGIN_S)
        (folder / "start").touch()
        time.sleep(SECONDS)
        (folder / "stop").touch()
        ended_s = time.monotonic() - began
        answers = load.result()
    first_s, last_s = max(each.pieces[0][0] for each in answers), min(each.pieces[-1][0] for each in answers)
    if not (first_s < BEGIN_S - 1 and ended_s < last_s):
        why = f"the sequences decoded from {first_s:.1f} to {last_s:.1f} s, and were sampled to {ended_s:.1f} s"
        return missing(metric, "%", why, target=target)
    shares = _shares(folder)
    python = 100 * sum(share for name, share in shares.items() if _PYTHON.search(name))
    parts = [f"{Path(name).name} {100 * share:.1f}%" for name, share in shares.most_common(8)]
    return measured(
        metric,
        python,
        "%",
        target=target,
        note=f"load {os.getloadavg()[0]:.1f}; samples every 0.5 ms of real time: {', '.join(parts)}",
    )


def _build(folder: Path) -> str:
    """Put the profiler into `folder`; why it cannot be, or nothing."""
    shutil.copy(_HERE / "sitecustomize.py", folder)
    command = ["cc", "-O2", "-shared", "-fPIC", str(_HERE / "sampler.c"), "-o", str(folder / "sampler.so")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no C compiler for the profiler"
    return done.stderr.strip()[-300:] if done.returncode else ""


def _shares(folder: Path) -> collections.Counter[str]:
    """Share of the samples by file."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not (folder / "done").exists():
        if time.monotonic() > deadline:
            raise RuntimeError("the engine's profiler did not finish")
        time.sleep(0.05)
    regions = _executable((folder / "maps.txt").read_text())
    data = (folder / "samples.bin").read_bytes()
    counts = collections.Counter(_owner(words, regions) for words in _SAMPLE.iter_unpack(data))
    shares: collections.Counter[str] = collections.Counter()
    for name, count in counts.items():
        shares[name] = count / counts.total()  # type: ignore[assignment]
    return shares


def _executable(maps: str) -> list[tuple[int, int, str]]:
    """(start, end, file) of the executable regions in a process's `maps`, in order."""
    regions = []
    for line in maps.splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if "x" in permissions:
            start, end = (int(address, 16) for address in addresses.split("-"))
            regions.append((start, end, name[0] if name else "made at run time"))
    return sorted(regions)


def _owner(words: tuple[int, ...], regions: list[tuple[int, int, str]]) -> str:
    """The file that a sample (instruction pointer, then words of the stack) belongs to."""
    found = "unknown"
    for word in words:
        i = bisect.bisect(regions, (word, 1 << 64, "")) - 1
        if i >= 0 and regions[i][0] <= word < regions[i][1]:
            found = regions[i][2]
            if not _PASSED_OVER.search(found):
                break
        elif word == words[0]:
            return found
    return found
