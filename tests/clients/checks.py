"""Runs a script of checks in the environment of its client, and reads what it prints of each check."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients import environments

SCRIPT_TIMEOUT_S = 900
FOLDER = Path(__file__).parent.parent.parent / ".edge" / "clients"
_HERE = Path(__file__).parent
_LINE = re.compile(r"^(ok  |FAIL|SKIP) (.*?)(?: - (.*)| *)$", re.MULTILINE)
_LAST = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What a script printed, as a whole and by check."""

    text: str
    passed: list[str]
    failed: dict[str, str]
    """Each with its reason."""
    skipped: list[str]


@dataclass(frozen=True)
class Clients:
    """A running node for the clients, as environment variables tell them of it."""

    variables: dict[str, str]

    def run(self, environment: str, script: str) -> Outcome:
        """Run `script`, a file beside this one, with the packages of `environment`."""
        if not environments.is_ready(FOLDER, environment):
            why = f"the clients of {environment!r} are not installed; `make test CLIENTS=1` says why"
            (pytest.skip if os.environ.get("CLIENTS") == "auto" else pytest.fail)(why)
        home = FOLDER / environment
        program = environments.node_of(FOLDER) if environment == "js" else environments.python_of(FOLDER, environment)
        done = subprocess.run(
            [str(program), str(_HERE / script)],
            cwd=home,
            env={"PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8", **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SCRIPT_TIMEOUT_S,
        )
        return _read(done.stdout, done.returncode)


def _read(text: str, code: int) -> Outcome:
    lines = [(kind, name.strip(), why or "") for kind, name, why in _LINE.findall(text)]
    outcome = Outcome(
        text,
        [name for kind, name, _ in lines if kind == "ok  "],
        {name: why for kind, name, why in lines if kind == "FAIL"},
        [name for kind, name, _ in lines if kind == "SKIP"],
    )
    counts = (len(outcome.passed), len(outcome.failed), len(outcome.skipped))
    last = _LAST.search(text)
    assert last is not None, f"the script ended with code {code} before its last check:\n{text[-3000:]}"
    assert tuple(map(int, last.groups())) == counts, text
    assert code == (1 if outcome.failed or not outcome.passed else 0), text
    return outcome
