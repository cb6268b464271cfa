"""`python -m bench [NAME ...] [--peers] [--json] [--quick] [--only SECTION]`: run benches, print tables and JSON."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

# Before torch is imported.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from bench import engine
from bench.report import as_json, table

BENCHES = {"engine": engine}


def main() -> None:
    """Run what the command line asks for. A row that misses its target says so; it is no failure of the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure, beside the peers where asked.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which benches (default: all): {', '.join(BENCHES)}")
    parser.add_argument("--peers", action="store_true", help="install the peers and measure them too")
    parser.add_argument("--json", action="store_true", help="print only the JSON lines")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--only", action="append", metavar="SECTION", help=f"a part of it: {', '.join(engine.SECTIONS)}"
    )
    parser.add_argument("--state-dir", type=Path, default=Path(".edge"), help="where models and peers are (.edge)")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHES:
            parser.error(f"there is no bench {name!r}; there are: {', '.join(BENCHES)}")
    for section in options.only or []:
        if section not in engine.SECTIONS:
            parser.error(f"there is no section {section!r}; there are: {', '.join(engine.SECTIONS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as for Ctrl-C: nothing that was started stays
    for name in options.names or list(BENCHES):
        settings = engine.Settings(
            state_dir=options.state_dir.resolve(),
            peers=options.peers,
            quick=options.quick,
            sections=tuple(options.only or engine.SECTIONS),
        )
        rows, versions = BENCHES[name].run(settings)
        if not options.json:
            print(table(rows))
        print(as_json(name, rows, versions), flush=True)


if __name__ == "__main__":
    main()
