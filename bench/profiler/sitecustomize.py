"""In an engine process, samples the steps thread between the appearance of the files `start` and `stop` beside this.

Python imports it at its start where this folder is on PYTHONPATH; every other process is left alone. Standard
library only. Writes `samples.bin`, `maps.txt` and then `done`.
"""

import ctypes
import sys
import threading
import time
from pathlib import Path

INTERVAL_NS = 500_000
POLL_S = 0.02
SAMPLE_BYTES = 8 * 65
HERE = Path(__file__).parent


def watch() -> None:
    """Wait for `start`, sample until `stop`, write what was found."""
    _wait_for("start")
    library = ctypes.CDLL(str(HERE / "sampler.so"))
    library.sampler_stop.restype = ctypes.c_long
    library.sampler_samples.restype = ctypes.c_void_p
    [steps] = [thread for thread in threading.enumerate() if thread.name == "steps"]
    failed = library.sampler_start(steps.native_id, ctypes.c_long(INTERVAL_NS))
    _wait_for("stop")
    count = 0 if failed else library.sampler_stop()
    (HERE / "samples.bin").write_bytes(ctypes.string_at(library.sampler_samples(), count * SAMPLE_BYTES))
    (HERE / "maps.txt").write_text(Path("/proc/self/maps").read_text())
    (HERE / "done").touch()


def _wait_for(name: str) -> None:
    while not (HERE / name).exists():
        time.sleep(POLL_S)


if "edge.engine" in sys.orig_argv:
    threading.Thread(target=watch, name="bench-profiler", daemon=True).start()
