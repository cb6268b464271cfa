from __future__ import annotations

import json

from click.testing import CliRunner

from edge.cli import cli
from edge.errors import catalogue


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["errors", *args])
    return result.exit_code, result.output


def test_all_errors_are_listed() -> None:
    code, shown = run()
    assert code == 0
    assert all(kind.name in shown for kind in catalogue())
    code, text = run("--json")
    assert [int(row["code"]) for row in json.loads(text)] == [kind.code for kind in catalogue()]


def test_one_error_is_explained() -> None:
    assert run("3040") == (
        0,
        "3040 OutOfCapacity: HTTP 429, trying again can help\n"
        "Too many calls are running and waiting, or the option `rejectIfBusy` was given.\n"
        "Try again after `Retry-After`. The operator: `max_batch_size` and `max_waiting` under [engine].\n",
    )
    assert run("outofcapacity") == run("3040")
    code, text = run("3006")
    assert code == 0
    assert ("HTTP 413" in text, "HTTP 414" in text) == (True, True)
    code, text = run("7001", "--json")
    assert [(row["name"], row["status"]) for row in json.loads(text)] == [("MethodNotAllowed", "405")]


def test_an_unknown_code_is_refused() -> None:
    code, text = run("1")
    assert code == 2
    assert "there is no error 1; `edge errors` lists all" in text
    assert "there is no error Nope" in run("Nope")[1]
