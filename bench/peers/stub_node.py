"""`stub_node.py CORES ENGINE_CORES ARGUMENT...`: the command `edge` on CORES, with `stub_engine.py` as its engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Do what the command line says."""
    os.sched_setaffinity(0, [int(core) for core in sys.argv[1].split(",")])
    from edge.pool import local

    local.ENGINE_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_engine.py")), sys.argv[2])
    from edge.cli import main as edge

    sys.argv[1:] = sys.argv[3:]
    edge()


if __name__ == "__main__":
    main()
