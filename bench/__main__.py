"""`python -m bench [NAME ...] [--peers] [--json] [--quick] [--only SECTION]`: run benches, print tables and JSON."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

# Before torch is imported.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from bench.report import as_json, table
from bench.settings import Settings

BENCHES = ("engine", "isolates", "wire")
"""Modules of this package. They are imported when they are run, because that of the engine brings torch along."""


def main() -> None:
    """Run what the command line asks for. A row that misses its target says so; it is no failure of the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure, beside the peers where asked.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which benches (default: all): {', '.join(BENCHES)}")
    parser.add_argument("--peers", action="store_true", help="install the peers and measure them too")
    parser.add_argument("--json", action="store_true", help="print only the JSON lines")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", action="append", metavar="SECTION", help="a part of it; a wrong one lists them")
    parser.add_argument("--state-dir", type=Path, default=Path(".edge"), help="where models and peers are (.edge)")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHES:
            parser.error(f"there is no bench {name!r}; there are: {', '.join(BENCHES)}")
    benches = {name: importlib.import_module(f"bench.{name}") for name in options.names or BENCHES}
    known = [section for bench in benches.values() for section in bench.SECTIONS]
    for section in options.only or []:
        if section not in known:
            parser.error(f"there is no section {section!r}; there are: {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as for Ctrl-C: nothing that was started stays
    for name, bench in benches.items():
        sections = tuple(section for section in bench.SECTIONS if section in (options.only or known))
        settings = Settings(
            state_dir=options.state_dir.resolve(), peers=options.peers, quick=options.quick, sections=sections
        )
        rows, versions = bench.run(settings)
        if not options.json:
            print(table(rows))
        print(as_json(name, rows, versions), flush=True)


if __name__ == "__main__":
    main()
