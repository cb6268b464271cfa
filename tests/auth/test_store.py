from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.auth.scopes import AI_READ, AI_RUN, DEFAULT
from edge.auth.store import FILE_NAME, MAX_TOKENS, AuditEntry, TokenStore, digest_of, id_of
from edge.billing.times import now_us
from edge.errors import InvalidInput, TokenStoreUnavailable, UnknownToken

HOUR_US = 3600 * 10**6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenStore]:
    store = TokenStore(tmp_path / "state" / FILE_NAME)
    yield store
    store.close()


def test_a_token_is_kept_as_a_hash_and_found_by_its_id(store: TokenStore) -> None:
    token, credential = store.create("ci", "acme", DEFAULT, actor="cli:root")
    assert re.fullmatch(rf"edge_{token.id}_[0-9a-f]{{64}}", credential)
    assert store.find(token.id) == (token, digest_of(credential))
    assert (token.name, token.account, token.scopes) == ("ci", "acme", {AI_RUN, AI_READ})
    assert (token.expires_us, token.last_used_us, token.revoked_us) == (None, None, None)
    secret = credential.rpartition("_")[2].encode()
    assert all(secret not in path.read_bytes() for path in store.path.parent.iterdir())


def test_only_its_owner_can_read_the_file(store: TokenStore) -> None:
    store.create("ci", "acme", DEFAULT)
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in store.path.parent.iterdir()} == {0o600}


def test_no_two_tokens_are_alike(store: TokenStore) -> None:
    made = [store.create("ci", "acme", DEFAULT) for _ in range(20)]
    assert len({credential for _, credential in made}) == len({token.id for token, _ in made}) == 20


def test_ids_are_read_off_the_form_alone() -> None:
    assert id_of(f"edge_{'a' * 16}_{'0' * 64}") == "a" * 16
    for other in (
        "dev",
        "",
        f"edge_{'a' * 16}_{'0' * 63}",
        f"edge_{'A' * 16}_{'0' * 64}",
        f"edge_{'a' * 16}_{'0' * 64}\n",
    ):
        assert id_of(other) is None


def test_status(store: TokenStore) -> None:
    token, _ = store.create("ci", "acme", DEFAULT, expires_us=now_us() + HOUR_US)
    assert token.expires_us is not None
    assert token.status(token.expires_us - 1) == "active"
    assert token.status(token.expires_us) == "expired"
    assert store.num_active() == {"acme": 1}
    revoked = store.revoke(token.id)
    assert (revoked.status(now_us()), store.num_active()) == ("revoked", {})


def test_revoking_again_changes_nothing(store: TokenStore) -> None:
    token, _ = store.create("ci", "acme", DEFAULT)
    first = store.revoke(token.id, actor="cli:root")
    assert store.revoke(token.id, actor="cli:other") == first
    assert [entry.event for entry in store.log(limit=9)] == ["revoked", "created"]


def test_tokens_of_other_accounts_are_not_there(store: TokenStore) -> None:
    token, _ = store.create("ci", "acme", DEFAULT)
    with pytest.raises(UnknownToken):
        store.revoke(token.id, account="other")
    with pytest.raises(UnknownToken):
        store.revoke("0" * 16)
    assert store.tokens("other") == []
    assert [each.id for each in store.tokens("acme")] == [token.id] == [each.id for each in store.tokens()]
    assert store.tokens()[0].revoked_us is None


def test_another_process_is_noticed(store: TokenStore) -> None:
    before = store.data_version()
    assert store.data_version() == before
    other = TokenStore(store.path)
    token, _ = other.create("ci", "acme", DEFAULT)
    other.close()
    assert store.data_version() != before
    assert store.find(token.id) is not None


def test_a_file_that_was_removed_is_noticed(store: TokenStore) -> None:
    assert store.is_current
    store.path.unlink()
    assert not store.is_current


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be 1 to 120"),
        ({"name": "a\nb"}, "name must be"),
        ({"name": "x" * 121}, "name must be"),
        ({"account": "a/b"}, "account 'a/b' must be an id"),
        ({"account": ""}, "account '' must be"),
        ({"expires_us": 1}, "would have expired on 1970-01-01T00:00:00.000001Z"),
    ],
)
def test_what_is_wrong_is_named(store: TokenStore, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        store.create(**{"name": "ci", "account": "acme", "scopes": DEFAULT, **changes})  # type: ignore[arg-type]
    assert (store.tokens(), store.log(limit=9)) == ([], [])


def test_an_account_has_so_many_tokens_at_most(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TOKENS > 2
    monkeypatch.setattr("edge.auth.store.MAX_TOKENS", 2)
    tokens = [store.create("ci", "acme", DEFAULT)[0] for _ in range(2)]
    with pytest.raises(InvalidInput, match="revoke some"):
        store.create("ci", "acme", DEFAULT)
    store.create("ci", "other", DEFAULT)
    store.revoke(tokens[0].id)
    store.create("ci", "acme", DEFAULT)


def test_the_log_says_who_did_what_and_only_grows(store: TokenStore) -> None:
    token, _ = store.create("ci", "acme", DEFAULT, actor="cli:root", address="10.0.0.1")
    store.note({token.id: 5}, [AuditEntry("refused", address="10.0.0.2", detail="unknown token", count=3)])
    refused, created = store.log(limit=9)
    assert (refused.event, refused.address, refused.detail, refused.count) == (
        "refused",
        "10.0.0.2",
        "unknown token",
        3,
    )
    assert (created.event, created.account, created.token_id) == ("created", "acme", token.id)
    assert (created.actor, created.address, created.detail) == ("cli:root", "10.0.0.1", "ci: ai:read ai:run")
    assert 0 < created.at_us <= refused.at_us <= now_us()
    assert store.log(limit=1) == [refused]
    assert store.log(limit=9, account="acme") == [created]
    assert store.tokens()[0].last_used_us == 5
    database = sqlite3.connect(store.path)
    for statement in ("DELETE FROM audit_log", "UPDATE audit_log SET actor = ''"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            database.execute(statement)
    database.close()


def test_what_cannot_be_opened_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 100)
    with pytest.raises(TokenStoreUnavailable, match=f"{FILE_NAME} cannot be opened: file is not a database"):
        TokenStore(tmp_path / FILE_NAME)
    with pytest.raises(TokenStoreUnavailable, match="cannot be opened"):
        TokenStore(tmp_path / FILE_NAME / "x")
