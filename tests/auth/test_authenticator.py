from __future__ import annotations

import asyncio
import hmac
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from edge.auth.authenticator import Authenticator, Grant
from edge.auth.scopes import AI_EDIT, AI_RUN, ALL, DEFAULT, TOKENS_EDIT
from edge.auth.store import FILE_NAME, AuditEntry, TokenStore
from edge.billing.times import now_us
from edge.errors import InvalidInput, MissingScope, TokenStoreUnavailable, Unauthorized

HANG_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenStore]:
    store = TokenStore(tmp_path / FILE_NAME)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authenticator looks at the file at each request, so that nobody has to wait for that."""
    monkeypatch.setattr("edge.auth.authenticator._LOOK_EVERY_S", 0.0)


@pytest.fixture
async def authenticator(store: TokenStore) -> AsyncIterator[Authenticator]:
    authenticator = Authenticator(store.path)
    yield authenticator
    await authenticator.close()


def refused(authenticator: Authenticator, credential: str, address: str = "") -> str:
    with pytest.raises(Unauthorized) as caught:
        authenticator.authenticate(credential, address)
    assert (caught.value.status, caught.value.code) == (401, 10000)
    return caught.value.message


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - a thread writes to a file when it likes
            await asyncio.sleep(0.02)


async def test_a_token_gives_what_it_was_made_for(store: TokenStore, authenticator: Authenticator) -> None:
    token, credential = store.create("ci", "acme", DEFAULT)
    expected = Grant(token.id, "acme", DEFAULT)
    assert [authenticator.authenticate(credential) for _ in range(2)] == [expected, expected]


async def test_any_other_credential_is_refused(store: TokenStore, authenticator: Authenticator) -> None:
    _, credential = store.create("ci", "acme", DEFAULT)
    last = "0" if credential[-1] != "0" else "1"
    assert "send the header" in refused(authenticator, "")
    for wrong in (
        "x",
        "é",
        credential[:-1],
        credential[:-1] + last,
        credential + "0",
        credential.upper(),
        f"edge_{'0' * 16}_{'0' * 64}",
    ):
        assert "this is no token of this node" in refused(authenticator, wrong)


async def test_the_work_is_the_same_for_each_wrong_token(
    store: TokenStore, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, credential = store.create("ci", "acme", DEFAULT)
    compared: list[tuple[int, int]] = []
    is_same = hmac.compare_digest

    def counting(known: bytes, given: bytes) -> bool:
        compared.append((len(known), len(given)))
        return is_same(known, given)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    flipped = [
        credential[: 21 + n] + ("0" if credential[21 + n] != "0" else "1") + credential[22 + n :] for n in (1, 63)
    ]
    for wrong in (*flipped, f"edge_{'0' * 16}_{'0' * 64}", "sk-something"):
        refused(authenticator, wrong)
    authenticator.authenticate(credential)
    # One comparison of two hashes, whether there is such an id, and wherever the secret begins to differ.
    assert compared == [(32, 32)] * 5


async def test_expired_and_revoked_ones_are_refused_with_the_reason(
    store: TokenStore, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring, first = store.create("a", "acme", DEFAULT, expires_us=now_us() + 3600 * 10**6)
    revoked, second = store.create("b", "acme", DEFAULT)
    for credential in (first, second):
        authenticator.authenticate(credential)
    store.revoke(revoked.id)
    assert f"the token {revoked.id} is revoked since 20" in refused(authenticator, second)
    monkeypatch.setattr("edge.auth.authenticator.now_us", lambda: expiring.expires_us)
    assert f"the token {expiring.id} is expired since 20" in refused(authenticator, first)


async def test_another_process_revokes_at_once(store: TokenStore, authenticator: Authenticator) -> None:
    tokens = [store.create("ci", "acme", DEFAULT) for _ in range(2)]
    store.close()
    code = (
        "import sys\nfrom pathlib import Path\nfrom edge.auth.store import TokenStore\n"
        "store = TokenStore(Path(sys.argv[1]))\nstore.revoke(sys.argv[2])\nstore.close()"
    )
    for token, credential in tokens:
        # Also where the node has opened the file again in between, which must not cost it its locks.
        assert len(await authenticator.tokens_of("acme")) == 2
        authenticator.authenticate(credential)
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code, str(store.path), token.id], check=True)
        assert "revoked" in refused(authenticator, credential)


async def test_tokens_go_with_their_file(
    store: TokenStore, authenticator: Authenticator, caplog: pytest.LogCaptureFixture
) -> None:
    _, credential = store.create("ci", "acme", DEFAULT)
    authenticator.authenticate(credential)
    for path in list(store.path.parent.glob(f"{FILE_NAME}*")):
        path.unlink()
    with caplog.at_level(logging.ERROR):
        refused(authenticator, credential)
    assert "was removed or replaced" in caplog.text
    other = TokenStore(store.path)
    _, renewed = other.create("ci", "acme", DEFAULT)
    other.close()
    assert authenticator.authenticate(renewed).account == "acme"


async def test_a_file_that_cannot_be_read_lets_nobody_in(store: TokenStore, authenticator: Authenticator) -> None:
    _, credential = store.create("ci", "acme", DEFAULT)
    for path in list(store.path.parent.glob(f"{FILE_NAME}*")):
        path.unlink()
    store.path.mkdir()
    with pytest.raises(TokenStoreUnavailable) as caught:
        authenticator.authenticate(credential)
    assert (caught.value.status, caught.value.code) == (503, 10001)


async def test_fixed_tokens_may_do_everything() -> None:
    authenticator = Authenticator(fixed={"dev": "dev", "t2": "other"})
    assert authenticator.authenticate("t2") == Grant("", "other", ALL)
    assert [authenticator.is_ours(each) for each in ("dev", "de", "", f"edge_{'0' * 16}_{'0' * 64}")] == [
        *(True, False, False),
        True,
    ]
    refused(authenticator, f"edge_{'0' * 16}_{'0' * 64}")
    await authenticator.close()


async def test_a_missing_scope_is_named(store: TokenStore, authenticator: Authenticator) -> None:
    token, credential = store.create("ci", "acme", DEFAULT)
    grant = authenticator.authenticate(credential)
    authenticator.require(grant, AI_RUN)
    with pytest.raises(MissingScope, match="lacks the scope ai:edit; it has ai:read, ai:run") as caught:
        authenticator.require(grant, AI_EDIT, "10.0.0.9")
    assert (caught.value.status, caught.value.code) == (403, 10000)
    await authenticator.close()
    entry = store.log(limit=1)[0]
    assert (entry.event, entry.account, entry.token_id) == ("forbidden", "acme", token.id)
    assert (entry.address, entry.detail) == ("10.0.0.9", AI_EDIT)


async def test_uses_and_refusals_are_written_later(store: TokenStore, authenticator: Authenticator) -> None:
    _, credential = store.create("ci", "acme", DEFAULT)
    began_us = now_us()
    for _ in range(3):
        authenticator.authenticate(credential)
        refused(authenticator, "guess", "10.0.0.1")
    await until(lambda: store.tokens()[0].last_used_us is not None and len(store.log(limit=9)) == 2)
    assert began_us <= (store.tokens()[0].last_used_us or 0) <= now_us()
    entry = store.log(limit=1)[0]
    assert (entry.event, entry.address, entry.detail, entry.count) == ("refused", "10.0.0.1", "unknown token", 3)
    # A use soon after is not worth a write; the second refusal is a line of its own.
    used_us = store.tokens()[0].last_used_us
    authenticator.authenticate(credential)
    refused(authenticator, "guess", "10.0.0.1")
    await until(lambda: len(store.log(limit=9)) == 3)
    assert store.tokens()[0].last_used_us == used_us


async def test_what_could_not_be_written_is_written_with_the_next(
    store: TokenStore,
    authenticator: Authenticator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("edge.auth.authenticator._WRITE_AFTER_S", 0.01)
    _, credential = store.create("ci", "acme", DEFAULT)
    for error in (TokenStoreUnavailable("the disk is full"), RuntimeError("whatever")):
        with monkeypatch.context() as failing:
            failing.setattr(TokenStore, "note", Mock(side_effect=error))
            authenticator.authenticate(credential)
            refused(authenticator, "guess")
            await until(lambda error=error: f"wait for the next: {error}" in caplog.text)
    assert len(store.log(limit=9)) == 1
    refused(authenticator, "guess")
    await until(lambda: len(store.log(limit=9)) == 2)
    assert store.log(limit=1)[0].count == 3
    assert store.tokens()[0].last_used_us is not None


async def test_a_token_makes_none_that_outlives_it(store: TokenStore, authenticator: Authenticator) -> None:
    end_us = now_us() + 3600 * 10**6
    _, credential = store.create("maker", "acme", ALL, expires_us=end_us)
    grant = authenticator.authenticate(credential)
    made = [
        (await authenticator.create(grant, "x", DEFAULT, us, ""))[0].expires_us for us in (None, end_us - 1, end_us)
    ]
    assert made == [end_us, end_us - 1, end_us]
    with pytest.raises(InvalidInput, match="none that ends after itself") as caught:
        await authenticator.create(grant, "x", DEFAULT, end_us + 1, "")
    assert caught.value.param == "expires_on"


async def test_a_token_revokes_none_that_may_do_more(store: TokenStore, authenticator: Authenticator) -> None:
    owner, _ = store.create("owner", "acme", ALL)
    narrow = frozenset({TOKENS_EDIT})
    maker, credential = store.create("maker", "acme", narrow)
    grant = authenticator.authenticate(credential)
    with pytest.raises(MissingScope):
        await authenticator.revoke(grant, owner.id, "")
    assert {token.id for token in store.tokens() if token.revoked_us is None} == {owner.id, maker.id}
    assert (await authenticator.revoke(grant, maker.id, "")).revoked_us is not None


async def test_who_guesses_all_the_time_fills_no_disk(
    store: TokenStore, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.auth.authenticator._WRITE_AFTER_S", 0.01)
    monkeypatch.setattr("edge.auth.authenticator._MAX_PENDING", 150)
    for number in range(500):
        refused(authenticator, "guess", f"10.0.{number // 256}.{number % 256}")
    await until(lambda: len(store.log(limit=999)) >= 100)
    refused(authenticator, "guess", "last")
    assert len(store.log(limit=999)) == 100
    await authenticator.close()
    entries = store.log(limit=999)
    # What had no line of its own is in one, and nothing is lost.
    assert len(entries) <= 153
    assert sum(entry.count for entry in entries) == 501
    assert AuditEntry("refused", detail="others", count=350).count == next(
        e.count for e in entries if e.detail == "others"
    )


async def test_the_file_is_looked_at_so_many_times_a_second(
    store: TokenStore, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.auth.authenticator._LOOK_EVERY_S", 0.1)
    token, credential = store.create("ci", "acme", DEFAULT)
    looks = 0
    data_version = TokenStore.data_version

    def counting(store: TokenStore) -> int:
        nonlocal looks
        looks += 1
        return data_version(store)

    monkeypatch.setattr(TokenStore, "data_version", counting)
    began = time.monotonic()
    for _ in range(1000):
        authenticator.authenticate(credential)
    assert 1 <= looks <= (time.monotonic() - began) / 0.1 + 1
    # What the node does itself it knows at once.
    await authenticator.revoke(Grant("", "acme", ALL), token.id, "")
    refused(authenticator, credential)
