"""Puts the modules that exist only in Cloudflare's runtime (`js`, `pyodide`, `asgi`, …) within a worker's reach.

They are on `sys.path` of isolates only: outside of them, their very absence is what libraries go by to tell that they
are not in a Python Worker.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parent / "_shims")


def activate() -> None:
    """Make the modules importable, ahead of any that a worker's dependencies bring along. Repeating it is harmless."""
    if _FOLDER not in sys.path:
        sys.path.insert(0, _FOLDER)
