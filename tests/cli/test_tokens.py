from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
from click.testing import CliRunner

from edge.auth.store import FILE_NAME, TokenStore, digest_of, id_of
from edge.billing.times import now_us
from edge.cli import cli

Run = Callable[..., click.testing.Result]
DAY_US = 86_400 * 10**6


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*arguments: str) -> click.testing.Result:
        return CliRunner().invoke(cli, ["tokens", *arguments, "--state-dir", str(tmp_path)])

    return invoke


def test_a_token_is_printed_once_and_alone_on_stdout(run: Run, tmp_path: Path) -> None:
    made = run("create", "ci", "--account", "acme")
    assert made.exit_code == 0
    credential = made.stdout.strip()
    token_id = id_of(credential)
    assert token_id is not None
    assert f"Token {token_id} of the account acme may ai:read, ai:run. It is shown this once:" in made.stderr
    store = TokenStore(tmp_path / FILE_NAME)
    found = store.find(token_id)
    store.close()
    assert found is not None
    assert found[1] == digest_of(credential)
    for command in (["list"], ["list", "--json"], ["log"], ["log", "--json"]):
        assert credential[22:] not in run(*command).output


def test_everything_that_can_be_said_of_a_token(run: Run) -> None:
    options = ["--account", "acme", "--scope", "usage:read", "--scope", "Workers AI Read", "--expires", "30d", "--json"]
    made = json.loads(run("create", "ci", *options).stdout)
    assert made["token"].startswith(f"edge_{made['id']}_")
    (listed,) = json.loads(run("list", "--json").stdout)
    assert listed == {key: value for key, value in made.items() if key != "token"}
    assert (listed["name"], listed["account"], listed["status"]) == ("ci", "acme", "active")
    assert listed["scopes"] == ["ai:read", "ai:run", "usage:read"]
    assert listed["last_used_at"] is None


@pytest.mark.parametrize(("expires", "days"), [("1d", 1), ("48h", 2), ("9999d", 9999)])
def test_a_time_to_live(run: Run, tmp_path: Path, expires: str, days: int) -> None:
    began = now_us()
    assert run("create", "ci", "--account", "acme", "--expires", expires).exit_code == 0
    store = TokenStore(tmp_path / FILE_NAME)
    (token,) = store.tokens()
    store.close()
    assert began + days * DAY_US <= (token.expires_us or 0) <= now_us() + days * DAY_US


def test_a_moment(run: Run) -> None:
    made = run("create", "ci", "--account", "acme", "--expires", "2999-01-31")
    assert "until 2999-01-31T00:00:00Z" in made.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scope", "ai:fly"], "there is no scope 'ai:fly'"),
        (["--expires", "soon"], "--expires 'soon': give 90d, 12h, or a date"),
        (["--expires", "2001-01-01"], "would have expired on 2001-01-01T00:00:00Z"),
        (["--account", "a/b"], "account 'a/b' must be an id"),
    ],
)
def test_what_is_wrong_makes_no_token(run: Run, options: list[str], message: str) -> None:
    made = run("create", "ci", "--account", "acme", *options)
    assert made.exit_code != 0
    assert made.stdout == ""
    assert message in made.stderr
    assert "There are no tokens in" in run("list").stdout


def test_the_account_is_that_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text("")
    (tmp_path / "edge.toml").write_text('name = "a"\nmain = "worker.py"\naccount_id = "acme"\n')
    made = CliRunner().invoke(cli, ["tokens", "create", "ci", "--json"])
    assert json.loads(made.stdout)["account"] == "acme"
    assert (tmp_path / ".edge" / FILE_NAME).is_file()


def test_revoking_by_id_and_by_the_token_itself(run: Run) -> None:
    first, second = (run("create", name, "--account", "acme").stdout.strip() for name in ("a", "b"))
    ids = [each.split("_")[1] for each in (first, second)]
    done = run("revoke", ids[0], second)
    assert done.exit_code == 0
    assert done.stderr == f"{ids[0]} (a) is revoked\n{ids[1]} (b) is revoked\n"
    assert {token["status"] for token in json.loads(run("list", "--json").stdout)} == {"revoked"}
    unknown = run("revoke", "0" * 16)
    assert (unknown.exit_code, unknown.stderr) == (1, f"error: there is no token of the id '{'0' * 16}'\n")


def test_the_log_says_who_and_when(run: Run) -> None:
    token_id = run("create", "ci", "--account", "acme").stdout.split("_")[1]
    run("revoke", token_id)
    revoked, created = json.loads(run("log", "--json").stdout)
    assert [entry["event"] for entry in (revoked, created)] == ["revoked", "created"]
    assert all(entry["token_id"] == token_id and entry["account"] == "acme" for entry in (revoked, created))
    assert all(entry["actor"].startswith("cli:") and entry["at"].endswith("Z") for entry in (revoked, created))
    assert "revoked" in run("log").stdout
    assert run("log", "--account", "other").stdout.startswith("Nothing is logged in")
